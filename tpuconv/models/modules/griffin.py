"""Griffin (arXiv:2402.19427): layers with a real-gated linear recurrent unit (RG-LRU), and layers with attention."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import Einsum, Keys, gelu_tanh
from tpuconv.models.common.recurrence import (
    Convolution,
    HybridBlock,
    HybridDecoder,
    LayerState,
    PackedTokens,
    scan_tokens,
)
from tpuconv.models.common.steps import Step
from tpuconv.notation.letters import with_letters

LEGEND = {"w": "block_dim", "v": "block_in"}
"""The words of this module, by the letters of its einsums and arrays."""

SHARPNESS = 8.0
"""The factor of the logarithm of decays, `c` in section 2.4."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UnitState(LayerState):
    """The cache of a layer: the state of each channel, and the last inputs of the convolution."""

    axes: ClassVar[tuple[str, ...]] = ("B N block_dim", "B taps N block_dim")

    s_BNw: jax.Array
    x_BcNw: jax.Array


class BlockGate(Einsum):
    """The gate of each channel, made of the channels of its block, x [B, T, N, w] to [B, T, N, w]."""

    def __init__(self, sizes: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__("BTNv,Nvw->BTNw", sizes, bias=True, dtype=dtype, keys=keys)
        self.bias = nnx.Param(jnp.zeros((sizes["N"], sizes["w"]), dtype))  # not one for all blocks

    def __call__(self, x_BTNw: jax.Array) -> jax.Array:
        return nnx.sigmoid(super().__call__(x_BTNw))


class RecurrentUnit(nnx.Module):
    """A convolution and an RG-LRU beside a gate, x [B, T, D] to [B, T, D]. Also returns the state after these
    tokens."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, LEGEND)
        self.y = Einsum("BTD,DNw->BTNw", sizes, bias=True, dtype=dtype, keys=keys)
        self.x = Einsum("BTD,DNw->BTNw", sizes, bias=True, dtype=dtype, keys=keys)
        self.conv = Convolution("Nw", sizes, bias=True, dtype=dtype, keys=keys)
        self.i = BlockGate(sizes, dtype=dtype, keys=keys)
        self.a = BlockGate(sizes, dtype=dtype, keys=keys)
        self.rate = nnx.Param(jnp.zeros((sizes["N"], sizes["w"]), jnp.float32))
        self.o = Einsum("BTNw,NwD->BTD", sizes, bias=True, dtype=dtype, keys=keys)
        self.config = config

    def __call__(
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, state: UnitState | None
    ) -> tuple[jax.Array, UnitState]:
        state = UnitState.empty(self.config, len(x_BTD)) if state is None else state
        packed = PackedTokens.of(x_BTD, step)
        is_first_BT, is_real_BT = packed.placed(step.pos_BT) == 0, packed.is_real_BT
        y_BTNw = gelu_tanh(self.y(packed.x_BTD))
        x_BTNw, x_last = self.conv(self.x(packed.x_BTD), state.x_BcNw, packed.length_B)
        decay_BTNw = unit_decays(self.a(x_BTNw), self.rate[...])
        # The first token enters as it is, since it adds to nothing.
        factor_BTNw = jnp.where(is_first_BT[..., None, None], 1, jnp.sqrt(1 - jnp.exp(2 * decay_BTNw)))
        u_BTNw = (x_BTNw * self.i(x_BTNw)).astype(jnp.float32) * factor_BTNw
        # Padding leaves the state as it is.
        decay_BTNw, u_BTNw = (jnp.where(is_real_BT[..., None, None], x, 0) for x in (decay_BTNw, u_BTNw))
        h_BTNw, s_BNw = recurrent_scan(decay_BTNw, u_BTNw, state.s_BNw)
        return packed.unpacked(self.o(h_BTNw.astype(x_BTD.dtype) * y_BTNw)), UnitState(s_BNw, x_last)


def unit_decays(gate_BTNw: jax.Array, rate_Nw: jax.Array) -> jax.Array:
    """Returns the logarithm of the decay of each channel [B, T, N, w] in float32 (equation 6)."""
    return -SHARPNESS * gate_BTNw.astype(jnp.float32) * nnx.softplus(rate_Nw.astype(jnp.float32))


def recurrent_scan(decay_BTNw: jax.Array, u_BTNw: jax.Array, s_BNw: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the states [B, T, N, w] after each token and after the last one, all in float32. For each token the state
    decays by exp(decay), then the input is added (equation 4)."""

    def step(s_BNw: jax.Array, decay_BNw: jax.Array, u_BNw: jax.Array) -> tuple[jax.Array, jax.Array]:
        s_BNw = s_BNw * jnp.exp(decay_BNw) + u_BNw
        return s_BNw, s_BNw

    return scan_tokens(step, (decay_BTNw, u_BTNw), s_BNw)


class RecurrentBlock(HybridBlock):
    """One layer: an RG-LRU or attention, then an MLP, each after a norm, with residual connections."""

    mixer_type = RecurrentUnit


class RecurrentDecoder(HybridDecoder):
    """A decoder with RG-LRUs in `state_layers`."""

    state_type = UnitState
