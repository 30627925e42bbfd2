"""Lara 4 Mini: gated delta nets (arXiv:2412.06464), and attention with a window or without positions."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.delta import LEGEND, DeltaNet, DeltaState
from tpuconv.models.common.layers import Einsum, Keys, ScaledRMSNorm, exact_product
from tpuconv.models.common.placement import placed
from tpuconv.models.common.recurrence import HybridBlock, HybridDecoder
from tpuconv.models.deepseek_v3 import modules as deepseek_v3
from tpuconv.notation.letters import with_letters


class Attention(blocks.NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    and keys are normalized, each head separately."""

    norm_type = ScaledRMSNorm

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        bias = config.attention_bias
        super().__init__(config, bias=bias, out_bias=bias, dtype=dtype, keys=keys)


class ScaledDeltaNet(DeltaNet):
    """Linear attention whose output is normalized, scaled and gated in float32, and then rounded."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.norm = ScaledRMSNorm("w", with_letters(config.sizes, LEGEND), config.rms_norm_eps, dtype=dtype)


class Router(nnx.Module):
    """x [B, T, D] to the ids and weights [B, T, X] of each token's experts: the most probable ones. Computed in
    float32."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.config = config
        self.kernel = Einsum("BTD,DE->BTE", config.sizes, dtype=dtype, keys=keys).kernel

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        probs_BTE = nnx.softmax(placed(exact_product("BTD,DE->BTE", x_BTD, self.kernel[...]), "B T E"))
        weights_BTX, ids_BTX = jax.lax.top_k(probs_BTE, self.config.num_experts_per_tok)
        if self.config.norm_topk_prob:
            weights_BTX /= weights_BTX.sum(-1, keepdims=True)
        return ids_BTX, weights_BTX.astype(x_BTD.dtype).astype(jnp.float32)


class MoE(deepseek_v3.MoE):
    """The chosen experts and the shared one, x [B, T, D] to [B, T, D]."""

    router_type = Router


class Block(HybridBlock):
    """One layer: linear attention or attention, then experts, each after a norm, with residual connections."""

    attention_type = Attention
    mixer_type = ScaledDeltaNet
    moe_type = MoE
    norm_type = ScaledRMSNorm


class Model(HybridDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = ScaledRMSNorm
    state_type = DeltaState
