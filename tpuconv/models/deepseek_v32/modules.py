"""DeepSeek V3.2 (arXiv:2512.02556): DeepSeek V3 whose tokens attend to selected tokens only."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import mtp
from tpuconv.models.common.blocks import PreNormBlock
from tpuconv.models.common.cache import empty_vectors
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, apply_rope, exact_product
from tpuconv.models.common.selection import among_best, indexer_scores
from tpuconv.models.common.steps import Step
from tpuconv.models.deepseek_v3 import modules as deepseek_v3
from tpuconv.models.deepseek_v3.modules import Latent
from tpuconv.models.deepseek_v32.family import Config
from tpuconv.notation.letters import with_letters

LEGEND = {"n": "index_heads", "x": "index_dim"}
"""The words of this module, by the letters of its einsums and arrays."""

INDEXER_EPS = 1e-6
"""Epsilon of the norm of the indexer's keys, which config.json does not have."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class IndexedLatent:
    """The cache of a layer: the cache of DeepSeek V3, and for each token the key of the indexer. An int8 cache has
    scales and the indexer's keys in the model's dtype: rounded ones would select other tokens. `axes` are the letters
    of each array."""

    axes: ClassVar[tuple[str, ...]] = ("B S C", "B S R", "B S index_dim", "B S", "B S")

    c_BSC: jax.Array
    k_BSR: jax.Array
    i_BSx: jax.Array
    c_scale_BS: jax.Array | None = None
    k_scale_BS: jax.Array | None = None

    @classmethod
    def empty(cls, config: Config, shape: tuple[int, ...], dtype: DTypeLike, model_dtype: DTypeLike) -> Self:
        """Returns a cache of zeros for a layer; `shape` is [B, S]."""
        c, k = (empty_vectors((*shape, config.sizes[letter]), dtype) for letter in "CR")
        return cls(c[0], k[0], jnp.zeros((*shape, config.sizes["index_dim"]), model_dtype), c[1], k[1])

    latents = Latent.latents


class HeadWeights(nnx.Module):
    """The weights of the indexer's heads: x [B, T, D] to [B, T, n], in float32."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, LEGEND)
        self.kernel = Einsum("BTD,Dn->BTn", sizes, dtype=dtype, keys=keys).kernel

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return exact_product("BTD,Dn->BTn", x_BTD, self.kernel[...])


class Indexer(nnx.Module):
    """Selects for each token the `index_topk` tokens with the highest scores (arXiv:2512.02556, section 2.1). The first
    R dimensions have rotary positions.

    Class attribute: `eps` is the epsilon of the norm of keys, which config.json does not have.
    """

    eps: ClassVar[float] = INDEXER_EPS

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, LEGEND)
        self.count, self.scale = config.index_topk, (sizes["n"] * sizes["x"]) ** -0.5
        self.q = Einsum("BTQ,Qnx->BTnx", sizes, dtype=dtype, keys=keys)
        self.k = Einsum("BTD,Dx->BTx", sizes, dtype=dtype, keys=keys)
        self.k_norm = LayerNorm("x", sizes, self.eps, dtype=dtype)
        self.router = HeadWeights(config, dtype=dtype, keys=keys)

    def queries(self, x_BTQ: jax.Array, step: Step) -> jax.Array:
        """Returns the queries [B, T, n, x]."""
        return self.rotated(self.q(x_BTQ), step)

    def rotated(self, x_BTnx: jax.Array, step: Step) -> jax.Array:
        """Returns queries or keys with rotary positions."""
        return apply_rope(x_BTnx, step.cos_sin_in(x_BTnx.dtype))

    def key(self, x_BTD: jax.Array, step: Step) -> jax.Array:
        """Returns the keys [B, T, x] of these tokens."""
        return self.rotated(self.k_norm(self.k(x_BTD))[:, :, None], step)[:, :, 0]

    def __call__(
        self, x_BTD: jax.Array, x_BTQ: jax.Array, kv: IndexedLatent, step: Step, visible_BTS: jax.Array
    ) -> jax.Array:
        """Returns the mask [B, T, S] of the selected tokens. A token that sees no more than `index_topk` selects all
        that it sees.

        Args:
            x_BTD: hidden states.
            x_BTQ: what queries are computed from.
            kv: the cache with these tokens.
            step: positions.
            visible_BTS: the mask of the tokens that each token sees.
        """
        # Computed where they are not needed too, since a quantization finds kernels by their products.
        q_BTnx, weights_BTn = self.queries(x_BTQ, step), self.router(x_BTD) * self.scale
        if visible_BTS.shape[-1] <= self.count:
            return visible_BTS
        return among_best(indexer_scores(q_BTnx, weights_BTn, kv.i_BSx), self.count, visible_BTS)


class Attention(deepseek_v3.Attention):
    """DeepSeek V3's attention to the tokens that an indexer selects."""

    indexer_type: ClassVar[Callable[..., Any]] = Indexer

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.indexer = self.indexer_type(config, dtype=dtype, keys=keys)

    def latents(self, x_BTD: jax.Array, step: Step) -> Any:
        latent = super().latents(x_BTD, step)
        return IndexedLatent(latent.c_BSC, latent.k_BSR, self.indexer.key(x_BTD, step))

    def visible(self, x_BTD: jax.Array, x_BTQ: jax.Array, kv: Any, step: Step, window: jax.Array | int) -> jax.Array:
        selected_BTS: jax.Array = self.indexer(x_BTD, x_BTQ, kv, step, step.visible(window))
        return selected_BTS


class Block(PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections."""

    attention_type = Attention
    moe_type = deepseek_v3.MoE


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    mtp_type = mtp.mtp_module(Block)

    def cached(self, config: Config, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Returns the empty cache of a layer; `shape` is [B, S], or [L, B, S] for all layers."""
        return IndexedLatent.empty(config, shape, dtype, self.embed.embedding.dtype)
