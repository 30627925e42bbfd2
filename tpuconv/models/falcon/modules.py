"""Falcon (arXiv:2311.16867)."""

import jax
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Keys, LayerNorm, gelu
from tpuconv.models.falcon.family import Config
from tpuconv.models.gpt_neox import modules as gpt_neox


class MLP(blocks.PlainMLP):
    """MLP without a gate, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.attention_bias, dtype=dtype, keys=keys)

    def act(self, x_BTF: jax.Array) -> jax.Array:
        return gelu(x_BTF)


class OneNormBlock(blocks.ParallelBlock):
    """One layer: attention and MLP, both after the same norm, with one residual connection."""

    attention_type = gpt_neox.Attention
    mlp_type = MLP
    norm_type = LayerNorm


class TwoNormBlock(gpt_neox.Block):
    """One layer: attention and MLP, each after a norm of its own, one after the other or side by side."""

    mlp_type = MLP


def new_block(config: Config, layer: int, *, dtype: DTypeLike, keys: Keys) -> OneNormBlock | TwoNormBlock:
    """Returns a layer."""
    block = OneNormBlock if config.one_norm else TwoNormBlock
    return block(config, layer, dtype=dtype, keys=keys)


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = staticmethod(new_block)
    norm_type = LayerNorm
