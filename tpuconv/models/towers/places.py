"""Arrays that depend on the sizes of images, computed by the host before a tower runs: where patches are, which rows of
a table of learned positions they read.

Letters: P patches of an image, A rows of the table that a patch reads. Sizes h and w are numbers of
patches in a column and in a row. `raster`, `block_order` and the taps are of one image; taps are in raster order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpuconv.errors import UsageError
from tpuconv.models.logits import padded_rows

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


def as_wide(arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Returns arrays [P, A] of several images with zeros behind the A of each up to the largest A."""
    most = max(x_PA.shape[1] for x_PA in arrays)
    return [np.pad(x_PA, [(0, 0), (0, most - x_PA.shape[1])]) for x_PA in arrays]


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
    return nested_order(h, w, [merge])


def nested_order(h: int, w: int, sides: Sequence[int]) -> IntArray:
    """Returns which patch of the raster is at each place [P], if patches come block by block, in blocks of blocks.

    Args:
        h, w: the rows and columns of patches.
        sides: the numbers of patches, or of blocks, along a side of the blocks, the innermost first.

    Raises:
        UsageError: the image has no whole number of the outermost blocks.
    """
    if h % (whole := prod(sides)) or w % whole:
        raise UsageError(f"an image of {h} x {w} patches has no whole number of blocks of {whole} x {whole}")
    row, column = raster(h, w).T
    keys: list[IntArray] = []
    for side in sides:
        keys += [column % side, row % side]
        row, column = row // side, column // side
    return np.lexsort([*keys, column, row]).astype(np.int32)


def bilinear_taps(h: int, w: int, table_height: int, table_width: int) -> Taps:
    """Returns four taps of bilinear interpolation with aligned corners: patch i of n is at i (G - 1) / (n - 1) of G
    rows (Qwen3-VL). The float32 operations are the reference's."""

    def axis(size: int, rows: int) -> AxisTaps:
        place = np.arange(size, dtype=np.float32) * np.float32(rows - 1) / np.float32(max(size - 1, 1))
        tap, distance = _neighbours(place, rows, 0, 2)
        return tap, np.maximum(1 - distance, np.float32(0))

    return _product(axis, h, w, table_height, table_width)


def bilinear_taps_of_centers(h: int, w: int, table_height: int, table_width: int, more: float = 0.0) -> Taps:
    """Returns four taps of bilinear interpolation: place i of n is at (i + 1/2) G / (n + more) - 1/2 of G rows, and
    rows outside are the ones at the border (LLaVA-OneVision; Hy4-VL with 0.1 more). torch copies an axis that keeps its
    size, whatever `more` is."""

    return _product(partial(_between_centers, more=more), h, w, table_height, table_width)


def corner_taps(h: int, w: int, table_height: int, table_width: int) -> Taps:
    """Returns the taps of `bilinear_taps_of_centers` for a square with the longer side of an image, which is its upper
    left corner (cropped positions, arXiv:2312.06709)."""

    def axis(size: int, rows: int) -> AxisTaps:
        tap, weight = _between_centers(max(h, w), rows)
        return tap[:size], weight[:size]

    return _product(axis, h, w, table_height, table_width)


def _between_centers(size: int, rows: int, more: float = 0.0) -> AxisTaps:
    centers = _centers(size, rows, 0 if size == rows else more)
    tap, distance = _neighbours(np.maximum(centers, np.float32(0)), rows, 0, 2)
    return tap, np.maximum(1 - distance, np.float32(0))


def bilinear_weights(size: int, rows: int) -> Floats:
    """Returns the weights [size, rows] of bilinear interpolation on one axis: place i of n is at (i + 1/2) (G / n) -
    1/2 of G rows, and rows outside are the ones at the border (Gemma 3n). The float32 operations are the
    reference's."""
    half, step = np.float32(0.5), np.float32(rows) / np.float32(size)
    place = np.maximum((np.arange(size, dtype=np.float32) + half) * step - half, np.float32(0))
    tap, distance = _neighbours(place, rows, 0, 2)
    weights = np.zeros((size, rows), np.float32)
    np.add.at(weights, (np.arange(size)[:, None], tap), np.maximum(1 - distance, np.float32(0)))
    return weights


def bicubic_taps(h: int, w: int, table_height: int, table_width: int, more: float = 0.0) -> Taps:
    """Returns 16 taps of bicubic interpolation with a = -0.75 (doi:10.1109/TASSP.1981.1163711): patch i of n is at
    (i + 1/2) G / (n + more) - 1/2 of G rows, and rows outside are the ones at the border (MoonViT, GLM-4V; CLIP and
    SigLIP for images of other sizes; Hy4-VL with 0.1 more)."""

    def axis(size: int, rows: int) -> AxisTaps:
        tap, d = _neighbours(_centers(size, rows, more), rows, -1, 3)
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
        most = int((weight > 0).sum(axis=1).max())
        tap = ((weight > 0).argmax(axis=1)[:, None] + np.arange(most)).astype(np.int32)
        padded = np.pad(weight, [(0, 0), (0, most)])
        return np.minimum(tap, rows - 1), np.take_along_axis(padded, tap, axis=1)

    return _product(axis, h, w, table_height, table_width)


def antialiased_cubic_weights(size: int, rows: int) -> Floats:
    """Returns the weights [size, rows] of bicubic interpolation with antialiasing on one axis, with a = -0.5: place i
    of n is at (i + 1/2) G / n - 1/2 of G rows, distances are divided by max(1, G / n), and the weights of a place by
    their sum (DeepSeek-OCR 2)."""
    reach, a = np.float32(max(1, rows / size)), np.float32(-0.5)
    d = np.abs(np.arange(rows, dtype=np.float32) - _centers(size, rows)[:, None]) / reach
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    weight: Floats = np.where(d < 1, near, np.where(d < 2, far, 0)).astype(np.float32)
    weight /= weight.sum(axis=1, keepdims=True)
    return weight


def zero_padded_taps(h: int, w: int, table_height: int, table_width: int) -> Taps:
    """Returns four taps of bilinear interpolation: patch i of n is at (i + 1/2) G / n - 1/2 of G rows, and rows outside
    are zeros (Muse)."""

    def axis(size: int, rows: int) -> AxisTaps:
        place = _centers(size, rows)
        tap, distance = _neighbours(place, rows, 0, 2)
        row = np.floor(place).astype(np.int32)[:, None] + np.arange(2, dtype=np.int32)
        return tap, np.maximum(1 - distance, np.float32(0)) * (row == tap)

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


def _centers(size: int, rows: int, more: float = 0.0) -> Floats:
    """Returns where patches are among the rows of an axis whose corners are not aligned."""
    half = np.float32(0.5)
    return (np.arange(size, dtype=np.float32) + half) * np.float32(rows) / np.float32(size + more) - half


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


def bucket(count: int, least: int = 256, multiple: int = 1) -> int:
    """Returns the number of patches that an array for `count` patches is padded to, so that few shapes are compiled: a
    power of two of at least `least`, rounded up to a multiple."""
    size = max(least, padded_rows(count))
    return -(-size // multiple) * multiple
