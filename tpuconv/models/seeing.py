"""Generation of token ids after prompts with images and sounds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuconv.models.common.cache import Cache
from tpuconv.models.common.seen import Seen
from tpuconv.models.generate import Generator


class SeeingGenerator(Generator):
    """A `Generator` of prompts with images and sounds. A prefill step is compiled for each number of features, which
    encoders pad to few."""

    features: Mapping[str, np.ndarray]
    """Images and sounds of the prompts that are read."""

    def __call__(  # type: ignore[override]
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        features: Mapping[str, np.ndarray],
        **options: Any,
    ) -> Iterator[np.ndarray]:
        """As `Generator`; `features` are as in `Decoder.see`."""
        self.features = features
        slots = sum(getattr(self.model, part).slots(features) for part in self.model.config.parts)
        if slots != self.image_slots:
            self.image_slots = slots
            self.forget()
        yield from super().__call__(prompts, max_new_tokens, **options)

    def _new_cache(self, batch: int, length: int) -> Cache:
        cache = super()._new_cache(batch, length)
        return cache if self.model.config.mrope is None else replace(cache, delta_B=jnp.zeros(batch, jnp.int32))

    def chunk(self, batch: int, tokens: int) -> int:
        """Returns the tokens of each sequence in one prefill step: all, if the tokens of an image see each other, or
        layers read images anew in each step."""
        return tokens if self.model.config.sees_images or self.image_slots else super().chunk(batch, tokens)

    def read(self, ids_BT: np.ndarray, mask_BT: np.ndarray, new_tokens: int, key: jax.Array) -> tuple[Any, Cache]:
        """As `Generator.read`, with the features of the prompts."""
        batch, tokens = ids_BT.shape
        chunk = self.chunk(batch, tokens)
        more = -tokens % chunk
        ids_BT, mask_BT = (np.pad(array, ((0, 0), (more, 0))) for array in (ids_BT, mask_BT))
        seen = self.model.see(ids_BT, mask_BT, **self.features)
        length = self.slots(batch, tokens, new_tokens)
        cache, ids_B1 = self.empty_cache(batch, length), None
        for start in range(0, tokens + more, chunk):
            columns = slice(start, start + chunk)
            part = _columns(seen, mask_BT, start, start + chunk)
            prefill = self._prefill_seen(batch, chunk, length, part)
            ids_B1, cache = prefill(self.weights, ids_BT[:, columns], mask_BT[:, columns], part, cache, key)
        return ids_B1, cache

    def _prefill_seen(self, batch: int, tokens: int, length: int, seen: Seen) -> Any:
        """Returns the compiled (weights, ids [B, T], mask [B, T], seen, cache, key) -> (next ids [B, 1], cache)."""
        leaves, form = jax.tree.flatten(seen)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        known = self.__dict__.setdefault("_prefills", {})
        if (found := known.get((batch, tokens, length, form, shapes))) is None:
            _, _, formats, _ = self.decode(batch, length).input_formats[0]
            ids = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)  # type: ignore[no-untyped-call]
            mask = jax.ShapeDtypeStruct((batch, tokens), bool)  # type: ignore[no-untyped-call]
            abstract = jax.eval_shape(lambda: seen)
            cache = self.cache_shapes(batch, length)
            found = self._compile(self._seen_step, self._weight_formats(), formats, ids, mask, abstract, cache=cache)
            known[batch, tokens, length, form, shapes] = found
        return found

    def _seen_step(
        self, weights: list[jax.Array], ids_BT: jax.Array, mask_BT: jax.Array, seen: Seen, cache: Cache, key: jax.Array
    ) -> Any:
        """Returns what the step of a prefill returns."""
        logits_B1V, cache = self._merged(weights)(ids_BT, mask_BT, cache=cache, seen=seen, first=-1)
        return self.sampling(logits_B1V[:, 0], jax.random.fold_in(key, cache.used))[:, None], cache


def _columns(seen: Seen, mask_BT: np.ndarray, start: int, end: int) -> Seen:
    """Returns the images and sounds of some columns of a call. Rotary positions count from the first token of the
    columns, and the last ones move the tokens after them."""
    if (start, end) == (0, mask_BT.shape[1]):
        return seen
    at_ABT = None
    if seen.at_ABT is not None:
        at_ABT = seen.at_ABT[:, :, start:end] - jnp.asarray(mask_BT[:, :start].sum(axis=1, dtype=np.int32))[:, None]
    delta_B1 = seen.delta_B1 if seen.delta_B1 is None or end == mask_BT.shape[1] else jnp.zeros_like(seen.delta_B1)
    return replace(
        seen,
        slot_BT=seen.slot_BT[:, start:end],
        block_BT=None if seen.block_BT is None else seen.block_BT[:, start:end],
        at_ABT=at_ABT,
        delta_B1=delta_B1,
    )
