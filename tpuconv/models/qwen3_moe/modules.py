"""Qwen3, mixture of experts (arXiv:2505.09388)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.cache import KV, append_kv
from tpuconv.models.common.decoder import Decoder, Step
from tpuconv.models.common.layers import Einsum, Keys, RMSNorm, apply_rope, attention
from tpuconv.models.common.moe import Experts
from tpuconv.models.common.placement import placed
from tpuconv.models.qwen3_moe.family import Config


class Attention(nnx.Module):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    and keys are normalized, each head separately."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes, bias = config.axes, config.attention_bias
        self.q = Einsum("BTD,DNH->BTNH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.k = Einsum("BTD,DKH->BTKH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.v = Einsum("BTD,DKH->BTKH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.o = Einsum("BTNH,NHD->BTD", sizes, bias=bias, dtype=dtype, keys=keys)
        self.q_norm = RMSNorm("H", sizes, config.rms_norm_eps, dtype=dtype)
        self.k_norm = RMSNorm("H", sizes, config.rms_norm_eps, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        cos_sin = step.cos_sin_in(x_BTD.dtype)
        q_BTNH = apply_rope(self.q_norm(self.q(x_BTD)), cos_sin)
        k_BTKH = apply_rope(self.k_norm(self.k(x_BTD)), cos_sin)
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


class MoE(Experts):
    """The X most probable experts of each token, x [B, T, D] to [B, T, D]. Their weights are their probabilities, which
    are normalized if `norm_topk_prob` is set."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.axes, nnx.silu, dtype=dtype, keys=keys)
        self.config = config
        self.router = Einsum("BTD,DE->BTE", config.axes, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        probs_BTE = nnx.softmax(placed(self.router(x_BTD), "B T E").astype(jnp.float32))
        weights_BTX, ids_BTX = jax.lax.top_k(probs_BTE, self.config.num_experts_per_tok)
        if self.config.norm_topk_prob:
            weights_BTX /= weights_BTX.sum(axis=-1, keepdims=True)
        return super().__call__(x_BTD, ids_BTX, weights_BTX.astype(x_BTD.dtype))


class Block(nnx.Module):
    """One layer: attention, then experts or an MLP, each after a norm, with residual connections."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        self.attn_norm = RMSNorm("D", config.axes, config.rms_norm_eps, dtype=dtype)
        self.attn = Attention(config, dtype=dtype, keys=keys)
        self.mlp_norm = RMSNorm("D", config.axes, config.rms_norm_eps, dtype=dtype)
        if layer in config.axes["J"]:
            self.moe = MoE(config, dtype=dtype, keys=keys)
        else:
            self.mlp = MLP(config, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        y_BTD, kv = self.attn(self.attn_norm(x_BTD), step, window, kv)
        x_BTD = x_BTD + y_BTD
        mlp: Any = self.moe if hasattr(self, "moe") else self.mlp
        return x_BTD + mlp(self.mlp_norm(x_BTD)), kv


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
