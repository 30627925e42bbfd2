"""Logits of a model on prompts, and the divergence of two models' logits."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tpuconv.models.common.heads import SCORES

if TYPE_CHECKING:
    from tpuconv.models.common.seen import Seen


@dataclass(frozen=True)
class Window:
    """Tokens that a model runs on at once.

    Attributes:
        ids: the token ids [T].
        first: the number of the first token whose prediction of the next one counts.
        features: of its images and sounds, as processors return them; empty for text alone.
    """

    ids: Sequence[int]
    first: int = 0
    features: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)

    @property
    def scored(self) -> Sequence[int]:
        """The tokens whose predictions count, and the last token, which is only predicted."""
        return self.ids[self.first :]


def whole_texts(prompts: Iterable[Sequence[int]]) -> list[Window]:
    """Returns a window for each of these prompts, all of whose tokens count."""
    return [Window(ids) for ids in prompts]


def forward(model: Any, prompts: Sequence[Sequence[int]], dtype: str) -> Callable[[], list[np.ndarray]]:
    """Returns a function that computes the model's logits [T, V] in float32 for each prompt (hidden states [T, D], or
    scores [1, O], of a model that returns these), with the weights that the model has when the function is called.

    Args:
        model: a Flax NNX model.
        prompts: token ids of each prompt.
        dtype: of the model's parameters.
    """
    run = forward_each(model, whole_texts(prompts), dtype)
    return lambda: list(run())


def forward_each(
    model: Any,
    windows: Sequence[Window],
    dtype: str,
    cache_dtype: str | None = None,
    on_seen: Callable[[np.ndarray], None] = lambda features: None,
) -> Callable[[], Iterator[np.ndarray]]:
    """As `forward`, for a function that yields the logits of one window after the other, from its first one that counts
    on. Windows are padded on the right to few lengths, so that few shapes are compiled.

    Args:
        model, dtype: as of `forward`.
        windows: what the model runs on.
        cache_dtype: the dtype of keys and values, which are written to a cache and read from it, as in decoding; None
            to compute without a cache.
        on_seen: called with the features [X, D] of each window that has some, in the order of its placeholders.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    widths = padded_widths([len(window.ids) for window in windows])
    graph, returned = nnx.graphdef(model), model.config.head.kind

    @partial(jax.jit, static_argnames="first")  # nnx.jit would return the weights too, which doubles their memory
    def logits(state: Any, ids_BT: Any, mask_BT: Any, first: int, seen: Any) -> Any:
        merged = nnx.merge(graph, state)
        if cache_dtype is None:
            return merged(ids_BT, mask_BT, first=first, seen=seen)
        return merged(ids_BT, mask_BT, cache=merged.init_cache(*ids_BT.shape, cache_dtype), first=first, seen=seen)[0]

    def run() -> Iterator[np.ndarray]:
        state = nnx.state(model)
        for window, width in zip(windows, widths, strict=True):
            length = len(window.ids)
            ids_BT = jnp.array([[*window.ids, *[0] * (width - length)]])
            mask_BT = jnp.arange(width)[None] < length
            # By default a TPU multiplies float32 as bfloat16.
            with jax.default_matmul_precision("highest") if dtype == "float32" else contextlib.nullcontext():
                seen = model.see(ids_BT, mask_BT, **window.features) if window.features else None
                if seen is not None:
                    on_seen(features_in_order(seen))
                outputs = on_host(logits(state, ids_BT, mask_BT, window.first, seen)).astype(np.float32)
            if returned == SCORES:
                yield outputs
            else:
                yield outputs[0, window.first if returned else 0 :][: length - window.first]

    return run


def features_in_order(seen: "Seen") -> np.ndarray:
    """Returns the features [X, D] in float32, one for each placeholder, in the order of these; those that layers attend
    to in the order of images."""
    if seen.across is not None:
        return on_host(seen.across.features_BSD).astype(np.float32).reshape(-1, seen.features_XD.shape[-1])
    slots = np.asarray(seen.slot_BT)
    features_XD = on_host(seen.features_XD).astype(np.float32)
    return np.asarray(features_XD[slots[slots >= 0]])


PADDED_FURTHER = 4
"""How many times its own length a text is padded to at most."""


def padded_widths(lengths: Sequence[int]) -> list[int]:
    """Returns the length that each of these texts is padded to: that of the longest text, or of a text's own group
    where it would be more than `PADDED_FURTHER` times as long."""
    widths: dict[int, int] = {}
    for length in sorted(set(lengths), reverse=True):
        widest = min(widths.values(), default=length)
        widths[length] = widest if widest <= PADDED_FURTHER * length else length
    return [widths[length] for length in lengths]


LEAST_WIDTH = 64
"""Tokens that a text is padded to at least; longer ones to a power of two, so that few shapes are compiled."""
TEXTS_AT_ONCE = 8
"""The most texts that a model runs on at once."""
LOGITS_AT_ONCE = 1 << 24
"""The most logits that `TokenScorer` has at once. Those of 4,096 tokens and 150,000 words would take 2.5 GB."""


