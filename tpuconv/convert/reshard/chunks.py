"""The chunks and the files of an array for a mesh: each device reads complete chunks, and nothing else."""

from collections.abc import Mapping
from math import prod

from tpuconv.notation.layout import Shape, lead, parse_axes
from tpuconv.notation.sharding import partition, shard_shape
from tpuconv.notation.table import EXPERTS, LAYERS, PERIODS, PLACES

MOST_PIECES = 4
"""An axis is left whole if its divisors would give more than this many times the pieces that are needed."""


def device_chunks(axes: str, shape: Shape, itemsize: int, mesh: Mapping[str, int], most: int) -> Shape:
    """Returns the shape of the chunks of an array: the shard of a device, divided evenly until a chunk has `most` bytes
    at most: along stacked axes first, so that a layer lies in few chunks, then from the outermost axis on.

    Args:
        axes, shape: letters and shape of the array.
        itemsize: bytes of a value.
        mesh: size of each mesh axis.
        most: the most bytes of a chunk, unless an axis has no divisor.
    """
    chunk = list(shard_shape(shape, partition(axes, shape, mesh), mesh))
    stacked = _stacked(axes)
    for axis in (*stacked, *_others(axes)):
        enough = most // 8 if axis in stacked else most
        pieces = -(-prod(chunk) * itemsize // max(1, enough))
        if pieces > 1:
            chunk[axis] //= _divisor(chunk[axis], pieces)
    return tuple(chunk)


def file_shape(axes: str, shape: Shape, chunks: Shape, most: int, within: Shape | None = None) -> Shape:
    """Returns the shape of the files of an array. Chunks are joined along the innermost axes first, along stacked axes
    last.

    Args:
        axes, shape: letters and shape of the array.
        chunks: of the array.
        most: the most values of a file of several chunks.
        within: a shape that a file of several chunks does not exceed along any axis; None for no limit.
    """
    file = list(chunks)
    for axis in (*reversed(_others(axes)), *_stacked(axes)):
        longest = shape[axis] if within is None else max(chunks[axis], within[axis])
        count = min(-(-shape[axis] // chunks[axis]), longest // chunks[axis] or 1)
        fitting = max(1, most // prod(file))
        file[axis] = min(count, fitting) * chunks[axis]
        if count > fitting:
            break
    return tuple(file)


def _stacked(axes: str) -> list[int]:
    return [i for i, axis in enumerate(parse_axes(axes)) if lead(axis) in (LAYERS, PERIODS, PLACES, EXPERTS)]


def _others(axes: str) -> list[int]:
    return [i for i in range(len(parse_axes(axes))) if i not in _stacked(axes)]


def _divisor(size: int, wanted: int) -> int:
    """Returns the smallest divisor from `wanted` on, unless it is much larger; `size` if that is at most `wanted`; 1 if
    the axis is not divided."""
    if size <= wanted:
        return size
    found = next(n for n in range(wanted, size + 1) if size % n == 0)
    return found if found <= MOST_PIECES * wanted else 1
