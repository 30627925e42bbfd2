"""Writes the arrays that a calibration finds. They are small: each is one shard with one chunk."""

from collections.abc import Mapping

import numpy as np

from tpuconv.checkpoint.manifest import chunk_checksum, crc_checksum
from tpuconv.checkpoint.shards import ShardBuilder
from tpuconv.convert.plan.types import Plan
from tpuconv.convert.run.results import UnitResult, add_sums
from tpuconv.convert.run.store import Store
from tpuconv.storage.disk import page_buffer
from tpuconv.storage.entries import RunJournal
from tpuconv.storage.journal import CALIBRATED

FOUND_STEP = f"{CALIBRATED}-arrays"
"""The journal's entry, of the same form as the entry of a unit of work."""


def write_found(plan: Plan, journal: RunJournal, store: Store, values: Mapping[str, np.ndarray]) -> None:
    """Writes the arrays with these values, by name, and records them as done."""
    result, paths = UnitResult(), []
    for name, found in values.items():
        spec = plan.arrays[name]
        first = (0,) * len(spec.shape)
        shard = ShardBuilder(spec, first, page_buffer(spec.shard_bytes))
        for slot, start in shard.chunks():
            chunk = shard.place(slot, np.dtype(np.uint32))
            chunk[...] = found.view(np.uint32)
            add_sums(result.checksums, name, (chunk_checksum(spec.shape, spec.chunks, start, chunk), 0))
            shard.close_chunk(slot)
        add_sums(result.checksums, name, (0, crc_checksum(spec.grid, first, shard.crcs())))
        paths.append(store.write(name, shard))
    store.sync(paths)
    journal.record(FOUND_STEP, result.to_json(), paths)
