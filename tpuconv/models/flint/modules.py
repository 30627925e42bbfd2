"""Flint: attention as Qwen3's (arXiv:2505.09388) with sinks, and experts with a sigmoid router."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.cache import KV, append_kv
from tpuconv.models.common.decoder import Decoder, Step
from tpuconv.models.common.layers import Einsum, Keys, ScaledRMSNorm, exact_product
from tpuconv.models.common.placement import placed
from tpuconv.models.deepseek_v3 import modules as deepseek_v3
from tpuconv.models.flint.family import Config
from tpuconv.models.gpt_oss.modules import attention_with_sinks


class Attention(blocks.NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    and keys are normalized, each head separately; each head has a score without a value."""

    norm_type = ScaledRMSNorm

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        bias = config.attention_bias
        super().__init__(config, bias=bias, out_bias=bias, dtype=dtype, keys=keys)
        self.sinks = nnx.Param(jnp.zeros(config.axes["N"], jnp.float32))

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        q_BTNH, k_BTKH = self.positioned(self.q(x_BTD), self.k(x_BTD), step)
        kv = append_kv(kv, k_BTKH, self.values(x_BTD), step.slot)
        return self.o(attention_with_sinks(q_BTNH, kv, step.visible(window), self.sinks[...])), kv


class Router(nnx.Module):
    """x [B, T, D] to the ids and weights [B, T, X] of each token's experts, those with the highest scores. Computed in
    float32."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        self.config = config
        self.kernel = Einsum("BTD,DE->BTE", config.axes, dtype=dtype, keys=keys).kernel

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores_BTE = placed(exact_product("BTD,DE->BTE", x_BTD, self.kernel[...]), "B T E")
        weights_BTX, ids_BTX = jax.lax.top_k(nnx.sigmoid(scores_BTE), self.config.num_experts_per_tok)
        if self.config.norm_topk_prob:
            weights_BTX /= weights_BTX.sum(-1, keepdims=True)
        return ids_BTX, weights_BTX


class MoE(deepseek_v3.MoE):
    """The chosen experts and the shared one, x [B, T, D] to [B, T, D]."""

    router_type = Router


class Block(blocks.PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections."""

    attention_type = Attention
    moe_type = MoE
    norm_type = ScaledRMSNorm


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = ScaledRMSNorm
