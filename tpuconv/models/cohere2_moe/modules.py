"""Cohere 2, mixture of experts: the attention of Cohere 2 (arXiv:2504.00698), and experts."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.build import attention_class
from tpuconv.models.cohere2_moe.family import Config
from tpuconv.models.common.blocks import GatedMLP
from tpuconv.models.common.cache import KV
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, RMSNorm, times
from tpuconv.models.common.moe import GatedExperts
from tpuconv.models.common.placement import placed
from tpuconv.models.common.steps import Step
from tpuconv.models.parts import Attn

Attention = attention_class(Attn("attention_bias", module="modules.cohere:CohereAttention"))


class MoE(GatedExperts):
    """The chosen experts, and the sum or the mean of their output and the output of the shared experts, if any; x [B,
    T, D] to [B, T, D]. The weights are a softmax over the scores of the chosen experts, or their sigmoids."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.sizes, nnx.silu, dtype=dtype, keys=keys)
        self.config = config
        self.router = Einsum("BTD,DE->BTE", config.sizes, dtype=dtype, keys=keys)
        self.shared = GatedMLP(config, "W", dtype=dtype, keys=keys) if config.has_shared_experts else None

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        scores_BTX, ids_BTX = jax.lax.top_k(placed(self.router(x_BTD), "B T E"), self.config.num_experts_per_tok)
        y_BTD = super().__call__(x_BTD, ids_BTX, self.weights(scores_BTX))
        if self.shared is None:
            return y_BTD
        y_BTD = y_BTD + self.shared(x_BTD)
        return y_BTD / 2 if self.config.shared_expert_combination_strategy == "average" else y_BTD

    def weights(self, scores_BTX: jax.Array) -> jax.Array:
        """Returns the weights [B, T, X] of the chosen experts, in the dtype of their scores."""
        if self.config.expert_selection_fn == "softmax":
            return nnx.softmax(scores_BTX.astype(jnp.float32)).astype(scores_BTX.dtype)
        weights_BTX = nnx.sigmoid(scores_BTX)
        return weights_BTX / weights_BTX.sum(-1, keepdims=True) if self.config.norm_topk_prob else weights_BTX


def new_norm(config: Config, *, dtype: DTypeLike) -> RMSNorm | LayerNorm:
    """Returns a norm of hidden states."""
    if config.has_rms_norms:
        return RMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype)
    return LayerNorm("D", config.sizes, config.rms_norm_eps, bias=False, dtype=dtype)


class Block(nnx.Module):
    """One layer: attention, and an MLP or experts, both after the same norm, with one residual connection."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        self.norm = new_norm(config, dtype=dtype)
        self.attn = Attention(config, dtype=dtype, keys=keys)
        if layer in config.layer_sets["J"]:
            self.moe = MoE(config, dtype=dtype, keys=keys)
        else:
            self.mlp = GatedMLP(config, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        normed_BTD = self.norm(x_BTD)
        y_BTD, kv = self.attn(normed_BTD, step, window, kv)
        fed_BTD = self.moe(normed_BTD) if hasattr(self, "moe") else self.mlp(normed_BTD)
        return x_BTD + y_BTD + fed_BTD, kv


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    config: Config

    def __init__(self, config: Config, *, dtype: DTypeLike = jnp.bfloat16, **options: object):
        super().__init__(config, dtype=dtype, **options)  # type: ignore[arg-type]
        self.norm = new_norm(config, dtype=dtype)

    def adjusted(self, logits_BTV: jax.Array) -> jax.Array:
        return times(logits_BTV, self.config.logit_scale)
