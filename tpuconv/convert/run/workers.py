"""The workers of a run: threads that take one task after the other, mostly to convert a slab of the source.

Reading, copying, hashing and writing all release the interpreter's lock.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial

from tpuconv.convert.plan.types import ZEROS, Plan
from tpuconv.convert.plan.units import WorkUnit
from tpuconv.convert.run.calibrated import CalibratedValues
from tpuconv.convert.run.converter import SlabConverter
from tpuconv.convert.run.results import HASH_ENTRY, UnitResult
from tpuconv.convert.run.share import Share
from tpuconv.convert.run.slabs import check_copy, check_promise
from tpuconv.convert.run.steps import COMPARE_STEP, proof_step, wide_ranges, work_steps
from tpuconv.convert.run.store import Store
from tpuconv.errors import SourceError
from tpuconv.progress import TICK_SECONDS
from tpuconv.sources.shard import SourceShard
from tpuconv.storage.entries import RunJournal


class Cancelled(Exception):
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
        """Returns the files of all shards. Waits until they are written, and raises what went wrong."""
        return [write.result() for write in self._writes]

    def result(self) -> UnitResult:
        """Returns the results of all slabs, in their order."""
        result = UnitResult()
        for number in range(len(self.unit.slabs)):
            result.add(self._found[number])
        return result


Task = Callable[[SlabConverter], None]


class Workers:
    """The threads of a run and what they have in common. Each takes the next task when it has done one, so that the
    source is read from start to end.

    Args:
        plan: what is converted.
        journal: takes what is done.
        store: takes the arrays.
        jobs: threads that convert. As many write, and one flushes what is written.
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
        self.calibrated, self.need = calibrated, plan.buffers
        self.stop = threading.Event()
        self.reader = plan.source.open(self._check_cancelled, hashes=self._hashes())
        self.converted: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.writers = ThreadPoolExecutor(jobs)
        self.finisher = ThreadPoolExecutor(1)
        self.flushes: deque[Future[None]] = deque()

    def run(self, units: Sequence[WorkUnit]) -> Iterator[int]:
        """Does all `units`. Yields the number of bytes converted so far, about ten times a second."""
        total = 0
        pool = ThreadPoolExecutor(self.jobs)
        try:  # of all that starts threads: one that an interrupt leaves without work would be waited for at exit
            tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
            for task in self._tasks(units):
                tasks.put(task)
            jobs: set[Future[None]] = {pool.submit(self._work, tasks) for _ in range(min(self.jobs, tasks.qsize()))}
            while jobs or self.flushes:
                finished, jobs = wait(jobs or {self.flushes[-1]}, timeout=TICK_SECONDS, return_when=FIRST_COMPLETED)
                for job in finished:
                    job.result()
                while self.flushes and self.flushes[0].done():
                    self.flushes.popleft().result()
                while not self.converted.empty():
                    total += self.converted.get()
                yield total
            self.reader.check_unchanged()
        finally:
            self.stop.set()
            # Units that are complete count, whatever ended the work.
            pools = (partial(pool.shutdown, cancel_futures=True), self.writers.shutdown, self.finisher.shutdown)
            _end((*pools, self.reader.close))

    def _hashes(self) -> list[str]:
        """Returns the files to be hashed while they are read, without those whose hash is known from an earlier run: a
        hash needs all of a file."""
        numbers = {shard.name: i for i, shard in enumerate(self.plan.source.shards)}
        names = [shard.name for shard in self.share.shards]
        return [name for name in names if self.journal.done(proof_step(numbers[name]), HASH_ENTRY) is None]

    def _work(self, tasks: "queue.SimpleQueue[Task]") -> None:
        """Does one task after the other until none is left."""
        converter = SlabConverter(self.plan, self.need, self.reader, self.store, self.calibrated, self.writers)
        while (task := _next_of(tasks)) is not None:
            self._check_cancelled()
            task(converter)

    def _tasks(self, units: Sequence[WorkUnit]) -> Iterator[Task]:
        """Yields the tasks of each step, in the order of the steps. From here on a remote source is fetched."""
        plan = self.plan
        names = [COMPARE_STEP, *(proof_step(i) for i in range(len(plan.source.shards)))]
        known = {name for name in names if name in self.share.others or self.journal.done(name) is not None}
        steps, wide = work_steps(plan, units, known), wide_ranges(plan)
        reserved = sum(plan.written_bytes(slab) for unit in units for slab in unit.slabs)
        self.reader.begin(steps, wide, self.journal.work, reserved)
        tasks: dict[str, list[Task]] = {COMPARE_STEP: [self._compare]}
        tasks |= {unit.uid: self._unit(unit) for unit in units}
        tasks |= {proof_step(i): [partial(self._check_hash, shard)] for i, shard in enumerate(plan.source.shards)}
        for step in steps:
            yield from tasks[step.name]

    def _check_hash(self, shard: SourceShard, _: SlabConverter | None = None) -> None:
        entry = proof_step(self.plan.source.shards.index(shard))
        if self.journal.done(entry, HASH_ENTRY) is None:
            digest = check_promise(self.plan.source, self.reader, shard)
            if digest is None:  # the source has checksums of its own
                return
            self.reader.check_unchanged({shard.name})
            self.journal.record(entry, {"hash": digest})
        self.reader.finish(entry)

    def _check_promises(self, shards: Collection[str]) -> None:
        """After an error in what shards hold: raises DamagedDownload if one does not match what the Hub promises. A
        shard that was fetched meanwhile was proved before it was read."""
        for shard in self.plan.source.shards:
            if shard.name in shards and shard.sha256 is not None and shard.name not in self.plan.source.remote:
                self._check_hash(shard)

    def _compare(self, _: SlabConverter) -> None:
        for copy, original in self.plan.copies.items():
            try:
                check_copy(self.plan, self.reader, copy, original, self._check_cancelled)
            except SourceError:
                names = [name for name in (copy, original) if name != ZEROS]
                self._check_promises({self.plan.tensors[name].values.shard for name in names})
                raise
        self.journal.record(COMPARE_STEP, {})
        self.reader.finish(COMPARE_STEP)

    def _unit(self, unit: WorkUnit) -> list[Task]:
        """Returns a task for each slab of a unit."""
        opened = _OpenUnit(unit)
        return [partial(self._unit_slab, opened, number) for number in range(len(unit.slabs))]

    def _unit_slab(self, opened: _OpenUnit, number: int, converter: SlabConverter) -> None:
        """Does a slab of a unit."""
        slab, found = opened.unit.slabs[number], UnitResult()
        try:
            writes = converter.convert(slab, found)
        except SourceError:
            self._check_promises(self.plan.shards_of(opened.unit))
            raise
        self.converted.put(self.plan.stored_bytes(slab))
        if opened.add(number, found, writes):
            self.flushes.append(self.finisher.submit(self._finish, opened))

    def _finish(self, opened: _OpenUnit) -> None:
        """Flushes what was made of a unit, and records it. In a thread of its own: it waits for the disk."""
        unit, written, result = opened.unit, opened.written(), opened.result()
        for name in result.statistics:
            self.plan.encoders[name].check()
        self.store.sync(written)
        self.reader.check_unchanged(self.plan.shards_of(unit))  # what is done was made of the files of the plan
        self.journal.record(unit.uid, result.to_json(), written)
        self.reader.finish(unit.uid)

    def _check_cancelled(self) -> None:
        if self.stop.is_set():
            raise Cancelled


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
