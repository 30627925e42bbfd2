"""Gemma 3 (arXiv:2503.19786), the text model."""

from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.layers import CenteredRMSNorm, Keys
from tpuconv.models.gemma2 import modules as gemma2
from tpuconv.models.gemma3_text.family import Config


class Attention(blocks.NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Queries and keys are normalized, each head separately; scores
    have a factor of their own."""

    norm_type = CenteredRMSNorm

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.attention_bias, out_bias=config.attention_bias, dtype=dtype, keys=keys)
        self.scale = config.query_pre_attn_scalar**-0.5


class Block(gemma2.Block):
    """One layer: attention and MLP, each between two norms, with residual connections."""

    attention_type = Attention


class Model(gemma2.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
