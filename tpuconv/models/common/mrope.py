"""Rotary positions by time, row and column, of models that see (mrope, arXiv:2409.12191), and by further axes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tpuconv.errors import ConfigError, UsageError
from tpuconv.jsonfile import short
from tpuconv.models.common.rope import PARAMETER_KEYS, check_rope_keys
from tpuconv.text import format_count

SECTIONS = "mrope_section"
TIME, ROW, COLUMN = range(3)
BY_TEXT, BY_COLUMN, BY_ROW, BY_IMAGE = range(4)


@dataclass(frozen=True)
class Mrope:
    """Which pairs of dimensions turn by time, by row and by column.

    Attributes:
        sections: the number of pairs of each.
        interleaved: whether row and column take every third pair, not all pairs of a section.
    """

    sections: tuple[int, ...]
    interleaved: bool

    def fault(self, pairs: int) -> str:
        """Returns why the sections do not fit a head with so many rotated pairs; nothing if they do."""
        fits = len(self.sections) == 3 and (self.interleaved or sum(self.sections) == pairs)
        return "" if fits else f"are not time, rows and columns of {format_count(pairs, 'pair')} of dimensions"

    def axis_of_angles(self, pairs: int) -> list[int]:
        """Returns for each pair `TIME`, `ROW` or `COLUMN`."""
        if self.interleaved:
            return [i % 3 if i < 3 * self.sections[i % 3] else TIME for i in range(pairs)]
        return [axis for axis, count in enumerate(self.sections) for _ in range(count)]


@dataclass(frozen=True)
class MropeOfDimensions(Mrope):
    """Which dimensions turn by which of the axes `BY_TEXT`, `BY_COLUMN`, `BY_ROW` and `BY_IMAGE` (Hunyuan-VL).
    Twice as many dimensions follow each other as a section has pairs, so that the two dimensions of a pair turn by
    angles of different axes. The last three sections are of the places in an image, all before them of the text."""

    interleaved: bool = False

    def fault(self, pairs: int) -> str:
        return "" if sum(self.sections) == pairs else f"are not the {format_count(pairs, 'pair')} of a head"

    def axis_of_angles(self, pairs: int) -> list[int]:
        """Returns for each dimension its axis."""
        first = len(self.sections) - 4
        return [max(BY_TEXT, i - first) for i, count in enumerate(self.sections) for _ in range(2 * count)]


@dataclass(frozen=True)
class MropeOfTimeLast(Mrope):
    """Which pairs turn by row, by column and by time (ERNIE 4.5 VL): pairs of the first two sections, of rows and of
    columns, take turns, and the last section is of time."""

    interleaved: bool = False

    def fault(self, pairs: int) -> str:
        fits = len(self.sections) == 3 and self.sections[0] == self.sections[1] and sum(self.sections) == pairs
        return "" if fits else f"are not rows, as many columns, and time of {format_count(pairs, 'pair')}"

    def axis_of_angles(self, pairs: int) -> list[int]:
        rows, _, time = self.sections
        return [ROW, COLUMN] * rows + [TIME] * time


class MropeConfig:
    """Reads rotary positions with sections. The three positions of a text token are equal, so that it turns by the
    plain angles. A family's Config derives from this class and from the Config of the text model, in this order.

    Attributes:
        interleaved: as of `Mrope`; the reference has it by model type, whatever `mrope_interleaved` says.
        default_sections: see `DecoderConfig`.
    """

    interleaved: ClassVar[bool] = False
    default_sections: ClassVar[tuple[int, ...]]

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """See `DecoderConfig.read_ropes`."""
        out: dict[str, Any] = super().read_ropes(without_mrope(raw), context)  # type: ignore[misc]
        sections = mrope_sections(raw) or cls.default_sections
        return {**out, "mrope": Mrope(sections, cls.interleaved) if sections else None}


def mrope_sections(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the sections for time, row and column that a parsed config.json has; empty if it has none.

    Raises:
        ConfigError: they are not a list of numbers.
    """
    check_rope_keys(raw)
    for key in PARAMETER_KEYS:
        given: Sequence[Any] | None = (raw.get(key) or {}).get(SECTIONS)
        if given is not None:
            if not isinstance(given, Sequence) or not all(type(count) is int and count >= 0 for count in given):
                raise ConfigError(f"config.json: {SECTIONS}={short(given)} in {key} is no list of numbers")
            return tuple(given)
    return ()


