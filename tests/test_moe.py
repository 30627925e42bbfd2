"""Routed experts against the plain formula."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tpuconv.models.common.layers import Keys
from tpuconv.models.common.moe import Experts

pytestmark = pytest.mark.usefixtures("quick_compiler")


def made(tokens: int, experts: int, chosen: int, dtype: Any) -> tuple[Experts, jax.Array, jax.Array, jax.Array]:
    """Experts, and tokens with the experts that each goes through and their weights."""
    layer = Experts({"E": experts, "D": 10, "M": 7}, nnx.silu, dtype=dtype, keys=Keys(jax.random.key(0)))
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
