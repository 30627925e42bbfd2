"""MiniMax: a router, lightning attention, and residuals with factors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import Einsum, Keys, RMSNorm, times
from tpuconv.models.common.lightning import LightningAttention, LightningBlock
from tpuconv.models.common.placement import placed
from tpuconv.models.common.steps import Step

LIGHTNING_EPS = 1e-6
"""Epsilon of the norm of lightning attention. config.json has only the epsilon of the other norms."""


class Router(nnx.Module):
    """x [B, T, D] to the ids and weights [B, T, X] of each token's experts: their sigmoids, normalized. `correction`
    balances how often experts are chosen, and does not change the weights."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.count = config.num_experts_per_tok
        self.kernel = Einsum("BTD,DE->BTE", config.sizes, dtype=dtype, keys=keys).kernel
        self.correction = nnx.Param(jnp.zeros(config.sizes["E"], jnp.float32))

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        kernel_DE = self.kernel[...]
        logits_BTE = placed(jnp.einsum("BTD,DE->BTE", x_BTD.astype(kernel_DE.dtype), kernel_DE), "B T E")
        scores_BTE = nnx.sigmoid(logits_BTE.astype(jnp.float32))
        ids_BTX = jax.lax.top_k(scores_BTE + self.correction[...].astype(jnp.float32), self.count)[1]
        weights_BTX = jnp.take_along_axis(scores_BTE, ids_BTX, axis=-1)
        return ids_BTX, weights_BTX / weights_BTX.sum(-1, keepdims=True)


def decay_rates(config: Any, layer: int) -> np.ndarray:
    """Returns by how much the logarithm of the state of each head decays with each token [n], as transformers'
    `MiniMaxLightningAttention` does. Later layers forget less; the last one nearly nothing."""
    heads, last = int(config.num_attention_heads), int(config.num_hidden_layers) - 1
    slopes_n = 2.0 ** (-8 / heads * np.arange(1, heads + 1))
    return (slopes_n * (1 - layer / (last + 1e-5) + 1e-5)).astype(np.float32)


class NormedLightning(LightningAttention):
    """Lightning attention whose output is normalized, all heads together. Queries, keys and values have an
    activation."""

    rates = decay_rates

    def new_norm(self, sizes: Any, *, dtype: DTypeLike) -> RMSNorm:
        return RMSNorm("nw", sizes, LIGHTNING_EPS, dtype=dtype)

    def heads(self, x_BTD: jax.Array, step: Step) -> tuple[jax.Array, jax.Array, jax.Array]:
        return nnx.silu(self.q(x_BTD)), nnx.silu(self.k(x_BTD)), nnx.silu(self.v(x_BTD))


class WeightedBlock(LightningBlock):
    """One layer: lightning or softmax attention, then experts. What a norm returns is the residual too; it and the
    output of a part have factors."""

    mixer_type = NormedLightning

    def __init__(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        full = config.full_attn_alpha_factor, config.full_attn_beta_factor
        linear = config.linear_attn_alpha_factor, config.linear_attn_beta_factor
        self.attn_factors = linear if layer in config.layer_sets["state_layers"] else full
        self.moe_factors = config.mlp_alpha_factor, config.mlp_beta_factor

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        x_BTD = self.attn_norm(x_BTD)
        y_BTD, kv = self.attn(x_BTD, step, window, kv)
        x_BTD = self.mlp_norm(weighted_sum(x_BTD, y_BTD, self.attn_factors))
        return weighted_sum(x_BTD, self.fed(x_BTD), self.moe_factors), kv


def weighted_sum(x_BTD: jax.Array, y_BTD: jax.Array, factors: tuple[float, float]) -> jax.Array:
    """Returns the sum of both, each times its factor."""
    return times(x_BTD, factors[0]) + times(y_BTD, factors[1])
