"""Nemotron (arXiv:2402.16819)."""

import jax
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Keys, LayerNorm
from tpuconv.models.nemotron.family import Config


class CenteredLayerNorm(LayerNorm):
    """Layer norm whose scale is stored less 1. The sum is rounded to the dtype of the stored scale."""

    def stretch(self) -> jax.Array:
        return self.scale[...] + 1


class Attention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.attention_bias, out_bias=config.attention_bias, dtype=dtype, keys=keys)


class MLP(blocks.PlainMLP):
    """MLP without a gate, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.mlp_bias, dtype=dtype, keys=keys)


class Block(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a layer norm, with residual connections."""

    attention_type = Attention
    mlp_type = MLP
    norm_type = CenteredLayerNorm


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = CenteredLayerNorm
