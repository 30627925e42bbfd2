"""Hunyuan's experts."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import Einsum, Keys, exact_product
from tpuconv.models.common.placement import placed


class Router(nnx.Module):
    """x [B, T, D] to the ids and weights [B, T, X] of each token's experts: their probabilities, normalized. Computed
    in float32 with a float32 kernel: a small error of a score may choose another expert."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.count = config.num_experts_per_tok
        self.kernel = Einsum("BTD,DE->BTE", config.sizes, dtype=jnp.float32, keys=keys).kernel

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_BTE = exact_product("BTD,DE->BTE", x_BTD, self.kernel[...])
        weights_BTX, ids_BTX = jax.lax.top_k(nnx.softmax(placed(logits_BTE, "B T E")), self.count)
        return ids_BTX, weights_BTX / weights_BTX.sum(-1, keepdims=True)
