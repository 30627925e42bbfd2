"""Granite 3, dense: Llama with four factors."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Keys, times
from tpuconv.models.granite.family import Config


class Attention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.attention_bias, out_bias=config.attention_bias, dtype=dtype, keys=keys)
        self.scale = config.attention_multiplier


class MLP(blocks.GatedMLP):
    """Gated MLP (arXiv:2002.05202), x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.mlp_bias, dtype=dtype, keys=keys)


class Block(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a norm, with residual connections and a factor of what they add."""

    attention_type = Attention
    mlp_type: ClassVar[Callable[..., Any]] = MLP

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        self.factor = config.residual_multiplier

    def joined(self, x_BTD: jax.Array, y_BTD: jax.Array) -> jax.Array:
        return x_BTD + times(y_BTD, self.factor)


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    config: Config

    def scaled(self, x_BTD: jax.Array) -> jax.Array:
        return times(x_BTD, self.config.embedding_multiplier)

    def adjusted(self, logits_BTV: jax.Array) -> jax.Array:
        return (logits_BTV.astype(jnp.float32) / self.config.logits_scaling).astype(logits_BTV.dtype)
