"""ERNIE 4.5's experts and multi-token prediction."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import mtp
from tpuconv.models.common.blocks import PreNormBlock
from tpuconv.models.common.cache import Cache
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Einsum, Keys, exact_product
from tpuconv.models.common.moe import GatedExperts, RoutedExperts
from tpuconv.models.common.placement import placed
from tpuconv.models.common.steps import Step
from tpuconv.notation.letters import with_letters


class Router(nnx.Module):
    """x [B, T, D] to the ids and weights [B, T, X] of each token's experts: their probabilities, normalized.
    `correction` balances how often experts are chosen, and does not change the weights. Computed in float32 with a
    float32 kernel: a small error of a score may choose another expert."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.config = config
        self.kernel = Einsum("BTD,DE->BTE", config.sizes, dtype=jnp.float32, keys=keys).kernel
        self.correction = nnx.Param(jnp.zeros(config.sizes["E"], jnp.float32))

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_BTE = exact_product("BTD,DE->BTE", x_BTD, self.kernel[...])
        probs_BTE = nnx.softmax(placed(logits_BTE, "B T E"))
        wanted_BTE = probs_BTE + self.correction[...].astype(jnp.float32)
        ids_BTX = jax.lax.top_k(wanted_BTE, self.config.num_experts_per_tok)[1]
        weights_BTX = jnp.take_along_axis(probs_BTE, ids_BTX, axis=-1)
        weights_BTX /= jnp.maximum(weights_BTX.sum(-1, keepdims=True), self.config.moe_norm_min)
        return ids_BTX, weights_BTX.astype(x_BTD.dtype)


class ExpertsOfImages(GatedExperts):
    """The experts for images and their router, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(with_letters(config.sizes, {"M": "image_width"}), nnx.silu, dtype=dtype, keys=keys)
        self.router = Router(config, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        return super().__call__(x_BTD, *self.router(x_BTD))


class ExpertsByModality(RoutedExperts):
    """Experts for text, others for images, and shared experts for both, x [B, T, D] to [B, T, D]. `of_images_BT` says
    which tokens are of images. Where it is None none is, and the experts for images do not run."""

    router_type = Router

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.images = ExpertsOfImages(config, dtype=dtype, keys=keys)

    def __call__(  # type: ignore[override]
        self, x_BTD: jax.Array, of_images_BT: jax.Array | None = None
    ) -> jax.Array:
        y_BTD = self.chosen(x_BTD)
        if of_images_BT is not None:
            y_BTD = jnp.where(of_images_BT[..., None], self.images(x_BTD), y_BTD)
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD)


class BlockByModality(PreNormBlock):
    """A layer that may have `ExpertsByModality`."""

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        y_BTD, kv = self.attn(self.attn_norm(x_BTD), step, window, kv)
        x_BTD += y_BTD
        y_BTD = self.mlp_norm(x_BTD)
        return x_BTD + (self.moe(y_BTD, step.of_images_BT) if hasattr(self, "moe") else self.mlp(y_BTD)), kv


class MTPLayer(mtp.MTPLayer):
    """The layer for multi-token prediction, which has an MLP, and no norm after it."""

    moe_type = None

    def add_parts(self, config: Any, *, dtype: DTypeLike, keys: Keys) -> None:
        self.add_joining(config, dtype=dtype, keys=keys)

    def predict(self, next_BTD: jax.Array, x_BTD: jax.Array, step: Step, kv: Any) -> tuple[jax.Array, Any]:
        block: Any = self
        y_BTD, kv = block(self.joined_inputs(next_BTD, x_BTD), step, self.window, kv)
        return y_BTD, kv


class NormedDraftDecoder(Decoder):
    """A decoder whose module for multi-token prediction reads hidden states before the last norm, and has none of its
    own."""

    def mtp_inputs(self, next_BT: jax.Array, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.embed(next_BT), x_BTD

    def draft(
        self, x_BTD: jax.Array, next_BT: jax.Array, cache: Cache, slot: jax.Array | int
    ) -> tuple[jax.Array, Cache]:
        """As `Decoder.draft`. The module has no norm before the head: the model's is used."""
        y_BTD, cache = super().draft(x_BTD, next_BT, cache, slot)
        return self.norm(y_BTD), cache
