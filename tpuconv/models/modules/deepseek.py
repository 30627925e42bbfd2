"""Latent attention and routers of models after DeepSeek V2 and V3."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Einsum, Keys, RMSNorm, apply_rope, deinterleave, exact_product
from tpuconv.models.common.placement import placed
from tpuconv.models.common.steps import Step
from tpuconv.models.deepseek_v3 import modules as deepseek_v3


class LatentDecoder(Decoder):
    """A decoder whose cache has latent vectors."""

    cached = deepseek_v3.Latent.empty


class NeighbourAttention(deepseek_v3.Attention):
    """DeepSeek V3's attention; rotary positions are applied in float32."""

    def _rotated(self, x_BTNR: jax.Array, step: Step) -> jax.Array:
        return apply_rope(deinterleave(x_BTNR), step.cos_sin)


class Router(nnx.Module):
    """The router (arXiv:2405.04434, section 2.1.3): x [B, T, D] to the ids and weights [B, T, X] of each token's
    experts, the most probable ones of the groups with the most probable experts. Computed in float32: a small error of
    a score may choose another expert."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.config = config
        self.kernel = Einsum("BTD,DE->BTE", config.sizes, dtype=dtype, keys=keys).kernel

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


class NormalizedRouter(Router):
    """The same router with weights whose sum is `routed_scaling_factor`."""

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        ids_BTX, weights_BTX = super().__call__(x_BTD)
        return ids_BTX, weights_BTX / weights_BTX.sum(-1, keepdims=True) * self.config.routed_scaling_factor


class MaybeCorrectedRouter(deepseek_v3.Router):
    """DeepSeek V3's router, in the release without corrections."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        if not config.is_corrected:
            del self.correction

    def corrected(self, scores_BTE: jax.Array) -> jax.Array:
        return super().corrected(scores_BTE) if hasattr(self, "correction") else scores_BTE


class NormedExpertsBlock(blocks.PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections. Experts have a norm
    after them too."""

    def __init__(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        if hasattr(self, "moe"):
            self.post_mlp_norm = RMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype)

    def fed(self, x_BTD: jax.Array) -> jax.Array:
        y_BTD = super().fed(x_BTD)
        return self.post_mlp_norm(y_BTD) if hasattr(self, "post_mlp_norm") else y_BTD
