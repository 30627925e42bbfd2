"""GPT-J: attention and MLP after the same norm, and rotary positions of adjacent pairs."""

import jax

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder, Step
from tpuconv.models.common.layers import LayerNorm, apply_rope_to_neighbours
from tpuconv.models.phi.modules import MLP


class Attention(blocks.Attention):
    """Attention, x [B, T, D] to [B, T, D]. Rotary positions turn adjacent pairs of a part of each head."""

    def positioned(self, q_BTNH: jax.Array, k_BTKH: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        cos_sin = step.cos_sin_in(q_BTNH.dtype)
        return apply_rope_to_neighbours(q_BTNH, cos_sin), apply_rope_to_neighbours(k_BTKH, cos_sin)


class Block(blocks.ParallelBlock):
    """One layer: attention and MLP, both after the same norm, with one residual connection."""

    attention_type = Attention
    mlp_type = MLP
    norm_type = LayerNorm


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = LayerNorm
