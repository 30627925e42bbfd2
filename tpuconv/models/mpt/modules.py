"""MPT (https://www.databricks.com/blog/mpt-7b)."""

from functools import partial

import jax
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.alibi import alibi
from tpuconv.models.common.decoder import Decoder, Step
from tpuconv.models.common.layers import Keys, LayerNorm, gelu
from tpuconv.models.mpt.family import Config


class Attention(blocks.ClippedAttention):
    """Attention biased by distance, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far.
    Queries, keys and values are clipped, if the config says so."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, normed=False, dtype=dtype, keys=keys)
        self.scale = config.softmax_scale
        self.heads = config.num_attention_heads

    def score_bias(self, step: Step) -> jax.Array:
        return alibi(step.pos_BS, self.heads)


class MLP(blocks.PlainMLP):
    """MLP without a gate, x [B, T, D] to [B, T, D]."""

    def act(self, x_BTF: jax.Array) -> jax.Array:
        return gelu(x_BTF)


class Block(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a layer norm, with residual connections."""

    attention_type = Attention
    mlp_type = MLP
    norm_type = partial(LayerNorm, bias=False)


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = partial(LayerNorm, bias=False)
