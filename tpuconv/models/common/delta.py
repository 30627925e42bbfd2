"""Linear attention by the gated delta rule (arXiv:2412.06464), after a causal convolution. A layer's cache is a state
whose size does not depend on the number of tokens."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.layers import Einsum, Keys, RMSNorm
from tpuconv.models.common.recurrence import Convolution, LayerState, PackedTokens, decays, exact_einsum, scan_chunks
from tpuconv.models.common.steps import Step
from tpuconv.notation.letters import with_letters

LEGEND = {"n": "groups", "r": "per_group", "k": "key_dim", "w": "value_dim"}
"""The words of this module, by the letters of its einsums and arrays."""

NORM_EPS = 1e-6
"""Epsilon of the length of queries and keys. config.json has only the epsilon of other norms."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaState(LayerState):
    """The cache of a layer: the state of each value head, and the last inputs of the convolutions of queries, keys and
    values."""

    axes: ClassVar[tuple[str, ...]] = (
        "B groups per_group key_dim value_dim",
        "B taps groups key_dim",
        "B taps groups key_dim",
        "B taps groups per_group value_dim",
    )

    s_Bnrkw: jax.Array
    q_Bcnk: jax.Array
    k_Bcnk: jax.Array
    v_Bcnrw: jax.Array


class DeltaNet(nnx.Module):
    """Linear attention, x [B, T, D] to [B, T, D]. Also returns the state after these tokens. Each key head has r value
    heads. The output is normalized and gated."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, LEGEND)
        self.q = Einsum("BTD,Dnk->BTnk", sizes, dtype=dtype, keys=keys)
        self.k = Einsum("BTD,Dnk->BTnk", sizes, dtype=dtype, keys=keys)
        self.v = Einsum("BTD,Dnrw->BTnrw", sizes, dtype=dtype, keys=keys)
        self.z = Einsum("BTD,Dnrw->BTnrw", sizes, dtype=dtype, keys=keys)
        self.b = Einsum("BTD,Dnr->BTnr", sizes, dtype=dtype, keys=keys)
        self.a = Einsum("BTD,Dnr->BTnr", sizes, dtype=dtype, keys=keys)
        self.o = Einsum("BTnrw,nrwD->BTD", sizes, dtype=dtype, keys=keys)
        self.q_conv = Convolution("nk", sizes, dtype=dtype, keys=keys)
        self.k_conv = Convolution("nk", sizes, dtype=dtype, keys=keys)
        self.v_conv = Convolution("nrw", sizes, dtype=dtype, keys=keys)
        self.a_log = nnx.Param(jnp.zeros((sizes["n"], sizes["r"]), jnp.float32))
        self.dt_bias = nnx.Param(jnp.ones((sizes["n"], sizes["r"]), dtype))
        self.norm = RMSNorm("w", sizes, config.rms_norm_eps, dtype=dtype)
        self.config = config

    def __call__(
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, state: DeltaState | None
    ) -> tuple[jax.Array, DeltaState]:
        state = DeltaState.empty(self.config, len(x_BTD)) if state is None else state
        packed = PackedTokens.of(x_BTD, step)
        x_BTD, length_B = packed.x_BTD, packed.length_B
        q_BTnk, q_last = self.q_conv(self.q(x_BTD), state.q_Bcnk, length_B)
        k_BTnk, k_last = self.k_conv(self.k(x_BTD), state.k_Bcnk, length_B)
        v_BTnrw, v_last = self.v_conv(self.v(x_BTD), state.v_Bcnrw, length_B)
        q_BTnk, k_BTnk, v_BTnrw = map(nnx.silu, (q_BTnk, k_BTnk, v_BTnrw))
        b_BTnr = self.strengths(x_BTD)
        rate_nr, bias_nr = jnp.exp(self.a_log[...].astype(jnp.float32)), self.dt_bias[...].astype(jnp.float32)
        g_BTnr = -rate_nr * nnx.softplus(self.a(x_BTD).astype(jnp.float32) + bias_nr)
        # A token with b = 0 and g = 0 leaves the state as it is.
        b_BTnr, g_BTnr = (jnp.where(packed.is_real_BT[..., None, None], y, 0) for y in (b_BTnr, g_BTnr))
        o_BTnrw, s_Bnrkw = gated_delta_rule(
            unit_vectors(q_BTnk) * q_BTnk.shape[-1] ** -0.5,
            unit_vectors(k_BTnk),
            v_BTnrw,
            g_BTnr,
            b_BTnr,
            state.s_Bnrkw,
        )
        y_BTD = self.o((self.norm(o_BTnrw.astype(x_BTD.dtype)) * self.gates(x_BTD)).astype(x_BTD.dtype))
        return packed.unpacked(y_BTD), DeltaState(s_Bnrkw, q_last, k_last, v_last)

    def strengths(self, x_BTD: jax.Array) -> jax.Array:
        """Returns by how much [B, T, n, r] each token changes the state's value for its key, in float32."""
        return nnx.sigmoid(self.b(x_BTD)).astype(jnp.float32)

    def gates(self, x_BTD: jax.Array) -> jax.Array:
        """Returns what the normalized output is multiplied with [B, T, n, r, w], in float32."""
        return nnx.silu(self.z(x_BTD).astype(jnp.float32))