def padded_width(tokens: int) -> int:
    """Returns the number of tokens that a text of so many is padded to."""
    return max(LEAST_WIDTH, padded_rows(tokens))


def texts_at_once(tokens: int) -> int:
    """Returns how many texts of so many tokens a model runs on at once."""
    from tpuconv.models.generate import PREFILL_TOKENS

    return max(1, min(TEXTS_AT_ONCE, PREFILL_TOKENS // tokens))


def padded_rows(count: int) -> int:
    """Returns the number of rows of a batch of so many texts, images or sounds: a power of two, so that few shapes are
    compiled."""
    return 1 << (count - 1).bit_length()


class TokenScorer:
    """The log-probabilities that a model gives the tokens of texts. Logits are computed for some tokens at a time.

    Args:
        model: a Flax NNX model.
        dtype, cache_dtype: as of `forward_each`.
    """

    def __init__(self, model: Any, dtype: str, cache_dtype: str | None = None):
        import jax
        import jax.numpy as jnp
        from flax import nnx

        graph, self._state = nnx.split(model)
        self._dtype = dtype
        most = max(1, LOGITS_AT_ONCE // model.config.vocab_size)  # tokens

        @jax.jit
        def score(state: Any, ids_BT: Any, mask_BT: Any) -> tuple[Any, Any]:
            merged, inputs_BT = nnx.merge(graph, state), ids_BT[:, :-1]
            cache = None if cache_dtype is None else merged.init_cache(*inputs_BT.shape, cache_dtype)
            x_BTD, _ = merged.run_layers(inputs_BT, mask_BT, cache)
            x_BTD = merged.norm(x_BTD)

            def of_slab(slab: tuple[Any, Any]) -> tuple[Any, Any]:
                x_SD, next_S = slab
                logits_SV = merged.head(x_SD[None])[0]
                logp_SV = jax.nn.log_softmax(logits_SV)
                return jnp.take_along_axis(logp_SV, next_S[:, None], axis=-1)[:, 0], logits_SV.argmax(-1) == next_S

            flat = x_BTD.reshape(-1, x_BTD.shape[-1]), ids_BT[:, 1:].reshape(-1)
            count = len(flat[1])
            size = min(most, count)

            def slabs(x: Any) -> Any:
                padded = jnp.pad(x, ((0, -count % size), *[(0, 0)] * (x.ndim - 1)))
                return padded.reshape(-1, size, *x.shape[1:])

            found = jax.lax.map(of_slab, jax.tree.map(slabs, flat))
            logp_BT, is_best_BT = (x.reshape(-1)[:count].reshape(inputs_BT.shape) for x in found)
            return logp_BT, is_best_BT

        self._score = score

    def __call__(
        self, texts: Sequence[Sequence[int]], on_text: Callable[[int, int], None] = lambda done, total: None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns for each text the log-probabilities in nats [T - 1] of its tokens after the first, each given those
        before it, and whether it is the most likely one [T - 1].

        Args:
            texts: token ids, two or more of each text.
            on_text: called with the number of texts that are done, and of all.
        """
        import jax

        out: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        while len(out) < len(order):
            chosen = order[len(out) : len(out) + TEXTS_AT_ONCE]
            # The longest one decides how many there are: of fewer the longest is no longer.
            chosen = chosen[: texts_at_once(padded_width(len(texts[chosen[-1]])))]
            width, rows = padded_width(len(texts[chosen[-1]])), padded_rows(len(chosen))
            ids_BT, mask_BT = np.zeros((rows, width), np.int32), np.zeros((rows, width - 1), bool)
            for row, i in enumerate(chosen):
                ids_BT[row, : len(texts[i])], mask_BT[row, : len(texts[i]) - 1] = texts[i], True
            exact = jax.default_matmul_precision("highest") if self._dtype == "float32" else contextlib.nullcontext()
            with exact:
                logp_BT, is_best_BT = map(on_host, self._score(self._state, ids_BT, mask_BT))
            for row, i in enumerate(chosen):
                count = len(texts[i]) - 1
                out[i] = logp_BT[row, :count], is_best_BT[row, :count]
            on_text(len(out), len(texts))
        return [out[i] for i in range(len(texts))]


def on_host(array: Any) -> np.ndarray:
    """Returns the values of an array, also of one that is divided over several processes, all of which call this."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental.multihost_utils import process_allgather

    return np.asarray(process_allgather(array, tiled=True))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Returns the log-probabilities [..., V] of logits [..., V] in float64. In float32 the error would be as large as a
    small divergence."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))


def divergences(logp: Sequence[np.ndarray], logq: Sequence[np.ndarray]) -> np.ndarray:
    """Returns KL(p || q) in nats for each token of all prompts, given the log-probabilities [T, V] of each prompt."""
    return np.concatenate([(np.exp(p) * (p - q)).sum(-1) for p, q in zip(logp, logq, strict=True)])
