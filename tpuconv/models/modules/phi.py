"""Phi's mixture of experts."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import MASKED_SCORE, Einsum, Keys
from tpuconv.models.common.moe import GatedExperts
from tpuconv.models.common.placement import placed


def is_near(scores_BTE: jax.Array, best_BT1: jax.Array, limit: float) -> jax.Array:
    """Returns which experts [B, T, E] count in the probability of the best one: those not worse by more than `limit`,
    as a part of the score."""
    return (best_BT1 - scores_BTE) / jnp.maximum(jnp.abs(scores_BTE), best_BT1) <= limit


class MoE(GatedExperts):
    """The two experts with the highest scores of each token, x [B, T, D] to [B, T, D]. The weight of each is its
    probability among those that are not much worse: SparseMixer without noise (arXiv:2409.12136)."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.sizes, nnx.silu, dtype=dtype, keys=keys)
        self.limit = 2 * config.router_jitter_noise
        self.router = Einsum("BTD,DE->BTE", config.sizes, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        scores_BTE = placed(self.router(x_BTD), "B T E").astype(jnp.float32)
        first_BT1, weight_1 = self.best(scores_BTE, scores_BTE)
        is_first_BTE = jnp.arange(scores_BTE.shape[-1]) == first_BT1
        second_BT1, weight_2 = self.best(scores_BTE, jnp.where(is_first_BTE, MASKED_SCORE, scores_BTE))
        ids_BTX = jnp.concatenate([first_BT1, second_BT1], axis=-1)
        return super().__call__(x_BTD, ids_BTX, jnp.concatenate([weight_1, weight_2], axis=-1))

    def best(self, scores_BTE: jax.Array, left_BTE: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the id of the best of the experts that are left, and its weight, both [B, T, 1]."""
        best_BT1, id_BT1 = jax.lax.top_k(left_BTE, 1)
        probs_BTE = nnx.softmax(jnp.where(is_near(scores_BTE, best_BT1, self.limit), left_BTE, MASKED_SCORE))
        return id_BT1, jnp.take_along_axis(probs_BTE, id_BT1, axis=-1)
