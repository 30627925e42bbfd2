"""OLMoE (arXiv:2409.02060)."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Keys
from tpuconv.models.olmoe.family import Config
from tpuconv.models.qwen3_moe.modules import MoE


class Attention(blocks.NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    and keys are normalized, all heads together; then they and the values are clipped, if the config says so."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        bias = config.attention_bias
        super().__init__(config, bias=bias, out_bias=bias, all_heads=True, dtype=dtype, keys=keys)
        self.limit = config.clip_qkv

    def values(self, x_BTD: jax.Array) -> jax.Array:
        return self._clipped(super().values(x_BTD))

    def normalized(self, q_BTNH: jax.Array, k_BTKH: jax.Array) -> tuple[jax.Array, jax.Array]:
        q_BTNH, k_BTKH = super().normalized(q_BTNH, k_BTKH)
        return self._clipped(q_BTNH), self._clipped(k_BTKH)

    def _clipped(self, x: jax.Array) -> jax.Array:
        return x if self.limit is None else jnp.clip(x, -self.limit, self.limit)


class Block(blocks.PreNormBlock):
    """One layer: attention and experts, each after a norm, with residual connections."""

    attention_type = Attention
    moe_type = MoE


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
