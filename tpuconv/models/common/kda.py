"""Kimi delta attention (arXiv:2510.26692): linear attention by the delta rule, with a decay for each element of a key.
A layer's cache is a state whose size does not depend on the number of tokens."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.delta import unit_vectors
from tpuconv.models.common.layers import Einsum, Keys, ScaledRMSNorm
from tpuconv.models.common.recurrence import Convolution, LayerState, PackedTokens, decays, exact_einsum, scan_chunks
from tpuconv.models.common.steps import Step
from tpuconv.notation.letters import with_letters

LEGEND = {"n": "groups", "k": "key_dim", "w": "value_dim"}
"""The words of this module, by the letters of its einsums and arrays."""

KDA_CHUNK = 16
"""Tokens that are computed at once. Each pair of them has a decay for each element of a key."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KDAState(LayerState):
    """The cache of a layer: the state of each head, and the last inputs of the convolutions of queries, keys and
    values."""

    axes: ClassVar[tuple[str, ...]] = (
        "B groups key_dim value_dim",
        "B taps groups key_dim",
        "B taps groups key_dim",
        "B taps groups value_dim",
    )

    s_Bnkw: jax.Array
    q_Bcnk: jax.Array
    k_Bcnk: jax.Array
    v_Bcnw: jax.Array


class KimiDelta(nnx.Module):
    """Linear attention, x [B, T, D] to [B, T, D]. Also returns the state after these tokens. The rates of decay and the
    gates of the output are made by two matrices each, with a narrow vector between them. The output is normalized and
    gated. `bound` is the smallest logarithm of a decay, where there is one."""

    bound: float | None = None

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, LEGEND)
        self.q = Einsum("BTD,Dnk->BTnk", sizes, dtype=dtype, keys=keys)
        self.k = Einsum("BTD,Dnk->BTnk", sizes, dtype=dtype, keys=keys)
        self.v = Einsum("BTD,Dnw->BTnw", sizes, dtype=dtype, keys=keys)
        self.b = Einsum("BTD,Dn->BTn", sizes, dtype=dtype, keys=keys)
        self.add_gates(config, dtype=dtype, keys=keys)
        self.o = Einsum("BTnw,nwD->BTD", sizes, dtype=dtype, keys=keys)
        self.q_conv = Convolution("nk", sizes, dtype=dtype, keys=keys)
        self.k_conv = Convolution("nk", sizes, dtype=dtype, keys=keys)
        self.v_conv = Convolution("nw", sizes, dtype=dtype, keys=keys)
        self.a_log = nnx.Param(jnp.zeros(sizes["n"], jnp.float32))
        self.dt_bias = nnx.Param(jnp.ones((sizes["n"], sizes["k"]), jnp.float32))
        self.norm = ScaledRMSNorm("w", sizes, config.rms_norm_eps, dtype=dtype)
        self.config = config

    def __call__(
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, state: KDAState | None
    ) -> tuple[jax.Array, KDAState]:
        state = KDAState.empty(self.config, len(x_BTD)) if state is None else state
        packed = PackedTokens.of(x_BTD, step)
        x_BTD, length_B = packed.x_BTD, packed.length_B
        q_BTnk, q_last = self.q_conv(self.q(x_BTD), state.q_Bcnk, length_B)
        k_BTnk, k_last = self.k_conv(self.k(x_BTD), state.k_Bcnk, length_B)
        v_BTnw, v_last = self.v_conv(self.v(x_BTD), state.v_Bcnw, length_B)
        q_BTnk, k_BTnk, v_BTnw = map(nnx.silu, (q_BTnk, k_BTnk, v_BTnw))
        # A token with b = 0 and g = 0 leaves the state as it is.
        is_real_BT1 = packed.is_real_BT[..., None]
        b_BTn = jnp.where(is_real_BT1, nnx.sigmoid(self.b(x_BTD)).astype(jnp.float32), 0)
        g_BTnk = jnp.where(is_real_BT1[..., None], self.rates(x_BTD), 0)
        q_BTnk, k_BTnk = unit_vectors(q_BTnk) * q_BTnk.shape[-1] ** -0.5, unit_vectors(k_BTnk)
        o_BTnw, s_Bnkw = kimi_delta_rule(q_BTnk, k_BTnk, v_BTnw.astype(jnp.float32), g_BTnk, b_BTn, state.s_Bnkw)
        gate_BTnw = nnx.sigmoid(self.gates(x_BTD).astype(jnp.float32))
        normed_BTnw = self.norm(o_BTnw.astype(x_BTD.dtype).astype(jnp.float32))
        y_BTD = self.o((normed_BTnw * gate_BTnw).astype(x_BTD.dtype))
        return packed.unpacked(y_BTD), KDAState(s_Bnkw, q_last, k_last, v_last)

    def add_gates(self, config: Any, *, dtype: DTypeLike, keys: Keys) -> None:
        """Adds the matrices that `gates` and `rates` multiply with."""
        sizes = with_letters(config.sizes, LEGEND)
        self.f_a = Einsum("BTD,Dw->BTw", sizes, dtype=dtype, keys=keys)
        self.f_b = Einsum("BTw,wnk->BTnk", sizes, dtype=dtype, keys=keys)
        self.g_a = Einsum("BTD,Dk->BTk", sizes, dtype=dtype, keys=keys)
        self.g_b = Einsum("BTk,knw->BTnw", sizes, dtype=dtype, keys=keys)

    def gates(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the gates [B, T, n, w] of the output, before the sigmoid."""
        return self.g_b(self.g_a(x_BTD))

    def rates(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the logarithms [B, T, n, k] of the decays, in float32."""
        return self.bounded(self.f_b(self.f_a(x_BTD)))

    def bounded(self, f_BTnk: jax.Array) -> jax.Array:
        """Returns the logarithms [B, T, n, k] of the decays that these inputs give, in float32; between `bound` and 0
        if there is one."""
        f_BTnk = f_BTnk.astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32)
        rate_n1 = jnp.exp(self.a_log[...].astype(jnp.float32))[: f_BTnk.shape[2], None]
        if self.bound is None:
            return -rate_n1 * nnx.softplus(f_BTnk)
        return self.bound * nnx.sigmoid(rate_n1 * f_BTnk)