def without_mrope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parsed config.json whose rotary positions have no sections."""
    check_rope_keys(raw)
    out = dict(raw)
    for key in PARAMETER_KEYS:
        if given := raw.get(key):
            plain = {k: value for k, value in given.items() if k not in (SECTIONS, "mrope_interleaved")}
            out[key] = {k: "default" if value == "mrope" else value for k, value in plain.items()}
    return out


def mrope_positions(
    kinds_T: ArrayLike, grids: Sequence[Sequence[int]], merge: int, intervals: Sequence[float] = ()
) -> tuple[NDArray[np.int32], int]:
    """Returns the positions [3, T] (time, row, column) of the tokens of one text without padding, and the difference
    between the position and the number of a later token.

    The three positions of a text token are equal and count on by one; so do a sound's. An image that begins at the
    position n has its merged patches at (n + frame, n + row, n + column), and the text goes on at n + max(rows,
    columns). If text separates the frames of an image (Qwen3-VL, GLM-4V), each is such an image of one frame.

    Args:
        kinds_T: 1 for a token of an image, 2 for one of a frame of a video; others count as text.
        grids: frames, rows and columns of patches of each image or video, in the order of the text.
        merge: rows and columns of patches that one token has.
        intervals: for each grid the difference in time between frames, 1 by default. Positions are rounded down.

    Raises:
        UsageError: grids and tokens do not match.
    """
    seen_T = np.isin(np.asarray(kinds_T), (1, 2))
    at_3T = np.zeros((3, len(seen_T)), np.int32)
    steps = intervals or [1] * len(grids)
    left = [(t, h // merge, w // merge, step) for (t, h, w), step in zip(grids, steps, strict=True)]
    start = position = 0
    for seen, run in groupby(seen_T.tolist()):
        end = start + len(list(run))
        while seen and start < end:
            t, h, w, step = left.pop(0) if left else (0, 1, 1, 1)
            frames = min(t, (end - start) // max(h * w, 1))
            if not frames:
                raise _mismatch(seen_T, grids, merge)
            time = (np.arange(frames, dtype=np.float32) * np.float32(step)).astype(np.int32)
            patches = np.meshgrid(time, np.arange(h), np.arange(w), indexing="ij")
            at_3T[:, start : start + frames * h * w] = position + np.reshape(patches, (3, -1))
            start, position = start + frames * h * w, position + max(h, w)
            if frames < t:
                left.insert(0, (t - frames, h, w, step))
        at_3T[:, start:end] = position + np.arange(end - start)
        start, position = end, position + end - start
    if left:
        raise _mismatch(seen_T, grids, merge)
    return at_3T, int(at_3T.max(initial=-1)) + 1 - len(seen_T)


def _mismatch(seen_T: NDArray[np.bool_], grids: Sequence[Sequence[int]], merge: int) -> UsageError:
    sizes = [t * (h // merge) * (w // merge) for t, h, w in grids]
    return UsageError(
        f"the text has {int(seen_T.sum())} tokens for images, whose sizes give {sum(sizes)}: {sizes}",
        hint="write as many placeholders for each image as it has merged patches, one run for each image",
    )


def positions_in_images(is_placeholder_T: ArrayLike, grids: Sequence[Sequence[int]]) -> tuple[NDArray[np.int32], int]:
    """Returns the positions [4, T] of the tokens of one text without padding by the axes of `MropeOfDimensions`, and 0,
    since a later token's position is its number.

    All positions of a token are its number in the text, with exceptions in images: between its first and its last
    token an image has the column and the row of each token, and the number of the image in the text.

    Args:
        is_placeholder_T: true for a token of an image.
        grids: frames, which are 1, rows and columns of the tokens of each image, without its first and last one.

    Raises:
        UsageError: another token stands between the placeholders of an image.
    """
    at_4T = np.tile(np.arange(len(np.asarray(is_placeholder_T)), dtype=np.int32), (4, 1))
    spans = spans_of_images(is_placeholder_T, [h * w + 2 for _, h, w in grids])
    for image, ((_, h, w), (start, end)) in enumerate(zip(grids, spans, strict=True)):
        rows, columns = np.divmod(np.arange(h * w), w)
        at_4T[BY_COLUMN:, start + 1 : end - 1] = columns, rows, np.full(h * w, image)
    return at_4T, 0


def spans_of_images(is_placeholder_T: ArrayLike, counts: Sequence[int]) -> list[tuple[int, int]]:
    """Returns where each image begins, and the place behind its last placeholder. `counts` are the numbers of
    placeholders.

    Raises:
        UsageError: another token stands between the placeholders of an image.
    """
    places, spans, first = np.flatnonzero(is_placeholder_T).tolist(), [], 0
    for count in counts:
        start, last = places[first], places[min(first + count, len(places)) - 1]
        if last - start != count - 1:
            raise UsageError(
                f"the {count} placeholders of an image have another token among them",
                hint="write the placeholders of each image one after the other",
            )
        spans.append((start, last + 1))
        first += count
    return spans
