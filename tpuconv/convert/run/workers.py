"""The workers of a run: threads that read slabs of the source, transform them and write chunks.

Reading, copying, hashing and writing all release the interpreter's lock. Each worker holds memory that is allocated
once: for values, for their bytes if they are stored in another form, and for two shards, of which one is built while
the other is written.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Self

import numpy as np

from tpuconv.checkpoint import manifest
from tpuconv.checkpoint.schema import STATISTICS
from tpuconv.checkpoint.shards import ShardBuilder, shard_name
from tpuconv.convert.plan.types import OutputArray, Plan, Slab, WorkUnit
from tpuconv.convert.run.calibrated import QVALUES, VALUES, CalibratedValues
from tpuconv.convert.run.share import Share
from tpuconv.convert.run.sizing import buffers
from tpuconv.convert.run.slabs import CAN_BE_NAN, all_finite, check_copy, check_promise, not_finite, read_slab
from tpuconv.convert.run.steps import COMPARE_STEP, proof_step, wide_ranges, work_steps
from tpuconv.convert.run.store import Store
from tpuconv.convert.run.strided import copy_strided
from tpuconv.errors import SourceError
from tpuconv.jsonfile import Each, Optional, Range, Size
from tpuconv.sources.reader import Reader
from tpuconv.sources.shard import SourceShard
from tpuconv.storage.disk import page_buffer
from tpuconv.storage.journal import RunJournal

HASH_ENTRY = {"hash": str}
SUM = Range(0, (1 << 64) - 1)
UNIT_ENTRY = {
    "checksums": Each({"values": SUM, "crcs": SUM}),
    "figures": Each(STATISTICS),
    "shard_bytes": Optional(Each(Each(Size))),
}
"""Schemas of the journal's entries for the hash of a shard and for a unit of work."""


Checksums = dict[str, tuple[int, int]]
"""By array: the sums over chunks and over their crc32c, as a manifest has them."""


def add_sums(checksums: Checksums, name: str, parts: tuple[int, int]) -> None:
    """Adds parts to the checksums of an array."""
    values, crcs = checksums.get(name, (0, 0))
    checksums[name] = manifest.add_checksums((values, parts[0])), manifest.add_checksums((crcs, parts[1]))


