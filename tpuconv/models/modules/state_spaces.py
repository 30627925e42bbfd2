"""Models whose layers have a state and nothing else."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import Keys, RMSNorm
from tpuconv.models.common.mamba1 import ChannelState, Mamba1, PlainNormedMamba1
from tpuconv.models.common.mamba2 import Mamba2, MambaState
from tpuconv.models.common.recurrence import HybridDecoder
from tpuconv.models.common.steps import Step


class StateBlock(nnx.Module):
    """One layer: a part with a state after a norm, with a residual connection. The hidden states may be in float32,
    whatever the dtype of the part.

    Attributes:
        mixer_type: the class of the part.
    """

    mixer_type: ClassVar[Callable[..., Any]]
    norm_type: ClassVar[Callable[..., Any]] = RMSNorm

    def __init__(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys):
        self.norm = self.norm_type("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.attn = self.mixer_type(config, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        y_BTD, kv = self.attn(self.norm(x_BTD.astype(self.norm.scale.dtype)), step, window, kv)
        return x_BTD + y_BTD.astype(x_BTD.dtype), kv


class StateDecoder(HybridDecoder):
    """A decoder of such layers. With `residual_in_fp32` the sums of hidden states are in float32."""

    def positioned(self, x_BTD: jax.Array, pos_BT: jax.Array) -> jax.Array:
        config: Any = self.config
        return x_BTD.astype(jnp.float32) if config.residual_in_fp32 else x_BTD

    def head(self, x_BTD: jax.Array) -> jax.Array:
        return super().head(x_BTD.astype(self.embed.embedding.dtype))


class Mamba2Block(StateBlock):
    """One layer: Mamba-2 after a norm, with a residual connection."""

    mixer_type = Mamba2


class Mamba2Decoder(StateDecoder):
    """A decoder with Mamba-2 in every layer."""

    state_type = MambaState


class Mamba1Block(StateBlock):
    """One layer: Mamba-1 after a norm, with a residual connection."""

    mixer_type = Mamba1


class PlainNormedBlock(StateBlock):
    """One layer: Mamba-1 with norms that have no scale, after a norm, with a residual connection."""

    mixer_type = PlainNormedMamba1


class Mamba1Decoder(StateDecoder):
    """A decoder with Mamba-1 in every layer."""

    state_type = ChannelState
