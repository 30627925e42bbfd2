"""Mamba-2 (arXiv:2405.21060). A layer's cache is a state whose size does not depend on the number of tokens.

In the letters of linear attention, of which it is a case (section 5): a group n has keys `b` and queries `c` of size
k, and r heads with values `x` of size w.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import Einsum, Keys, normalize
from tpuconv.models.common.recurrence import (
    Convolution,
    HybridBlock,
    HybridDecoder,
    LayerState,
    PackedTokens,
    decays,
    exact_einsum,
    scan_chunks,
)
from tpuconv.models.common.steps import Step
from tpuconv.notation.letters import with_letters

LEGEND = {"n": "groups", "r": "per_group", "k": "key_dim", "w": "value_dim"}
"""The words of this module, by the letters of its einsums and arrays."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MambaState(LayerState):
    """The cache of a layer: the state of each head, and the last inputs of the convolutions."""

    axes: ClassVar[tuple[str, ...]] = (
        "B groups per_group key_dim value_dim",
        "B taps groups per_group value_dim",
        "B taps groups key_dim",
        "B taps groups key_dim",
    )

    s_Bnrkw: jax.Array
    x_Bcnrw: jax.Array
    b_Bcnk: jax.Array
    c_Bcnk: jax.Array


class GatedGroupNorm(nnx.Module):
    """RMS norm of each group of heads of y * silu(z), in float32. `eps` is by default the one of other norms."""

    def __init__(self, config: Any, *, eps: float | None = None, dtype: DTypeLike):
        self.eps = config.rms_norm_eps if eps is None else eps
        sizes = with_letters(config.sizes, LEGEND)
        self.scale = nnx.Param(jnp.ones(tuple(sizes[letter] for letter in "nrw"), dtype))

    def __call__(self, y_BTnrw: jax.Array, z_BTnrw: jax.Array) -> jax.Array:
        gated_BTnrw = y_BTnrw * nnx.silu(z_BTnrw.astype(jnp.float32))
        return normalize(gated_BTnrw, 2, self.eps) * self.scale[...].astype(jnp.float32)


class Mamba2(nnx.Module):
    """Mamba-2, x [B, T, D] to [B, T, D]. Also returns the state after these tokens. Its config is a `MambaConfig`."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes, bias = with_letters(config.sizes, LEGEND), config.mamba_proj_bias
        self.z = Einsum("BTD,Dnrw->BTnrw", sizes, bias=bias, dtype=dtype, keys=keys)
        self.x = Einsum("BTD,Dnrw->BTnrw", sizes, bias=bias, dtype=dtype, keys=keys)
        self.b = Einsum("BTD,Dnk->BTnk", sizes, bias=bias, dtype=dtype, keys=keys)
        self.c = Einsum("BTD,Dnk->BTnk", sizes, bias=bias, dtype=dtype, keys=keys)
        self.dt = Einsum("BTD,Dnr->BTnr", sizes, bias=bias, dtype=dtype, keys=keys)
        self.o = Einsum("BTnrw,nrwD->BTD", sizes, bias=bias, dtype=dtype, keys=keys)
        self.x_conv = Convolution("nrw", sizes, bias=config.mamba_conv_bias, dtype=dtype, keys=keys)
        self.b_conv = Convolution("nk", sizes, bias=config.mamba_conv_bias, dtype=dtype, keys=keys)
        self.c_conv = Convolution("nk", sizes, bias=config.mamba_conv_bias, dtype=dtype, keys=keys)
        self.a_log = nnx.Param(jnp.zeros((sizes["n"], sizes["r"]), jnp.float32))
        self.dt_bias = nnx.Param(jnp.ones((sizes["n"], sizes["r"]), dtype))
        self.skip = nnx.Param(jnp.ones((sizes["n"], sizes["r"]), dtype))
        self.norm = self.new_norm(config, dtype)
        self.config = config

    def __call__(
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, state: MambaState | None
    ) -> tuple[jax.Array, MambaState]:
        state = MambaState.empty(self.config, len(x_BTD)) if state is None else state
        packed = PackedTokens.of(x_BTD, step)
        z_BTnrw, x_BTnrw, b_BTnk, c_BTnk, dt_BTnr = self.inputs(packed.x_BTD)
        x_BTnrw, x_last = self.x_conv(x_BTnrw, state.x_Bcnrw, packed.length_B)
        b_BTnk, b_last = self.b_conv(b_BTnk, state.b_Bcnk, packed.length_B)
        c_BTnk, c_last = self.c_conv(c_BTnk, state.c_Bcnk, packed.length_B)
        x_BTnrw, b_BTnk, c_BTnk = (nnx.silu(y).astype(jnp.float32) for y in (x_BTnrw, b_BTnk, c_BTnk))

        dt_BTnr = dt_BTnr + self.dt_bias[...].astype(dt_BTnr.dtype)
        dt_BTnr = nnx.softplus(dt_BTnr.astype(jnp.float32)).astype(dt_BTnr.dtype).astype(jnp.float32)
        # A token with dt = 0 leaves the state as it is.
        dt_BTnr = jnp.where(packed.is_real_BT[..., None, None], jnp.clip(dt_BTnr, *self.config.step_limits), 0)
        g_BTnr = -jnp.exp(self.a_log[...].astype(jnp.float32)) * dt_BTnr
        y_BTnrw, s_Bnrkw = state_space(c_BTnk, b_BTnk, x_BTnrw * dt_BTnr[..., None], g_BTnr, state.s_Bnrkw)
        y_BTnrw += self.skip[...].astype(jnp.float32)[..., None] * x_BTnrw
        y_BTD = self.o(self.norm(y_BTnrw, z_BTnrw).astype(x_BTD.dtype))
        return packed.unpacked(y_BTD), MambaState(s_Bnrkw, x_last, b_last, c_last)

    def inputs(self, x_BTD: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the gate, the values, keys and queries before their convolutions, and the time steps."""
        return self.z(x_BTD), self.x(x_BTD), self.b(x_BTD), self.c(x_BTD), self.dt(x_BTD)

    def new_norm(self, config: Any, dtype: DTypeLike) -> Any:
        """Returns what joins outputs [B, T, n, r, w] in float32 and gates."""
        return GatedGroupNorm(config, dtype=dtype)