@dataclass
class UnitResult:
    """What a unit of work found.

    Attributes:
        checksums: of each array that it wrote to.
        statistics: of each quantized parameter, what its encoder found.
        shard_bytes: of each compressed array, the sizes of the files that it wrote, by name.
    """

    checksums: Checksums = field(default_factory=dict)
    statistics: dict[str, dict[str, float]] = field(default_factory=dict)
    shard_bytes: dict[str, dict[str, int]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The journal's entry."""
        sums = {name: dict(zip(("values", "crcs"), parts, strict=True)) for name, parts in self.checksums.items()}
        return {
            "checksums": sums,
            "figures": self.statistics,
            **({"shard_bytes": self.shard_bytes} if self.shard_bytes else {}),
        }

    def add(self, other: "UnitResult") -> None:
        """Adds what another part of the work found."""
        for name, sums in other.checksums.items():
            add_sums(self.checksums, name, sums)
        for name, found in other.statistics.items():
            manifest.add_statistics(self.statistics.setdefault(name, {}), found)
        for name, files in other.shard_bytes.items():
            self.shard_bytes.setdefault(name, {}).update(files)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        """What the journal's entry of a unit says."""
        checksums = {name: (sums["values"], sums["crcs"]) for name, sums in entry["checksums"].items()}
        return cls(checksums, entry["figures"], entry.get("shard_bytes", {}))


class _Cancelled(Exception):
    """Another worker failed, or the user interrupted."""


class _OpenUnit:
    """A unit of work whose slabs are done side by side, by any worker."""

    def __init__(self, unit: WorkUnit):
        self.unit = unit
        self._found: dict[int, UnitResult] = {}
        self._writes: list[Future[str]] = []
        self._lock = threading.Lock()

    def add(self, number: int, found: UnitResult, writes: Sequence[Future[str]]) -> bool:
        """Adds what a slab found, and the writes of its shards. Returns whether it was the last slab."""
        with self._lock:
            self._found[number] = found
            self._writes += writes
            return len(self._found) == len(self.unit.slabs)

    def written(self) -> list[str]:
        """The files of all shards. Waits until they are written, and raises what went wrong."""
        return [write.result() for write in self._writes]

    def result(self) -> UnitResult:
        """What all slabs found, in their order."""
        result = UnitResult()
        for number in range(len(self.unit.slabs)):
            result.add(self._found[number])
        return result


Task = Callable[["_Memory"], None]


class Workers:
    """The threads of a run and what they have in common. Each takes the next task when it has done one, so that the
    source is read from start to end.

    Args:
        plan: what is converted.
        journal: takes what is done.
        store: takes the arrays.
        jobs: threads.
        share: what this process does of the plan.
        calibrated: what a calibration found, if there was one.
    """

    def __init__(
        self,
        plan: Plan,
        journal: RunJournal,
        store: Store,
        jobs: int,
        share: Share,
        calibrated: CalibratedValues | None,
    ):
        self.plan, self.journal, self.store, self.jobs, self.share = plan, journal, store, jobs, share
        self.calibrated = calibrated
        self.stop = threading.Event()
        self.reader = plan.source.open(self._check_cancelled, hashes=self._hashes())
        self.done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.writers = ThreadPoolExecutor(jobs)
        self.finisher = ThreadPoolExecutor(1)
        self.ends: deque[Future[None]] = deque()
        self.made: list[tuple[WorkUnit, UnitResult]] = []
        self.recording = threading.Lock()

    def run(self, units: Sequence[WorkUnit]) -> Iterator[int]:
        """Does all `units`. Yields the number of bytes converted so far, about ten times a second."""
        total = 0
        pool = ThreadPoolExecutor(self.jobs)
        try:  # of all that starts threads: one that an interrupt leaves without work would be waited for at exit
            tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
            for task in self._tasks(units):
                tasks.put(task)
            jobs: set[Future[None]] = {pool.submit(self._work, tasks) for _ in range(min(self.jobs, tasks.qsize()))}
            while jobs or self.ends:
                finished, jobs = wait(jobs or {self.ends[-1]}, timeout=0.1, return_when=FIRST_COMPLETED)
                for job in finished:
                    job.result()
                while self.ends and self.ends[0].done():
                    self.ends.popleft().result()
                while not self.done.empty():
                    total += self.done.get()
                yield total
            self.reader.check_unchanged()
        finally:
            self.stop.set()
            # Units that are complete count, whatever ended the work.
            pools = (partial(pool.shutdown, cancel_futures=True), self.writers.shutdown, self.finisher.shutdown)
            _end((*pools, self.reader.close))

    def _hashes(self) -> list[str]:
        """The files to be hashed while they are read. Of a source that is here, those are left out whose hash is known
        from an earlier run: a hash needs all of a file."""
        numbers = {shard.name: i for i, shard in enumerate(self.plan.source.shards)}
        names = self.share.hashes(self.plan)
        if self.plan.source.remote:
            return names
        return [name for name in names if self.journal.done(proof_step(numbers[name]), HASH_ENTRY) is None]

    def _work(self, tasks: "queue.SimpleQueue[Task]") -> None:
        """Does one task after the other until none is left."""
        memory = _Memory(self.plan, self.writers)
        while (task := _next_of(tasks)) is not None:
            self._check_cancelled()
            task(memory)

    def _tasks(self, units: Sequence[WorkUnit]) -> Iterator[Task]:
        """What is done for each step, in the order of the steps. From here on a source that is not here is fetched."""
        plan = self.plan
        names = [COMPARE_STEP, *(proof_step(i) for i in range(len(plan.source.shards)))]
        known = {name for name in names if name in self.share.others or self.journal.done(name) is not None}
        steps, wide = work_steps(plan, units, known), wide_ranges(plan)
        reserved = sum(plan.written_bytes(slab) for unit in units for slab in unit.slabs)
        while lost := self.reader.begin(steps, wide, self.journal.work, reserved):
            again = {proof_step(i) for i, shard in enumerate(plan.source.shards) if shard.name in lost}
            self.journal.forget(sorted(again))
            known -= again
            steps = work_steps(plan, units, known)
        tasks: dict[str, list[Task]] = {COMPARE_STEP: [self._compare]}
        tasks |= {unit.uid: self._unit(unit) for unit in units}
        tasks |= {proof_step(i): [partial(self._check_hash, shard)] for i, shard in enumerate(plan.source.shards)}
        for step in steps:
            yield from tasks[step.name]

    def _check_hash(self, shard: SourceShard, _: "_Memory | None" = None) -> None:
        entry = proof_step(self.plan.source.shards.index(shard))
        # What another process found does not prove what was fetched here.
        if self.journal.done(entry, HASH_ENTRY) is None or self.reader.unproved({shard.name}):
            digest = check_promise(self.plan, self.reader, shard)
            if digest is None:  # the source has checksums of its own
                return
            self.reader.check_unchanged({shard.name})
            self.journal.record(entry, {"hash": digest})
            self.reader.finish(entry)
            self._record_proved()

    def _check_promises(self, shards: Collection[str]) -> None:
        """After an error in what shards hold: raises DamagedDownload if one does not match what the Hub promises."""
        self.reader.unbound()
        for shard in self.plan.source.shards:
            if shard.name in shards and shard.sha256 is not None:
                self._check_hash(shard)

    def _compare(self, _: "_Memory") -> None:
        for copy, original in self.plan.copies.items():
            try:
                check_copy(self.plan, self.reader, copy, original, self._check_cancelled)
            except SourceError:
                self._check_promises({self.plan.tensors[name].values.shard for name in (copy, original)})
                raise
        self.journal.record(COMPARE_STEP, {})
        self.reader.finish(COMPARE_STEP)

    def _unit(self, unit: WorkUnit) -> list[Task]:
        """A task for each slab of a unit."""
        made = _OpenUnit(unit)
        return [partial(self._unit_slab, made, number) for number in range(len(unit.slabs))]

    def _unit_slab(self, made: _OpenUnit, number: int, memory: "_Memory") -> None:
        """Does a slab of a unit."""
        slab, found = made.unit.slabs[number], UnitResult()
        try:
            writes = self._slab(slab, memory, found)
        except SourceError:
            self._check_promises(self.plan.shards_of(made.unit))
            raise
        self.done.put(self.plan.stored_bytes(slab))
        if made.add(number, found, writes):
            self.ends.append(self.finisher.submit(self._finish, made))

    def _finish(self, made: _OpenUnit) -> None:
        """Flushes what was made of a unit, and records it. In a thread of its own: it waits for the disk."""
        written, result = made.written(), made.result()
        for name in result.statistics:
            self.plan.encoders[name].check()
        self.store.sync(written)
        self.reader.check_unchanged(self.plan.shards_of(made.unit))  # what is done was made of the files of the plan
        with self.recording:
            self.made.append((made.unit, result))
        self._record_proved()

    def _record_proved(self) -> None:
        """Marks as done the units that are made, and whose sources are known to be the promised ones."""
        with self.recording:
            proved = [made for made in self.made if not self.reader.unproved(self.plan.shards_of(made[0]))]
            self.made = [made for made in self.made if made not in proved]
        for unit, result in proved:
            self.journal.record(unit.uid, result.to_json())
            self.reader.finish(unit.uid)

    def _slab(self, slab: Slab, memory: "_Memory", result: UnitResult) -> list[Future[str]]:
        """Converts a slab, and begins to write its shards."""
        writes = []
        bits = _bits(slab.dtype)  # plain integers move faster than bfloat16 and keep every bit
        sources = [source.view(bits) for source in memory.read(self.reader, self.plan, slab)]
        targets, changes = slab.binding.layout(sources, slab.sizes), slab.binding.arithmetic
        for stack, box, rearranged in zip(slab.binding.dst, slab.boxes(), targets, strict=True):
            name = stack.names[0]
            encoder = self.plan.encoders.get(name)
            target = self._calibrated(name, VALUES, box, slab.dtype)
            target = rearranged if target is None else target.view(bits)
            if (change := changes.get(name)) is not None:
                with np.errstate(all="ignore"):  # what is not finite is found in the chunks, and named
                    target = change.apply(rearranged.view(slab.dtype), slab.binding.sizes).view(bits)
            try:
                if encoder is None:
                    writes.append(self._write(self.plan.arrays[name], box, target, memory, result))
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
                own_box = tuple(box for axis, box in enumerate(part_box) if axis not in array.dropped)
                own_values = values.view(_bits(part.dtype)).squeeze(array.dropped)
                writes.append(self._write(array, own_box, own_values, memory, result))
        return writes

    def _calibrated(self, name: str, kind: str, box: tuple[slice, ...], dtype: np.dtype[Any]) -> np.ndarray | None:
        """What a calibration found for a box of a parameter, if there was one."""
        if self.calibrated is None:
            return None
        return self.calibrated.read(name, kind, self.plan.arrays[self.plan.stored_names(name)[0]].shape, box, dtype)

    def _not_finite(self, name: str, slab: Slab, sources: Sequence[np.ndarray]) -> SourceError:
        """The error for values of a parameter that are not finite. It names the first one in the source."""
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

    def _write(
        self, array: OutputArray, box: tuple[slice, ...], values: np.ndarray, memory: "_Memory", result: UnitResult
    ) -> Future[str]:
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
        return memory.write(partial(self.store.write, array.name, shard))

    def _check_cancelled(self) -> None:
        if self.stop.is_set():
            raise _Cancelled


def _next_of(tasks: "queue.SimpleQueue[Task]") -> Task | None:
    with suppress(queue.Empty):
        return tasks.get_nowait()
    return None


def _end(steps: Iterable[Callable[[], None]]) -> None:
    """Does all steps, whatever signals arrive meanwhile: a thread that outlives the lock of the journal would write
    into the work of whoever takes it next. Then raises the last signal."""
    interruption: KeyboardInterrupt | None = None
    for step in steps:
        is_done = False
        while not is_done:
            try:
                step()
                is_done = True
            except KeyboardInterrupt as e:
                interruption = e
    if interruption is not None:
        raise interruption


class _Memory:
    """The memory of one worker. It is allocated once, since new memory costs more than the copy into it."""

    def __init__(self, plan: Plan, writers: Executor):
        need = buffers(plan)
        self.values, self.raw, *shards = map(page_buffer, (need.values, need.raw, need.shard, need.shard))
        self.shards, self.writers = deque(shards), writers
        self.writes: deque[Future[str]] = deque()

    def room_for_shard(self) -> np.ndarray:
        """Memory for a shard. Waits until the shard that was in it is written, and raises what went wrong."""
        if len(self.writes) == len(self.shards):
            self.writes.popleft().result()
        return self.shards[0]

    def write(self, write: Callable[[], str]) -> "Future[str]":
        """Begins to write the shard in the room. The next shard gets another room."""
        self.writes.append(self.writers.submit(write))
        self.shards.rotate(-1)
        return self.writes[-1]

    def read(self, reader: Reader, plan: Plan, slab: Slab) -> list[np.ndarray]:
        """The slab's source tensors; see `read_slab`."""
        return read_slab(reader, plan, slab, self.values, self.raw)


def _bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Unsigned integers of the same size."""
    return np.dtype(f"u{dtype.itemsize}")
