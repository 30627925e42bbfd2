"""ERNIE 4.5, mixture of experts."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import GatedMLP, PreNormBlock
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Einsum, Keys, exact_product
from tpuconv.models.common.moe import Experts
from tpuconv.models.common.placement import placed
from tpuconv.models.ernie4_5.modules import Attention
from tpuconv.models.ernie4_5_moe.family import Config


class Router(nnx.Module):
    """x [B, T, D] to the ids and weights [B, T, X] of each token's experts: their probabilities, normalized.
    `correction` balances how often experts are chosen, and does not change the weights. Computed in float32 with a
    float32 kernel: a small error of a score may choose another expert."""

    def __init__(self, config: Config, *, keys: Keys):
        self.config = config
        self.kernel = Einsum("BTD,DE->BTE", config.axes, dtype=jnp.float32, keys=keys).kernel
        self.correction = nnx.Param(jnp.zeros(config.axes["E"], jnp.float32))

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_BTE = exact_product("BTD,DE->BTE", x_BTD, self.kernel[...])
        probs_BTE = nnx.softmax(placed(logits_BTE, "B T E"))
        ids_BTX = jax.lax.top_k(probs_BTE + self.correction[...].astype(jnp.float32), self.config.moe_k)[1]
        weights_BTX = jnp.take_along_axis(probs_BTE, ids_BTX, axis=-1)
        weights_BTX /= jnp.maximum(weights_BTX.sum(-1, keepdims=True), self.config.moe_norm_min)
        return ids_BTX, weights_BTX.astype(x_BTD.dtype)


class MoE(Experts):
    """The chosen experts and the shared ones, if any, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.axes, nnx.silu, dtype=dtype, keys=keys)
        self.router = Router(config, keys=keys)
        self.shared = GatedMLP(config, "W", dtype=dtype, keys=keys) if config.has_shared_experts else None

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        y_BTD = super().__call__(x_BTD, *self.router(x_BTD))
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD)


class Block(PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections."""

    attention_type = Attention
    moe_type = MoE


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
