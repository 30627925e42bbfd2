"""A text in windows that overlap, for perplexity with strides: each token is predicted once, from at least
`length - stride` tokens before it if the text has them."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tpuconv.errors import UsageError
from tpuconv.models.logits import Window


def check_stride(length: int, stride: int) -> None:
    """Raises UsageError if windows of `length` tokens cannot begin `stride` tokens after each other."""
    if not 0 < stride < length:
        raise UsageError(
            f"a stride of {stride} does not fit windows of {length} tokens",
            hint="it must be from 1 to the length less 1",
        )


def windows(ids: Sequence[int], length: int, stride: int, begin: Sequence[int] = ()) -> list[Window]:
    """Returns the windows of a text: each begins `stride` tokens after the one before it.

    Args:
        ids: the text, two tokens or more.
        length: tokens of a window, two or more.
        stride: less than `length`: the last token of a window is predicted in it, and predicts in the next one.
        begin: what each window begins with, such as BOS; the first token of the text is predicted from it.

    Raises:
        UsageError: the text is too short, or the stride does not fit the length.
    """
    check_stride(length, stride)
    room = length - len(begin)  # for the text
    if room < stride:
        raise UsageError(
            f"windows of {length} tokens begin with {len(begin)} of the tokenizer, and their stride is {stride}",
            hint="give a larger `length=` or a smaller `stride=`",
        )
    if len(ids) < 2:
        raise UsageError("the text is shorter than two tokens", hint="give a longer text")
    out: list[Window] = []
    predicted = 0 if begin else 1  # tokens that have been; the first one has nothing before it without `begin`
    for start in range(0, len(ids), stride):
        end = min(start + room, len(ids))
        out.append(Window([*begin, *ids[start:end]], len(begin) + predicted - 1 - start))
        predicted = end
        if end == len(ids):
            break
    return out


def scored_logits(windows: Sequence[Window], logits: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields of the logits [T, V] of each window those that count: they predict the tokens of `Window.scored` after the
    first."""
    for window, logits_TV in zip(windows, logits, strict=True):
        yield logits_TV[window.first : -1]
