"""StarCoder2 (arXiv:2402.19173)."""

import jax
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Keys, LayerNorm, gelu_tanh
from tpuconv.models.starcoder2.family import Config


class Attention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.use_bias, out_bias=config.use_bias, dtype=dtype, keys=keys)


class MLP(blocks.PlainMLP):
    """MLP without a gate, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.use_bias, dtype=dtype, keys=keys)

    def act(self, x_BTF: jax.Array) -> jax.Array:
        return gelu_tanh(x_BTF)


class Block(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a layer norm, with residual connections."""

    attention_type = Attention
    mlp_type = MLP
    norm_type = LayerNorm


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = LayerNorm
