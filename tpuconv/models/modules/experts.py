"""Experts that are chosen by the softmax of their scores."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.layers import Einsum, Keys
from tpuconv.models.common.moe import GatedExperts
from tpuconv.models.common.placement import placed


class ProbableExperts(GatedExperts):
    """The X most probable experts of each token, x [B, T, D] to [B, T, D]. Their weights are their probabilities, which
    are normalized if `norm_topk_prob` is set."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.sizes, nnx.silu, dtype=dtype, keys=keys)
        self.config = config
        self.router = Einsum("BTD,DE->BTE", config.sizes, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        probs_BTE = nnx.softmax(placed(self.router(x_BTD), "B T E").astype(jnp.float32))
        weights_BTX, ids_BTX = jax.lax.top_k(probs_BTE, self.config.num_experts_per_tok)
        if self.config.norm_topk_prob:
            weights_BTX /= weights_BTX.sum(axis=-1, keepdims=True)
        return super().__call__(x_BTD, ids_BTX, weights_BTX.astype(x_BTD.dtype))


class SharedAndProbableExperts(ProbableExperts):
    """The chosen experts and a shared one, x [B, T, D] to [B, T, D]. A sigmoid of the token weights the shared
    expert."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.shared = blocks.GatedMLP(config, "W", dtype=dtype, keys=keys)
        self.router_shared = Einsum("BTD,D->BT", config.sizes, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        weight_BT = nnx.sigmoid(self.router_shared(x_BTD))
        return super().__call__(x_BTD) + weight_BT[..., None] * self.shared(x_BTD)


class NormalizedExperts(GatedExperts):
    """The X most probable experts of each token, x [B, T, D] to [B, T, D]. Their weights are normalized probabilities
    in float32."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.sizes, nnx.silu, dtype=dtype, keys=keys)
        self.chosen = config.num_experts_per_tok
        self.router = Einsum("BTD,DE->BTE", config.sizes, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        probs_BTE = nnx.softmax(placed(self.router(x_BTD), "B T E").astype(jnp.float32))
        weights_BTX, ids_BTX = jax.lax.top_k(probs_BTE, self.chosen)
        return super().__call__(x_BTD, ids_BTX, weights_BTX / weights_BTX.sum(axis=-1, keepdims=True))


class BestExperts(GatedExperts):
    """The X experts with the highest scores of each token, and the shared one, if any, x [B, T, D] to [B, T, D]. The
    weights are the softmax of these X scores."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.sizes, nnx.silu, dtype=dtype, keys=keys)
        self.count = config.num_experts_per_tok
        self.router = Einsum("BTD,DE->BTE", config.sizes, dtype=dtype, keys=keys)
        self.shared = blocks.GatedMLP(config, "W", dtype=dtype, keys=keys) if config.has_shared_expert else None

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        scores_BTX, ids_BTX = jax.lax.top_k(placed(self.router(x_BTD), "B T E").astype(jnp.float32), self.count)
        y_BTD = super().__call__(x_BTD, ids_BTX, nnx.softmax(scores_BTX).astype(x_BTD.dtype))
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD)