def state_space(
    c_BTnk: jax.Array, b_BTnk: jax.Array, x_BTnrw: jax.Array, g_BTnr: jax.Array, s_Bnrkw: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs [B, T, n, r, w] and the state after these tokens, all in float32. For each token the state
    decays by exp(g), then the product of key and values is added; the output is the state's value for the query
    (arXiv:2405.21060, equation 2)."""
    inputs = (c_BTnk, b_BTnk, x_BTnrw, g_BTnr)
    if x_BTnrw.shape[1] == 1:
        c_Bnk, b_Bnk, x_Bnrw, g_Bnr = (x[:, 0] for x in inputs)
        s_Bnrkw = s_Bnrkw * jnp.exp(g_Bnr)[..., None, None] + b_Bnk[:, :, None, :, None] * x_Bnrw[..., None, :]
        return exact_einsum("Bnk,Bnrkw->Bnrw", c_Bnk, s_Bnrkw)[:, None], s_Bnrkw
    return scan_chunks(_one_chunk, inputs, s_Bnrkw)


def _one_chunk(
    s_Bnrkw: jax.Array, c_Btnk: jax.Array, b_Btnk: jax.Array, x_Btnrw: jax.Array, g_Btnr: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens of a chunk at once (section 6): the state after it, and the outputs."""
    g_Bnrt = jnp.moveaxis(g_Btnr, 1, -1)
    decay_Bnrts, until_Bnrt = decays(g_Bnrt), jnp.exp(jnp.cumsum(g_Bnrt, axis=-1))
    scores_Bnts = exact_einsum("Btnk,Bsnk->Bnts", c_Btnk, b_Btnk)
    y_Btnrw = exact_einsum("Bnrts,Bsnrw->Btnrw", scores_Bnts[:, :, None] * decay_Bnrts, x_Btnrw)
    y_Btnrw += exact_einsum("Btnk,Bnrkw->Btnrw", c_Btnk, s_Bnrkw) * jnp.moveaxis(until_Bnrt, -1, 1)[..., None]
    left_Btnrw = x_Btnrw * jnp.moveaxis(decay_Bnrts[..., -1, :], -1, 1)[..., None]
    return s_Bnrkw * until_Bnrt[..., -1, None, None] + exact_einsum("Btnk,Btnrw->Bnrkw", b_Btnk, left_Btnrw), y_Btnrw


class MambaBlock(HybridBlock):
    """One layer: attention or Mamba-2, then an MLP or experts, each after a norm, with residual connections."""

    mixer_type = Mamba2


class MambaDecoder(HybridDecoder):
    """A decoder with Mamba-2 in `state_layers`."""

    state_type = MambaState
