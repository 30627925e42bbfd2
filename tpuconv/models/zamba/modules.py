"""Zamba (arXiv:2405.16712): Mamba-1 in heads in each layer, and before some of them one block of attention and MLP
whose weights these layers share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import Keys
from tpuconv.models.common.mamba1 import LEGEND, ChannelState, Mamba1
from tpuconv.models.zamba.family import Config
from tpuconv.models.zamba2 import modules as zamba2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadState(ChannelState):
    """The cache of a layer, with an axis of heads before the channels and before the keys."""

    axes: ClassVar[tuple[str, ...]] = ("B mamba_heads key_dim head_channels", "B taps mamba_heads head_channels")


class MambaInHeads(Mamba1):
    """Mamba-1 whose heads have keys, queries and time steps of their own, x [B, T, D] to [B, T, D]."""

    legend: ClassVar[Mapping[str, str]] = {**LEGEND, "h": "mamba_heads", "n": "head_channels"}
    heads: ClassVar[str] = "h"
    state_type: ClassVar[type[ChannelState]] = HeadState

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.dt_bias = nnx.Param(jnp.zeros([config.sizes[self.legend[letter]] for letter in "hn"], dtype))

    def time_steps(self, dt_BTr: jax.Array) -> jax.Array:
        return self.dt(dt_BTr) + self.dt_bias[...]


class Block(zamba2.Block):
    """One layer: Mamba-1 in heads after a norm, with a residual connection, and perhaps the shared block before it."""

    mixer_type: ClassVar[Callable[..., Any]] = MambaInHeads
    has_adapters: ClassVar[bool] = False


class Model(zamba2.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    state_type = HeadState
