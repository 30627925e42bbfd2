"""Apertus (arXiv:2509.14233)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.apertus.family import Config
from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Keys


class Attention(blocks.NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    and keys are normalized, each head separately."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.attention_bias, out_bias=config.attention_bias, dtype=dtype, keys=keys)


class XIELU(nnx.Module):
    """The activation xIELU (arXiv:2411.13010), with two learned numbers, in the dtype of x."""

    def __init__(self, *, dtype: DTypeLike):
        self.alpha_p, self.alpha_n = nnx.Param(jnp.zeros(1, dtype)), nnx.Param(jnp.zeros(1, dtype))
        self.beta, self.eps = nnx.Param(jnp.full((), 0.5, dtype)), nnx.Param(jnp.full((), -1e-6, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        alpha_p, alpha_n, beta, eps = (
            param[...].astype(x.dtype) for param in (self.alpha_p, self.alpha_n, self.beta, self.eps)
        )
        positive = nnx.softplus(alpha_p) * x * x + beta * x
        negative = (jnp.expm1(jnp.minimum(x, eps)) - x) * (beta + nnx.softplus(alpha_n)) + beta * x
        return jnp.where(x > 0, positive, negative)


class MLP(blocks.PlainMLP):
    """MLP without a gate, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.xielu = XIELU(dtype=dtype)

    def act(self, x_BTF: jax.Array) -> jax.Array:
        return self.xielu(x_BTF)


class Block(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a norm, with residual connections."""

    attention_type = Attention
    mlp_type = MLP


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
