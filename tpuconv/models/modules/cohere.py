"""Cohere's attention."""

import jax
import jax.numpy as jnp

from tpuconv.models.common.blocks import NormedAttention
from tpuconv.models.common.layers import apply_rope_to_neighbours
from tpuconv.models.common.steps import Step


class CohereAttention(NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Rotary
    positions turn adjacent pairs, by rounded cosines and sines but in float32."""

    def positioned(self, q_BTNH: jax.Array, k_BTKH: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        q_BTNH, k_BTKH = self.normalized(q_BTNH, k_BTKH)
        cos, sin = (part.astype(jnp.float32) for part in step.cos_sin_in(q_BTNH.dtype))
        return apply_rope_to_neighbours(q_BTNH, (cos, sin)), apply_rope_to_neighbours(k_BTKH, (cos, sin))
