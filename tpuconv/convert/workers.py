"""The workers of a run: threads that read slabs of the source, transform them and write chunks.

Reading, copying, hashing and writing all release the interpreter's lock. Each worker holds memory that is allocated
once: for values, for their bytes if they are stored in another form, and for two shards, of which one is built while
the other is written.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from tpuconv.checkpoint import manifest
from tpuconv.checkpoint.shards import ShardBuilder
from tpuconv.convert.plan.types import FLOAT_DTYPES, OutputArray, Plan, Slab, WorkUnit
from tpuconv.convert.sizing import buffers
from tpuconv.convert.store import Store
from tpuconv.convert.strided import copy_strided
from tpuconv.errors import SourceError
from tpuconv.jsonfile import MIB, Each, Range
from tpuconv.sources.damaged import wrong_hash
from tpuconv.sources.reader import Reader
from tpuconv.sources.shard import SourceShard
from tpuconv.storage.disk import page_buffer
from tpuconv.storage.journal import Journal

CAN_BE_NAN = {*FLOAT_DTYPES, "float8_e4m3fn"}
"""Stored dtypes that have NaN and are searched for it. Other quantized values have none."""
HASH_ENTRY = {"sha256": str}
SUM = Range(0, (1 << 64) - 1)
UNIT_ENTRY = {"checksums": Each({"values": SUM, "crcs": SUM}), "figures": Each(manifest.STATISTICS)}
"""Schemas of the journal's entries for the hash of a shard and for a unit of work."""


def hash_entry(shard: int) -> str:
    """The journal's entry for the hash of a shard, by its number."""
    return f"sha256-{shard:05d}"


Checksums = dict[str, tuple[int, int]]
"""By array: the sums over chunks and over their crc32c, as a manifest has them."""


def add_sums(checksums: Checksums, name: str, parts: tuple[int, int]) -> None:
    """Adds parts to the checksums of an array."""
    values, crcs = checksums.get(name, (0, 0))
    checksums[name] = manifest.add_checksums((values, parts[0])), manifest.add_checksums((crcs, parts[1]))


class _Cancelled(Exception):
    """Another worker failed, or the user interrupted."""


