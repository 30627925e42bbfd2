"""Mistral 4: latent attention (arXiv:2405.04434) with queries that grow with their position, and experts."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import PreNormBlock
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Einsum, Keys
from tpuconv.models.common.placement import placed
from tpuconv.models.common.steps import Step
from tpuconv.models.deepseek_v3 import modules as deepseek_v3
from tpuconv.models.mistral4.text import TextConfig
from tpuconv.models.modules.mistral import grown


class Attention(deepseek_v3.Attention):
    """DeepSeek V3's attention. Queries grow with their position."""

    def __init__(self, config: TextConfig, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.beta, self.original = config.llama_4_scaling_beta, config.rope.original_max_position_embeddings

    def queries(self, x_BTQ: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        q_BTNP, q_BTNR = super().queries(x_BTQ, step)
        return grown(q_BTNP, step, self.beta, self.original), grown(q_BTNR, step, self.beta, self.original)


class Router(nnx.Module):
    """x [B, T, D] to the ids and weights [B, T, X] of each token's experts: the most probable ones of the groups whose
    two most probable experts have the largest sum. Computed in the dtype of x."""

    def __init__(self, config: TextConfig, *, dtype: DTypeLike, keys: Keys):
        self.config = config
        self.kernel = Einsum("BTD,DE->BTE", config.sizes, dtype=dtype, keys=keys).kernel

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = self.config
        logits_BTE = placed(jnp.einsum("BTD,DE->BTE", x_BTD, self.kernel[...]).astype(x_BTD.dtype), "B T E")
        probs_BTE = nnx.softmax(logits_BTE.astype(jnp.float32)).astype(x_BTD.dtype)
        count, kept = config.groups
        groups = probs_BTE.reshape(*probs_BTE.shape[:2], count, -1)
        best_two = jax.lax.top_k(groups, 2)[0].sum(-1)
        chosen = jax.nn.one_hot(jax.lax.top_k(best_two, kept)[1], count).sum(-2) > 0
        wanted_BTE = jnp.where(chosen[..., None], groups, 0).reshape(probs_BTE.shape)
        weights_BTX, ids_BTX = jax.lax.top_k(wanted_BTE, config.num_experts_per_tok)
        if config.norm_topk_prob:
            weights_BTX /= weights_BTX.sum(-1, keepdims=True) + 1e-20
        return ids_BTX, weights_BTX * config.routed_scaling_factor


class MoE(deepseek_v3.MoE):
    """The chosen experts and the shared ones, x [B, T, D] to [B, T, D]."""

    router_type = Router


class Block(PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections."""

    attention_type = Attention
    moe_type = MoE


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    cached = deepseek_v3.Latent.empty
