"""Gemma, the first version (arXiv:2403.08295)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.cache import KV, append_kv
from tpuconv.models.common.decoder import Decoder, Step
from tpuconv.models.common.layers import CenteredRMSNorm, Einsum, Keys, apply_rope, attention, gelu_tanh
from tpuconv.models.gemma.family import Config


class Attention(nnx.Module):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes, bias = config.axes, config.attention_bias
        self.q = Einsum("BTD,DNH->BTNH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.k = Einsum("BTD,DKH->BTKH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.v = Einsum("BTD,DKH->BTKH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.o = Einsum("BTNH,NHD->BTD", sizes, bias=bias, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        cos_sin = step.cos_sin_in(x_BTD.dtype)
        q_BTNH = apply_rope(self.q(x_BTD), cos_sin)
        kv = append_kv(kv, apply_rope(self.k(x_BTD), cos_sin), self.v(x_BTD), step.slot)
        return self.o(attention(q_BTNH, kv, step.visible(window))), kv


class MLP(nnx.Module):
    """Gated MLP (arXiv:2002.05202), x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes = config.axes
        self.gate = Einsum("BTD,DF->BTF", sizes, dtype=dtype, keys=keys)
        self.up = Einsum("BTD,DF->BTF", sizes, dtype=dtype, keys=keys)
        self.down = Einsum("BTF,FD->BTD", sizes, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(gelu_tanh(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nnx.Module):
    """One layer: attention and MLP, each after a norm, with residual connections."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        self.attn_norm = CenteredRMSNorm("D", config.axes, config.rms_norm_eps, dtype=dtype)
        self.attn = Attention(config, dtype=dtype, keys=keys)
        self.mlp_norm = CenteredRMSNorm("D", config.axes, config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        y_BTD, kv = self.attn(self.attn_norm(x_BTD), step, window, kv)
        x_BTD = x_BTD + y_BTD
        return x_BTD + self.mlp(self.mlp_norm(x_BTD)), kv


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = CenteredRMSNorm

    def scaled(self, x_BTD: jax.Array) -> jax.Array:
        """Multiplies the embeddings by sqrt(D), rounded to their dtype. Returns [B, T, D]."""
        return x_BTD * jnp.float32(self.config.hidden_size**0.5).astype(x_BTD.dtype)
