"""LongCat-Flash with embeddings of n-grams."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.cache import Cache
from tpuconv.models.common.hashed_ngrams import remainders, wide_product
from tpuconv.models.common.layers import Einsum, Embed, Keys
from tpuconv.models.kernels.lookup import take_rows
from tpuconv.models.longcat_flash import modules as longcat_flash
from tpuconv.models.longcat_flash_ngram.family import Config

LEGEND = {"w": "table_width", "z": "ngram_tables"}
"""The words of this module, by the letters of its einsums and arrays."""


def numbers_of_ngrams(ids_BTn: jax.Array, config: Config) -> jax.Array:
    """Returns the row [B, T, z] of each table. An n-gram is a number whose digits, in the base of the vocabulary, are
    its tokens; its row is the remainder by the number of rows.

    Args:
        ids_BTn: the tokens of the longest n-grams, the newest first; 0 before a text or behind an end.
        config: of the tables.
    """
    rows_z, lengths_z = jnp.array(config.ngram_rows, jnp.uint32), jnp.array(config.ngram_lengths)
    numbers_BTz = jnp.zeros((*ids_BTn.shape[:2], len(rows_z)), jnp.uint32)
    for back in reversed(range(ids_BTn.shape[-1])):
        shifted_BTz = remainders(wide_product(numbers_BTz, config.vocab_size), config.ngram_rows)
        digit_BTz = jnp.where(back < lengths_z, ids_BTn[..., back, None], 0).astype(jnp.uint32)
        numbers_BTz = (shifted_BTz + digit_BTz) % rows_z
    return numbers_BTz.astype(jnp.int32)


def last_tokens(pos_BT: jax.Array, ids_BS: jax.Array, pos_BS: jax.Array, count: int, end: int) -> jax.Array:
    """Returns the last tokens [B, T, n] of each position, the newest first, of a text whose tokens have these positions
    in any columns. It is 0 before the text, and from an end on that stands before the position's own token.

    Args:
        pos_BT: the positions; -1 for padding.
        ids_BS, pos_BS: the tokens, and their positions.
        count: of the tokens.
        end: the token that ends a text.
    """
    rows_B1, slots = jnp.arange(len(ids_BS))[:, None], ids_BS.shape[1]
    text_BS = jnp.zeros_like(ids_BS).at[rows_B1, jnp.where(pos_BS < 0, slots, pos_BS)].set(ids_BS, mode="drop")
    found, goes_on_BT = [], jnp.ones(pos_BT.shape, bool)
    for back in range(count):
        at_BT = pos_BT - back
        ids_BT = jnp.where(at_BT < 0, 0, jnp.take_along_axis(text_BS, jnp.maximum(at_BT, 0), axis=1))
        goes_on_BT &= (ids_BT != end) | (back == 0)
        found.append(jnp.where(goes_on_BT, ids_BT, 0))
    return jnp.stack(found, axis=-1)


class ProjectedNGrams(Embed):
    """A table of n-grams, and the projection of its vectors to the width of the model."""

    def __init__(self, rows: int, config: Config, *, dtype: DTypeLike, keys: Keys):
        width = config.sizes["table_width"]
        super().__init__({"V": rows, "D": width}, dtype=dtype, keys=keys)
        self.dtype = jnp.dtype(dtype)
        self.out = Einsum("BTw,wD->BTD", {"w": width, "D": config.hidden_size}, dtype=dtype, keys=keys)

    def __call__(self, ids_BT: jax.Array) -> jax.Array:
        """Returns the projected vectors [B, T, D] of these rows."""
        return self.out(take_rows(self.embedding[...], ids_BT).astype(self.dtype))


class NGramEmbed(Embed):
    """The embedding matrix, and tables of the n-grams that end with a token. The vector of a token is the mean of its
    own vector and the vectors of its n-grams, in float32."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.sizes, dtype=dtype, keys=keys)
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.ngrams = nnx.List(ProjectedNGrams(rows, config, dtype=dtype, keys=keys) for rows in config.ngram_rows)

    def __call__(self, ids_BT: jax.Array) -> jax.Array:
        """Returns the vectors [B, T, D] of the tokens of complete texts without padding."""
        return self.in_text(ids_BT, jnp.broadcast_to(jnp.arange(ids_BT.shape[1]), ids_BT.shape), None)

    def in_text(self, ids_BT: jax.Array, pos_BT: jax.Array, cache: Cache | None) -> jax.Array:
        config = self.config
        assert config.emb_neighbor_num is not None
        assert config.eos_token_id is not None
        ids_BS, pos_BS = (ids_BT, pos_BT) if cache is None else (cache.ids_BS, cache.positions_BS)
        assert ids_BS is not None
        ids_BTn = last_tokens(pos_BT, ids_BS, pos_BS, config.emb_neighbor_num, config.eos_token_id)
        numbers_BTz = numbers_of_ngrams(ids_BTn, config)
        sum_BTD = super().__call__(ids_BT).astype(jnp.float32)
        for table, module in enumerate(self.ngrams):
            sum_BTD += module(numbers_BTz[..., table]).astype(jnp.float32)
        return (sum_BTD / (1 + len(self.ngrams))).astype(self.dtype)


class Model(longcat_flash.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    config: Config

    def __init__(
        self, config: Config, *, dtype: DTypeLike = jnp.bfloat16, rngs: nnx.Rngs | None = None, **options: Any
    ):
        super().__init__(config, dtype=dtype, rngs=rngs, **options)
        if config.has_ngrams:
            self.embed = NGramEmbed(config, dtype=dtype, keys=Keys((rngs or nnx.Rngs(1)).params()))

    def init_cache(self, batch: int, length: int, dtype: DTypeLike | None = None) -> Cache:
        """Returns an empty cache as `Decoder.init_cache` does, with room for the tokens themselves."""
        cache = super().init_cache(batch, length, dtype)
        return replace(cache, ids_BS=jnp.zeros_like(cache.positions_BS)) if self.config.has_ngrams else cache
