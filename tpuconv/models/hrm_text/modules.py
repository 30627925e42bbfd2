"""HRM-Text (arXiv:2506.21734): two stacks of layers that run in turn, several times."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.layers import Einsum, Keys, PlainRMSNorm, times
from tpuconv.models.common.loops import LoopedDecoder
from tpuconv.models.hrm_text.family import Config


class Attention(blocks.Attention):
    """Attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. The output has
    gates."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.gate = Einsum("BTD,DNH->BTNH", config.sizes, dtype=dtype, keys=keys)

    def gated(self, x_BTD: jax.Array, y_BTNH: jax.Array) -> jax.Array:
        return y_BTNH * nnx.sigmoid(self.gate(x_BTD))


class Block(blocks.PreNormBlock):
    """One layer: attention, then an MLP, each after a norm, with residual connections."""

    attention_type = Attention
    norm_type = PlainRMSNorm


class LowState(nnx.Module):
    """The state of the stack that runs more often, before its first run: the same [D] for each token."""

    def __init__(self, config: Config, *, dtype: DTypeLike):
        self.start = nnx.Param(jnp.zeros(config.sizes["D"], dtype))


class Model(LoopedDecoder):
    """Token ids [B, T] to logits [B, T, V]. Each run of a stack reads the sum of the states of both, and its normalized
    output is the new state of this stack. The first state of the other stack is made of the embeddings."""

    block = Block
    norm_type = PlainRMSNorm
    config: Config

    def __init__(self, config: Config, *, dtype: DTypeLike = jnp.bfloat16, **options: Any):
        super().__init__(config, dtype=dtype, **options)
        self.low = LowState(config, dtype=dtype)

    def scaled(self, x_BTD: jax.Array) -> jax.Array:
        return times(x_BTD, self.config.embedding_factor)

    def entering(self, execution: int, x_BTD: jax.Array, kept: dict[str, jax.Array]) -> jax.Array:
        run, place = divmod(execution, self.config.stack_size)
        if place:
            return x_BTD
        if not run:
            kept |= {"high": x_BTD, "low": self.low.start[...].astype(x_BTD.dtype)}
        else:
            kept["low" if run % (self.config.low_cycles + 1) else "high"] = self.norm(x_BTD)
        return kept["low"] + kept["high"]
