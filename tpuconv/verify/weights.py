"""Does a checkpoint hold what its manifest says? Every array is read once, by TensorStore, as Orbax will, in bounded
memory."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (numpy learns bfloat16 by it)
import numpy as np

from tpuconv.convert.manifest import Manifest, StoredArray, add_checksums, chunk_checksum
from tpuconv.errors import root_cause

READ_BYTES = 32 << 20
ORBAX_FILES = ("_METADATA", "_CHECKPOINT_METADATA", "commit_success.txt")


@dataclass(frozen=True)
class Checked:
    """One array: `fault` says what is wrong with it, None if it is whole."""

    name: str
    nbytes: int
    fault: str | None


def check(manifest: Manifest) -> Iterator[Checked]:
    """Checks structure and checksum of every array, in the manifest's order."""
    extra = sorted(p.parent.name for p in manifest.params.glob("*/zarr.json") if p.parent.name not in manifest.arrays)
    for name in (name for name in ORBAX_FILES if not (manifest.params / name).is_file()):
        yield Checked(name, 0, "is missing: Orbax does not take the folder for a checkpoint")
    for name in extra:
        yield Checked(name, 0, "is not in the manifest")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield from pool.map(lambda array: _check_array(manifest, array), manifest.arrays.values())


def _check_array(manifest: Manifest, array: StoredArray) -> Checked:
    nbytes = prod(array.shape) * np.dtype(array.dtype).itemsize
    try:
        stored = _open(manifest.params / array.name)
        have = (tuple(stored.shape), stored.dtype.name, tuple(stored.chunk_layout.read_chunk.shape or ()))
        want = (array.shape, array.dtype, array.chunks)
        if have != want:
            return Checked(array.name, nbytes, f"is {have}, the manifest says {want}")
        checksum = add_checksums(_checksums(stored, array))
    except ValueError as e:
        return Checked(array.name, nbytes, f"cannot be read: {root_cause(e)}")
    fault = None if f"{checksum:016x}" == array.xxh3 else "does not have the checksum of the manifest"
    return Checked(array.name, nbytes, fault)


def _open(folder: Path) -> Any:
    """An array as a TensorStore, of which nothing is cached and a missing chunk is an error: a ValueError, as what else
    is wrong with what is stored."""
    import tensorstore as ts

    return ts.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": str(folder.absolute())},
            "cache_pool": {"total_bytes_limit": 0},
            "fill_missing_data_reads": False,
        }
    ).result()


def _checksums(stored: Any, array: StoredArray) -> Iterator[int]:
    """The share of every chunk in the checksum, read in runs of whole chunks along the first axis."""
    dtype = np.dtype(array.dtype)
    rows, *others = array.shape or (1,)
    step = array.chunks[0] if array.shape else 1
    step *= max(1, READ_BYTES // max(1, step * prod(others) * dtype.itemsize))
    for first in range(0, rows, step):
        part = (stored[first : min(first + step, rows)] if array.shape else stored).read().result()
        for start in product(*(range(0, n, c) for n, c in zip(part.shape, array.chunks, strict=True))):
            piece = part[tuple(slice(a, a + c) for a, c in zip(start, array.chunks, strict=True))]
            chunk = np.zeros(array.chunks, dtype)
            chunk[tuple(map(slice, piece.shape))] = piece
            at = (first + start[0], *start[1:]) if start else ()
            yield chunk_checksum(array.shape, array.chunks, at, chunk)
