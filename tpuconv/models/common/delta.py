"""Linear attention by the gated delta rule (arXiv:2412.06464), after a causal convolution. A layer's cache is a state
whose size does not depend on the number of tokens."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.decoder import Step
from tpuconv.models.common.layers import Einsum, Keys, RMSNorm, normal

CHUNK = 64
"""Tokens that are computed at once by matrix products. The state is passed from chunk to chunk."""

NORM_EPS = 1e-6
"""Epsilon of the length of queries and keys. config.json has that of other norms only."""

# By default a TPU multiplies float32 as bfloat16, and errors of the state add up.
exact_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaState:
    """The cache of a layer: the state of each value head, and the last inputs of the convolutions of queries, keys and
    values. In float32, whatever the dtype of other caches. `axes` are the letters of each array."""

    axes: ClassVar[tuple[str, ...]] = ("B n r k w", "B c n k", "B c n k", "B c n r w")

    s_Bnrkw: jax.Array
    q_Bcnk: jax.Array
    k_Bcnk: jax.Array
    v_Bcnrw: jax.Array

    @classmethod
    def empty(cls, config: DecoderConfig, batch: int) -> Self:
        """Returns a state of zeros."""
        n, r, k, w, taps = (config.axes[letter] for letter in "nrkwc")
        shapes = ((n, r, k, w), (taps - 1, n, k), (taps - 1, n, k), (taps - 1, n, r, w))
        return cls(*(jnp.zeros((batch, *shape), jnp.float32) for shape in shapes))


class Convolution(nnx.Module):
    """A causal convolution of each channel along the tokens, then SiLU. `letters` are those of the channels; the last
    tap is that of the current token."""

    def __init__(self, letters: str, sizes: Any, *, dtype: DTypeLike, keys: Keys):
        self.kernel = nnx.Param(normal(keys(), tuple(sizes[letter] for letter in (*letters, "c")), dtype))

    def __call__(self, x: jax.Array, last: jax.Array, length_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the output for x [B, T, ...], and the last inputs of the first `length_B` tokens [B, c - 1, ...], as
        `last` has them of the tokens before."""
        kernel, tokens = self.kernel[...].astype(jnp.float32), x.shape[1]
        taps = kernel.shape[-1]
        inputs = jnp.concatenate([last, x.astype(jnp.float32)], axis=1)
        y = sum(inputs[:, tap : tap + tokens] * kernel[..., tap] for tap in range(taps))
        at_Bc = length_B[:, None] + jnp.arange(taps - 1)
        last = jnp.take_along_axis(inputs, at_Bc.reshape(*at_Bc.shape, *[1] * (x.ndim - 2)), axis=1)
        return nnx.silu(jnp.asarray(y).astype(x.dtype)), last


class DeltaNet(nnx.Module):
    """Linear attention, x [B, T, D] to [B, T, D]. Also returns the state after these tokens. Each key head has r value
    heads. The output is normalized and gated."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, keys: Keys):
        sizes = config.axes
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
        is_real_BT, order_BT1 = step.pos_BT >= 0, None
        length_B = is_real_BT.sum(axis=1)
        if x_BTD.shape[1] > 1:  # padding goes to the end of each row, where it changes no state
            order_BT1 = jnp.argsort(~is_real_BT, axis=1, stable=True)[..., None]
            x_BTD = jnp.take_along_axis(x_BTD, order_BT1, axis=1)
            is_real_BT = jnp.arange(x_BTD.shape[1]) < length_B[:, None]

        q_BTnk, q_last = self.q_conv(self.q(x_BTD), state.q_Bcnk, length_B)
        k_BTnk, k_last = self.k_conv(self.k(x_BTD), state.k_Bcnk, length_B)
        v_BTnrw, v_last = self.v_conv(self.v(x_BTD), state.v_Bcnrw, length_B)
        b_BTnr = nnx.sigmoid(self.b(x_BTD)).astype(jnp.float32)
        rate_nr, bias_nr = jnp.exp(self.a_log[...].astype(jnp.float32)), self.dt_bias[...].astype(jnp.float32)
        g_BTnr = -rate_nr * nnx.softplus(self.a(x_BTD).astype(jnp.float32) + bias_nr)
        # A token with b = 0 and g = 0 leaves the state as it is.
        b_BTnr, g_BTnr = (jnp.where(is_real_BT[..., None, None], y, 0) for y in (b_BTnr, g_BTnr))
        o_BTnrw, s_Bnrkw = gated_delta_rule(
            _unit(q_BTnk) * q_BTnk.shape[-1] ** -0.5, _unit(k_BTnk), v_BTnrw, g_BTnr, b_BTnr, state.s_Bnrkw
        )
        z_BTnrw = nnx.silu(self.z(x_BTD).astype(jnp.float32))
        y_BTD = self.o((self.norm(o_BTnrw.astype(x_BTD.dtype)) * z_BTnrw).astype(x_BTD.dtype))
        if order_BT1 is not None:
            y_BTD = jnp.take_along_axis(y_BTD, jnp.argsort(order_BT1, axis=1), axis=1)
        return y_BTD, DeltaState(s_Bnrkw, q_last, k_last, v_last)


def _unit(x: jax.Array) -> jax.Array:
    """x of length 1 along the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + NORM_EPS)


def gated_delta_rule(
    q_BTnk: jax.Array, k_BTnk: jax.Array, v_BTnrw: jax.Array, g_BTnr: jax.Array, b_BTnr: jax.Array, s_Bnrkw: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs [B, T, n, r, w] and the state after these tokens, in float32. For each token the state decays
    by exp(g), then its value for the key k moves towards v by the part b (arXiv:2412.06464, equation 10); the output is
    the state's value for the query."""
    v_BTnrw = v_BTnrw.astype(jnp.float32)
    batch, tokens = v_BTnrw.shape[:2]
    inputs = (q_BTnk, k_BTnk, v_BTnrw, g_BTnr, b_BTnr)
    if tokens == 1:
        o_Bnrw, s_Bnrkw = _one_token(s_Bnrkw, *(x[:, 0] for x in inputs))
        return o_Bnrw[:, None], s_Bnrkw
    size = min(CHUNK, tokens)
    count = -(-tokens // size)

    def chunks(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, count * size - tokens), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(batch, count, size, *x.shape[2:]), 1, 0)

    s_Bnrkw, o = jax.lax.scan(lambda s, x: _one_chunk(s, *x), s_Bnrkw, tuple(map(chunks, inputs)))
    return jnp.moveaxis(o, 0, 1).reshape(batch, count * size, *o.shape[3:])[:, :tokens], s_Bnrkw


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
    """The tokens of a chunk at once, by the WY form (section 3.3): the state after it, and the outputs. The changes of
    the tokens before, which a token's own change depends on, are the solution of a triangular system."""
    tokens = q_Btnk.shape[1]
    g_Bnrt, b_Bnrt = (jnp.moveaxis(x, 1, -1) for x in (g_Btnr, b_Btnr))
    until_Bnrt = jnp.exp(jnp.cumsum(g_Bnrt, axis=-1))
    earlier = jnp.tril(jnp.ones((tokens, tokens), bool))
    # Sums from token to token: differences of sums from the first token on would lose small rates among large ones.
    sums_Bnrts = jnp.cumsum(jnp.where(jnp.tril(earlier, -1), g_Bnrt[..., None], 0), axis=-2)
    decay_Bnrts = jnp.where(earlier, jnp.exp(sums_Bnrts), 0)
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
