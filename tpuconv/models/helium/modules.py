"""Helium: Llama (arXiv:2302.13971) with rotary positions of adjacent pairs."""

import jax
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder, Step
from tpuconv.models.common.layers import Keys, ScaledRMSNorm, apply_rope_to_neighbours
from tpuconv.models.granite.modules import MLP
from tpuconv.models.helium.family import Config


class Attention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Rotary positions turn adjacent pairs."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.attention_bias, dtype=dtype, keys=keys)

    def positioned(self, q_BTNH: jax.Array, k_BTKH: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        cos_sin = step.cos_sin_in(q_BTNH.dtype)
        return apply_rope_to_neighbours(q_BTNH, cos_sin), apply_rope_to_neighbours(k_BTKH, cos_sin)


class Block(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a norm, with residual connections."""

    attention_type = Attention
    mlp_type = MLP
    norm_type = ScaledRMSNorm


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = ScaledRMSNorm
