"""Token ids from a model: the prompts in chunks (prefill), then one call for each token (decode), the cache in place.

`Generator` compiles both programs. `tpuconv generate`, the benchmark and the ahead-of-time compilation for a slice of
TPUs use it, so that what is judged ahead of time is what runs.
"""

import functools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Compiled
from jax.typing import DTypeLike

from tpuconv.errors import ResourceError, UsageError
from tpuconv.models.common.cache import Cache, cache_shardings
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import MASKED_SCORE

CACHE_SHARE = 0.6
"""Of the memory of a machine without other devices, the part that a cache may take beside the weights."""

PREFILL_TOKENS = 2048
"""Tokens of all sequences in one call of prefill: the attention scores of longer prompts would not fit in memory."""

LEAST_TEMPERATURE = 1e-5
"""Below it the most likely token is taken: logits divided by less are infinite in float32."""

ENDED = -1
"""Stands where a sequence has no token any more."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. A temperature of 0 takes the most likely one. `top_k` leaves the k most likely, `top_p`
    the fewest that have this probability together (arXiv:1904.09751)."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        possible = 0 <= self.temperature < inf and 0 < self.top_p <= 1  # which NaN is not
        if not possible or (self.top_k is not None and self.top_k < 1):
            raise UsageError(f"{self} cannot be: a finite temperature >= 0, top_k >= 1 and 0 < top_p <= 1 are needed")

    def __call__(self, logits_BV: jax.Array, key: jax.Array) -> jax.Array:
        """One token id [B] for each row of logits."""
        if self.temperature < LEAST_TEMPERATURE:
            return jnp.argmax(logits_BV, axis=-1)
        logits_BV = logits_BV / self.temperature
        if self.top_k is not None:
            least_B1 = jax.lax.top_k(logits_BV, min(self.top_k, logits_BV.shape[-1]))[0][:, -1:]
            logits_BV = jnp.where(logits_BV < least_B1, MASKED_SCORE, logits_BV)
        if self.top_p < 1:
            sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
            chances_BV = jax.nn.softmax(sorted_BV, axis=-1)
            likelier_BV = jnp.cumsum(chances_BV, axis=-1) - chances_BV
            least_B1 = jnp.where(likelier_BV < self.top_p, sorted_BV, jnp.inf).min(axis=-1, keepdims=True)
            logits_BV = jnp.where(logits_BV < least_B1, MASKED_SCORE, logits_BV)
        return jax.random.categorical(key, logits_BV)


TPU_OPTIONS: Mapping[str, str] = {
    "xla_tpu_msa_inefficient_use_to_copy_ratio": "0.6",
    "xla_tpu_enable_dot_strength_reduction": "false",
}
"""Without the first the compiler fetches a layer's whole cache into fast memory, updates one token there and writes all
of it back; so it prefetches only what is used more than moved. Without the second it computes the products of one token
element by element, where the matrix unit takes a third of the time or less."""


def compiler_options(platform: str) -> dict[str, str | bool]:
    """What every step of a model is compiled with for devices of a platform ("tpu", "cpu")."""
    return dict(TPU_OPTIONS) if platform == "tpu" else {}


def prefill_chunk(batch: int, tokens: int) -> int:
    """Tokens of each sequence in one call of prefill, for `batch` prompts of `tokens` tokens."""
    return max(1, min(tokens, PREFILL_TOKENS // batch))


class Generator:
    """A model with its prefill and decode steps, compiled once for each shape, for the devices that hold its weights.

    - `decode(batch, length)` is compiled from (weights, ids [B], cache, key) to (next ids [B], cache).
    - `prefill(batch, tokens, length)` is compiled from (weights, ids [B, T], mask [B, T], cache, key) to the same.
    - `empty_cache(batch, length)` makes the cache of `length` slots that both take.

    Both steps donate the cache, whose memory layout is the one that the compiler chooses for decoding. Weights keep
    their layouts; with `free_layouts` the compiler chooses those too, and `decode(...).input_formats` has its choice.
    The model may hold shapes with shardings (`jax.ShapeDtypeStruct`) instead of arrays: then it only compiles.

    Args:
        model: from `tpuconv.load`.
        sampling: how a token is chosen from its logits.
        cache_dtype: of keys and values; the model's dtype where None.
        free_layouts: for the ahead-of-time compilation.
    """

    def __init__(
        self,
        model: Decoder,
        sampling: Sampling = Sampling(),
        cache_dtype: DTypeLike | None = None,
        *,
        free_layouts: bool = False,
    ):
        self.model, self.sampling, self.cache_dtype, self.free_layouts = model, sampling, cache_dtype, free_layouts
        self.graph, state = nnx.split(model)
        self.weights, self.form = jax.tree.flatten(state)  # a plain list: a step of a small model is as short as a call
        where = self.weights[0].sharding
        self.mesh: Any = where.mesh if isinstance(where, NamedSharding) else None
        self.whole = where if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())  # type: ignore[no-untyped-call]
        self.platform = next(iter(where.device_set)).platform
        self.options = compiler_options(self.platform)
        self.decode, self.prefill = functools.cache(self._decode), functools.cache(self._prefill)
        self._empty_cache = functools.cache(self._empty)

    def _decode(self, batch: int, length: int) -> Compiled:
        def decode(weights: list[jax.Array], ids_B: jax.Array, cache: Cache, key: jax.Array) -> Any:
            return self._step(weights, ids_B[:, None], None, cache, key)

        cache = self.cache_shapes(batch, length)
        self._check_memory(cache)
        formats = jax.tree.map(lambda own: Format(Layout.AUTO, own), self._cache_shardings(cache))
        weights = [Format(Layout.AUTO, x.sharding) if self.free_layouts else x.format for x in self.weights]
        jitted = jax.jit(
            decode,
            donate_argnums=2,
            in_shardings=(weights, self.whole, formats, self.whole),
            out_shardings=(self.whole, formats),
        )
        return self._compile(jitted, jax.ShapeDtypeStruct((batch,), jnp.int32), cache)  # type: ignore[no-untyped-call]

    def _prefill(self, batch: int, tokens: int, length: int) -> Compiled:
        def prefill(
            weights: list[jax.Array], ids_BT: jax.Array, mask_BT: jax.Array, cache: Cache, key: jax.Array
        ) -> Any:
            return self._step(weights, ids_BT, mask_BT, cache, key)

        weights, _, cache, _ = self.decode(batch, length).input_formats[0]
        jitted = jax.jit(
            prefill,
            donate_argnums=3,
            in_shardings=(weights, self.whole, self.whole, cache, self.whole),
            out_shardings=(self.whole, cache),
        )
        ids, mask = (jax.ShapeDtypeStruct((batch, tokens), dtype) for dtype in (jnp.int32, bool))  # type: ignore[no-untyped-call]
        return self._compile(jitted, ids, mask, self.cache_shapes(batch, length))

    def _step(self, weights: list[jax.Array], ids_BT: jax.Array, mask_BT: Any, cache: Cache, key: jax.Array) -> Any:
        """The next token [B] of each sequence after ids_BT, and the cache with these tokens: what both programs do."""
        model = nnx.merge(self.graph, jax.tree.unflatten(self.form, weights))
        logits_B1V, cache = model(ids_BT, mask_BT, cache=cache, last_only=True)
        return self.sampling(logits_B1V[:, 0], jax.random.fold_in(key, cache.used)), cache

    def _compile(self, jitted: Any, *args: Any) -> Compiled:
        key = jax.eval_shape(jax.random.key, 0)
        weights = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.weights]  # type: ignore[no-untyped-call]
        with self._on_mesh():
            compiled: Compiled = jitted.lower(weights, *args, key).compile(self.options)
        return compiled

    def _on_mesh(self) -> Any:
        return nullcontext() if self.mesh is None else jax.sharding.set_mesh(self.mesh)

    def cache_shapes(self, batch: int, length: int) -> Cache:
        """The cache with shapes instead of arrays."""
        shapes: Cache = jax.eval_shape(lambda: self.model.init_cache(batch, length, self.cache_dtype))
        return shapes

    def _cache_shardings(self, cache: Cache) -> Any:
        return jax.tree.map(lambda _: self.whole, cache) if self.mesh is None else cache_shardings(cache, self.mesh)

    def empty_cache(self, batch: int, length: int) -> Cache:
        """A cache of `length` slots, none of them used."""
        cache: Cache = self._empty_cache(batch, length)()
        return cache

    def _empty(self, batch: int, length: int) -> Any:
        formats = self.decode(batch, length).input_formats[0][2]
        make = jax.jit(lambda: self.model.init_cache(batch, length, self.cache_dtype), out_shardings=formats)
        with self._on_mesh():
            return make.lower().compile(self.options)

    def _check_memory(self, cache: Cache) -> None:
        """Raises ResourceError where the cache takes more than a part of this machine's memory. Other devices refuse it
        by themselves; a CPU gives addresses, and the process is killed when they are written."""
        need = sum(prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.platform == "cpu" and need > CACHE_SHARE * memory:
            raise ResourceError(
                f"the cache of keys and values needs {need / 1e9:.3g} GB, and may have {CACHE_SHARE:.0%} of this "
                f"machine's {memory / 1e9:.3g} GB",
                hint="ask for fewer tokens or sequences",
            )

    def read(self, ids_BT: np.ndarray, mask_BT: np.ndarray, new_tokens: int, key: jax.Array) -> tuple[Any, Cache]:
        """Runs the prompts ids_BT, padded on the left, through `prefill`, in chunks of `prefill_chunk` tokens.

        Returns:
            The next token [B] of each prompt, and the cache, which has room for `new_tokens` more.
        """
        batch, tokens = ids_BT.shape
        chunk = prefill_chunk(batch, tokens)
        more = -tokens % chunk  # all chunks have one shape: the first is filled up on the left
        ids_BT, mask_BT = (np.pad(array, ((0, 0), (more, 0))) for array in (ids_BT, mask_BT))
        length = self.slots(batch, tokens, new_tokens)
        prefill, cache = self.prefill(batch, chunk, length), self.empty_cache(batch, length)
        for at in range(0, tokens + more, chunk):
            now = slice(at, at + chunk)
            ids_B, cache = prefill(self.weights, ids_BT[:, now], mask_BT[:, now], cache, key)
        return ids_B, cache

    def slots(self, batch: int, tokens: int, new_tokens: int) -> int:
        """The `length` of the cache for prompts of so many tokens and `new_tokens` after them."""
        return tokens + -tokens % prefill_chunk(batch, tokens) + new_tokens

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        eos: Collection[int] = (),
        seed: int = 0,
    ) -> Iterator[np.ndarray]:
        """Yields the next token id of every prompt [B], step by step; `ENDED` after a token of `eos`. It stops when all
        have ended.

        Raises:
            UsageError: a prompt without tokens, or no token asked for.
        """
        if not prompts or not all(prompts) or max_new_tokens < 1:
            raise UsageError("every prompt needs a token at least, and max_new_tokens is 1 or more")
        ids_BT, mask_BT = left_padded(prompts)
        key = jax.random.key(seed)
        ended_B = np.zeros(len(prompts), bool)
        batch, tokens = ids_BT.shape
        decode = self.decode(batch, self.slots(batch, tokens, max_new_tokens))
        ids_B, cache = self.read(ids_BT, mask_BT, max_new_tokens, key)
        for step in range(max_new_tokens):
            chosen_B = ids_B
            if step + 1 < max_new_tokens:  # the device computes the next token while this one is looked at
                ids_B, cache = decode(self.weights, ids_B, cache, key)
            out_B = np.where(ended_B, ENDED, np.asarray(chosen_B))
            yield out_B
            ended_B |= np.isin(out_B, list(eos))
            if ended_B.all():
                return


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Ids [B, T] whose last tokens stand in one column, and the mask [B, T] of those that are real."""
    width = max(map(len, prompts))
    ids_BT = np.array([[0] * (width - len(own)) + list(own) for own in prompts], np.int32)
    mask_BT = np.arange(width) >= np.array([[width - len(own)] for own in prompts])
    return ids_BT, mask_BT
