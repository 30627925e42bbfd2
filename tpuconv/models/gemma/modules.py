"""Gemma, the first version (arXiv:2403.08295)."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import CenteredRMSNorm, Keys, gelu_tanh
from tpuconv.models.gemma.family import Config


class Attention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.attention_bias, out_bias=config.attention_bias, dtype=dtype, keys=keys)


class MLP(blocks.GatedMLP):
    """Gated MLP (arXiv:2002.05202) with GELU, x [B, T, D] to [B, T, D]."""

    def act(self, x_BTF: jax.Array) -> jax.Array:
        return gelu_tanh(x_BTF)


class Block(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a norm, with residual connections."""

    attention_type: ClassVar[Any] = Attention
    mlp_type = MLP
    norm_type = CenteredRMSNorm


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block: ClassVar[Any] = Block
    norm_type = CenteredRMSNorm

    def scaled(self, x_BTD: jax.Array) -> jax.Array:
        """Multiplies the embeddings by sqrt(D), rounded to their dtype. Returns [B, T, D]."""
        factor: jax.Array = jnp.float32(self.config.hidden_size**0.5).astype(x_BTD.dtype)
        return x_BTD * factor
