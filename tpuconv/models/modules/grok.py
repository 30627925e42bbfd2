"""Attention and experts of Grok 2."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.cache import KV
from tpuconv.models.common.layers import Einsum, Keys, attention, gelu_tanh, soft_capped
from tpuconv.models.common.moe import GatedExperts
from tpuconv.models.common.placement import placed
from tpuconv.models.common.steps import Step


class SharpenedAttention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Scores have a soft limit; behind it the scores of a query at a
    position p beyond `attn_temperature_len` are multiplied by log p / log `attn_temperature_len`."""

    def __init__(self, config: Any, **options: Any):
        super().__init__(config, **options)
        self.cap, self.length = config.score_cap, config.attn_temperature_len

    def attended(self, q_BTNH: jax.Array, kv: KV, visible_BTS: jax.Array, step: Step) -> jax.Array:
        if self.length <= 1:
            return super().attended(q_BTNH, kv, visible_BTS, step)
        position_BT = jnp.maximum(step.pos_BT, self.length).astype(jnp.float32)
        factor = (jnp.log(position_BT) / math.log(self.length))[:, None, None, :, None]
        # cap * factor * tanh(s * factor / (cap * factor)) is the limited score s times the factor.
        cap = None if self.cap is None else self.cap * factor
        return attention(q_BTNH, kv, visible_BTS, scale=factor * q_BTNH.shape[-1] ** -0.5, cap=cap)


class CappedExperts(GatedExperts):
    """The X most probable experts of each token, whose weights are their probabilities, x [B, T, D] to [B, T, D].
    Scores have a soft limit. With an MLP beside them the sum is divided by the root of 2."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.sizes, gelu_tanh, dtype=dtype, keys=keys)
        self.count, self.cap = config.num_experts_per_tok, config.router_cap
        self.router = Einsum("BTD,DE->BTE", config.sizes, dtype=dtype, keys=keys)
        self.dense = blocks.TanhMLP(config, dtype=dtype, keys=keys) if config.residual_moe else None

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        scores_BTE = placed(self.router(x_BTD), "B T E").astype(jnp.float32)
        weights_BTX, ids_BTX = jax.lax.top_k(nnx.softmax(soft_capped(scores_BTE, self.cap)), self.count)
        y_BTD = super().__call__(x_BTD, ids_BTX, weights_BTX.astype(x_BTD.dtype))
        return y_BTD if self.dense is None else (y_BTD + self.dense(x_BTD)) * 2**-0.5