class Workers:
    """The threads of a run and what they share."""

    def __init__(self, plan: Plan, journal: Journal, store: Store, jobs: int):
        self.plan, self.journal, self.store, self.jobs = plan, journal, store, jobs
        self.stop = threading.Event()
        self.reader = plan.source.open(self._check_cancelled, hashes=plan.hashes_shards)
        self.done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.memories: queue.SimpleQueue[_Memory] = queue.SimpleQueue()
        self.writers = ThreadPoolExecutor(jobs)

    def run(self, units: Sequence[WorkUnit]) -> Iterator[int]:
        """Does all `units`. Yields the number of bytes converted so far, about ten times a second."""
        tasks = self._tasks(units)
        if units:
            for _ in range(min(self.jobs, len(units))):
                self.memories.put(_Memory(self.plan, self.writers))
        total = 0
        pool = ThreadPoolExecutor(self.jobs)
        futures: set[Future[None]] = {pool.submit(task) for task in tasks}
        try:
            while futures:
                finished, futures = wait(futures, timeout=0.1, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
                while not self.done.empty():
                    total += self.done.get()
                yield total
            self.reader.check_unchanged()
        finally:
            self.stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            self.writers.shutdown(wait=True)
            self.reader.close()

    def _tasks(self, units: Sequence[WorkUnit]) -> list[Callable[[], None]]:
        """Units in the order of the source on disk. The hash of a shard, mostly done by then, follows its last unit."""
        shards = self.plan.source.shards if self.plan.hashes_shards else ()
        last = {shard: i for i, unit in enumerate(units) for shard in self.plan.shards_of(unit)}
        tasks: list[Callable[[], None]] = [self._describe]
        tasks += [partial(self._compare, *copy) for copy in self.plan.copies.items()]
        for i, unit in enumerate(units):
            tasks.append(partial(self._unit, unit))
            tasks += [partial(self._check_hash, shard) for shard in shards if last.get(shard.name) == i]
        return tasks + [partial(self._check_hash, shard) for shard in shards if shard.name not in last]

    def _describe(self) -> None:
        if self.journal.done("metadata") is None:
            self.store.write_metadata()
            self.journal.record("metadata", {})

    def _check_hash(self, shard: SourceShard) -> None:
        entry = hash_entry(self.plan.source.shards.index(shard))
        if self.journal.done(entry, HASH_ENTRY) is None:
            digest = self.reader.sha256(shard.name)
            if digest is None:  # the source has checksums of its own
                return
            if shard.sha256 is not None and digest != shard.sha256:
                raise wrong_hash(self.plan.source.folder / shard.name, shard.sha256, digest)
            self.reader.check_unchanged({shard.name})
            self.journal.record(entry, {"sha256": digest})

    def _check_promises(self, shards: Collection[str]) -> None:
        """After an error in what shards hold: raises DamagedDownload if one does not match what the Hub promises."""
        for shard in self.plan.source.shards:
            if shard.name in shards and shard.sha256 is not None:
                self._check_hash(shard)

    def _compare(self, copy: str, original: str) -> None:
        a, b = (self.plan.tensors[name].values for name in (copy, original))
        buffers = [memoryview(bytearray(min(4 * MIB, a.nbytes))) for _ in range(2)]
        for start in range(0, a.nbytes, 4 * MIB):
            self._check_cancelled()
            views = [buffer[: a.nbytes - start] for buffer in buffers]
            for info, view in zip((a, b), views, strict=True):
                self.reader.read(info, start, view)
            if views[0] != views[1]:
                self._check_promises({a.shard, b.shard})
                raise SourceError(
                    f"{copy} should be a copy of {original}, but holds other values",
                    hint="set tie_word_embeddings in config.json to what the model was trained with"
                    + (", or leave out --include-mtp" if self.plan.options.include_mtp else ""),
                )

    def _unit(self, unit: WorkUnit) -> None:
        checksums: Checksums = {}
        statistics: dict[str, dict[str, float]] = {}
        memory = self.memories.get()
        try:
            for slab in unit.slabs:
                self._check_cancelled()
                self._slab(slab, memory, checksums, statistics)
                self.done.put(self.plan.stored_bytes(slab))
            memory.wait_until_written()
        except SourceError:
            self._check_promises(self.plan.shards_of(unit))
            raise
        finally:
            self.memories.put(memory)
        for name in statistics:
            self.plan.encoders[name].check()
        self.store.sync(checksums)
        self.reader.check_unchanged(self.plan.shards_of(unit))  # what is done was made of the files of the plan
        sums = {name: dict(zip(("values", "crcs"), parts, strict=True)) for name, parts in checksums.items()}
        self.journal.record(unit.uid, {"checksums": sums, "figures": statistics})

    def _slab(
        self, slab: Slab, memory: "_Memory", checksums: "Checksums", statistics: dict[str, dict[str, float]]
    ) -> None:
        bits = _bits(slab.dtype)  # plain integers move faster than bfloat16 and keep every bit
        sources = [source.view(bits) for source in memory.read(self.reader, self.plan, slab)]
        targets = slab.binding.layout(sources, slab.sizes)
        for stack, box, target in zip(slab.binding.dst, slab.boxes(), targets, strict=True):
            name = stack.names[0]
            encoder = self.plan.encoders.get(name)
            try:
                if encoder is None:
                    self._write(self.plan.arrays[name], box, target, memory, checksums)
                    continue
                parts, found = encoder(target.view(slab.dtype))
            except FloatingPointError:
                raise self._not_finite(name, slab, memory) from None
            manifest.add_statistics(statistics.setdefault(name, {}), found)
            for part, values, full_name in zip(encoder.parts, parts, self.plan.stored_names(name), strict=True):
                part_box = tuple(slice(s.start // n, s.stop // n) for s, n in zip(box, part.blocks, strict=True))
                array = self.plan.arrays[full_name]
                self._write(array, part_box, values.view(_bits(part.dtype)), memory, checksums)

    def _not_finite(self, name: str, slab: Slab, memory: "_Memory") -> SourceError:
        """The error for values of a parameter that are not finite. It names the first one in the source."""
        values = memory.values[: slab.nbytes].view(slab.dtype)
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
        return SourceError(
            f"{name} is not finite: there are NaN or infinite values",
            details=details,
            hint="the checkpoint is damaged, or --dtype too small for its values: download it again, try float32, or "
            "give --allow-nonfinite to convert it as it is",
        )

    def _write(
        self, array: OutputArray, box: tuple[slice, ...], values: np.ndarray, memory: "_Memory", checksums: "Checksums"
    ) -> None:
        """Builds the shard of the `values`, unsigned integers that fill `box`, and begins to write it.

        Raises:
            FloatingPointError: a value is not finite.
        """
        checked = array.dtype.name in CAN_BE_NAN and not self.plan.options.allow_nonfinite
        if checked and not all_finite(values, array.dtype):
            raise FloatingPointError
        index = tuple(s.start // n for s, n in zip(box, array.shards, strict=True))
        shard = ShardBuilder(array, index, memory.room_for_shard())
        built, copies = [], []
        for slot, start in shard.chunks():
            ranges = zip(start, box, array.chunks, strict=True)
            within = tuple(slice(a - s.start, a - s.start + c) for a, s, c in ranges)
            view = values[within + (...,)]  # "..." makes it an array, also without axes
            chunk = shard.place(slot, values.dtype)
            if view.shape != chunk.shape:  # the last one along an axis, which zarr fills up with zeros
                chunk[...] = 0
            built.append((slot, start, chunk))
            copies.append((chunk[tuple(map(slice, view.shape)) + (...,)], view))
        copy_strided(copies)
        for slot, start, chunk in built:
            part = manifest.chunk_checksum(array.shape, array.chunks, start, chunk)
            add_sums(checksums, array.name, (part, 0))
            shard.close_chunk(slot)
        add_sums(checksums, array.name, (0, manifest.crc_checksum(array.grid, index, shard.crcs())))
        memory.write(partial(self.store.write, array.name, shard))

    def _check_cancelled(self) -> None:
        if self.stop.is_set():
            raise _Cancelled


class _Memory:
    """The memory of one worker. It is allocated once, since new memory costs more than the copy into it."""

    def __init__(self, plan: Plan, writers: Executor):
        need = buffers(plan)
        self.values, self.raw, *shards = map(page_buffer, (need.values, need.raw, need.shard, need.shard))
        self.shards, self.writers = deque(shards), writers
        self.writes: deque[Future[None]] = deque()

    def room_for_shard(self) -> np.ndarray:
        """Memory for a shard. Waits until the shard that was in it is written, and raises what went wrong."""
        if len(self.writes) == len(self.shards):
            self.writes.popleft().result()
        return self.shards[0]

    def write(self, write: Callable[[], None]) -> None:
        """Begins to write the shard in the room. The next shard gets another room."""
        self.writes.append(self.writers.submit(write))
        self.shards.rotate(-1)

    def wait_until_written(self) -> None:
        """Waits until all shards are written, and raises what went wrong."""
        while self.writes:
            self.writes.popleft().result()

    def read(self, reader: Reader, plan: Plan, slab: Slab) -> list[np.ndarray]:
        """The slab's source tensors, in the dtype of its values, one after the other in `values`."""
        if plan.is_box(slab):
            (box,) = slab.boxes()
            values = self.values[: slab.nbytes].view(slab.dtype).reshape([s.stop - s.start for s in box])
            reader.read_box(plan.tensors[slab.binding.src[0].names[0]].values, box, values)
            return [values]
        sources, used = [], 0
        for parts, shape in zip(slab.reads(), slab.binding.layout.src_shapes(slab.sizes), strict=True):
            first = used
            for name, start, count in parts:
                out = self.values[used : used + count * slab.dtype.itemsize].view(slab.dtype)
                with np.errstate(all="ignore"):  # what is not finite is found in the chunks, and named
                    plan.tensors[name].read(reader, start, self.raw, out)
                used += out.nbytes
            sources.append(self.values[first:used].view(slab.dtype).reshape(shape))
        return sources


def all_finite(bits: np.ndarray, dtype: np.dtype[Any]) -> bool:
    """Whether no element is infinite or NaN, from the bit patterns of floats of the dtype `dtype`.

    Those are the patterns from that of infinity on (of NaN, if the dtype has no infinity), of either sign. So the
    largest signed and the largest unsigned pattern decide: two passes at the speed of memory, without a copy.
    """
    if not bits.size:
        return True
    infinity = int(np.array(np.inf, dtype).view(bits.dtype))
    sign = 1 << (8 * dtype.itemsize - 1)
    return int(bits.view(f"i{dtype.itemsize}").max()) < infinity and int(bits.max()) < (sign | infinity)


def _bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Unsigned integers of the same size."""
    return np.dtype(f"u{dtype.itemsize}")
