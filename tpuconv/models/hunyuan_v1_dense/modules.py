"""Hunyuan, dense."""

import jax
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder, Step
from tpuconv.models.common.layers import Keys, RMSNorm
from tpuconv.models.hunyuan_v1_dense.family import Config


class Attention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    and keys are normalized after they get rotary positions, each head separately."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.attention_bias, out_bias=config.attention_bias, dtype=dtype, keys=keys)
        self.q_norm = RMSNorm("H", config.axes, config.rms_norm_eps, dtype=dtype)
        self.k_norm = RMSNorm("H", config.axes, config.rms_norm_eps, dtype=dtype)

    def positioned(self, q_BTNH: jax.Array, k_BTKH: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        q_BTNH, k_BTKH = super().positioned(q_BTNH, k_BTKH, step)
        return self.q_norm(q_BTNH), self.k_norm(k_BTKH)


class Block(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a norm, with residual connections."""

    attention_type = Attention


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
