"""Hunyuan's experts, and the attention of Hunyuan-VL."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import NormedAttention
from tpuconv.models.common.layers import Einsum, Keys, exact_product
from tpuconv.models.common.placement import placed
from tpuconv.models.common.steps import Step


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


class AttentionByDimension(NormedAttention):
    """The attention of Hunyuan-VL. In images the dimensions i and i + H/2 of a pair turn by angles of different axes:
    angles are of dimensions, [B, T, 1, H]. Norms are behind."""

    def positioned(self, q_BTNH: jax.Array, k_BTKH: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        cos_sin = step.cos_sin_in(q_BTNH.dtype)
        return self.normalized(turned_by_dimension(q_BTNH, cos_sin), turned_by_dimension(k_BTKH, cos_sin))


def turned_by_dimension(x_BTNH: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns heads of which each dimension turns by its own angle of H, or of H/2 as in `apply_rope`. The products are
    in float32."""
    exact_BTNH, H = x_BTNH.astype(jnp.float32), x_BTNH.shape[-1]
    cos, sin = (x if x.shape[-1] == H else jnp.tile(x, 2) for x in cos_sin)
    a, b = jnp.split(exact_BTNH, 2, axis=-1)
    return (exact_BTNH * cos + jnp.concatenate([-b, a], axis=-1) * sin).astype(x_BTNH.dtype)