def kimi_delta_rule(
    q_BTnk: jax.Array, k_BTnk: jax.Array, v_BTnw: jax.Array, g_BTnk: jax.Array, b_BTn: jax.Array, s_Bnkw: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs [B, T, n, w] and the state after these tokens, all in float32. For each token each row of the
    state decays by its exp(g), then the state's value for the key k moves towards v by the part b (arXiv:2510.26692,
    equation 1); the output is the state's value for the query."""
    inputs = (q_BTnk, k_BTnk, v_BTnw, g_BTnk, b_BTn)
    if v_BTnw.shape[1] == 1:
        q_Bnk, k_Bnk, v_Bnw, g_Bnk, b_Bn = (x[:, 0] for x in inputs)
        s_Bnkw = s_Bnkw * jnp.exp(g_Bnk)[..., None]
        change_Bnw = b_Bn[..., None] * (v_Bnw - exact_einsum("Bnk,Bnkw->Bnw", k_Bnk, s_Bnkw))
        s_Bnkw = s_Bnkw + k_Bnk[..., None] * change_Bnw[:, :, None]
        return exact_einsum("Bnk,Bnkw->Bnw", q_Bnk, s_Bnkw)[:, None], s_Bnkw
    return scan_chunks(_one_chunk, inputs, s_Bnkw, KDA_CHUNK)


def _one_chunk(
    s_Bnkw: jax.Array, q_Btnk: jax.Array, k_Btnk: jax.Array, v_Btnw: jax.Array, g_Btnk: jax.Array, b_Btn: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens of a chunk at once, by the WY form (section 3): the state after it, and the outputs."""
    decay_Bnkts, b_Bnt1 = decays(jnp.moveaxis(g_Btnk, 1, -1)), jnp.moveaxis(b_Btn, 1, -1)[..., None]
    q_Bntk, k_Bntk, v_Bntw = (jnp.swapaxes(x, 1, 2) for x in (q_Btnk, k_Btnk, v_Btnw))
    until_Bntk = jnp.exp(jnp.cumsum(jnp.swapaxes(g_Btnk, 1, 2), axis=2))
    keys_Bnts, queries_Bnts = (
        exact_einsum("Bntk,Bnkts->Bnts", x, decay_Bnkts * jnp.swapaxes(k_Bntk, 2, 3)[..., None, :])
        for x in (k_Bntk, q_Bntk)
    )
    # The diagonal of the system is taken as ones.
    solved = jax.lax.linalg.triangular_solve(
        b_Bnt1 * keys_Bnts,
        jnp.concatenate([b_Bnt1 * v_Bntw, b_Bnt1 * until_Bntk * k_Bntk], axis=-1),
        left_side=True,
        lower=True,
        unit_diagonal=True,
    )
    width = v_Bntw.shape[-1]
    change_Bntw = solved[..., :width] - exact_einsum("Bntk,Bnkw->Bntw", solved[..., width:], s_Bnkw)
    o_Bntw = exact_einsum("Bntk,Bnkw->Bntw", q_Bntk * until_Bntk, s_Bnkw)
    o_Bntw += exact_einsum("Bnts,Bnsw->Bntw", queries_Bnts, change_Bntw)
    left_Bnkt = jnp.swapaxes(k_Bntk, 2, 3) * decay_Bnkts[..., -1, :]
    s_Bnkw = s_Bnkw * until_Bntk[:, :, -1, :, None] + exact_einsum("Bnkt,Bntw->Bnkw", left_Bnkt, change_Bntw)
    return s_Bnkw, jnp.swapaxes(o_Bntw, 1, 2)
