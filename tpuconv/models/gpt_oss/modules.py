"""gpt-oss (arXiv:2508.10925)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.cache import KV
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import MASKED_SCORE, Einsum, Keys, ScaledRMSNorm
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


class WithSinks:
    """Attention whose heads each have a score without a value, `sinks`. A class of attention derives from this one and
    from another, in this order."""

    sinks: Any
    scale: float | None

    def attended(self, q_BTNH: jax.Array, kv: KV, visible_BTS: jax.Array, step: Step) -> jax.Array:
        """See `tpuconv.models.common.blocks.Attention`."""
        return attention_with_sinks(q_BTNH, kv, visible_BTS, self.sinks[...], scale=self.scale)


class SinkAttention(WithSinks, blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Each
    head has a score without a value."""

    def __init__(self, config: Any, **options: Any):
        super().__init__(config, **options)
        self.sinks = nnx.Param(jnp.zeros(config.sizes["N"], options["dtype"]))


class Attention(SinkAttention):
    """Attention whose biases `attention_bias` of config.json says."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.attention_bias, out_bias=config.attention_bias, dtype=dtype, keys=keys)


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


class Block(blocks.MoeNormBlock):
    """One layer: attention and experts, each after a norm, with residual connections."""

    attention_type = Attention
    moe_type = MoE
    norm_type = ScaledRMSNorm


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = ScaledRMSNorm
