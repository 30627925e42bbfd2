"""Files of safetensors that are written while their source is fetched, from the Hub or a bucket.

To the reader of the source each file is a step: what was fetched for it stays until it is recorded, and it is recorded
once every shard that it was made from has the hash that the Hub promises.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tpuconv.convert.export.carried import Carried
from tpuconv.convert.export.files import file_names
from tpuconv.convert.export.layout import FileLayout
from tpuconv.convert.export.planned_arrays import PlannedArrays
from tpuconv.convert.plan.types import Plan
from tpuconv.convert.run.slabs import check_promise
from tpuconv.convert.run.steps import COMPARE_STEP, compare_steps, copied_ranges, proof_of, proof_step, whole
from tpuconv.errors import SourceError
from tpuconv.hosts import ProcessPart
from tpuconv.sources.schedule import Extent, FetchSchedule, ReadStep
from tpuconv.storage.entries import RunJournal

Reads = Sequence[Collection[Extent]]
"""By file of an export what it is made from."""


def file_entry(number: int) -> str:
    """Returns the name of the journal's entry, and of the step, for a file of an export."""
    return f"file-{number:05d}"


def record_file(journal: RunJournal, number: int, count: int, facts: Mapping[str, Any]) -> None:
    """Records that one of `count` files is done."""
    journal.record(file_entry(number), facts, [file_names(count)[number]])


def file_reads(arrays: PlannedArrays, layout: FileLayout, beside: Carried | None) -> list[set[Extent]]:
    """Returns the extents of the source that each file is made from."""
    place = {tensor.name: number for number, file in enumerate(layout.files) for tensor in file}
    reads: list[set[Extent]] = [set() for _ in layout.files]
    for piece in layout.pieces:
        names = {name for row in piece.rows for stack in row.inverse.src for name in stack.names}
        extents = {extent for name in names for slab in piece.slabs for extent in arrays.extents(name, slab)}
        for number in {place[tensor.name] for tensor in piece.tensors}:
            reads[number].update(extents)
    for tensor in beside.tensors if beside else ():
        reads[place[tensor.name]].add(whole(arrays.plan.source.tensors[tensor.of]))
    return reads


def file_steps(
    plan: Plan, reads: Reads, left: Sequence[int], proved: Collection[str], known: Collection[str]
) -> list[ReadStep]:
    """Returns the files that are left to write in their order, each followed by the proofs of the shards that no
    further one reads; then copies are compared.

    Args:
        plan: of the source.
        reads: of all files.
        left: numbers of files.
        proved: the shards whose hash this process compares.
        known: names of steps that are done.
    """
    last = {shard: number for number in left for shard, _, _ in reads[number]}
    proofs: dict[int | None, list[ReadStep]] = {}
    for i, shard in enumerate(plan.source.shards):
        if shard.name in proved and proof_step(i) not in known:
            proofs.setdefault(last.get(shard.name), []).append(proof_of(i, shard))
    steps = []
    for number in left:
        steps += [ReadStep(file_entry(number), tuple(reads[number])), *proofs.pop(number, ())]
    return [*steps, *proofs.get(None, ()), *compare_steps(plan, known)]


def workspace_of_files(arrays: PlannedArrays, reads: Reads) -> int:
    """Returns the most that the source takes on the disk of the workspace while all files are written."""
    plan = arrays.plan
    sizes = {shard.name: shard.size for shard in plan.source.shards if shard.name in plan.source.remote}
    steps = file_steps(plan, reads, range(len(reads)), arrays.hashed, ())
    return FetchSchedule(sizes, steps, copied_ranges(plan)).peak_bytes


class FetchedFiles:
    """The files that this process writes.

    Args:
        arrays: what is exported.
        reads: the reads of all files, also of other processes.
        own: the numbers of the files of this process.
        part: which process this is.
        journal: takes what is done.
    """

    def __init__(
        self, arrays: PlannedArrays, reads: Reads, own: Collection[int], part: ProcessPart | None, journal: RunJournal
    ):
        self.arrays, self.plan, self.reads, self.own, self.journal = arrays, arrays.plan, reads, own, journal
        self.is_first = part is None or part.index == 0
        self._shards_of = {file_entry(number): {shard for shard, _, _ in each} for number, each in enumerate(reads)}
        hashed = set(arrays.hashed)
        unread = hashed.difference(*self._shards_of.values()) if self.is_first else set()
        self._proved = hashed.intersection(set().union(*(self._shards_of[file_entry(n)] for n in own))) | unread
        self._made: dict[int, Mapping[str, Any]] = {}
        self._numbers = {shard.name: i for i, shard in enumerate(self.plan.source.shards)}
        self._steps: deque[ReadStep] = deque()

    def __enter__(self) -> None:
        """Work that ends with an error does not wait for bytes any more."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or self.arrays.is_cancelled:
            return
        try:
            if issubclass(kind, SourceError):
                self._check_promises()
        finally:
            self.arrays.cancel()

    def begin(self, reserved: int) -> None:
        """Begins to fetch what is left to do.

        Args:
            reserved: bytes that the output takes on its disk.

        Raises:
            ResourceError: there is no room for what is fetched.
        """
        left = [number for number in sorted(self.own) if self.journal.done(file_entry(number)) is None]
        names = [COMPARE_STEP, *map(proof_step, self._numbers.values())]
        known = {name for name in names if self.journal.done(name) is not None}
        known |= set() if self.is_first else {COMPARE_STEP}
        proved, wide = self._proved, copied_ranges(self.plan)
        steps = file_steps(self.plan, self.reads, left, proved, known)
        while lost := self.arrays.reader.begin(steps, wide, self.journal.work, reserved):
            again = {proof_step(self._numbers[name]) for name in lost}
            self.journal.forget(sorted(again))
            known, proved = known - again, proved | lost
            steps = file_steps(self.plan, self.reads, left, proved, known)
        self._steps = deque(steps)
        self._check_next()

    def written(self, number: int, facts: Mapping[str, Any]) -> None:
        """Records a file that was written, once its shards are proved.

        Raises:
            DamagedDownload: a shard does not have the sha256 that the Hub promises.
        """
        self._made[number] = facts
        self._steps.popleft()
        self._record_proved()
        self._check_next()

    def _check_promises(self) -> None:
        """After an error in what was fetched for the next file: raises DamagedDownload if a shard does not match what
        the Hub promises."""
        self.arrays.reader.unbound()
        for shard in self.plan.source.shards:
            if self._steps and shard.name in self._shards_of.get(self._steps[0].name, ()) and shard.sha256 is not None:
                check_promise(self.plan, self.arrays.reader, shard)

    def _check_next(self) -> None:
        """Does the steps that come before the next file."""
        reader = self.arrays.reader
        while self._steps and self._steps[0].name not in self._shards_of:
            step = self._steps.popleft()
            if step.proves is None:
                self.arrays.check_copies()
                self.journal.record(step.name, {})
            else:
                digest = check_promise(self.plan, reader, self.plan.source.shards[self._numbers[step.proves]])
                self.journal.record(step.name, {"hash": digest})
            reader.finish(step.name)
            self._record_proved()

    def _record_proved(self) -> None:
        for number in list(self._made):
            if not self.arrays.reader.unproved(self._shards_of[file_entry(number)]):
                record_file(self.journal, number, len(self.reads), self._made.pop(number))
                self.arrays.reader.finish(file_entry(number))
