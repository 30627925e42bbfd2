"""Ministral 3: Mistral (arXiv:2310.06825) with queries that grow with their position."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder, Step
from tpuconv.models.common.layers import Keys
from tpuconv.models.ministral3.family import Config


def grown(q_BTNH: jax.Array, step: Step, beta: float, original: int) -> jax.Array:
    """Returns queries [B, T, N, H] times a factor that grows with the logarithm of their position: 1 within the
    original context S0, then 1 + beta ln(1 + floor(position / S0)) (arXiv:2501.19399)."""
    contexts_BT = jnp.maximum(step.pos_BT, 0) // original
    factors_BT = 1 + beta * jnp.log1p(contexts_BT.astype(jnp.float32))
    return q_BTNH * factors_BT[:, :, None, None].astype(q_BTNH.dtype)


class Attention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Queries grow with their position."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.beta, self.original = config.llama_4_scaling_beta, config.rope.original_max_position_embeddings

    def positioned(self, q_BTNH: jax.Array, k_BTKH: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        q_BTNH, k_BTKH = super().positioned(q_BTNH, k_BTKH, step)
        return (grown(q_BTNH, step, self.beta, self.original) if self.beta else q_BTNH), k_BTKH


class Block(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a norm, with residual connections."""

    attention_type: ClassVar[Any] = Attention


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
