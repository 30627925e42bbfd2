"""DBRX (https://www.databricks.com/blog/introducing-dbrx-new-state-art-open-llm)."""

from functools import partial

from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Keys, LayerNorm
from tpuconv.models.dbrx.family import Config
from tpuconv.models.mixtral.modules import MoE


class Attention(blocks.ClippedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far.
    Queries, keys and values are clipped, if the config says so."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, normed=False, dtype=dtype, keys=keys)


class Block(blocks.PreNormBlock):
    """One layer: attention and experts, each after a layer norm, with residual connections."""

    attention_type = Attention
    moe_type = MoE
    norm_type = partial(LayerNorm, bias=False)


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = partial(LayerNorm, bias=False)
