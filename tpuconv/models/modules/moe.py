"""Routers of single families, and Mixtral's layer."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.layers import Einsum, Keys, exact_product
from tpuconv.models.common.placement import placed
from tpuconv.models.common.sinks import WithSinks
from tpuconv.models.deepseek_v3.modules import Router


class ScoreRouter(nnx.Module):
    """x [B, T, D] to the ids and weights [B, T, X] of each token's experts: those with the highest scores and
    corrections. The weights are the sigmoids of the scores. Computed in float32."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.config = config
        self.kernel = Einsum("BTD,DE->BTE", config.sizes, dtype=dtype, keys=keys).kernel
        self.correction = nnx.Param(jnp.zeros(config.sizes["E"], jnp.float32))

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores_BTE = placed(exact_product("BTD,DE->BTE", x_BTD, self.kernel[...]), "B T E")
        wanted_BTE = scores_BTE + self.correction[...].astype(jnp.float32)
        ids_BTX = jax.lax.top_k(wanted_BTE, self.config.num_experts_per_tok)[1]
        weights_BTX = nnx.sigmoid(jnp.take_along_axis(scores_BTE, ids_BTX, axis=-1))
        if self.config.norm_topk_prob:
            weights_BTX /= weights_BTX.sum(-1, keepdims=True)
        return ids_BTX, weights_BTX


class RoundedRouter(Router):
    """DeepSeek V3's router with scores that are rounded to the dtype of x before the sigmoid."""

    def scores(self, x_BTD: jax.Array) -> jax.Array:
        logits_BTE = jnp.einsum("BTD,DE->BTE", x_BTD, self.kernel[...]).astype(x_BTD.dtype)
        return nnx.sigmoid(logits_BTE.astype(jnp.float32))


class GatedAttention(blocks.NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Each
    element of the output has a gate."""

    def __init__(self, config: Any, **options: Any):
        super().__init__(config, **options)
        self.gate = Einsum("BTD,DNH->BTNH", config.sizes, dtype=options["dtype"], keys=options["keys"])

    def gated(self, x_BTD: jax.Array, y_BTNH: jax.Array) -> jax.Array:
        return y_BTNH * nnx.sigmoid(self.gate(x_BTD))


class SinksOfHeads(WithSinks, blocks.NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Each
    head has a score without a value."""

    def __init__(self, config: Any, **options: Any):
        super().__init__(config, **options)
        self.sinks = nnx.Param(jnp.zeros(config.sizes["N"], jnp.float32))


class PlainScoreRouter(nnx.Module):
    """x [B, T, D] to the ids and weights [B, T, X] of each token's experts, those with the highest scores. Computed in
    float32."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.config = config
        self.kernel = Einsum("BTD,DE->BTE", config.sizes, dtype=dtype, keys=keys).kernel

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores_BTE = placed(exact_product("BTD,DE->BTE", x_BTD, self.kernel[...]), "B T E")
        weights_BTX, ids_BTX = jax.lax.top_k(nnx.sigmoid(scores_BTE), self.config.num_experts_per_tok)
        if self.config.norm_topk_prob:
            weights_BTX /= weights_BTX.sum(-1, keepdims=True)
        return ids_BTX, weights_BTX
