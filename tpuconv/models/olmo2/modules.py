"""OLMo 2 (arXiv:2501.00656)."""

from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Keys, ScaledRMSNorm
from tpuconv.models.olmo2.family import Config


class Attention(blocks.NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    and keys are normalized, all heads together; rotary positions are applied in float32."""

    norm_type = ScaledRMSNorm
    float32_rope = True

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        bias = config.attention_bias
        super().__init__(config, bias=bias, out_bias=bias, all_heads=True, dtype=dtype, keys=keys)


class Block(blocks.PostNormBlock):
    """One layer: attention and MLP, each before a norm, with residual connections."""

    attention_type = Attention
    norm_type = ScaledRMSNorm


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = ScaledRMSNorm
