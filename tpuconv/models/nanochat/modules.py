"""nanochat: norms without parameters, also of embeddings and of queries and keys, and an MLP without a gate."""

from collections.abc import Mapping

import jax
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder, Step
from tpuconv.models.common.layers import Keys, apply_rope, normalize, soft_capped
from tpuconv.models.nanochat.family import Config


class PlainRMSNorm(nnx.Module):
    """RMS norm (arXiv:1910.07467) over the last axis, without a scale."""

    def __init__(self, letters: str, sizes: Mapping[str, int], eps: float, *, dtype: DTypeLike):
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return normalize(x, 1, self.eps).astype(x.dtype)


class Attention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Rotary
    positions turn the other way round; queries and keys are normalized after them, each head separately."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.attention_bias, out_bias=config.attention_bias, dtype=dtype, keys=keys)
        self.head_norm = PlainRMSNorm("H", config.axes, config.rms_norm_eps, dtype=dtype)

    def positioned(self, q_BTNH: jax.Array, k_BTKH: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        cos, sin = step.cos_sin_in(q_BTNH.dtype)
        return self.head_norm(apply_rope(q_BTNH, (cos, -sin))), self.head_norm(apply_rope(k_BTKH, (cos, -sin)))


class Block(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a norm, with residual connections."""

    attention_type = Attention
    mlp_type = blocks.PlainMLP
    norm_type = PlainRMSNorm


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V], which have a soft limit."""

    block = Block
    norm_type = PlainRMSNorm
    config: Config

    def scaled(self, x_BTD: jax.Array) -> jax.Array:
        return normalize(x_BTD, 1, self.config.rms_norm_eps).astype(x_BTD.dtype)

    def adjusted(self, logits_BTV: jax.Array) -> jax.Array:
        return soft_capped(logits_BTV, self.config.final_logit_softcapping)