def unit_vectors(x: jax.Array) -> jax.Array:
    """Returns x with length 1 along the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + NORM_EPS)


def gated_delta_rule(
    q_BTnk: jax.Array, k_BTnk: jax.Array, v_BTnrw: jax.Array, g_BTnr: jax.Array, b_BTnr: jax.Array, s_Bnrkw: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs [B, T, n, r, w] and the state after these tokens, in float32. For each token the state decays
    by exp(g), then its value for the key k moves towards v by the part b (arXiv:2412.06464, equation 10); the output is
    the state's value for the query."""
    v_BTnrw = v_BTnrw.astype(jnp.float32)
    inputs = (q_BTnk, k_BTnk, v_BTnrw, g_BTnr, b_BTnr)
    if v_BTnrw.shape[1] == 1:
        o_Bnrw, s_Bnrkw = _one_token(s_Bnrkw, *(x[:, 0] for x in inputs))
        return o_Bnrw[:, None], s_Bnrkw
    return scan_chunks(_one_chunk, inputs, s_Bnrkw)


def _one_token(
    s_Bnrkw: jax.Array, q_Bnk: jax.Array, k_Bnk: jax.Array, v_Bnrw: jax.Array, g_Bnr: jax.Array, b_Bnr: jax.Array
) -> tuple[jax.Array, jax.Array]:
    s_Bnrkw = s_Bnrkw * jnp.exp(g_Bnr)[..., None, None]
    change_Bnrw = b_Bnr[..., None] * (v_Bnrw - exact_einsum("Bnk,Bnrkw->Bnrw", k_Bnk, s_Bnrkw))
    s_Bnrkw = s_Bnrkw + exact_einsum("Bnk,Bnrw->Bnrkw", k_Bnk, change_Bnrw)
    return exact_einsum("Bnk,Bnrkw->Bnrw", q_Bnk, s_Bnrkw), s_Bnrkw


def _one_chunk(
    s_Bnrkw: jax.Array, q_Btnk: jax.Array, k_Btnk: jax.Array, v_Btnrw: jax.Array, g_Btnr: jax.Array, b_Btnr: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens of a chunk at once, by the WY form (section 3.3): the state after it, and the outputs. The
    changes of the tokens before, which a token's own change depends on, are the solution of a triangular system."""
    g_Bnrt, b_Bnrt = (jnp.moveaxis(x, 1, -1) for x in (g_Btnr, b_Btnr))
    until_Bnrt = jnp.exp(jnp.cumsum(g_Bnrt, axis=-1))
    decay_Bnrts = decays(g_Bnrt)
    keys_Bnts, queries_Bnts = (exact_einsum("Btnk,Bsnk->Bnts", x, k_Btnk) for x in (k_Btnk, q_Btnk))
    system_Bnrts = b_Bnrt[..., None] * keys_Bnts[:, :, None] * decay_Bnrts  # its diagonal is taken as ones
    right_v = exact_einsum("Bnrt,Btnrw->Bnrtw", b_Bnrt, v_Btnrw)
    right_k = exact_einsum("Bnrt,Btnk->Bnrtk", b_Bnrt * until_Bnrt, k_Btnk)
    solved = jax.lax.linalg.triangular_solve(
        system_Bnrts, jnp.concatenate([right_v, right_k], axis=-1), left_side=True, lower=True, unit_diagonal=True
    )
    width = v_Btnrw.shape[-1]
    change_Bnrtw = solved[..., :width] - exact_einsum("Bnrtk,Bnrkw->Bnrtw", solved[..., width:], s_Bnrkw)
    o_Btnrw = exact_einsum("Btnk,Bnrkw->Btnrw", q_Btnk, s_Bnrkw) * jnp.moveaxis(until_Bnrt, -1, 1)[..., None]
    o_Btnrw += exact_einsum("Bnrts,Bnrsw->Btnrw", queries_Bnts[:, :, None] * decay_Bnrts, change_Bnrtw)
    s_Bnrkw = s_Bnrkw * until_Bnrt[..., -1:, None]
    left_Bnrtw = change_Bnrtw * decay_Bnrts[..., -1, :, None]
    return s_Bnrkw + exact_einsum("Btnk,Bnrtw->Bnrkw", k_Btnk, left_Bnrtw), o_Btnrw
