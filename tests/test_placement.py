"""Models on a mesh: shardings do not change what is computed."""

import json
import os
import subprocess
import sys

import pytest

from helpers.families import FIRST, released_config
from tpuconv.notation.sharding import undivided

# In a process of its own: the number of devices is fixed when jax starts.
ON_A_MESH = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import Mesh
from tpuconv.models.registry import find_family
from tpuconv.notation.sharding import partition

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
    # Logits near zero would show no mistake. From four times on, one rounding of each weight moves some by about 2e-5.
    # The equal elements of a query that reads residuals add up: scores of 60 would enlarge each rounding as much.
    for path, value in nnx.to_flat_state(nnx.state(model)):
        offset = len(str(path)) / (250 if path[-1] == "query" else 50)
        value.set_value(value.get_value() * 3 if value.ndim > 1 else value.get_value() + offset)
    ids = jnp.arange(4 * 6).reshape(4, 6) * 7 % 101
    alone = list(map(np.asarray, logits(model, ids)))
    worst = 0.0
    for axes in (("tensor", "group", "expert"), ("data", "tensor", "expert")):
        with jax.sharding.set_mesh(Mesh(np.array(jax.devices()).reshape(2, 2, 2), axes)):
            for a, b in zip(alone, logits(model, ids)):
                worst = max(worst, float(np.abs(a - np.asarray(b)).max() / np.abs(a).max()))
    print(json.dumps(worst), flush=True)
    jax.clear_caches()
"""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@pytest.fixture(scope="module")
def differences(chosen):
    families, configs = chosen(FIRST), []
    for case in map(FIRST.__getitem__, families):
        config = released_config(case)
        text = config.get("text_config", config)
        # An odd number of experts stays whole.
        text |= {name: 2 * text[name] for name in EXPERTS if isinstance(text.get(name), int)}
        configs.append(config)
    done = subprocess.run(
        [sys.executable, "-c", ON_A_MESH],
        input="".join(json.dumps(config) + "\n" for config in configs),
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(families, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("family", FIRST)
def test_a_mesh_changes_no_logits(family, differences):
    assert differences[family] < 2e-5


def test_what_a_mesh_cannot_divide_is_told() -> None:
    assert undivided("D N H", (160, 6, 32), {"tensor": 4}) == {"N": 6}
    assert undivided("D N H", (160, 8, 32), {"tensor": 4}) == {}
    assert undivided("D", (160,), {"tensor": 4}) == {}
