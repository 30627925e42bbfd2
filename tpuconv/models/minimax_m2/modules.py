"""MiniMax-M2 (arXiv:2506.13585 has its predecessor)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Einsum, Keys
from tpuconv.models.common.moe import GatedExperts
from tpuconv.models.common.placement import placed
from tpuconv.models.minimax_m2.family import Config


class Attention(blocks.NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    and keys are normalized, all heads together."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, all_heads=True, dtype=dtype, keys=keys)


class Router(nnx.Module):
    """x [B, T, D] to the ids and weights [B, T, X] of each token's experts: their sigmoids, normalized. `correction`
    balances how often experts are chosen, and does not change the weights."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        self.count = config.num_experts_per_tok
        self.kernel = Einsum("BTD,DE->BTE", config.axes, dtype=dtype, keys=keys).kernel
        self.correction = nnx.Param(jnp.zeros(config.axes["E"], jnp.float32))

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        kernel_DE = self.kernel[...]
        logits_BTE = placed(jnp.einsum("BTD,DE->BTE", x_BTD.astype(kernel_DE.dtype), kernel_DE), "B T E")
        scores_BTE = nnx.sigmoid(logits_BTE.astype(jnp.float32))
        ids_BTX = jax.lax.top_k(scores_BTE + self.correction[...].astype(jnp.float32), self.count)[1]
        weights_BTX = jnp.take_along_axis(scores_BTE, ids_BTX, axis=-1)
        return ids_BTX, weights_BTX / weights_BTX.sum(-1, keepdims=True)


class MoE(GatedExperts):
    """The chosen experts, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.axes, nnx.silu, dtype=dtype, keys=keys)
        self.router = Router(config, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        return super().__call__(x_BTD, *self.router(x_BTD))


class Block(blocks.PreNormBlock):
    """One layer: attention and experts, each after a norm, with residual connections."""

    attention_type = Attention
    moe_type = MoE


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
