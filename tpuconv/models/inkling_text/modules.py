"""Inkling: attention with learned relative positions, and short convolutions of keys, values and outputs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.cache import KV, append_kv
from tpuconv.models.common.layers import Einsum, Keys, RMSNorm, exact_product
from tpuconv.models.common.moe import GatedExperts
from tpuconv.models.common.placement import placed
from tpuconv.models.common.recurrence import HybridDecoder
from tpuconv.models.common.relative import (
    ConvolutionStates,
    RelativePositions,
    ResidualConvolution,
    attention_with_bias,
    temperature,
)
from tpuconv.models.common.steps import Step
from tpuconv.models.inkling_text.family import Config
from tpuconv.models.modules.gpt import NormedEmbeddings
from tpuconv.notation.letters import with_letters

LEGEND = {"e": "scored_experts", "s": "shared_experts"}
"""The words of this module, by the letters of its einsums and arrays."""


class Attention(nnx.Module):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far, and the
    last inputs of the convolutions of both. Queries and keys are normalized, each head separately."""

    def __init__(self, config: Any, *, is_full: bool, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        self.q = Einsum("BTD,DNH->BTNH", sizes, dtype=dtype, keys=keys)
        self.k = Einsum("BTD,DKH->BTKH", sizes, dtype=dtype, keys=keys)
        self.v = Einsum("BTD,DKH->BTKH", sizes, dtype=dtype, keys=keys)
        self.o = Einsum("BTNH,NHD->BTD", sizes, dtype=dtype, keys=keys)
        self.k_conv = ResidualConvolution("KH", sizes, dtype=dtype, keys=keys)
        self.v_conv = ResidualConvolution("KH", sizes, dtype=dtype, keys=keys)
        self.q_norm = RMSNorm("H", sizes, config.rms_norm_eps, dtype=dtype)
        self.k_norm = RMSNorm("H", sizes, config.rms_norm_eps, dtype=dtype)
        self.scale = 1 / sizes["H"]
        self.floor = config.log_scaling_n_floor if is_full else None
        self.alpha = config.log_scaling_alpha

    def __call__(
        self,
        x_BTD: jax.Array,
        bias_BNTS: jax.Array,
        step: Step,
        window: jax.Array | int,
        kv: KV | None,
        states: ConvolutionStates,
    ) -> tuple[jax.Array, KV, tuple[jax.Array, jax.Array]]:
        k_BTKH, k_last = self.k_conv.smoothed(self.k(x_BTD), step, states.k_BcKH)
        v_BTKH, v_last = self.v_conv.smoothed(self.v(x_BTD), step, states.v_BcKH)
        kv = append_kv(kv, self.k_norm(k_BTKH), v_BTKH, step.slot)
        q_BTNH = self.q_norm(self.q(x_BTD))
        if self.floor is not None:  # transformers rounds both products
            factor_BT = temperature(step, self.floor, self.alpha)
            q_BTNH = (q_BTNH.astype(jnp.float32) * factor_BT[..., None, None]).astype(q_BTNH.dtype)
            bias_BNTS = (bias_BNTS.astype(jnp.float32) * factor_BT[:, None, :, None]).astype(bias_BNTS.dtype)
        y_BTNH = attention_with_bias(q_BTNH, kv, step.visible(window), bias_BNTS, self.scale)
        return self.o(y_BTNH), kv, (k_last, v_last)


class MLP(blocks.GatedMLP):
    """Gated MLP with a learned factor, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.factor = nnx.Param(jnp.ones(1, dtype))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return super().__call__(x_BTD) * self.factor[...]


class Chosen(NamedTuple):
    """The experts of each token.

    Attributes:
        ids_BTX: the experts that the router chooses.
        weights_BTX: their weights.
        shared_BTs: the weights of the experts that every token uses.
    """

    ids_BTX: jax.Array
    weights_BTX: jax.Array
    shared_BTs: jax.Array


class Router(nnx.Module):
    """x [B, T, D] to the experts of each token: those with the highest sigmoids of scores and corrections. The sigmoids
    of these and of the shared experts are divided by their sum. Computed in float32."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        self.config = config
        sizes = with_letters(config.sizes, LEGEND)
        self.kernel = Einsum("BTD,De->BTe", sizes, dtype=dtype, keys=keys).kernel
        self.factor = nnx.Param(jnp.ones(1, dtype))
        self.correction = nnx.Param(jnp.zeros(sizes["E"], jnp.float32))

    def __call__(self, x_BTD: jax.Array) -> Chosen:
        count, routed = self.config.num_experts_per_tok, self.config.n_routed_experts
        scores_BTe = placed(exact_product("BTD,De->BTe", x_BTD, self.kernel[...]), "B T E")
        wanted_BTE = nnx.sigmoid(scores_BTe[..., :routed]) + self.correction[...].astype(jnp.float32)
        ids_BTX = jax.lax.top_k(wanted_BTE, count)[1]
        chosen_BTX = jnp.take_along_axis(scores_BTe, ids_BTX, axis=-1)
        logits = jax.nn.log_sigmoid(jnp.concatenate([chosen_BTX, scores_BTe[..., routed:]], axis=-1))
        factor = self.config.route_scale * self.factor[...].astype(jnp.float32)
        weights = (nnx.softmax(logits) * factor).astype(x_BTD.dtype)
        return Chosen(ids_BTX, weights[..., :count], weights[..., count:])


class SharedExperts(nnx.Module):
    """Gated MLPs that every token uses, x [B, T, D] and their weights [B, T, s] to the sum of their outputs."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, LEGEND)
        self.gate = Einsum("BTD,DsM->BTsM", sizes, dtype=dtype, keys=keys)
        self.up = Einsum("BTD,DsM->BTsM", sizes, dtype=dtype, keys=keys)
        self.down = Einsum("BTsM,sMD->BTD", sizes, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, weights_BTs: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x_BTD)) * self.up(x_BTD) * weights_BTs[..., None])


class MoE(GatedExperts):
    """The chosen experts and the shared ones, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.sizes, nnx.silu, dtype=dtype, keys=keys)
        self.router = Router(config, dtype=dtype, keys=keys)
        self.shared = SharedExperts(config, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        chosen = self.router(x_BTD)
        y_BTD = super().__call__(x_BTD, chosen.ids_BTX, chosen.weights_BTX.astype(jnp.float32))
        return y_BTD + self.shared(x_BTD, chosen.shared_BTs)


class Block(blocks.PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm and before a convolution, with residual
    connections."""

    mlp_type = MLP
    moe_type = MoE

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        self.attn_conv = ResidualConvolution("D", config.sizes, dtype=dtype, keys=keys)
        self.mlp_conv = ResidualConvolution("D", config.sizes, dtype=dtype, keys=keys)
        self.config = config.of_layer(layer)
        self.relative = RelativePositions(self.config.sizes, dtype=dtype, keys=keys)

    def new_attention(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys) -> Attention:
        is_full = config.windows[layer] is None
        return Attention(config.of_layer(layer), is_full=is_full, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        keys, states = kv or (None, ConvolutionStates.empty(self.config, len(x_BTD)))
        y_BTD = self.attn_norm(x_BTD)
        bias_BNTS = self.relative(y_BTD, step)
        y_BTD, keys, (k_last, v_last) = self.attn(y_BTD, bias_BNTS, step, window, keys, states)
        y_BTD, attn_last = self.attn_conv.smoothed(y_BTD, step, states.attn_BcD)
        x_BTD = x_BTD + y_BTD
        y_BTD, mlp_last = self.mlp_conv.smoothed(self.fed(self.mlp_norm(x_BTD)), step, states.mlp_BcD)
        return x_BTD + y_BTD, (keys, ConvolutionStates(k_last, v_last, attn_last, mlp_last))


class ConvolvedDecoder(NormedEmbeddings, HybridDecoder):
    """A decoder whose layers have both keys and values and the last inputs of convolutions."""

    state_type = ConvolutionStates

    def cached(self, config: Any, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Returns the empty cache of a layer; `shape` is [B, S]."""
        own = config.of_layer(layer)
        return KV.empty(own, layer, shape, dtype), ConvolutionStates.empty(own, *shape[:-1])


class Model(ConvolvedDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block, embed_norm_type = Block, RMSNorm
    config: Config

    def adjusted(self, logits_BTV: jax.Array) -> jax.Array:
        logits_BTV = logits_BTV.astype(jnp.float32) / self.config.logits_mup_width_multiplier
        return logits_BTV[..., : self.config.logit_count]
