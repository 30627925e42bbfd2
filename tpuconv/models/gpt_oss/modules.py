"""gpt-oss (arXiv:2508.10925)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.cache import KV, append_kv
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import MASKED_SCORE, Einsum, Keys, ScaledRMSNorm, apply_rope
from tpuconv.models.common.moe import Expert, Rows, routed
from tpuconv.models.common.placement import placed, rules_for
from tpuconv.models.common.steps import Step
from tpuconv.models.gpt_oss.family import Config


def attention_with_sinks(
    q_BTNH: jax.Array, kv: KV, visible_BTS: jax.Array, sinks_N: jax.Array, *, scale: float | None = None
) -> jax.Array:
    """Returns softmax attention [B, T, N, H] with a sink: for each head, a learned score of a key without a value. The
    products of queries and keys are multiplied by `scale`, by default H^-0.5."""
    B, T, N, H = q_BTNH.shape
    K = kv.k_BSKH.shape[2]
    q_BTKGH = placed(q_BTNH.reshape(B, T, K, N // K, H), "B T K G H", rules_for(kv))
    scores_BKGTS = kv.scores(q_BTKGH) * (H**-0.5 if scale is None else scale)
    scores_BKGTS = jnp.where(visible_BTS[:, None, None], scores_BKGTS, MASKED_SCORE)
    sinks_BKGT1 = jnp.broadcast_to(
        sinks_N.astype(jnp.float32).reshape(1, K, N // K, 1, 1), (*scores_BKGTS.shape[:-1], 1)
    )
    weights = jax.nn.softmax(jnp.concatenate([scores_BKGTS, sinks_BKGT1], axis=-1), axis=-1)
    y_BTKGH = kv.weighted_values(weights[..., :-1], q_BTNH.dtype)
    return placed(y_BTKGH.reshape(B, T, N, -1), "B T N H").astype(q_BTNH.dtype)


class Attention(nnx.Module):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes, bias = config.sizes, config.attention_bias
        self.q = Einsum("BTD,DNH->BTNH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.k = Einsum("BTD,DKH->BTKH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.v = Einsum("BTD,DKH->BTKH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.o = Einsum("BTNH,NHD->BTD", sizes, bias=bias, dtype=dtype, keys=keys)
        self.sinks = nnx.Param(jnp.zeros(sizes["N"], dtype))

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        cos_sin = step.cos_sin_in(x_BTD.dtype)
        q_BTNH = apply_rope(self.q(x_BTD), cos_sin)
        kv = append_kv(kv, apply_rope(self.k(x_BTD), cos_sin), self.v(x_BTD), step.slot)
        return self.o(attention_with_sinks(q_BTNH, kv, step.visible(window), self.sinks[...])), kv


class MoE(nnx.Module):
    """The X experts with the highest scores of each token, x [B, T, D] to [B, T, D]. Their weights are the softmax of
    these X scores. Gate and up of an expert are clamped; the hidden state is (1 + up) gate sigmoid(alpha gate)."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        self.config = config
        self.router = Einsum("BTD,DE->BTE", sizes, bias=True, dtype=dtype, keys=keys)
        self.gate = Expert("EDM", sizes, bias=True, dtype=dtype, keys=keys)
        self.up = Expert("EDM", sizes, bias=True, dtype=dtype, keys=keys)
        self.down = Expert("EMD", sizes, bias=True, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        scores_BTX, ids_BTX = jax.lax.top_k(placed(self.router(x_BTD), "B T E"), self.config.num_experts_per_tok)
        limit, alpha = self.config.swiglu_limit, self.config.swiglu_alpha

        def feed(gate: Expert, up: Expert, down: Expert, rows: Rows) -> jax.Array:
            clamped = jnp.minimum(gate(rows.x, rows), limit)
            hidden = (jnp.clip(up(rows.x, rows), -limit, limit) + 1) * (clamped * nnx.sigmoid(clamped * alpha))
            return down(hidden, rows)

        return routed(feed, (self.gate, self.up, self.down), x_BTD, ids_BTX, nnx.softmax(scores_BTX))


class Block(nnx.Module):
    """One layer: attention and experts, each after a norm, with residual connections."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        self.attn_norm = ScaledRMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.attn = Attention(config, dtype=dtype, keys=keys)
        self.moe_norm = ScaledRMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.moe = MoE(config, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        y_BTD, kv = self.attn(self.attn_norm(x_BTD), step, window, kv)
        x_BTD = x_BTD + y_BTD
        return x_BTD + self.moe(self.moe_norm(x_BTD)), kv


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = ScaledRMSNorm
