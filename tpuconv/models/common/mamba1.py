"""Mamba (arXiv:2312.00752), the first version. Each of n channels has a state of size k, and each element of a state
has a decay rate. All channels have the same keys `b` and queries `c` of size k."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import Einsum, Keys, PlainRMSNorm, RMSNorm
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

LEGEND = {"n": "channels", "k": "key_dim", "r": "step_rank"}
"""The words of this module, by the letters of its einsums and arrays."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChannelState(LayerState):
    """The cache of a layer: the state of each channel, and the last inputs of the convolution. Channels come last,
    since the last axis on a TPU is a multiple of 128."""

    axes: ClassVar[tuple[str, ...]] = ("B key_dim channels", "B taps channels")

    s_Bkn: jax.Array
    x_Bcn: jax.Array


class Mamba1(nnx.Module):
    """Mamba, x [B, T, D] to [B, T, D]. Also returns the state after these tokens. Its config is a `ChannelConfig`.

    Class attributes: `legend` has the words of its letters, `heads` is the letter of heads of channels that have keys,
    queries and time steps of their own, which arrays [..., n], [..., k] and [..., r] then have before the last axis;
    empty for one head. `state_type` is the type of its state.
    """

    legend: ClassVar[Mapping[str, str]] = LEGEND
    heads: ClassVar[str] = ""
    state_type: ClassVar[type[ChannelState]] = ChannelState

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes, bias, h = with_letters(config.sizes, self.legend), config.mamba_proj_bias, self.heads
        self.x = Einsum(f"BTD,D{h}n->BT{h}n", sizes, bias=bias, dtype=dtype, keys=keys)
        self.z = Einsum(f"BTD,D{h}n->BT{h}n", sizes, bias=bias, dtype=dtype, keys=keys)
        self.conv = Convolution(f"{h}n", sizes, bias=config.mamba_conv_bias, dtype=dtype, keys=keys)
        self.dt_a = Einsum(f"BT{h}n,{h}nr->BT{h}r", sizes, dtype=dtype, keys=keys)
        self.b = Einsum(f"BT{h}n,{h}nk->BT{h}k", sizes, dtype=dtype, keys=keys)
        self.c = Einsum(f"BT{h}n,{h}nk->BT{h}k", sizes, dtype=dtype, keys=keys)
        self.dt = Einsum(f"BT{h}r,{h}rn->BT{h}n", sizes, bias=not h, dtype=dtype, keys=keys)
        self.o = Einsum(f"BT{h}n,{h}nD->BTD", sizes, bias=bias, dtype=dtype, keys=keys)
        self.a_log = nnx.Param(jnp.zeros([sizes[letter] for letter in f"{h}kn"], jnp.float32))
        self.skip = nnx.Param(jnp.ones([sizes[letter] for letter in f"{h}n"], dtype))
        self.config = config

    def __call__(
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, state: ChannelState | None
    ) -> tuple[jax.Array, ChannelState]:
        state = self.state_type.empty(self.config, len(x_BTD)) if state is None else state
        packed = PackedTokens.of(x_BTD, step)
        z_BTn = self.z(packed.x_BTD)
        x_BTn, x_last = self.conv(self.x(packed.x_BTD), state.x_Bcn, packed.length_B)
        x_BTn = nnx.silu(x_BTn)
        dt_BTr, b_BTk, c_BTk = self.normalized(self.dt_a(x_BTn), self.b(x_BTn), self.c(x_BTn))
        dt_BTn = self.time_steps(dt_BTr)
        dt_BTn = nnx.softplus(dt_BTn.astype(jnp.float32)).astype(dt_BTn.dtype).astype(jnp.float32)
        is_real = jnp.expand_dims(packed.is_real_BT, tuple(range(2, dt_BTn.ndim)))
        dt_BTn = jnp.where(is_real, dt_BTn, 0)  # of padding, which leaves the state as it is
        x_BTn, b_BTk, c_BTk = (x.astype(jnp.float32) for x in (x_BTn, b_BTk, c_BTk))
        scan = jax.vmap(selective_scan, (2, 2, 2, 2, 0, 1), (2, 1)) if self.heads else selective_scan
        y_BTn, s_Bkn = scan(c_BTk, b_BTk, x_BTn, dt_BTn, self.a_log[...], state.s_Bkn)
        y_BTn = (y_BTn + x_BTn * self.skip[...].astype(jnp.float32)) * nnx.silu(z_BTn.astype(jnp.float32))
        return packed.unpacked(self.o(y_BTn.astype(x_BTD.dtype))), self.state_type(s_Bkn, x_last)

    def time_steps(self, dt_BTr: jax.Array) -> jax.Array:
        """Returns the time steps [B, T, n] before softplus."""
        return self.dt(dt_BTr)

    def normalized(
        self, dt_BTr: jax.Array, b_BTk: jax.Array, c_BTk: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns what the time steps are made of, the keys and the queries, which some models normalize."""
        return dt_BTr, b_BTk, c_BTk


class NormedMamba1(Mamba1):
    """Mamba with RMS norms of keys, of queries and of what the time steps are made of, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        sizes = with_letters(config.sizes, LEGEND)
        self.dt_norm = RMSNorm("r", sizes, config.rms_norm_eps, dtype=dtype)
        self.b_norm = RMSNorm("k", sizes, config.rms_norm_eps, dtype=dtype)
        self.c_norm = RMSNorm("k", sizes, config.rms_norm_eps, dtype=dtype)

    def normalized(
        self, dt_BTr: jax.Array, b_BTk: jax.Array, c_BTk: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.dt_norm(dt_BTr), self.b_norm(b_BTk), self.c_norm(c_BTk)


class PlainNormedMamba1(Mamba1):
    """As `NormedMamba1`, with norms that have no scale, x [B, T, D] to [B, T, D]."""

    def normalized(
        self, dt_BTr: jax.Array, b_BTk: jax.Array, c_BTk: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        norm = PlainRMSNorm("", {}, self.config.mixer_rms_eps, dtype=dt_BTr.dtype)
        return norm(dt_BTr), norm(b_BTk), norm(c_BTk)


def selective_scan(
    c_BTk: jax.Array, b_BTk: jax.Array, x_BTn: jax.Array, dt_BTn: jax.Array, a_log_kn: jax.Array, s_Bkn: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs [B, T, n] and the state after these tokens, all in float32. For each token the state decays
    by exp(-exp(a_log) dt), then dt times the product of key and channels is added; the output is the state's value for
    the query (section 3.2, algorithm 2, with the key discretized as dt b)."""
    rate_kn = -jnp.exp(a_log_kn.astype(jnp.float32))

    def step(
        s_Bkn: jax.Array, c_Bk: jax.Array, b_Bk: jax.Array, u_Bn: jax.Array, dt_Bn: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        s_Bkn = s_Bkn * jnp.exp(rate_kn * dt_Bn[:, None]) + b_Bk[..., None] * u_Bn[:, None]
        return s_Bkn, jnp.sum(s_Bkn * c_Bk[..., None], axis=1)

    return scan_tokens(step, (c_BTk, b_BTk, x_BTn * dt_BTn, dt_BTn), s_Bkn)


class NormedMamba1Block(HybridBlock):
    """One layer: attention or Mamba-1 with norms, then an MLP or experts, each after a norm, with residual
    connections."""

    mixer_type = NormedMamba1


class Mamba1Hybrid(HybridDecoder):
    """A decoder with Mamba-1 in `state_layers`."""

    state_type = ChannelState
