"""Cohere 2 (arXiv:2504.00698)."""

from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tpuconv.models.cohere2.family import Config
from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder, Step
from tpuconv.models.common.layers import Keys, LayerNorm, apply_rope_to_neighbours, times


class Attention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Rotary
    positions turn adjacent pairs, by rounded cosines and sines but in float32."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.attention_bias, out_bias=config.attention_bias, dtype=dtype, keys=keys)

    def positioned(self, q_BTNH: jax.Array, k_BTKH: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        cos, sin = (part.astype(jnp.float32) for part in step.cos_sin_in(q_BTNH.dtype))
        return apply_rope_to_neighbours(q_BTNH, (cos, sin)), apply_rope_to_neighbours(k_BTKH, (cos, sin))


class Block(blocks.ParallelBlock):
    """One layer: attention and MLP, both after the same norm, with one residual connection."""

    attention_type: ClassVar[Any] = Attention
    norm_type = partial(LayerNorm, bias=False)


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block: ClassVar[Any] = Block
    norm_type = partial(LayerNorm, bias=False)
    config: Config

    def adjusted(self, logits_BTV: jax.Array) -> jax.Array:
        return times(logits_BTV, self.config.logit_scale)
