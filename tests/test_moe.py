"""Routed experts against the plain formula."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers.families import FIRST, save
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.models.common.layers import Keys
from tpuconv.models.common.moe import GatedExperts


def made(tokens: int, experts: int, chosen: int, dtype: Any) -> tuple[GatedExperts, jax.Array, jax.Array, jax.Array]:
    """GatedExperts, and tokens with the experts that each goes through and their weights."""
    layer = GatedExperts({"E": experts, "D": 10, "M": 7}, nnx.silu, dtype=dtype, keys=Keys(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), 3)
    x_BTD = jax.random.normal(keys[0], (2, tokens, 10), dtype)
    ids_BTX = jax.lax.top_k(jax.random.normal(keys[1], (2, tokens, experts)), chosen)[1]
    return layer, x_BTD, ids_BTX, jax.random.uniform(keys[2], ids_BTX.shape)


@pytest.mark.parametrize(("dtype", "limit"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2e-2)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("tokens", "experts", "chosen"), [(1, 33, 4), (1, 16, 4), (1, 15, 4), (9, 5, 5), (4, 1, 1), (13, 6, 1)]
)
def test_as_every_expert_on_every_token(tokens: int, experts: int, chosen: int, dtype: Any, limit: float) -> None:
    layer, x_BTD, ids_BTX, weights_BTX = made(tokens, experts, chosen, dtype)
    x, gate, up, down = (
        np.asarray(array, np.float64)
        for array in (x_BTD, *(one.kernel[...] for one in (layer.gate, layer.up, layer.down)))
    )
    hidden = np.einsum("btd,edm->betm", x, gate)
    hidden = hidden / (1 + np.exp(-hidden)) * np.einsum("btd,edm->betm", x, up)
    shares = np.zeros((2, tokens, experts))
    np.put_along_axis(shares, np.asarray(ids_BTX), np.asarray(weights_BTX), axis=-1)
    wanted = np.einsum("betm,emd,bte->btd", hidden, down, shares)
    y_BTD = layer(x_BTD, ids_BTX, weights_BTX)
    assert y_BTD.dtype == dtype
    assert np.abs(np.asarray(y_BTD, np.float64) - wanted).max() <= limit * np.abs(wanted).max()


@pytest.mark.parametrize(("rows", "primitive"), [(16, "gather"), (18, "ragged_dot")])
def test_few_rows_read_the_weights_of_their_experts_alone(rows: int, primitive: str) -> None:
    layer, *arguments = made(rows // 2, 32, 1, jnp.float32)
    traced = str(jax.make_jaxpr(lambda *arrays: layer(*arrays))(*arguments))
    assert ("ragged_dot" in traced) == (primitive == "ragged_dot")


@pytest.mark.parametrize("experts", [3, 48])
def test_a_token_that_is_no_number_spoils_no_other(experts: int) -> None:
    layer, x_BTD, *routed = made(6, experts, 2, jnp.float32)
    y_BTD = layer(x_BTD.at[1, 4].set(jnp.nan), *routed)
    assert np.array_equal(np.isnan(y_BTD).any(-1), np.arange(12).reshape(2, 6) == 10)


ON_MESHES = """
import sys
import jax, numpy as np
import tpuconv
from flax import nnx
from tpuconv.verify.logits import device_mesh, model_logits
ids = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])
run = nnx.jit(lambda model, ids: model(ids))
want = np.asarray(run(tpuconv.load(sys.argv[1]), ids))
for sizes in ({"tensor": 2}, {"tensor": 4}, {"tensor": 2, "expert": 2}):
    mesh = device_mesh(sizes)
    model = tpuconv.load(sys.argv[1], mesh=mesh)
    with jax.sharding.set_mesh(mesh):
        have = np.asarray(run(model, ids))
        assert tpuconv.load(sys.argv[1], mesh=mesh)  # shapes are not those of the mesh in use
    assert np.abs(have - want).max() <= float(sys.argv[2]) * np.abs(want).max(), (sizes, np.abs(have - want).max())
    assert model_logits(sys.argv[1], ids.tolist(), "float32", mesh)[0].shape == want[0].shape
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "limit"),
    [
        ("weight_qtype: int8, tile_size: 32", 2e-5),
        ("weight_qtype: int8, tile_size: 32, tile_axes: block", 2e-5),
        # The activations of a part of the width have scales of their own.
        ("weight_qtype: int8, act_qtype: int8, tile_size: 32", 2e-2),
    ],
    ids=["tiles", "blocks", "activations"],
)
def test_tiles_are_not_cut_on_a_mesh(rule: str, limit: float, tmp_path: Path) -> None:
    """Where the mesh divides the width of the experts, and not the number of its tiles."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    case = replace(FIRST["mixtral"], config=dict(FIRST["mixtral"].config) | sizes | {"num_local_experts": 4})
    save(case, tmp_path / "hf")
    rules = f"qwix:\n  rules:\n    - {{module_path: '.*/(gate|up|down)', {rule}}}\ngates: none\n"
    (tmp_path / "rules.yaml").write_text(rules)
    api.convert(tmp_path / "hf", tmp_path / "out", quantize=str(tmp_path / "rules.yaml"))
    done = subprocess.run(
        [sys.executable, "-c", ON_MESHES, str(tmp_path / "out"), str(limit)],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_rule_is_the_one_that_qwix_takes_for_the_operation(tmp_path: Path) -> None:
    """The first rule is for grouped products alone, and matches the modules of others too."""
    save(FIRST["mixtral"], tmp_path / "hf", "bfloat16")
    (tmp_path / "rules.yaml").write_text(
        "qwix:\n  rules:\n"
        "    - {module_path: 'layers/.*', op_names: [ragged_dot], weight_qtype: int4}\n"
        "    - {module_path: 'layers/.*', weight_qtype: int8}\ngates: none\n"
    )
    api.convert(tmp_path / "hf", tmp_path / "out", quantize=str(tmp_path / "rules.yaml"))
    found = read_manifest(tmp_path / "out").quantization
    assert found is not None
    kinds = {name: (facts["qtype"], facts["rule"]) for name, facts in found["parameters"].items()}
    assert kinds["layers.0.moe.gate.kernel"] == ("int4", 0)
    assert kinds["layers.0.attn.q.kernel"] == ("int8", 1)
