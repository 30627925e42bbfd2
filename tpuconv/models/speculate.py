"""Greedy generation with drafts: the module for multi-token prediction (MTP) drafts the token after the next, and the
next step checks it (arXiv:2412.19437, section 5.4.3; arXiv:2211.17192).

A step computes the logits of two tokens: the last one and the draft. If the draft is what the model itself chooses,
both are taken, and the draft's successor with them. So a step gives one or two tokens, and reads the weights once.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from tpuconv.errors import UnsupportedConfig, UsageError
from tpuconv.models.common.cache import Cache
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.generate import (
    ENDED,
    LEAST_TEMPERATURE,
    NOTHING_TO_DO,
    Generator,
    Sampling,
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


class Speculator(Generator):
    """A `Generator` that drafts with the model's module for multi-token prediction. Its tokens are those of `Generator`
    with the same model: equal if the logits of two tokens at once are those of one after the other, and where they
    differ by rounding nearly always.

    In a batch a sequence takes its draft while another does not: the slot of a draft that is not accepted stays empty.
    A model with linear attention, whose states cannot forget a token, repeats the step if a draft of the batch is not
    accepted.

    - `decode(batch, length)` returns the compiled (weights, ids [B, 2], cache, key) -> ((the next ids [B, 2], tokens
      [B, 2] after both ids, accepted [B]), cache). Ids are the last token and the draft.
    - `prefill(batch, tokens, length)` returns the compiled (weights, ids [B, T + 1], mask [B, T], cache, key) ->
      (ids [B, 2], cache). The id after the T tokens is `ENDED` if the model is to choose it.

    Attributes:
        drafts: counts of all calls.

    Args:
        model: a model from `tpuconv.load(..., mtp=True)`.
        sampling: only that without a temperature.
        cache_dtype: of keys and values; None for the model's dtype.

    Raises:
        UsageError: the sampling has a temperature, or the model has no such module.
        UnsupportedConfig: rotary positions depend on the length of the cache.
    """

    ids_of_step: ClassVar[tuple[int, ...]] = (2,)
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
        if any(rope and rope.depends_on_length for rope in model.config.ropes):
            raise UnsupportedConfig(
                "the rotary positions of this model depend on the length of the cache, which is longer with drafts",
                hint="generate without them, for the same text",
            )
        super().__init__(model, sampling, cache_dtype)
        self.drafts = Drafts()

    def _decode_step(self, weights: list[jax.Array], ids_B2: jax.Array, cache: Cache, key: jax.Array) -> Any:
        model, slot = self._merged(weights), cache.used
        x_B2D, after = model.run_layers(ids_B2, jnp.ones(ids_B2.shape, bool), cache)
        best_B2 = jnp.argmax(model.head(model.norm(x_B2D)), axis=-1).astype(jnp.int32)
        accepted_B = best_B2[:, 0] == ids_B2[:, 1]
        kept_B2 = jnp.stack([jnp.ones_like(accepted_B), accepted_B], axis=1)
        after = model.without(ids_B2, kept_B2, cache, after)
        next_B, draft_B, after = self._drafted(model, x_B2D, best_B2, accepted_B.astype(jnp.int32), after, slot)
        # The slot of the drafts is used again if none is accepted.
        after = replace(after, used=slot + 1 + accepted_B.any())
        return (jnp.stack([next_B, draft_B], axis=1), best_B2, accepted_B), after

    def _prefill_step(
        self, weights: list[jax.Array], ids_BT: jax.Array, mask_BT: Any, cache: Cache, key: jax.Array
    ) -> Any:
        model, slot = self._merged(weights), cache.used
        x_BTD, after = model.run_layers(ids_BT[:, :-1], mask_BT, cache)
        chosen_B = jnp.argmax(model.head(model.norm(x_BTD[:, -1:]))[:, 0], axis=-1).astype(jnp.int32)
        last_B = jnp.where(ids_BT[:, -1] == ENDED, chosen_B, ids_BT[:, -1])
        next_BT = jnp.concatenate([ids_BT[:, 1:-1], last_B[:, None]], axis=1)
        column_B = jnp.full(last_B.shape, next_BT.shape[1] - 1)
        next_B, draft_B, after = self._drafted(model, x_BTD, next_BT, column_B, after, slot)
        return jnp.stack([next_B, draft_B], axis=1), after

    def _drafted(
        self, model: Any, x_BTD: jax.Array, next_BT: jax.Array, column_B: jax.Array, cache: Cache, slot: jax.Array
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """Returns the next token [B] and the draft of its successor [B], after the tokens in these columns, and the
        cache with the tokens of all columns."""
        y_BTD, cache = model.draft(x_BTD, next_BT, cache, slot)
        y_B1D = jnp.take_along_axis(y_BTD, column_B[:, None, None], axis=1)
        next_B = jnp.take_along_axis(next_BT, column_B[:, None], axis=1)[:, 0]
        return next_B, jnp.argmax(model.head(y_B1D)[:, 0], axis=-1).astype(jnp.int32), cache

    def slots(self, batch: int, tokens: int, new_tokens: int) -> int:
        """Returns the `length` of the cache: of several sequences each step may take two slots. One sequence takes a
        slot for each token, and two more in a step that is computed ahead."""
        more = new_tokens + 1 if batch == 1 else 2 * new_tokens
        return tokens + -tokens % prefill_chunk(batch, tokens) + more

    def steps(
        self, ids_BT: np.ndarray, mask_BT: np.ndarray, new_tokens: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the tokens of each step [B, 2], and how many of them each sequence takes [B]: first those of the
        prefill, of which it takes one. Ends when each sequence has `new_tokens`. Prompts are as for `read`."""
        batch, tokens = ids_BT.shape
        key = jax.random.key(0)  # not used: the most likely token is taken
        decode = self.decode(batch, self.slots(batch, tokens, new_tokens))
        ids_B2, cache = self.read(ids_BT, mask_BT, new_tokens, key)
        result: tuple[Any, Any] = (ids_B2, np.zeros(batch, bool))
        counts_B = np.zeros(batch, int)
        while counts_B.min() < new_tokens:
            tokens_B2, accepted_B = result
            if counts_B.min() + 1 < new_tokens:  # the device computes a step while the caller processes the one before
                (ids_B2, *result), cache = decode(self.weights, ids_B2, cache, key)
            taken_B = 1 + np.asarray(accepted_B)
            counts_B += taken_B
            yield np.asarray(tokens_B2), taken_B

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
        if not prompts or not all(prompts) or max_new_tokens < 1:
            raise UsageError(NOTHING_TO_DO)
        rows: list[list[int]] = [[] for _ in prompts]
        ended_B, done = np.zeros(len(prompts), bool), 0
        for step, (tokens_B2, taken_B) in enumerate(self.steps(*left_padded(prompts, width), max_new_tokens)):
            for row, ended, tokens, taken in zip(rows, ended_B, tokens_B2, taken_B, strict=True):
                if step and not ended and len(row) < max_new_tokens:
                    self.drafts.checked += 1
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
