"""OLMo 1 (arXiv:2402.00838)."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Keys, normalize
from tpuconv.models.olmo.family import Config


class PlainLayerNorm(nnx.Module):
    """Layer norm (arXiv:1607.06450) over the last axis, without scale and bias."""

    def __init__(self, letters: str, sizes: Mapping[str, int], eps: float, *, dtype: DTypeLike):
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        centered = x.astype(jnp.float32)
        centered -= centered.mean(axis=-1, keepdims=True)
        return normalize(centered, 1, self.eps).astype(x.dtype)


class Attention(blocks.ClippedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far.
    Queries, keys and values may be clipped. Rotary positions are in float32."""

    float32_rope = True

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        bias = config.attention_bias
        super().__init__(config, bias=bias, out_bias=bias, normed=False, dtype=dtype, keys=keys)


class Block(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a norm, with residual connections."""

    attention_type = Attention
    norm_type = PlainLayerNorm


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = PlainLayerNorm
