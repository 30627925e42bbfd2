"""Modules of K2-Horizon, after the code of its release and of a server (vLLM): attention whose values may be sums of
products with chosen matrices."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.layers import Einsum, Keys
from tpuconv.models.common.moe import Expert, RoutedExperts, Rows, routed
from tpuconv.notation.letters import with_letters


def softplus_of_two(x: jax.Array) -> jax.Array:
    """Returns log2(1 + 2^x), which is 1 at 0."""
    return nnx.softplus(math.log(2) * x) / math.log(2)


class ScoredRouter(nnx.Module):
    """The router: x [B, T, D] to the ids and weights [B, T, X] of the chosen experts of each token. A correction
    balances how often experts are chosen, and does not change the weights. Products are rounded to the dtype of x.

    Args:
        experts: the letter of the number of experts.
        chosen: how many of them a token uses.
        normed: whether their weights are divided by their sum.
    """

    def __init__(self, config: Any, experts: str, chosen: int, *, normed: bool, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, {"E": experts})
        self.kernel = Einsum("BTD,DE->BTE", sizes, dtype=dtype, keys=keys).kernel
        self.correction = nnx.Param(jnp.zeros(sizes["E"], dtype)) if config.moe_gate_bias else None
        self.by_softmax = config.router_score_func == "softmax"
        self.chosen, self.normed, self.factor = chosen, normed, config.router_scaling_factor or 1.0

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_BTE = jnp.einsum("BTD,DE->BTE", x_BTD, self.kernel[...]).astype(x_BTD.dtype).astype(jnp.float32)
        scores_BTE = nnx.softmax(logits_BTE) if self.by_softmax else nnx.sigmoid(logits_BTE)
        wanted_BTE = scores_BTE
        if self.correction is not None:
            wanted_BTE = scores_BTE + self.correction[...].astype(jnp.float32)
        ids_BTX = jax.lax.top_k(wanted_BTE, self.chosen)[1]
        weights_BTX = jnp.take_along_axis(scores_BTE, ids_BTX, axis=-1)
        if self.normed:
            weights_BTX /= weights_BTX.sum(axis=-1, keepdims=True)
        return ids_BTX, weights_BTX * self.factor


def _router_of_experts(config: Any, *, dtype: DTypeLike, keys: Keys) -> ScoredRouter:
    chosen, normed = config.num_experts_per_tok, config.norm_topk_prob
    return ScoredRouter(config, "E", chosen, normed=normed, dtype=dtype, keys=keys)


class MoE(RoutedExperts):
    """The chosen experts and the shared ones, if any, x [B, T, D] to [B, T, D]."""

    router_type = staticmethod(_router_of_experts)


class Attention(blocks.NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D], whose output may have gates. Values have one matrix, or are
    weighted sums of the products with chosen matrices, each after SiLU."""

    def __init__(self, config: Any, *, chooses_values: bool, dtype: DTypeLike, keys: Keys, **options: Any):
        super().__init__(config, dtype=dtype, keys=keys, **options)
        self.gate_act, sizes = config.attention_gate_func, config.sizes
        self.gate = Einsum("BTD,DNH->BTNH", sizes, dtype=dtype, keys=keys) if config.has_gate else None
        self.chooses_values, self.head_dim = chooses_values, sizes["H"]
        if chooses_values:
            del self.v
            chosen = config.mova_num_experts_per_tok
            self.router = ScoredRouter(config, "value_experts", chosen, normed=chosen > 1, dtype=dtype, keys=keys)
            of_values = with_letters(sizes, {"E": "value_experts", "M": "value_width"})
            self.values_of = Expert("EDM", of_values, dtype=dtype, keys=keys)

    def values(self, x_BTD: jax.Array) -> jax.Array:
        if not self.chooses_values:
            return super().values(x_BTD)

        def products(values_of: Expert, rows: Rows) -> jax.Array:
            return nnx.silu(values_of(rows.x, rows))

        v_BTM = routed(products, (self.values_of,), x_BTD, *self.router(x_BTD))
        return v_BTM.reshape(*v_BTM.shape[:-1], -1, self.head_dim)

    def gated(self, x_BTD: jax.Array, y_BTNH: jax.Array) -> jax.Array:
        if self.gate is None:
            return y_BTNH
        gate = self.gate(x_BTD).astype(jnp.float32)
        act = nnx.silu if self.gate_act == "silu" else softplus_of_two
        return y_BTNH * act(gate).astype(y_BTNH.dtype)


class Block(blocks.PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections."""

    def new_attention(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
        chooses_values = config.chooses_values and layer in config.layer_sets["J"]
        return self.attention_type(config, chooses_values=chooses_values, dtype=dtype, keys=keys)
