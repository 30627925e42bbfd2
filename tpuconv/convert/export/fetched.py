"""Files of safetensors that are written while their source is fetched, from the Hub or a bucket.

To the reader of the source each file is a step: what was fetched for it stays until it is recorded.
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
from tpuconv.convert.run.steps import COMPARE_STEP, compare_steps, copied_ranges, proof_of, proof_step
from tpuconv.hosts import ProcessPart
from tpuconv.sources.schedule import FetchSchedule, ReadStep
from tpuconv.storage.entries import RunJournal

Reads = Sequence[Collection[str]]
"""By file of an export the files of the source that it is made from."""


def file_entry(number: int) -> str:
    """Returns the name of the journal's entry, and of the step, for a file of an export."""
    return f"file-{number:05d}"


def record_file(journal: RunJournal, number: int, count: int, facts: Mapping[str, Any]) -> None:
    """Records that one of `count` files is done."""
    journal.record(file_entry(number), facts, [file_names(count)[number]])


def file_reads(arrays: PlannedArrays, layout: FileLayout, beside: Carried | None) -> list[set[str]]:
    """Returns the files of the source that each file is made from."""
    place = {tensor.name: number for number, file in enumerate(layout.files) for tensor in file}
    reads: list[set[str]] = [set() for _ in layout.files]
    for piece in layout.pieces:
        names = {name for row in piece.rows for stack in row.inverse.src for name in stack.names}
        shards = {shard for name in names for slab in piece.slabs for shard in arrays.shards_of(name, slab)}
        for number in {place[tensor.name] for tensor in piece.tensors}:
            reads[number] |= shards
    for tensor in beside.tensors if beside else ():
        reads[place[tensor.name]].add(arrays.plan.source.tensors[tensor.of].shard)
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
    last = {shard: number for number in left for shard in reads[number]}
    proofs: dict[int | None, list[ReadStep]] = {}
    for i, shard in enumerate(plan.source.shards):
        if shard.name in proved and proof_step(i) not in known:
            proofs.setdefault(last.get(shard.name), []).append(proof_of(i, shard))
    steps = []
    for number in left:
        steps += [ReadStep(file_entry(number), reads[number]), *proofs.pop(number, ())]
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
        hashed = set(arrays.hashed)
        unread = hashed.difference(*reads) if self.is_first else set()
        self._proved = hashed.intersection(set().union(*(reads[number] for number in own))) | unread
        self._numbers = {shard.name: i for i, shard in enumerate(self.plan.source.shards)}
        self._steps: deque[ReadStep] = deque()

    def __enter__(self) -> None:
        """Work that ends with an error does not wait for bytes any more."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
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
        steps = file_steps(self.plan, self.reads, left, self._proved, known)
        self.arrays.reader.begin(steps, copied_ranges(self.plan), self.journal.work, reserved)
        self._files = {file_entry(number) for number in left}
        self._steps = deque(steps)
        self._check_next()

    def written(self, number: int, facts: Mapping[str, Any]) -> None:
        """Records a file that was written.

        Raises:
            DamagedDownload: a shard does not have the sha256 that the Hub promises.
        """
        record_file(self.journal, number, len(self.reads), facts)
        self.arrays.reader.finish(self._steps.popleft().name)
        self._check_next()

    def _check_next(self) -> None:
        """Does the steps that come before the next file."""
        reader = self.arrays.reader
        while self._steps and self._steps[0].name not in self._files:
            step = self._steps.popleft()
            if step.proves is None:
                self.arrays.check_copies()
                self.journal.record(step.name, {})
            else:
                digest = check_promise(self.plan.source, reader, self.plan.source.shards[self._numbers[step.proves]])
                self.journal.record(step.name, {"hash": digest})
            reader.finish(step.name)
