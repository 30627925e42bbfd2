"""Copies of strided views to contiguous chunks: what is left of a layout's transpositions when values are written."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

MIN_TRANSPOSED = 1 << 16
"""Elements from which on a transposition is worth the import of its kernel."""
WORD = 8
"""Bytes that are moved at once."""


def copy_strided(copies: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    """`chunk[...] = view` for each (chunk, view). Where views are transposed a kernel does it, ten times as fast and
    at once: a thread that lets go of the interpreter's lock for each chunk waits longer for it than copying takes."""
    alike: dict[tuple[Any, ...], list[tuple[np.ndarray, np.ndarray]]] = {}
    for chunk, view in copies:
        alike.setdefault((view.shape, view.strides, chunk.strides), []).append((chunk, view))
    for own in alike.values():
        if not _transpose(*zip(*own, strict=True)):
            for chunk, view in own:
                np.copyto(chunk, view)


def _transpose(chunks: Sequence[np.ndarray], views: Sequence[np.ndarray]) -> bool:
    """Does it if they consist of matrices whose columns are contiguous in the views and whose rows are in the chunks,
    in whole words; says whether they do. All are alike."""
    chunk, view = chunks[0], views[0]
    if view.ndim < 2 or view.size * len(views) < MIN_TRANSPOSED or view.strides[-1] == view.itemsize:
        return False
    axis = int(np.argmin(view.strides[:-1]))
    rows, columns, pitch = view.shape[axis], view.shape[-1], view.strides[-1]
    per = WORD // view.itemsize
    if (
        min(view.strides) <= 0
        or (view.strides[axis], chunk.strides[-1]) != (view.itemsize, view.itemsize)
        or chunk.strides[axis] != columns * view.itemsize
        or any(n % per for n in (rows, columns))
    ):
        return False
    (source, at), (target, to) = _matrices(views, axis), _matrices(chunks, axis)
    if pitch % WORD or (at % WORD).any():
        return False

    from tpuconv.convert.transpose import transpose

    last = int(at.max()) + (columns - 1) * pitch + rows * view.itemsize
    words = as_strided(source, (last // view.itemsize,), (view.itemsize,)).view(np.uint64)
    room = int(to.max()) + rows * columns * view.itemsize
    first = target[(0,) * (target.ndim - 1)][:1].view(np.uint8)  # by bytes: chunks are 4 apart, elements may have 8
    out = as_strided(first, (room,), (1,))
    transpose(words, at // WORD, pitch // WORD, out, to, columns, rows, per)
    return True


def _matrices(arrays: Sequence[np.ndarray], axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the matrices begin that this axis and the last one make of arrays alike: the array in which the first one
    lies, and their distances from it in bytes."""
    first = arrays[0]
    starts = np.array([array.__array_interface__["data"][0] for array in arrays])
    at = starts - starts.min()
    for other, (n, stride) in enumerate(zip(first.shape[:-1], first.strides[:-1], strict=True)):
        if other != axis:
            at = (at[:, None] + stride * np.arange(n)).reshape(-1)
    return arrays[int(np.argmin(starts))], at
