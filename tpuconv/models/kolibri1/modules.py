"""Kolibri 1: attention as EXAONE 4 (arXiv:2507.11407), norms before and after each part, and experts with a sigmoid
router."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Einsum, Keys, exact_product
from tpuconv.models.common.placement import placed
from tpuconv.models.deepseek_v3 import modules as deepseek_v3
from tpuconv.models.kolibri1.family import Config


class Router(nnx.Module):
    """x [B, T, D] to the ids and weights [B, T, X] of each token's experts: those with the highest scores and
    corrections. The weights are the sigmoids of the scores. Computed in float32."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        self.config = config
        self.kernel = Einsum("BTD,DE->BTE", config.axes, dtype=dtype, keys=keys).kernel
        self.correction = nnx.Param(jnp.zeros(config.axes["E"], jnp.float32))

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores_BTE = placed(exact_product("BTD,DE->BTE", x_BTD, self.kernel[...]), "B T E")
        wanted_BTE = scores_BTE + self.correction[...].astype(jnp.float32)
        ids_BTX = jax.lax.top_k(wanted_BTE, self.config.num_experts_per_tok)[1]
        weights_BTX = nnx.sigmoid(jnp.take_along_axis(scores_BTE, ids_BTX, axis=-1))
        if self.config.norm_topk_prob:
            weights_BTX /= weights_BTX.sum(-1, keepdims=True)
        return ids_BTX, weights_BTX


class MoE(deepseek_v3.MoE):
    """The chosen experts and the shared one, x [B, T, D] to [B, T, D]."""

    router_type = Router


class Block(blocks.SandwichBlock):
    """One layer: attention, then experts, each between two norms, with residual connections."""

    attention_type = blocks.NormedAttention
    moe_type = MoE


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
