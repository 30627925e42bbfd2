"""Arrays that depend on the sizes of images, computed by the host before a tower runs: where patches are, which rows of
a table of learned positions they read, and which positions their tokens have in the text.

Letters: P patches of an image, A rows of the table that a patch reads, T tokens of a text. Sizes h and w are numbers of
patches in a column and in a row. `raster`, `block_order` and the taps are of one image; taps are in raster order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tpuconv.errors import UsageError

IntArray = NDArray[np.int32]
Floats = NDArray[np.float32]
AxisTaps = tuple[IntArray, Floats]
"""The rows of one axis of a table that each place on that axis reads, and their weights."""

LARGEST_FRACTION = np.float32(1 - 1e-6)


@dataclass(frozen=True)
class Taps:
    """The rows of a table of learned positions whose weighted sum is the position of each patch.

    Attributes:
        index_PA: numbers of the rows.
        weight_PA: their weights.
    """

    index_PA: IntArray
    weight_PA: Floats


def raster(h: int, w: int) -> IntArray:
    """Returns row and column [P, 2] of each patch, row by row."""
    place_P = np.arange(h * w, dtype=np.int32)
    return np.stack([place_P // w, place_P % w], axis=1)


def block_order(h: int, w: int, merge: int) -> IntArray:
    """Returns which patch of the raster is at each place [P], if patches come in blocks of merge x merge, block by
    block, as Qwen's processors write them.

    Raises:
        UsageError: the image has no whole number of blocks.
    """
    if h % merge or w % merge:
        raise UsageError(f"an image of {h} x {w} patches has no whole number of blocks of {merge} x {merge}")
    place_P = np.arange(h * w, dtype=np.int32)
    return place_P.reshape(h // merge, merge, w // merge, merge).transpose(0, 2, 1, 3).reshape(-1)


def bilinear_taps(h: int, w: int, table_height: int, table_width: int) -> Taps:
    """Returns four taps of bilinear interpolation with aligned corners: patch i of n is at i (G - 1) / (n - 1) of G
    rows (Qwen3-VL). The float32 operations are the reference's."""

    def axis(size: int, rows: int) -> AxisTaps:
        place = np.arange(size, dtype=np.float32) * np.float32(rows - 1) / np.float32(max(size - 1, 1))
        tap, distance = _neighbours(place, rows, 0, 2)
        return tap, np.maximum(1 - distance, np.float32(0))

    return _product(axis, h, w, table_height, table_width)


def bicubic_taps(h: int, w: int, table_height: int, table_width: int) -> Taps:
    """Returns 16 taps of bicubic interpolation with a = -0.75 (doi:10.1109/TASSP.1981.1163711): patch i of n is at
    (i + 1/2) G / n - 1/2 of G rows, and rows outside are the ones at the border (MoonViT, GLM-4V; CLIP and SigLIP for
    images of other sizes)."""

    def axis(size: int, rows: int) -> AxisTaps:
        tap, d = _neighbours(_centers(size, rows), rows, -1, 3)
        a = np.float32(-0.75)
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        return tap, np.where(d <= 1, near, far).astype(np.float32)

    return _product(axis, h, w, table_height, table_width)


def antialiased_taps(h: int, w: int, table_height: int, table_width: int) -> Taps:
    """Returns taps of bilinear interpolation with antialiasing: patch i of n is at (i + 1/2) G / n - 1/2 of G rows, and
    a row at a distance d weighs max(0, 1 - d / max(1, G / n)), divided by the sum over the axis (SigLIP 2). All patches
    have as many taps as the one with most; weights of the others are 0."""

    def axis(size: int, rows: int) -> AxisTaps:
        reach = np.float32(max(1, rows / size))
        distance = np.abs(np.arange(rows, dtype=np.float32) - _centers(size, rows)[:, None])
        weight = np.maximum(1 - distance / reach, np.float32(0))
        weight /= weight.sum(axis=1, keepdims=True)
        first, most = (weight > 0).argmax(axis=1).astype(np.int32), (weight > 0).sum(axis=1).max()
        tap = first[:, None] + np.arange(most, dtype=np.int32)
        padded = np.pad(weight, [(0, 0), (0, most)])
        return np.minimum(tap, rows - 1), np.take_along_axis(padded, tap, axis=1)

    return _product(axis, h, w, table_height, table_width)


def nearest_taps(h: int, w: int, table_height: int, table_width: int, *, divides: bool = False) -> Taps:
    """Returns one tap, of weight 1: patch i of n reads the row whose number is the number of limits 1/G, 2/G, ... that
    are at most i / n. Fractions and limits are rounded to float32, and a fraction that is a limit may fall on either
    side.

    Args:
        h: patches in a column of the image itself, without padding; `w` in a row.
        divides: computes i / n (MiniCPM-V). Otherwise i times 1 / n, at most 1 - 1e-6 (Idefics).
    """

    def axis(size: int, rows: int) -> AxisTaps:
        limits = (np.arange(1, rows) / rows).astype(np.float32)
        i, n = np.arange(size, dtype=np.float32), np.float32(size)
        fraction = i / n if divides else np.minimum(i * (np.float32(1) / n), LARGEST_FRACTION)
        tap = np.searchsorted(limits, fraction, side="right").astype(np.int32)[:, None]
        return tap, np.ones(tap.shape, np.float32)

    return _product(axis, h, w, table_height, table_width)


def _centers(size: int, rows: int) -> Floats:
    """Returns where patches are among the rows of an axis whose corners are not aligned."""
    half = np.float32(0.5)
    return (np.arange(size, dtype=np.float32) + half) * np.float32(rows) / np.float32(size) - half


def _neighbours(place: Floats, rows: int, first: int, last: int) -> tuple[IntArray, Floats]:
    """Returns the rows from `first` to before `last`, counted from the one below each place, and how far they are;
    numbers of rows outside are those at the border."""
    low, offset = np.floor(place), np.arange(first, last, dtype=np.int32)
    distance = np.abs(place[:, None] - low[:, None] - offset.astype(np.float32))
    return np.clip(low.astype(np.int32)[:, None] + offset, 0, rows - 1), distance


def _product(axis: Callable[[int, int], AxisTaps], h: int, w: int, table_height: int, table_width: int) -> Taps:
    """Returns the taps of an image, of which each is one tap of a row with one of a column."""
    (row, row_weight), (column, column_weight) = axis(h, table_height), axis(w, table_width)
    index = row[:, None, :, None] * np.int32(table_width) + column[None, :, None, :]
    weight = row_weight[:, None, :, None] * column_weight[None, :, None, :]
    return Taps(index.reshape(h * w, -1), weight.reshape(h * w, -1))


def mrope_positions(
    kinds_T: ArrayLike, grids: Sequence[Sequence[int]], merge: int, intervals: Sequence[float] = ()
) -> tuple[IntArray, int]:
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


def bucket(count: int, least: int = 256, multiple: int = 1) -> int:
    """Returns the number of patches that an array for `count` patches is padded to, so that few shapes are compiled: a
    power of two of at least `least`, rounded up to a multiple."""
    size = max(least, 1 << (count - 1).bit_length())
    return -(-size // multiple) * multiple
