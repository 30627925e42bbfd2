"""Attention with queries that grow with their position."""

from typing import Any

import jax
import jax.numpy as jnp

from tpuconv.models.common import blocks
from tpuconv.models.common.steps import Step


def grown(q_BTNH: jax.Array, step: Step, beta: float, original: int) -> jax.Array:
    """Returns queries [B, T, N, H] times a factor that grows with the logarithm of their position: 1 within the
    original context S0, then 1 + beta ln(1 + floor(position / S0)) (arXiv:2501.19399)."""
    contexts_BT = jnp.maximum(step.pos_BT, 0) // original
    factors_BT = 1 + beta * jnp.log1p(contexts_BT.astype(jnp.float32))
    return q_BTNH * factors_BT[:, :, None, None].astype(q_BTNH.dtype)


class GrowingAttention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Queries grow with their position."""

    def __init__(self, config: Any, **options: Any):
        super().__init__(config, **options)
        self.beta, self.original = config.llama_4_scaling_beta, config.rope.original_max_position_embeddings

    def positioned(self, q_BTNH: jax.Array, k_BTKH: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        q_BTNH, k_BTKH = super().positioned(q_BTNH, k_BTKH, step)
        return (grown(q_BTNH, step, self.beta, self.original) if self.beta else q_BTNH), k_BTKH
