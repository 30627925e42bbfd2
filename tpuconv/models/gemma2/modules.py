"""Gemma 2 (arXiv:2408.00118)."""

from typing import Any, ClassVar

import jax
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.layers import CenteredRMSNorm, Keys, soft_capped
from tpuconv.models.gemma import modules as gemma
from tpuconv.models.gemma2.family import Config


class Attention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Scores have a factor of their own, and a soft limit."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.attention_bias, out_bias=config.attention_bias, dtype=dtype, keys=keys)
        self.scale, self.cap = config.query_pre_attn_scalar**-0.5, config.attn_logit_softcapping


class Block(blocks.SandwichBlock):
    """One layer: attention and MLP, each between two norms, with residual connections."""

    attention_type: ClassVar[Any] = Attention
    mlp_type = gemma.MLP
    norm_type = CenteredRMSNorm


class Model(gemma.Model):
    """Token ids [B, T] to logits [B, T, V], which have a soft limit."""

    block = Block
    config: Config

    def adjusted(self, logits_BTV: jax.Array) -> jax.Array:
        """Limits the logits [B, T, V] softly."""
        return soft_capped(logits_BTV, self.config.final_logit_softcapping)
