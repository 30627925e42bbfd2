"""Attention with sinks: for each head a learned score of a key without a value (gpt-oss, arXiv:2508.10925)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tpuconv.models.common import blocks
from tpuconv.models.common.cache import KV
from tpuconv.models.common.layers import MASKED_SCORE
from tpuconv.models.common.placement import placed, rules_for
from tpuconv.models.common.steps import Step


def softmax_with_sinks(scores: jax.Array, sinks: jax.Array) -> jax.Array:
    """Returns the softmax of scores [..., S] and of a sink beside them, [..., 1] or what broadcasts to it, without the
    share of the sink."""
    beside = jnp.broadcast_to(sinks.astype(jnp.float32), (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores, beside], axis=-1), axis=-1)[..., :-1]


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
    weights_BKGTS = softmax_with_sinks(scores_BKGTS, sinks_N.reshape(1, K, N // K, 1, 1))
    y_BTKGH = kv.weighted_values(weights_BKGTS, q_BTNH.dtype)
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
