"""Granite with sliding windows and sinks."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.cache import KV, append_kv
from tpuconv.models.common.decoder import Step
from tpuconv.models.common.layers import Keys
from tpuconv.models.gpt_oss.modules import attention_with_sinks
from tpuconv.models.granite import modules as granite
from tpuconv.models.granite_swa.family import GraniteWindows


class Attention(granite.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Each
    head has a score without a value."""

    def __init__(self, config: GraniteWindows, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.sinks = nnx.Param(jnp.zeros(config.axes["N"], dtype))

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        q_BTNH, k_BTKH = self.positioned(self.q(x_BTD), self.k(x_BTD), step)
        kv = append_kv(kv, k_BTKH, self.values(x_BTD), step.slot)
        y_BTNH = attention_with_sinks(q_BTNH, kv, step.visible(window), self.sinks[...], scale=self.scale)
        return self.o(y_BTNH), kv


class Block(granite.Block):
    """One layer: attention and MLP, each after a norm, with residual connections and a factor of what they add."""

    attention_type: ClassVar[Any] = Attention


class Model(granite.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    block: ClassVar[Any] = Block
