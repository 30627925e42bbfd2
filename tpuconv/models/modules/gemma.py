"""Attention of models after Gemma 3."""

import jax

from tpuconv.models.common import blocks
from tpuconv.models.common.steps import Step


class ChunkedAttention(blocks.NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D], with norms of queries and keys. Also returns the keys and
    values of all tokens so far. In layers with a window, chunks have half its size, and a token sees its own chunk and
    the one before."""

    def seen(self, step: Step, window: jax.Array | int) -> jax.Array:
        size = window // 2  # of layers without a window more than any position
        first_BT = (step.pos_BT // size - 1) * size
        return step.visible(window) & (step.pos_BS[:, None, :] >= first_BT[..., None])
