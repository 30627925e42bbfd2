"""Qwen2 and Qwen2.5 (arXiv:2407.10671, arXiv:2412.15115)."""

from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Keys
from tpuconv.models.qwen2.family import Config


class Attention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far.
    Queries, keys and values have biases."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=True, dtype=dtype, keys=keys)


class Block(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a norm, with residual connections."""

    attention_type = Attention


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
