"""Qwen3, mixture of experts (arXiv:2505.09388)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import PreNormBlock
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Einsum, Keys
from tpuconv.models.common.moe import Experts
from tpuconv.models.common.placement import placed
from tpuconv.models.qwen3.modules import Attention
from tpuconv.models.qwen3_moe.family import Config


class MoE(Experts):
    """The X most probable experts of each token, x [B, T, D] to [B, T, D]. Their weights are their probabilities, which
    are normalized if `norm_topk_prob` is set."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.axes, nnx.silu, dtype=dtype, keys=keys)
        self.config = config
        self.router = Einsum("BTD,DE->BTE", config.axes, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        probs_BTE = nnx.softmax(placed(self.router(x_BTD), "B T E").astype(jnp.float32))
        weights_BTX, ids_BTX = jax.lax.top_k(probs_BTE, self.config.num_experts_per_tok)
        if self.config.norm_topk_prob:
            weights_BTX /= weights_BTX.sum(axis=-1, keepdims=True)
        return super().__call__(x_BTD, ids_BTX, weights_BTX.astype(x_BTD.dtype))


class Block(PreNormBlock):
    """One layer: attention, then experts or an MLP, each after a norm, with residual connections."""

    attention_type = Attention
    moe_type = MoE


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
