"""GLM-4 of 2024 (arXiv:2406.12793)."""

import jax
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder, Step
from tpuconv.models.common.layers import Keys, apply_rope_to_neighbours
from tpuconv.models.glm.family import Config


class Attention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Rotary
    positions turn adjacent pairs of the first dimensions of each head."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.attention_bias, dtype=dtype, keys=keys)

    def positioned(self, q_BTNH: jax.Array, k_BTKH: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        cos_sin = step.cos_sin_in(q_BTNH.dtype)
        return apply_rope_to_neighbours(q_BTNH, cos_sin), apply_rope_to_neighbours(k_BTKH, cos_sin)


class Block(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a norm, with residual connections."""

    attention_type = Attention


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
