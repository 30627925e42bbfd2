"""Rotary positions of MiniCPM-V 4.7: images lie on canvases, which markers of the text span.

An image may come with slices, larger pictures of its parts. Each has a run of placeholders. An image without slices is
its own canvas. Slices lie side by side on the canvas, row by row, and their image is stretched over it. The markers
around a run are at corners of the canvas or of the slice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tpuconv.models.common.mrope import COLUMN, ROW, spans_of_images
from tpuconv.models.towers.places import IntArray


@dataclass(frozen=True)
class Markers:
    """The ids of the tokens that stand around placeholders; None where config.json has none.

    Attributes:
        slice_start: the token before a slice.
        others: before an image, behind an image or a slice, and between rows of slices.
    """

    slice_start: int | None
    others: tuple[int | None, ...]

    def among(self, ids_T: np.ndarray) -> NDArray[np.bool_]:
        """Returns which tokens are markers [T]."""
        return np.isin(ids_T, [each for each in (self.slice_start, *self.others) if each is not None])


class Crop(NamedTuple):
    """The placeholders of an image or a slice: from `start` to before `end`, `h` rows of `w`."""

    start: int
    end: int
    h: int
    w: int


@dataclass
class Frame:
    """An image with its slices.

    Attributes:
        image: the image.
        slices: its slices.
        follows: whether markers alone stand between the image before and this one.
    """

    image: Crop
    slices: list[Crop] = field(default_factory=list)
    follows: bool = False

    @property
    def columns(self) -> int:
        """The slices in a row, which ends where more than two tokens stand before the next; all, if rows differ."""
        gaps = (after.start - before.end for before, after in zip(self.slices, self.slices[1:], strict=False))
        columns = next((number for number, gap in enumerate(gaps, 1) if gap > 2), len(self.slices))
        return columns if columns and len(self.slices) % columns == 0 else len(self.slices)

    @property
    def canvas(self) -> tuple[int, int]:
        """The rows and columns of the canvas."""
        if not self.slices:
            return self.image.h, self.image.w
        rows = len(self.slices) // self.columns
        return rows * self.slices[0].h, self.columns * self.slices[0].w

    @property
    def end(self) -> int:
        """The first place behind all placeholders."""
        return (self.slices or [self.image])[-1].end


def canvas_positions(
    ids_T: np.ndarray, placeholder: int, grids: Sequence[Sequence[int]], markers: Markers
) -> tuple[IntArray, int]:
    """Returns the positions [3, T] (time, row, column) of the tokens of one text without padding, and the difference
    between the position and the number of a later token.

    The positions of a text token are equal and count on by one. All tokens of an image and its slices have the origin
    of the canvas as time; rows and columns count from there. The text goes on one behind the larger side of the canvas.

    Args:
        ids_T: the tokens.
        placeholder: the token of images and slices.
        grids: frames, which are 1, rows and columns of placeholders of each image and slice, in the order of the text.
        markers: the tokens around them.

    Raises:
        UsageError: another token stands between the placeholders of an image.
    """
    is_marker_T = markers.among(ids_T)
    spans = spans_of_images(ids_T == placeholder, [h * w for _, h, w in grids])
    crops = [Crop(*span, h, w) for span, (_, h, w) in zip(spans, grids, strict=True)]
    frames = _frames(ids_T, crops, is_marker_T, markers.slice_start)
    at_3T = np.zeros((3, len(ids_T)), np.int32)
    position = place = 0

    def count_on(end: int) -> None:
        nonlocal position, place
        if end > place:
            at_3T[:, place:end] = position + np.arange(end - place)
            position, place = position + end - place, end

    for frame in frames:
        begin = frame.image.start - 1
        is_apart = frame.follows and begin > place  # markers stand between: one step more, for the one before the image
        count_on(begin)
        position += is_apart
        end = frame.end
        while end < len(ids_T) and is_marker_T[end]:
            end += 1
        at_3T[:, max(begin, 0) : end] = position
        _lay_out(at_3T[:, :end], frame, position)
        position, place = position + max(frame.canvas) + 1, end
    count_on(len(ids_T))
    return at_3T, int(at_3T.max(initial=-1)) + 1 - len(ids_T)


def _frames(
    ids_T: np.ndarray, crops: Sequence[Crop], is_marker_T: NDArray[np.bool_], slice_start: int | None
) -> list[Frame]:
    """Returns the images with their slices. A run of placeholders behind the marker of a slice is a slice of the image
    before; all others are images."""
    frames: list[Frame] = []
    end = 0
    for crop in crops:
        if frames and ids_T[crop.start - 1] == slice_start:
            frames[-1].slices.append(crop)
        else:
            frames.append(Frame(crop, follows=bool(frames) and bool(is_marker_T[end : crop.start - 1].all())))
        end = crop.end
    return frames


def _lay_out(at_3T: IntArray, frame: Frame, origin: int) -> None:
    """Sets the rows and columns of a frame's tokens, in the positions [3, T] up to its last marker."""
    image, (canvas_h, canvas_w) = frame.image, frame.canvas
    if image.start:
        at_3T[ROW:, image.start - 1] = max(origin - 1, 0)
    _set(at_3T, image.end, origin + canvas_h, origin + canvas_w)
    _place(at_3T, image, origin + _spread(canvas_h, image.h), origin + _spread(canvas_w, image.w))
    for number, crop in enumerate(frame.slices):
        row, column = divmod(number, frame.columns)
        top, left = origin + row * frame.slices[0].h, origin + column * frame.slices[0].w
        _set(at_3T, crop.start - 1, top, left)
        _set(at_3T, crop.end, top + crop.h - 1, left + crop.w - 1)
        _place(at_3T, crop, top + np.arange(crop.h), left + np.arange(crop.w))
    for number, (before, after) in enumerate(zip(frame.slices, frame.slices[1:], strict=False)):
        between = slice(before.end + 1, after.start - 1)  # ends of rows
        at_3T[ROW, between] = origin + (number // frame.columns + 1) * frame.slices[0].h - 1
        at_3T[COLUMN, between] = origin + canvas_w


def _set(at_3T: IntArray, place: int, row: int, column: int) -> None:
    if place < at_3T.shape[1]:
        at_3T[ROW, place], at_3T[COLUMN, place] = row, column


def _place(at_3T: IntArray, crop: Crop, rows: np.ndarray, columns: np.ndarray) -> None:
    at_3T[ROW, crop.start : crop.end] = np.repeat(rows, crop.w)
    at_3T[COLUMN, crop.start : crop.end] = np.tile(columns, crop.h)


def _spread(side: int, count: int) -> IntArray:
    """Returns the places of `count` rows, or columns, on a canvas of `side`, from the first to the last. The float32
    operations are the reference's, since they decide where a place between two is rounded to."""
    number = np.arange(count, dtype=np.float32)
    last, step = np.float32(side - 1), np.float32(side - 1) / np.float32(max(count - 1, 1))
    from_end = last - step * (np.float32(count - 1) - number)
    return np.round(np.where((number < count // 2) | (count == 1), step * number, from_end)).astype(np.int32)
