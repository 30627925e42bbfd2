"""Converting slabs: what one job of a run does with its memory."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from itertools import chain
from typing import Any

import numpy as np

from tpuconv.checkpoint import manifest
from tpuconv.checkpoint.shards import ShardBuilder, shard_name
from tpuconv.convert.plan.types import OutputArray, Plan, Slab
from tpuconv.convert.run.calibrated import QVALUES, VALUES, CalibratedValues
from tpuconv.convert.run.results import UnitResult, add_sums
from tpuconv.convert.run.sizing import Buffers
from tpuconv.convert.run.slabs import CAN_BE_NAN, all_finite, not_finite, read_slab
from tpuconv.convert.run.store import Store
from tpuconv.convert.run.strided import copy_strided
from tpuconv.encodings.casts import check_cast
from tpuconv.errors import SourceError
from tpuconv.sources.reader import Reader
from tpuconv.storage.disk import page_buffer


class SlabConverter:
    """Reads slabs, rearranges or quantizes their values, builds shards and has them written.

    Its memory is allocated once, since new memory costs more than the copy into it: for values, for their bytes if they
    are stored in another form, and for two shards, of which one is built while the other is written.

    Args:
        plan: of the slabs.
        need: the memory that they need.
        reader: of the source.
        store: takes the shards.
        calibrated: what a calibration found, if there was one.
        writers: the threads that write.
    """

    def __init__(
        self,
        plan: Plan,
        need: Buffers,
        reader: Reader,
        store: Store,
        calibrated: CalibratedValues | None,
        writers: Executor,
    ):
        self.plan, self.reader, self.store, self.calibrated, self._writers = plan, reader, store, calibrated, writers
        self._values, self._raw, *shards = map(page_buffer, (need.values, need.raw, need.shard, need.shard))
        self._shards = deque(shards)
        self._writes: deque[Future[str]] = deque()

    def convert(self, slab: Slab, result: UnitResult) -> list[Future[str]]:
        """Converts a slab, and begins to write its shards.

        Args:
            slab: what to convert.
            result: takes what is found.

        Returns:
            The writes, each with the path of the file.

        Raises:
            SourceError: the source cannot be read, or holds values that are not finite.
        """
        writes = []
        bits = _bits(slab.dtype)  # plain integers move faster than bfloat16 and keep every bit
        sources = [x.view(bits) for x in read_slab(self.reader, self.plan, slab, self._values, self._raw)]
        targets, changes = slab.binding.layout(sources, slab.sizes), slab.binding.arithmetic
        for stack, box, rearranged in zip(slab.binding.dst, slab.boxes(), targets, strict=True):
            name = stack.names[0]
            encoder = self.plan.encoders.get(name)
            target = self._calibrated(name, VALUES, box, slab.dtype, rearranged.view(slab.dtype))
            target = rearranged if target is None else target.view(bits)
            if (change := changes.get(name)) is not None:
                with np.errstate(all="ignore"):  # what is not finite is found in the chunks, and named
                    target = change.apply(rearranged.view(slab.dtype), slab.binding.sizes).view(bits)
                if self.plan.options.allow_nonfinite:
                    check_cast(name, rearranged.view(slab.dtype), target.view(slab.dtype))
            try:
                if encoder is None:
                    writes.append(self._write(self.plan.arrays[name], box, target, result))
                    continue
                parts, found = encoder(
                    target.view(slab.dtype), self._calibrated(name, QVALUES, box, np.dtype(np.uint8))
                )
            except FloatingPointError:
                raise self._not_finite(name, slab, sources) from None
            manifest.add_statistics(result.statistics.setdefault(name, {}), found)
            for part, values, full_name in zip(encoder.parts, parts, self.plan.stored_names(name), strict=True):
                part_box = tuple(slice(s.start // n, s.stop // n) for s, n in zip(box, part.blocks, strict=True))
                array = self.plan.arrays[full_name]
                array_box = tuple(box for axis, box in enumerate(part_box) if axis not in array.dropped)
                array_values = values.view(_bits(part.dtype)).squeeze(array.dropped)
                writes.append(self._write(array, array_box, array_values, result))
        return writes

    def _calibrated(
        self, name: str, kind: str, box: tuple[slice, ...], dtype: np.dtype[Any], others: np.ndarray | None = None
    ) -> np.ndarray | None:
        """Returns the result of a calibration for a box of a parameter, if there was a calibration; see
        `CalibratedValues.read`."""
        if self.calibrated is None:
            return None
        shape = self.plan.arrays[self.plan.stored_names(name)[0]].shape
        return self.calibrated.read(name, kind, shape, box, dtype, others)

    def _not_finite(self, name: str, slab: Slab, sources: Sequence[np.ndarray]) -> SourceError:
        """Returns the error for values of a parameter that are not finite. It names the first one in the source."""
        values = np.concatenate([source.reshape(-1) for source in sources]).view(slab.dtype)
        found = np.flatnonzero(~np.isfinite(values.astype(np.float64)))
        details = []
        if found.size:
            number = int(found[0])
            for source, start, count in chain.from_iterable(slab.reads()):
                if number < count:
                    index = self.plan.tensors[source].place(start + number)
                    details.append(f"the first is {source}{index}, which is {values[found[0]]} in {slab.dtype.name}")
                    break
                number -= count
        return not_finite(name, details)

    def _write(self, array: OutputArray, box: tuple[slice, ...], values: np.ndarray, result: UnitResult) -> Future[str]:
        """Builds the shard of the `values`, unsigned integers that fill `box`, and begins to write it.

        Raises:
            FloatingPointError: a value is not finite.
        """
        checked = array.dtype.name in CAN_BE_NAN and not self.plan.options.allow_nonfinite
        if checked and not all_finite(values, array.dtype):
            raise FloatingPointError
        index = tuple(s.start // n for s, n in zip(box, array.shards, strict=True))
        shard = ShardBuilder(array, index, self._room_for_shard())
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
            result.shard_bytes.setdefault(array.name, {})[shard_name(index)] = shard.nbytes
        self._writes.append(self._writers.submit(self.store.write, array.name, shard))
        self._shards.rotate(-1)  # the next shard gets the other memory
        return self._writes[-1]

    def _room_for_shard(self) -> np.ndarray:
        """Memory for a shard. Waits until the shard that was in it is written, and raises what went wrong."""
        if len(self._writes) == len(self._shards):
            self._writes.popleft().result()
        return self._shards[0]


def _bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Unsigned integers of the same size."""
    return np.dtype(f"u{dtype.itemsize}")
