"""Muse Glimmer, the text model."""

import jax
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import (
    CenteredRMSNorm,
    Einsum,
    Keys,
    ScaledRMSNorm,
    normalize,
    soft_capped,
    times,
)
from tpuconv.models.common.steps import Step
from tpuconv.models.muse_glimmer.family import Config


class Attention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    and keys are normalized, each head separately and without a scale of their own; queries are multiplied by a factor.
    The output is gated."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        bias = config.attention_bias
        super().__init__(config, bias=bias, out_bias=bias, dtype=dtype, keys=keys)
        self.gate = Einsum("BTD,DNH->BTNH", config.sizes, dtype=dtype, keys=keys)
        self.eps, self.factor = config.rms_norm_eps, config.qk_scale_factor

    def gated(self, x_BTD: jax.Array, y_BTNH: jax.Array) -> jax.Array:
        return y_BTNH * nnx.sigmoid(self.gate(x_BTD))

    def positioned(self, q_BTNH: jax.Array, k_BTKH: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        q_BTNH, k_BTKH = (normalize(x, 1, self.eps).astype(x.dtype) for x in (q_BTNH, k_BTKH))
        return super().positioned(times(q_BTNH, self.factor), k_BTKH, step)


class Block(blocks.SandwichBlock):
    """One layer: attention and MLP, each between two norms, with residual connections. The norms after them have an
    epsilon of their own."""

    attention_type = Attention
    norm_type = CenteredRMSNorm

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        self.post_attn_norm.eps = self.post_mlp_norm.eps = config.post_norm_eps


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V], which have a factor and a soft limit."""

    block = Block
    norm_type = ScaledRMSNorm
    config: Config

    def scaled(self, x_BTD: jax.Array) -> jax.Array:
        """Normalizes the embeddings. Returns [B, T, D]."""
        return normalize(x_BTD, 1, self.config.rms_norm_eps).astype(x_BTD.dtype)

    def adjusted(self, logits_BTV: jax.Array) -> jax.Array:
        """Multiplies the logits [B, T, V] and limits them softly."""
        return soft_capped(times(logits_BTV, self.config.output_multiplier), self.config.final_logit_softcapping)
