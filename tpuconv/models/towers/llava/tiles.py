"""Images in tiles, as LLaVA-NeXT and LLaVA-OneVision see them: an image is resized and padded to one of several sizes,
which are multiples of a tile; the tower sees it whole, and its tiles. Features of tiles are one grid, cut to the image
itself. Computed by the host.

Letters: X features, A features of the tower that one is made of.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tpuconv.models.towers.places import Floats, IntArray, Taps, bilinear_taps_of_centers

SHRINKS = 1.1
"""A grid is made smaller if it exceeds the most tiles by this factor in each direction."""


class Arrangement(NamedTuple):
    """The tiles that the features of some images are made of.

    Attributes:
        index_XA: numbers of features: 0 is the vector at the ends of rows, 1 the first feature of the tower.
        weight_XA: their weights.
        counts: how many features each image has.
    """

    index_XA: IntArray
    weight_XA: Floats
    counts: list[int]


def fitting_size(height: int, width: int, sizes: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Returns the size, of some, at which most pixels of an image remain, and fewest are padding."""

    def rank(size: Sequence[int]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - size[0] * size[1]

    best = max(sizes, key=rank)
    return best[0], best[1]


def inside_padding(h: int, w: int, height: int, width: int) -> tuple[range, range]:
    """Returns the rows and columns, of a grid of h x w, in which an image of this height and width is."""
    if width / height > w / h:
        padding = (h - int(round(height * (w / width), 7))) // 2
        return range(padding, h - padding), range(w)
    padding = (w - int(round(width * (h / height), 7))) // 2
    return range(h), range(padding, w - padding)


def tile_counts(images: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]], side: int) -> Iterator[int]:
    """Yields how many tiles of side x side pixels each image has, and one for the whole."""
    for height, width in images:
        fitting = fitting_size(height, width, sizes)
        yield 1 + -(-fitting[0] // side) * -(-fitting[1] // side)


def arrangement(
    images: Sequence[Sequence[int]],
    tiles: Sequence[int],
    sizes: Sequence[Sequence[int]],
    side: int,
    tokens: int,
    most_tiles: int | None,
) -> Arrangement:
    """Returns what the features of images are made of: of the whole image, then row by row of the tiles, each row with
    the vector at its end.

    Args:
        images: their heights and widths.
        tiles: how many tiles each has, with the whole.
        sizes: see `fitting_size`.
        side: pixels of a side of a tile.
        tokens: features of a side of a tile.
        most_tiles: the number of tiles above which features are made fewer by interpolation.
    """
    index: list[IntArray] = []
    weight: list[Floats] = []
    counts, first = [], 1
    for (height, width), number in zip(images, tiles, strict=True):
        whole = np.arange(first, first + tokens**2, dtype=np.int32)[:, None]
        if number == 1:
            rows = Taps(np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32))
        else:
            fitting = fitting_size(height, width, sizes)
            h, w = fitting[0] // side * tokens, fitting[1] // side * tokens
            row, column = (np.asarray(each, np.int32) for each in inside_padding(h, w, height, width))
            tile = row[:, None] // tokens * (w // tokens) + column // tokens
            grid_YX = first + (1 + tile) * tokens**2 + row[:, None] % tokens * tokens + column % tokens
            rows = _with_ends(grid_YX, shrunk(len(row), len(column.reshape(-1)), tokens, most_tiles))
        index += [np.pad(whole, ((0, 0), (0, rows.index_PA.shape[1] - 1))), rows.index_PA]
        weight += [np.eye(1, rows.index_PA.shape[1], dtype=np.float32).repeat(len(whole), 0), rows.weight_PA]
        counts.append(len(whole) + len(rows.index_PA))
        first += number * tokens**2
    taps = max(each.shape[1] for each in index)
    fill = [((0, 0), (0, taps - each.shape[1])) for each in index]
    return Arrangement(
        np.concatenate([np.pad(x, pad) for x, pad in zip(index, fill, strict=True)]),
        np.concatenate([np.pad(x, pad) for x, pad in zip(weight, fill, strict=True)]),
        counts,
    )


def shrunk(h: int, w: int, tokens: int, most_tiles: int | None) -> tuple[int, int]:
    """Returns how many rows and columns of features are made of h x w: fewer if these exceed the most tiles by more
    than SHRINKS in each direction."""
    ratio = 0.0 if most_tiles is None else (h * w / (most_tiles * tokens**2)) ** 0.5
    return (int(h // ratio), int(w // ratio)) if ratio > SHRINKS else (h, w)


def _with_ends(grid_YX: IntArray, size: tuple[int, int]) -> Taps:
    """Returns the taps of a grid of features at a size, with the vector at the end of each row."""
    h, w = size
    if size == grid_YX.shape:
        index, weight = grid_YX.reshape(h, w, 1), np.ones((h, w, 1), np.float32)
    else:
        taps = bilinear_taps_of_centers(h, w, *grid_YX.shape)
        index = grid_YX.reshape(-1)[taps.index_PA].reshape(h, w, -1)
        weight = taps.weight_PA.reshape(h, w, -1)
    end = ((0, 0), (0, 1), (0, 0))
    index, weight = np.pad(index, end), np.pad(weight, end)
    weight[:, -1, 0] = 1
    return Taps(index.reshape(-1, index.shape[-1]), weight.reshape(-1, index.shape[-1]))
