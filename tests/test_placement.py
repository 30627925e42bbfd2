"""Models on a mesh: shardings do not change what is computed."""

import json
import os
import subprocess
import sys

import pytest

from helpers.families import CASES
from tpuconv.sharding import undivided

pytestmark = pytest.mark.usefixtures("quick_compiler")

# In a process of its own: the number of devices is fixed when jax starts.
ON_A_MESH = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import Mesh
from tpuconv.models.registry import find_family
from tpuconv.sharding import partition

@nnx.jit
def logits(model, ids):
    # of a prompt, and of one more token
    cache = model.init_cache(ids.shape[0], 8)
    first, cache = model(ids[:, :5], cache=cache)
    return first, model(ids[:, 5:], cache=cache)[0]

for line in sys.stdin:
    raw = json.loads(line)
    family = find_family(raw)
    model = family.model_class(family.config.from_hf(raw), dtype=jnp.float32, rngs=nnx.Rngs(0))
    for path, value in nnx.to_flat_state(nnx.state(model)):  # logits near zero would show no mistake
        value.set_value(value.get_value() * 8 if value.ndim > 1 else value.get_value() + len(str(path)) / 50)
    ids = jnp.arange(4 * 6).reshape(4, 6) * 7 % 101
    alone = list(map(np.asarray, logits(model, ids)))
    worst = 0.0
    meshes = [{"tensor": 2, "group": 2, "expert": 2}]
    if family.name == "qwen3_moe":
        meshes.append({"data": 2, "tensor": 2, "expert": 2})
    for sizes in meshes:
        devices = np.array(jax.devices()[: int(np.prod(list(sizes.values())))])
        with jax.sharding.set_mesh(Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))):
            for a, b in zip(alone, logits(model, ids)):
                worst = max(worst, float(np.abs(a - np.asarray(b)).max() / np.abs(a).max()))
    print(json.dumps(worst), flush=True)
"""

FAMILIES = ("qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", "llama4")  # each with an attention or experts of its own
FIRST = {family: next(case for case in CASES if case.family == family) for family in FAMILIES}
DIVISIBLE = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 24}
"""So that chips divide the experts: prime numbers of them stay whole."""


@pytest.fixture(scope="module")
def differences():
    configs = []
    for case in FIRST.values():
        config = json.loads(case.hf_config().to_json_string())
        text = config.get("text_config", config)
        text |= {name: size for name, size in DIVISIBLE.items() if name in text}
        configs.append(config | ({"model_type": case.written_as} if case.written_as else {}))
    done = subprocess.run(
        [sys.executable, "-c", ON_A_MESH],
        input="".join(json.dumps(config) + "\n" for config in configs),
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(FIRST, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("family", FIRST)
def test_a_mesh_changes_no_logits(family, differences):
    assert differences[family] < 2e-5


def test_what_a_mesh_cannot_divide_is_told() -> None:
    assert undivided("D N H", (160, 6, 32), {"tensor": 4}) == {"N": 6}
    assert undivided("D N H", (160, 8, 32), {"tensor": 4}) == {}
    assert undivided("D", (160,), {"tensor": 4}) == {}
