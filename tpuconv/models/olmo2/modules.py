"""OLMo 2 (arXiv:2501.00656)."""

import jax
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.cache import KV, append_kv
from tpuconv.models.common.decoder import Decoder, Step
from tpuconv.models.common.layers import Einsum, Keys, ScaledRMSNorm, apply_rope, attention
from tpuconv.models.olmo2.family import Config


class Attention(nnx.Module):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    and keys are normalized, all heads together; rotary positions are applied in float32."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes, bias = config.axes, config.attention_bias
        self.q = Einsum("BTD,DNH->BTNH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.k = Einsum("BTD,DKH->BTKH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.v = Einsum("BTD,DKH->BTKH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.o = Einsum("BTNH,NHD->BTD", sizes, bias=bias, dtype=dtype, keys=keys)
        self.q_norm = ScaledRMSNorm("NH", sizes, config.rms_norm_eps, dtype=dtype)
        self.k_norm = ScaledRMSNorm("KH", sizes, config.rms_norm_eps, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        q_BTNH = apply_rope(self.q_norm(self.q(x_BTD)), step.cos_sin)
        k_BTKH = apply_rope(self.k_norm(self.k(x_BTD)), step.cos_sin)
        kv = append_kv(kv, k_BTKH, self.v(x_BTD), step.slot)
        return self.o(attention(q_BTNH, kv, step.visible(window))), kv


class MLP(nnx.Module):
    """Gated MLP (arXiv:2002.05202), x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes = config.axes
        self.gate = Einsum("BTD,DF->BTF", sizes, dtype=dtype, keys=keys)
        self.up = Einsum("BTD,DF->BTF", sizes, dtype=dtype, keys=keys)
        self.down = Einsum("BTF,FD->BTD", sizes, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nnx.Module):
    """One layer: attention and MLP, each before a norm, with residual connections."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        self.attn = Attention(config, dtype=dtype, keys=keys)
        self.post_attn_norm = ScaledRMSNorm("D", config.axes, config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype, keys=keys)
        self.post_mlp_norm = ScaledRMSNorm("D", config.axes, config.rms_norm_eps, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        y_BTD, kv = self.attn(x_BTD, step, window, kv)
        x_BTD = x_BTD + self.post_attn_norm(y_BTD)
        return x_BTD + self.post_mlp_norm(self.mlp(x_BTD)), kv


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = ScaledRMSNorm
