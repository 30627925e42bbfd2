"""LFM: short convolutions, gates of heads, and a router."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import NormedAttention
from tpuconv.models.common.layers import Einsum, Keys, RMSNorm, times
from tpuconv.models.common.placement import placed
from tpuconv.models.common.recurrence import Convolution, HybridBlock, HybridDecoder, LayerState, PackedTokens
from tpuconv.models.common.steps import Step
from tpuconv.notation.letters import with_letters

LEGEND = {"n": "channels"}
"""The words of this module, by the letters of its einsums and arrays."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShortState(LayerState):
    """The cache of a layer: the last inputs of its convolution."""

    axes: ClassVar[tuple[str, ...]] = ("B taps channels",)

    x_Bcn: jax.Array


class ShortConvolution(nnx.Module):
    """A convolution of a few tokens between two gates, x [B, T, D] to [B, T, D]. Also returns the state after these
    tokens."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes, bias = with_letters(config.sizes, LEGEND), config.conv_bias
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


class ShortConvBlock(HybridBlock):
    """One layer: a short convolution or attention, then an MLP or experts, each after a norm, with residual
    connections."""

    mixer_type = ShortConvolution


class ShortConvDecoder(HybridDecoder):
    """A decoder with short convolutions in `state_layers`."""

    state_type = ShortState


class GatedHeads(NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. The
    output of each head may have a gate."""

    def __init__(self, config: Any, **options: Any):
        super().__init__(config, **options)
        gated = config.use_attention_gate
        self.gate = Einsum("BTD,DN->BTN", config.sizes, dtype=options["dtype"], keys=options["keys"]) if gated else None

    def gated(self, x_BTD: jax.Array, y_BTNH: jax.Array) -> jax.Array:
        return y_BTNH if self.gate is None else y_BTNH * nnx.sigmoid(self.gate(x_BTD))[..., None]


class SandwichConvBlock(ShortConvBlock):
    """One layer: a short convolution or attention, then an MLP, each after a norm and, if there are these, before
    another one, with residual connections."""

    def __init__(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        if config.use_sandwich_norm:
            self.post_attn_norm = RMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype)
            self.post_mlp_norm = RMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        if not hasattr(self, "post_mlp_norm"):
            return super().__call__(x_BTD, step, window, kv)
        y_BTD, kv = self.attn(self.attn_norm(x_BTD), step, window, kv)
        x_BTD = x_BTD + self.post_attn_norm(y_BTD)
        return x_BTD + self.post_mlp_norm(self.fed(self.mlp_norm(x_BTD))), kv


class CorrectedRouter(Einsum):
    """The router: x [B, T, D] to the ids and weights [B, T, X] of each token's experts. `correction`, if any, balances
    how often experts are chosen, and does not change the weights. Scores are computed in the dtype of x."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__("BTD,DE->BTE", config.sizes, dtype=dtype, keys=keys)
        self.config = config
        self.correction = nnx.Param(jnp.zeros(config.sizes["E"], jnp.float32)) if config.use_expert_bias else None

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:  # type: ignore[override]
        config = self.config
        scores_BTE = nnx.sigmoid(placed(super().__call__(x_BTD), "B T E"))
        wanted_BTE = scores_BTE.astype(jnp.float32)
        if self.correction is not None:
            wanted_BTE += self.correction[...].astype(jnp.float32)
        ids_BTX = jax.lax.top_k(wanted_BTE, config.num_experts_per_tok)[1]
        weights_BTX = jnp.take_along_axis(scores_BTE, ids_BTX, axis=-1)
        if config.norm_topk_prob:
            weights_BTX /= weights_BTX.sum(-1, keepdims=True) + 1e-6
        return ids_BTX, times(weights_BTX, config.routed_scaling_factor)
