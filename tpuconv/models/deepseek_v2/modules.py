"""DeepSeek V2 (arXiv:2405.04434)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import PreNormBlock
from tpuconv.models.common.decoder import Decoder, Step
from tpuconv.models.common.layers import Einsum, Keys, apply_rope, deinterleave, exact_product
from tpuconv.models.common.placement import placed
from tpuconv.models.deepseek_v2.family import Config
from tpuconv.models.deepseek_v3 import modules as deepseek_v3


class Attention(deepseek_v3.Attention):
    """DeepSeek V3's attention; rotary positions are applied in float32."""

    def _rotated(self, x_BTNR: jax.Array, step: Step) -> jax.Array:
        return apply_rope(deinterleave(x_BTNR), step.cos_sin)


class Router(nnx.Module):
    """The router (arXiv:2405.04434, section 2.1.3): x [B, T, D] to the ids and weights [B, T, X] of each token's
    experts, the most probable ones of the groups with the most probable experts. Computed in float32: a small error of
    a score may choose another expert."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        self.config = config
        self.kernel = Einsum("BTD,DE->BTE", config.axes, dtype=dtype, keys=keys).kernel

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = self.config
        logits_BTE = exact_product("BTD,DE->BTE", x_BTD, self.kernel[...])
        probs_BTE = nnx.softmax(placed(logits_BTE, "B T E"))
        count, kept = config.groups
        groups = probs_BTE.reshape(*probs_BTE.shape[:2], count, -1)
        best = jax.lax.top_k(groups.max(-1), kept)[1]
        chosen = jax.nn.one_hot(best, count).sum(-2) > 0
        probs_BTE = jnp.where(chosen[..., None], groups, 0).reshape(probs_BTE.shape)
        weights_BTX, ids_BTX = jax.lax.top_k(probs_BTE, config.num_experts_per_tok)
        return ids_BTX, weights_BTX * config.routed_scaling_factor


class MoE(deepseek_v3.MoE):
    """The chosen experts and the shared experts, if any, x [B, T, D] to [B, T, D]."""

    router_type = Router


class Block(PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections."""

    attention_type = Attention
    moe_type = MoE


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    cached = deepseek_v3.Latent.empty
