"""Copies strided views to contiguous chunks: what remains of a layout's transpositions when values are written."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

MIN_TRANSPOSED = 1 << 16
"""Number of elements from which on a transposition is worth the import of the compiled loop."""
WORD = 8
"""Bytes that are moved at once."""


def copy_strided(copies: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    """Does `chunk[...] = view` for each pair (chunk, view). A chunk may be a part of a larger array.

    If the views are transposed, a compiled loop copies them all at once, ten times as fast: a thread that releases the
    interpreter's lock for each chunk waits longer for it than the copy takes.
    """
    alike: dict[tuple[Any, ...], list[tuple[np.ndarray, np.ndarray]]] = {}
    for chunk, view in copies:
        alike.setdefault((view.shape, view.strides, chunk.strides), []).append((chunk, view))
    for group in alike.values():
        if not _transpose(*zip(*group, strict=True)):
            for chunk, view in group:
                np.copyto(chunk, view)


def _transpose(chunks: Sequence[np.ndarray], views: Sequence[np.ndarray]) -> bool:
    """Transposes the views into the chunks, which are all alike, if they consist of matrices whose columns are
    contiguous in the views and whose rows are contiguous in the chunks, in complete words. Returns whether they do."""
    chunk, view = chunks[0], views[0]
    if view.ndim < 2 or view.size * len(views) < MIN_TRANSPOSED or view.strides[-1] == view.itemsize:
        return False
    axis = int(np.argmin(view.strides[:-1]))
    rows, columns, pitch = view.shape[axis], view.shape[-1], view.strides[-1]
    per = WORD // view.itemsize
    if (
        min(*view.strides, *chunk.strides) <= 0
        or (view.strides[axis], chunk.strides[-1]) != (view.itemsize, view.itemsize)
        or any(n % per for n in (rows, columns))
    ):
        return False
    (source, source_starts), (target, target_starts) = _matrices(views, axis), _matrices(chunks, axis)
    if pitch % WORD or chunk.strides[axis] % WORD or (source_starts % WORD).any():
        return False

    from tpuconv.convert.run.transpose import transpose

    last = int(source_starts.max()) + (columns - 1) * pitch + rows * view.itemsize
    words = as_strided(source, (last // view.itemsize,), (view.itemsize,)).view(np.uint64)
    room = int(target_starts.max()) + (rows - 1) * chunk.strides[axis] + columns * view.itemsize
    first = target[(0,) * (target.ndim - 1)][:1].view(np.uint8)  # by bytes: chunks are 4 apart, elements may have 8
    out = as_strided(first, (room,), (1,))
    out_pitch = chunk.strides[axis] // WORD
    transpose(words, source_starts // WORD, pitch // WORD, out, target_starts, out_pitch, columns, rows, per)
    return True


def _matrices(arrays: Sequence[np.ndarray], axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the matrices of this axis and the last one in equal arrays: the array in which the first one lies, and
    their offsets [matrices] from it in bytes."""
    first = arrays[0]
    starts = np.array([array.__array_interface__["data"][0] for array in arrays])
    offsets = starts - starts.min()
    for other, (n, stride) in enumerate(zip(first.shape[:-1], first.strides[:-1], strict=True)):
        if other != axis:
            offsets = (offsets[:, None] + stride * np.arange(n)).reshape(-1)
    return arrays[int(np.argmin(starts))], offsets
