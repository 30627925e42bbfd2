"""Builds the shards of arrays from their values."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tpuconv.checkpoint import manifest
from tpuconv.checkpoint.shards import ShardBuilder
from tpuconv.convert.plan.types import OutputArray, Plan
from tpuconv.convert.run.results import UnitResult, add_sums
from tpuconv.convert.run.store import Store
from tpuconv.convert.run.strided import copy_strided
from tpuconv.storage.disk import page_buffer
from tpuconv.storage.entries import RunJournal
from tpuconv.storage.journal import CALIBRATED

FOUND_STEP = f"{CALIBRATED}-arrays"
"""The journal's entry of the arrays that a calibration finds, of the same form as the entry of a unit of work."""


def build_shard(
    array: OutputArray, box: tuple[slice, ...], values: np.ndarray, memory: np.ndarray, result: UnitResult
) -> ShardBuilder:
    """Returns the shard of an array with these values.

    Args:
        array: of the output.
        box: the part of the array that the shard has.
        values: unsigned integers that fill `box`.
        memory: for the file of the shard; see `ShardBuilder`.
        result: takes the checksums, and the size of the file of a compressed array.
    """
    index = tuple(s.start // n for s, n in zip(box, array.shards, strict=True))
    shard = ShardBuilder(array, index, memory)
    built, copies = [], []
    for slot, start in shard.chunks():
        ranges = zip(start, box, array.chunks, strict=True)
        inside: tuple[Any, ...] = tuple(slice(a - s.start, a - s.start + c) for a, s, c in ranges)
        view = values[(*inside, ...)]  # "...": never a scalar
        chunk = shard.place(slot, values.dtype)
        if view.shape != chunk.shape:  # the last one along an axis, which zarr fills up with zeros
            chunk[...] = 0
        built.append((slot, start, chunk))
        filled: tuple[Any, ...] = tuple(map(slice, view.shape))
        copies.append((chunk[(*filled, ...)], view))
    copy_strided(copies)
    for slot, start, chunk in built:
        part = manifest.chunk_checksum(array.shape, array.chunks, start, chunk)
        add_sums(result.checksums, array.name, (part, 0))
        shard.close_chunk(slot)
    add_sums(result.checksums, array.name, (0, manifest.crc_checksum(array.grid, index, shard.crcs())))
    if array.compressed:
        result.shard_bytes.setdefault(array.name, {})[array.shard_name(index)] = shard.nbytes
    return shard


def write_found(plan: Plan, journal: RunJournal, store: Store, values: Mapping[str, np.ndarray]) -> None:
    """Writes the arrays with these values that a calibration found, by name, and records them as done. They are small:
    each is one shard with one chunk."""
    result, paths = UnitResult(), []
    for name, found in values.items():
        array = plan.arrays[name]
        box = tuple(slice(0, n) for n in array.shape)
        shard = build_shard(array, box, found.view(np.uint32), page_buffer(array.shard_bytes), result)
        paths.append(store.write(name, shard))
    store.sync(paths)
    journal.record(FOUND_STEP, result.to_json(), paths)
