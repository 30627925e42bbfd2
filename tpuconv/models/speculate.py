"""Greedy generation with drafts: the module for multi-token prediction (MTP) drafts the token after the next, and the
next step checks it (arXiv:2412.19437, section 5.4.3; arXiv:2211.17192). `drafts.py` drafts with another model.

A step computes the logits of the last token and of its drafts. The drafts are taken up to the first one that the model
itself would not choose, and then the token that it chooses there. So a step gives one token or more, and reads the
weights once.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.cache import Cache
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.pairing import check_ropes
from tpuconv.models.common.rope import Rope
from tpuconv.models.generate import (
    ENDED,
    LEAST_TEMPERATURE,
    Generator,
    Sampling,
    check_work,
    left_padded,
    prefill_chunk,
)


def check_greedy(sampling: Sampling) -> None:
    """Raises UsageError if the most likely token is not always taken."""
    if sampling.temperature >= LEAST_TEMPERATURE:
        raise UsageError(
            f"drafts are checked against the most likely token, and the temperature is {sampling.temperature}",
            hint="leave out `temperature=` or `speculate=`",
        )


@dataclass
class Drafts:
    """How many drafts were checked, of all sequences together, and how many of them were accepted."""

    checked: int = 0
    accepted: int = 0

    @property
    def share(self) -> float:
        """The share that was accepted; 0 if none was checked."""
        return self.accepted / max(1, self.checked)


def _have_positions(config: DecoderConfig, ids_BI: jax.Array, cache: Cache) -> jax.Array:
    """Returns a mask [B, 1 + n], False for drafts behind the last position: their vectors would be NaN, which attention
    does not mask."""
    if config.position_limit is None:
        return jnp.ones(ids_BI.shape, bool)
    first_B1 = cache.positions_BS.max(axis=1, keepdims=True) + 1
    return first_B1 + jnp.arange(ids_BI.shape[1]) < config.position_limit


class Speculator(Generator):
    """A `Generator` that drafts with the model's module for multi-token prediction. Its tokens are those of `Generator`
    with the same model: equal if the logits of several tokens at once are those of one after the other, and where they
    differ by rounding nearly always.

    In a batch a sequence takes its drafts while another does not: the slot of a draft that is not accepted stays empty.
    A model with linear attention, whose states cannot forget a token, repeats the step if a draft of the batch is not
    accepted.

    - `decode(batch, length)` returns the compiled (weights, ids [B, 1 + n], cache, key) -> ((the next ids [B, 1 + n],
      tokens [B, 1 + n] after each id, number of accepted drafts [B]), cache). Ids are the last token and n drafts.
    - `prefill(batch, tokens, length)` returns the compiled (weights, ids [B, T + 1], mask [B, T], cache, key) ->
      (ids [B, 1 + n], cache). The id after the T tokens is `ENDED` if the model is to choose it.

    Attributes:
        drafts: counts of all calls.
        ahead: n, the number of drafts in a step.

    Args:
        model: a model from `tpuconv.load(..., mtp=True)`.
        sampling: only that without a temperature.
        cache_dtype: of keys and values; None for the model's dtype.

    Raises:
        UsageError: the sampling has a temperature, or the model has no such module.
        UnsupportedConfig: rotary positions depend on the length of the cache.
    """

    ahead: int = 1
    ids_ahead: ClassVar[int] = 1

    def __init__(
        self,
        model: Decoder,
        sampling: Sampling = Sampling(),  # noqa: B008  (frozen)
        cache_dtype: DTypeLike | None = None,
    ):
        check_greedy(sampling)
        if not hasattr(model, "mtp"):
            raise UsageError(
                "the model was loaded without its module for multi-token prediction",
                hint="load it with mtp=True, from a checkpoint converted with `include_mtp=True`",
            )
        self._begin(model, model.config.ropes, sampling, cache_dtype)

    def _begin(
        self, model: Any, ropes: Sequence[Rope | None], sampling: Sampling, cache_dtype: DTypeLike | None
    ) -> None:
        """Initializes the generator of a model that has these rotary positions."""
        check_ropes(ropes)
        super().__init__(model, sampling, cache_dtype)
        self.ids_of_step = 1 + self.ahead
        self.drafts = Drafts()

    def _decode_step(self, weights: list[jax.Array], ids_BI: jax.Array, cache: Cache, key: jax.Array) -> Any:
        merged, slot = self._merged(weights), cache.used
        model = self._target(merged)
        x_BID, states, after = self._read(model, ids_BI, _have_positions(model.config, ids_BI, cache), cache)
        best_BI = jnp.argmax(model.head(model.norm(x_BID)), axis=-1).astype(jnp.int32)
        is_right_BI = best_BI[:, :-1] == ids_BI[:, 1:]
        accepted_B = jnp.cumprod(is_right_BI.astype(jnp.int32), axis=1).sum(axis=1)
        kept_BI = jnp.arange(ids_BI.shape[1]) <= accepted_B[:, None]
        after = model.without(ids_BI, kept_BI, cache, after)
        # The slots of drafts that no sequence accepts are used again.
        after = replace(after, used=slot + 1 + accepted_B.max())
        next_BI, after = self._drafted(merged, states, best_BI, accepted_B, after, slot)
        return (next_BI, best_BI, accepted_B), after

    def _prefill_step(
        self, weights: list[jax.Array], ids_BT: jax.Array, mask_BT: Any, cache: Cache, key: jax.Array
    ) -> Any:
        merged, slot = self._merged(weights), cache.used
        model = self._target(merged)
        x_BTD, states, after = self._read(model, ids_BT[:, :-1], mask_BT, cache)
        chosen_B = jnp.argmax(model.head(model.norm(x_BTD[:, -1:]))[:, 0], axis=-1).astype(jnp.int32)
        last_B = jnp.where(ids_BT[:, -1] == ENDED, chosen_B, ids_BT[:, -1])
        next_BT = jnp.concatenate([ids_BT[:, 1:-1], last_B[:, None]], axis=1)
        column_B = jnp.full(last_B.shape, next_BT.shape[1] - 1)
        return self._drafted(merged, states, next_BT, column_B, after, slot)

    def _target(self, merged: Any) -> Any:
        """Returns the model whose tokens are generated."""
        return merged

    def _read(self, model: Any, ids_BT: jax.Array, mask_BT: Any, cache: Cache) -> tuple[jax.Array, Any, Cache]:
        """Returns the hidden states [B, T, D] of tokens, what `_drafted` reads of them, and the cache with them."""
        x_BTD, after = model.run_layers(ids_BT, mask_BT, cache)
        return x_BTD, x_BTD, after

    def _drafted(
        self, merged: Any, states: Any, next_BT: jax.Array, column_B: jax.Array, cache: Cache, slot: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Returns the next token and the drafts of its successors [B, 1 + n], after the tokens in these columns, and
        the cache with the tokens of all columns, of which the first is in this slot."""
        y_BTD, cache = merged.draft(states, next_BT, cache, slot)
        y_B1D = jnp.take_along_axis(y_BTD, column_B[:, None, None], axis=1)
        next_B1 = jnp.take_along_axis(next_BT, column_B[:, None], axis=1)
        draft_B1 = jnp.argmax(merged.head(y_B1D), axis=-1).astype(jnp.int32)
        return jnp.concatenate([next_B1, draft_B1], axis=1), cache

    def slots(self, batch: int, tokens: int, new_tokens: int) -> int:
        """Returns the `length` of the cache: of several sequences each step may take a slot for each of its tokens. One
        sequence takes a slot for each token that it keeps, and more in a step that is computed ahead."""
        more = new_tokens + 2 * self.ahead - 1 if batch == 1 else (1 + self.ahead) * new_tokens
        return tokens + -tokens % prefill_chunk(batch, tokens) + more

    def steps(
        self, ids_BT: np.ndarray, mask_BT: np.ndarray, new_tokens: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the tokens of each step [B, 1 + n], and how many of them each sequence takes [B]: first those of the
        prefill, of which it takes one. Ends when each sequence has `new_tokens`. Prompts are as for `read`."""
        batch, tokens = ids_BT.shape
        key = jax.random.key(0)  # not used: the most likely token is taken
        decode = self.decode(batch, self.slots(batch, tokens, new_tokens))
        ids_BI, cache = self.read(ids_BT, mask_BT, new_tokens, key)
        result: tuple[Any, Any] = (ids_BI, np.zeros(batch, int))
        counts_B = np.zeros(batch, int)
        while counts_B.min() < new_tokens:
            tokens_BI, accepted_B = result
            if counts_B.min() + 1 < new_tokens:  # the device computes a step while the caller processes the one before
                (ids_BI, *result), cache = decode(self.weights, ids_BI, cache, key)
            taken_B = 1 + np.asarray(accepted_B)
            counts_B += taken_B
            yield np.asarray(tokens_BI), taken_B

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        eos: Collection[int] = (),
        seed: int = 0,
        width: int = 0,
    ) -> Iterator[np.ndarray]:
        """Generates tokens; arguments, results and errors as in `Generator`."""
        check_work(prompts, max_new_tokens)
        rows: list[list[int]] = [[] for _ in prompts]
        ended_B, done = np.zeros(len(prompts), bool), 0
        for step, (tokens_BI, taken_B) in enumerate(self.steps(*left_padded(prompts, width), max_new_tokens)):
            for row, ended, tokens, taken in zip(rows, ended_B, tokens_BI, taken_B, strict=True):
                if step and not ended and len(row) < max_new_tokens:
                    self.drafts.checked += self.ahead
                    self.drafts.accepted += int(taken) - 1
                row.extend(map(int, tokens[:taken]))
            # A sequence is yielded up to where the slowest one is.
            ready = min(max_new_tokens, *map(len, rows))
            for at in range(done, ready):
                out_B = np.where(ended_B, ENDED, np.array([row[at] for row in rows]))
                yield out_B
                ended_B |= np.isin(out_B, list(eos))
                if ended_B.all():
                    return
            done = ready
