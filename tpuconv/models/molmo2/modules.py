"""Molmo 2, the text model: attention and MLP as Qwen3's (arXiv:2505.09388), or with norms as OLMo 2's
(arXiv:2501.00656)."""

from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks, layers
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Keys, normal
from tpuconv.models.molmo2.family import Config


class WiderEmbed(layers.Embed):
    """The embedding matrix, and the matrix of the tokens after the vocabulary, for which the head has no rows."""

    tables: ClassVar[tuple[str, ...]] = ("embedding", "added")

    def __init__(self, sizes: Mapping[str, int], *, dtype: DTypeLike, keys: Keys):
        super().__init__(sizes, dtype=dtype, keys=keys)
        self.added = nnx.Param(normal(keys(), (sizes["added_vocab"], sizes["D"]), dtype))

    def __call__(self, ids_BT: jax.Array) -> jax.Array:
        V = self.embedding.shape[0]
        added_BTD = jnp.take(self.added[...], ids_BT - V, axis=0, mode="fill")
        return jnp.where(ids_BT[..., None] < V, super().__call__(ids_BT), added_BTD)


class Attention(blocks.NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    and keys are normalized, each head separately or all heads together."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        bias, all_heads = config.attention_bias, config.norms_all_heads
        super().__init__(config, bias=bias, all_heads=all_heads, dtype=dtype, keys=keys)


class NormBeforeBlock(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a norm, with residual connections."""

    attention_type = Attention


class NormAfterBlock(blocks.PostNormBlock):
    """One layer: attention and MLP, each before a norm, with residual connections."""

    attention_type = Attention


def new_block(config: Config, layer: int, *, dtype: DTypeLike, keys: Keys) -> NormBeforeBlock | NormAfterBlock:
    """Returns a layer."""
    block = NormAfterBlock if config.norm_after else NormBeforeBlock
    return block(config, layer, dtype=dtype, keys=keys)


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = staticmethod(new_block)
    embed_type = WiderEmbed
