"""Phi-1, 1.5 and 2 (arXiv:2306.11644, arXiv:2309.05463)."""

import jax
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Keys, LayerNorm, gelu_tanh
from tpuconv.models.phi.family import Config


class Attention(blocks.NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    and keys may be normalized, each head separately."""

    norm_type = LayerNorm

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=True, out_bias=True, normed=config.qk_layernorm, dtype=dtype, keys=keys)


class MLP(blocks.PlainMLP):
    """MLP without a gate, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=True, dtype=dtype, keys=keys)

    def act(self, x_BTF: jax.Array) -> jax.Array:
        return gelu_tanh(x_BTF)


class Block(blocks.ParallelBlock):
    """One layer: attention and MLP, both after the same norm, with one residual connection."""

    attention_type = Attention
    mlp_type = MLP
    norm_type = LayerNorm


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = LayerNorm
