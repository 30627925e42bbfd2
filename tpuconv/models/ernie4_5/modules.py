"""ERNIE 4.5, dense."""

import jax
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder, Step
from tpuconv.models.common.layers import Keys, apply_rope_to_neighbours
from tpuconv.models.ernie4_5.family import Config


class Attention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Rotary
    positions turn adjacent pairs, in float32."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=bool(config.use_bias), out_bias=bool(config.use_bias), dtype=dtype, keys=keys)

    def positioned(self, q_BTNH: jax.Array, k_BTKH: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        return apply_rope_to_neighbours(q_BTNH, step.cos_sin), apply_rope_to_neighbours(k_BTKH, step.cos_sin)


class MLP(blocks.GatedMLP):
    """Gated MLP (arXiv:2002.05202), x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=bool(config.use_bias), dtype=dtype, keys=keys)


class Block(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a norm, with residual connections."""

    attention_type = Attention
    mlp_type = MLP


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
