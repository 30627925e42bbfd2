"""MiniMax-Text-01 (arXiv:2501.08313): lightning attention, a linear attention with fixed decays, and full attention."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.decoder import Step
from tpuconv.models.common.layers import Einsum, Keys, RMSNorm, times
from tpuconv.models.common.mamba2 import state_space
from tpuconv.models.common.recurrence import HybridBlock, HybridDecoder, LayerState, PackedTokens
from tpuconv.models.minimax.family import Config
from tpuconv.models.mixtral.modules import MoE

LIGHTNING_EPS = 1e-6
"""Epsilon of the norm of linear attention. config.json has that of the other norms only."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LightningState(LayerState):
    """The cache of a layer with linear attention: the state of each head."""

    axes: ClassVar[tuple[str, ...]] = ("B n r k w",)

    s_Bnrkw: jax.Array


class LightningAttention(nnx.Module):
    """Linear attention, x [B, T, D] to [B, T, D]. Also returns the state after these tokens. For each token the state
    of a head decays by a fixed factor, then the product of key and values is added; the output is the state's value
    for the query (arXiv:2501.08313, section 2.2). The outputs of all heads are normalized together, and gated."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        sizes = config.axes
        self.config, self.rates = config, config.decays_of(layer)
        self.q = Einsum("BTD,Dnk->BTnk", sizes, dtype=dtype, keys=keys)
        self.k = Einsum("BTD,Dnk->BTnk", sizes, dtype=dtype, keys=keys)
        self.v = Einsum("BTD,Dnw->BTnw", sizes, dtype=dtype, keys=keys)
        self.gate = Einsum("BTD,Dnw->BTnw", sizes, dtype=dtype, keys=keys)
        self.o = Einsum("BTnw,nwD->BTD", sizes, dtype=dtype, keys=keys)
        self.norm = RMSNorm("nw", sizes, LIGHTNING_EPS, dtype=dtype)

    def __call__(
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, state: LightningState | None
    ) -> tuple[jax.Array, LightningState]:
        state = LightningState.empty(self.config, len(x_BTD)) if state is None else state
        packed = PackedTokens.of(x_BTD, step)
        x_BTD, is_real_BT11 = packed.x_BTD, packed.is_real_BT[..., None, None]
        q_BTnk, k_BTnk, v_BTnw = (nnx.silu(part(x_BTD)).astype(jnp.float32) for part in (self.q, self.k, self.v))
        # A token without a key and without a decay leaves the state as it is.
        k_BTnk = jnp.where(is_real_BT11, k_BTnk, 0)
        g_BTnr = jnp.where(is_real_BT11, jnp.asarray(self.rates, jnp.float32)[:, None], 0)
        y_BTnrw, s_Bnrkw = state_space(q_BTnk, k_BTnk, v_BTnw[:, :, :, None], g_BTnr, state.s_Bnrkw)
        y_BTnw = self.norm(y_BTnrw[:, :, :, 0].astype(x_BTD.dtype)) * nnx.sigmoid(self.gate(x_BTD))
        return packed.unpacked(self.o(y_BTnw)), LightningState(s_Bnrkw)


class Block(HybridBlock):
    """One layer: linear or full attention, then experts, each after a norm. The residual connections begin after the
    norms, and have factors."""

    moe_type = MoE

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        linear = (config.linear_attn_alpha_factor, config.linear_attn_beta_factor)
        full = (config.full_attn_alpha_factor, config.full_attn_beta_factor)
        self.attn_factors = linear if layer in config.axes["l"] else full
        self.mlp_factors = (config.mlp_alpha_factor, config.mlp_beta_factor)

    def new_attention(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
        if layer in config.axes["l"]:
            return LightningAttention(config, layer, dtype=dtype, keys=keys)
        return self.attention_type(config, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        x_BTD = self.attn_norm(x_BTD)
        y_BTD, kv = self.attn(x_BTD, step, window, kv)
        x_BTD = self.mlp_norm(weighted(x_BTD, y_BTD, self.attn_factors))
        return weighted(x_BTD, self.fed(x_BTD), self.mlp_factors), kv


def weighted(x_BTD: jax.Array, y_BTD: jax.Array, factors: tuple[float, float]) -> jax.Array:
    """Returns the sum of hidden states and the output of a part, each times its factor."""
    alpha, beta = factors
    return times(x_BTD, alpha) + times(y_BTD, beta)


class Model(HybridDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    state_type = LightningState
