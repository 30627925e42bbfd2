"""OLMoE (arXiv:2409.02060)."""

from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Keys
from tpuconv.models.olmoe.family import Config
from tpuconv.models.qwen3_moe.modules import MoE


class Attention(blocks.ClippedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    and keys are normalized, all heads together; then they and the values are clipped, if the config says so."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        bias = config.attention_bias
        super().__init__(config, bias=bias, out_bias=bias, all_heads=True, dtype=dtype, keys=keys)


class Block(blocks.PreNormBlock):
    """One layer: attention and experts, each after a norm, with residual connections."""

    attention_type = Attention
    moe_type = MoE


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
