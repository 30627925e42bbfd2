"""Text from a model: the prompts in one call (prefill), then a call for each token (decode), the cache in place."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tpuconv.errors import UsageError
from tpuconv.models.cache import Cache
from tpuconv.models.decoder import Decoder
from tpuconv.models.layers import HIDDEN

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
        if self.temperature < 0 or (self.top_k is not None and self.top_k < 1) or not 0 < self.top_p <= 1:
            raise UsageError(f"{self} cannot be: temperature >= 0, top_k >= 1 and 0 < top_p <= 1 are needed")

    def __call__(self, logits_BV: jax.Array, key: jax.Array) -> jax.Array:
        """One token id [B] for each row of logits."""
        if self.temperature == 0:
            return jnp.argmax(logits_BV, axis=-1)
        logits_BV = logits_BV / self.temperature
        if self.top_k is not None:
            least_B1 = jax.lax.top_k(logits_BV, min(self.top_k, logits_BV.shape[-1]))[0][:, -1:]
            logits_BV = jnp.where(logits_BV < least_B1, HIDDEN, logits_BV)
        if self.top_p < 1:
            sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
            chances_BV = jax.nn.softmax(sorted_BV, axis=-1)
            likelier_BV = jnp.cumsum(chances_BV, axis=-1) - chances_BV
            least_B1 = jnp.where(likelier_BV < self.top_p, sorted_BV, jnp.inf).min(axis=-1, keepdims=True)
            logits_BV = jnp.where(logits_BV < least_B1, HIDDEN, logits_BV)
        return jax.random.categorical(key, logits_BV)


class Generator:
    """A model with its prefill and decode step, compiled once for each shape."""

    def __init__(self, model: Decoder, sampling: Sampling = Sampling()):
        graph, state = nnx.split(model)
        self.weights, form = jax.tree.flatten(state)  # a plain list: a step of a small model is as short as a call

        def run(weights: list[jax.Array], ids_BT: jax.Array, mask_BT: Any, cache: Cache, key: jax.Array) -> Any:
            model = nnx.merge(graph, jax.tree.unflatten(form, weights))
            logits_B1V, cache = model(ids_BT, mask_BT, cache=cache, last_only=True)
            return sampling(logits_B1V[:, 0], jax.random.fold_in(key, cache.used)), cache

        @partial(jax.jit, static_argnums=4)
        def prefill(weights: list[jax.Array], ids_BT: Any, mask_BT: Any, key: Any, length: int) -> Any:
            """The next token [B] of every prompt, and the cache, which has `length` slots."""
            return run(weights, ids_BT, mask_BT, model.init_cache(ids_BT.shape[0], length), key)

        @partial(jax.jit, donate_argnums=2)
        def decode(weights: list[jax.Array], ids_B: jax.Array, cache: Cache, key: jax.Array) -> Any:
            """The token [B] after each of these; the cache is used up and comes back extended."""
            return run(weights, ids_B[:, None], None, cache, key)

        self.prefill, self.decode = prefill, decode

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
        ids_B, cache = self.prefill(self.weights, ids_BT, mask_BT, key, ids_BT.shape[1] + max_new_tokens)
        for step in range(max_new_tokens):
            chosen_B = ids_B
            if step + 1 < max_new_tokens:  # the device computes the next token while this one is looked at
                ids_B, cache = self.decode(self.weights, ids_B, cache, key)
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
