"""LFM2 (arXiv:2511.23404): short convolutions and attention."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import NormedAttention
from tpuconv.models.common.decoder import Step
from tpuconv.models.common.layers import Einsum, Keys
from tpuconv.models.common.recurrence import Convolution, HybridBlock, HybridDecoder, LayerState, PackedTokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShortState(LayerState):
    """The cache of a layer: the last inputs of its convolution."""

    axes: ClassVar[tuple[str, ...]] = ("B c n",)

    x_Bcn: jax.Array


class ShortConvolution(nnx.Module):
    """A convolution of a few tokens between two gates, x [B, T, D] to [B, T, D]. Also returns the state after these
    tokens."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes, bias = config.axes, config.conv_bias
        self.b = Einsum("BTD,Dn->BTn", sizes, bias=bias, dtype=dtype, keys=keys)
        self.c = Einsum("BTD,Dn->BTn", sizes, bias=bias, dtype=dtype, keys=keys)
        self.x = Einsum("BTD,Dn->BTn", sizes, bias=bias, dtype=dtype, keys=keys)
        self.conv = Convolution("n", sizes, bias=bias, dtype=dtype, keys=keys)
        self.o = Einsum("BTn,nD->BTD", sizes, bias=bias, dtype=dtype, keys=keys)
        self.config = config

    def __call__(
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, state: ShortState | None
    ) -> tuple[jax.Array, ShortState]:
        state = ShortState.empty(self.config, len(x_BTD)) if state is None else state
        packed = PackedTokens.of(x_BTD, step)
        x_BTD = packed.x_BTD
        y_BTn, last_Bcn = self.conv(self.b(x_BTD) * self.x(x_BTD), state.x_Bcn, packed.length_B)
        return packed.unpacked(self.o(self.c(x_BTD) * y_BTn)), ShortState(last_Bcn)


class Block(HybridBlock):
    """One layer: a short convolution or attention, then an MLP, each after a norm, with residual connections."""

    attention_type = NormedAttention
    mixer_type = ShortConvolution


class Model(HybridDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    state_type = ShortState
