"""LFM2, mixture of experts."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import Einsum, Keys, times
from tpuconv.models.common.moe import GatedExperts
from tpuconv.models.common.placement import placed
from tpuconv.models.lfm2 import modules as lfm2
from tpuconv.models.lfm2_moe.family import Config


class Router(Einsum):
    """The router: x [B, T, D] to the ids and weights [B, T, X] of each token's experts. `correction`, if any, balances
    how often experts are chosen, and does not change the weights. Scores are computed in the dtype of x."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__("BTD,DE->BTE", config.axes, dtype=dtype, keys=keys)
        self.config = config
        self.correction = nnx.Param(jnp.zeros(config.axes["E"], jnp.float32)) if config.use_expert_bias else None

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


class MoE(GatedExperts):
    """The chosen experts, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.axes, nnx.silu, dtype=dtype, keys=keys)
        self.router = Router(config, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        return super().__call__(x_BTD, *self.router(x_BTD))


class Block(lfm2.Block):
    """One layer: a short convolution or attention, then an MLP or experts, each after a norm, with residual
    connections."""

    moe_type = MoE


class Model(lfm2.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
