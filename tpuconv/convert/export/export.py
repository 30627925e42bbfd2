"""Exporting a checkpoint of ours to safetensors with Hugging Face's names, by the inverse of the table; or converting a
source to such files, in one pass.

If it was not cast, the exported bytes equal the source: values, or quantized values and scales if they stayed
encoded. A few tensors are in memory at a time.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from tpuconv.checkpoint.manifest import add_statistics
from tpuconv.checkpoint.schema import STATISTICS
from tpuconv.convert.export.array_source import ArraySource
from tpuconv.convert.export.carried import Carried, skipped_tensors
from tpuconv.convert.export.exporting import Exporting, describe_exporting
from tpuconv.convert.export.fetched import FetchedFiles, file_entry, file_reads, record_file, workspace_of_files
from tpuconv.convert.export.files import (
    exported_names,
    file_names,
    safetensors_header,
    write_index_and_companions,
)
from tpuconv.convert.export.layout import FileLayout, lay_out
from tpuconv.convert.export.making import make_piece
from tpuconv.convert.export.planned_arrays import PlannedArrays, describe_plan
from tpuconv.convert.export.rows import ExportPiece
from tpuconv.convert.export.serving.formats import IN_COMPRESSED
from tpuconv.convert.export.tensor import ExportTensor
from tpuconv.convert.plan.types import Plan
from tpuconv.convert.run.card import drafts_of
from tpuconv.convert.run.engine import WORKING, RunProgress, Work, make
from tpuconv.convert.run.results import HASH_ENTRY
from tpuconv.convert.run.sizing import Limits, TensorRoom, planned_memory_for_tensors, room_for_tensors
from tpuconv.convert.run.stamps import Stale
from tpuconv.convert.run.steps import COMPARE_STEP, proof_step
from tpuconv.hosts import ProcessPart, divided
from tpuconv.jsonfile import Each, Size
from tpuconv.location import Location
from tpuconv.names import MANIFEST
from tpuconv.notation.layout import Ranges
from tpuconv.progress import TICK_SECONDS
from tpuconv.storage.entries import RunJournal
from tpuconv.storage.hashes import hash_bytes
from tpuconv.storage.sealed import MANIFEST_FORMAT, SAFETENSORS, Sealed, check_file_sizes, seal

_Made = tuple[ExportTensor, np.ndarray, dict[str, Any], bool]
"""Values of a tensor, what was found about the parameters of its piece, and whether they are its last."""


FILE_ENTRY = {"facts": {"bytes": Size, "xxh3_128": str}, "figures": Each(STATISTICS)}
"""The journal's entry of a file: its facts, and the facts of the parameters whose first tensor it has."""


class ExportWork(Work):
    """The export of arrays as safetensors. Its progress counts bytes of tensors. Of a run that was killed, complete
    files stay.

    Args:
        arrays: the arrays of a checkpoint or of a plan.
        what: what is written of them.
        layout: how, from `lay_out`.
        room: threads and memory.
        streamed: the arrays again, if their source is fetched meanwhile.
    """

    def __init__(
        self,
        arrays: ArraySource,
        what: Exporting,
        layout: FileLayout,
        room: TensorRoom,
        streamed: PlannedArrays | None = None,
    ):
        self.arrays, self.what, self.layout, self.room, self.streamed = arrays, what, layout, room, streamed
        beside, scheme = what.beside, layout.scheme
        self.source, self.nbytes = arrays.manifest.folder, layout.nbytes
        self.facts = {
            "format": MANIFEST_FORMAT,
            "kind": SAFETENSORS,
            "checkpoint": arrays.manifest.sealed.identity,
            "table": what.table.fingerprint,
            **({"scheme": scheme} if scheme and scheme != IN_COMPRESSED else {}),
            **({"carried": sorted(tensor.name for tensor in beside.tensors)} if beside else {}),
        }
        names = [[tensor.name for tensor in file] for file in layout.files]  # another version may divide them otherwise
        self.fingerprint = hash_bytes(json.dumps([self.facts, names]).encode())["xxh3_128"]
        self._proofs = {name: proof_step(i) for i, name in enumerate(arrays.hashed)}

    @property
    def names(self) -> set[str]:
        """See `Work`."""
        return exported_names(self.arrays, len(self.layout.files))

    @property
    def stamps(self) -> dict[str, str]:
        """See `Work`."""
        return self.arrays.stamps

    @property
    def stamps_for_hosts(self) -> dict[str, str]:
        """See `Work`."""
        return self.arrays.stamps_for_hosts

    @property
    def entries(self) -> list[str]:
        """See `Work`."""
        compared = [COMPARE_STEP] if self.streamed is not None and self.streamed.plan.copies else []
        return [*map(file_entry, range(len(self.layout.files))), *self._proofs.values(), *compared]

    def stale(self, journal: RunJournal, changed: set[str]) -> Stale:
        """See `Work`: all files that are done, since each may hold tensors of a file that changed."""
        files = (file_entry(i) for i in range(len(self.layout.files)))
        return Stale(
            [entry for entry in files if journal.done(entry, FILE_ENTRY)],
            [entry for name, entry in self._proofs.items() if name in changed],
        )

    def check_made(self, out: Location, elsewhere: Sealed | None = None) -> Iterator[RunProgress]:
        """See `Work`."""
        yield from self.arrays.check_made(out, elsewhere or check_file_sizes(out))

    def opened(self, journal: RunJournal) -> AbstractContextManager[None]:
        """See `Work`: nothing."""
        return nullcontext()

    def do(self, journal: RunJournal, part: ProcessPart | None) -> Iterator[RunProgress]:
        """See `Work`: the files of this process."""
        files, arrays = self.layout.files, self.arrays
        companions = sum(facts["bytes"] for facts in arrays.companions.values())
        journal.sink.check_room(self.nbytes + companions, "the export")
        for name, file in zip(file_names(len(files)), files, strict=True):
            journal.sink.check_size(name, sum(tensor.nbytes for tensor in file))
        arrays.check()
        journal.share()
        writing = _Run(arrays, self.layout.pieces, self.what.beside, files, journal, self.room, part)
        if self.streamed is not None:
            reads = file_reads(self.streamed, self.layout, self.what.beside)
            writing.fetched = FetchedFiles(self.streamed, reads, writing.own, part, journal)
        with writing.fetched or nullcontext():
            for last in writing.write():
                yield last
        for name, digest in arrays.finish_part().items():
            journal.record(self._proofs[name], {"hash": digest})
        yield replace(last, done=last.total)

    def write_rest(self, journal: RunJournal) -> None:
        """See `Work`: the index, config.json, the companions and the manifest."""
        arrays, sink, names = self.arrays, journal.sink, file_names(len(self.layout.files))
        entries = [journal.required(file_entry(i), FILE_ENTRY) for i in range(len(names))]
        files = {name: entry["facts"] for name, entry in zip(names, entries, strict=True)}
        drafts = drafts_of(self.what.config)
        write_index_and_companions(arrays, self.layout.files, sink, files, self.layout.encoding, drafts)
        figures: dict[str, Any] = {}
        for entry in entries:
            for name, found in entry["figures"].items():
                add_statistics(figures.setdefault(name, {}), found)
        found_hashes = {name: journal.done(entry, HASH_ENTRY) for name, entry in self._proofs.items()}
        source = arrays.finish({name: found["hash"] for name, found in found_hashes.items() if found})
        further, texts = arrays.describe(figures)
        files |= sink.write_all({name: text.encode() for name, text in texts.items()})
        known = {"fingerprint": self.fingerprint, "source": source, "family": self.what.family}
        sink.write(MANIFEST, seal({**self.facts, **known, **further, "files": files}))


def convert_to_safetensors(
    plan: Plan,
    out: Location,
    limits: Limits,
    *,
    overwrite: bool = False,
    part: ProcessPart | None = None,
    elsewhere: Sealed | None = None,
) -> Iterator[RunProgress]:
    """Converts a source to safetensors in one pass: cast, with adapters merged, or quantized. What the table leaves out
    and is not encoded, such as the towers of a multimodal model, is written as it is. Raises as `make` does.

    Args:
        plan: of the conversion to a target that holds safetensors.
        out: the output folder.
        limits: jobs and memory.
        overwrite, part, elsewhere: as of `make`.
    """
    plan.check()
    with closing(PlannedArrays(plan, part)) as arrays:
        what = describe_exporting(arrays, plan.options.scheme, skipped_tensors(plan))
        layout = lay_out(arrays, what)
        streamed = arrays if plan.source.remote else None
        room = room_for_layout(plan.source.name, arrays, layout, limits)
        work = ExportWork(arrays, what, layout, room, streamed)
        yield from make(work, out, overwrite=overwrite, part=part, elsewhere=elsewhere)


@dataclass(frozen=True)
class PlannedFiles:
    """The files that `convert_to_safetensors` would write.

    Attributes:
        files: the tensors of each.
        room: threads and memory.
        memory: the most private memory in bytes that the threads need.
        workspace_bytes: the most that a source which is fetched takes on the disk of the workspace.
    """

    files: Sequence[Sequence[ExportTensor]]
    room: TensorRoom
    memory: int
    workspace_bytes: int


def room_for_layout(name: str, arrays: ArraySource, layout: FileLayout, limits: Limits) -> TensorRoom:
    """Returns the threads and the memory of an export; see `room_for_tensors`."""
    return room_for_tensors(name, limits, layout.job_bytes, layout.nbytes, arrays.memory)


def planned_files(plan: Plan, limits: Limits) -> PlannedFiles:
    """Plans what `convert_to_safetensors` would write. No weight is read.

    Raises:
        UsageError: no format of servers holds what is quantized.
        ResourceError: the memory does not suffice.
    """
    with closing(PlannedArrays(plan)) as arrays:
        what = describe_exporting(arrays, plan.options.scheme, skipped_tensors(plan))
        layout = lay_out(arrays, what)
        reads = file_reads(arrays, layout, what.beside) if plan.source.remote else None
        workspace = 0 if reads is None else workspace_of_files(arrays, reads)
        room = room_for_layout(plan.source.name, arrays, layout, limits)
        memory = planned_memory_for_tensors(room, layout.job_bytes, arrays.memory)
        return PlannedFiles(layout.files, room, memory, workspace)


def described(plan: Plan, published: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts that the manifest of a checkpoint would contain, for safetensors of `convert_to_safetensors`,
    whose manifest is `published`."""
    sizes = [facts["bytes"] for name, facts in published["files"].items() if name.endswith(".safetensors")]
    return {**describe_plan(plan), **published, "stored_bytes": sum(sizes)}


class _Run:
    """Makes tensors in threads and writes them in their order."""

    def __init__(
        self,
        arrays: ArraySource,
        pieces: list[ExportPiece],
        beside: Carried | None,
        shards: list[list[ExportTensor]],
        journal: RunJournal,
        room: TensorRoom,
        part: ProcessPart | None,
    ):
        self.arrays, self.pieces, self.beside = arrays, pieces, beside
        self.shards, self.journal, self.room = shards, journal, room
        self._sizes = [sum(tensor.nbytes for tensor in shard) for shard in shards]
        numbers = range(len(shards))
        self.fetched: FetchedFiles | None = None
        self.own = set(numbers if part is None else divided(numbers, self._sizes, part.count)[part.index])

    @property
    def nbytes(self) -> int:
        """The bytes of the files that this process writes."""
        return sum(self._sizes[number] for number in self.own)

    def write(self) -> Iterator[RunProgress]:
        """Writes the files that are left to do. A piece is made again if one of its tensors is in such a file."""
        numbers = range(len(self.shards))
        is_done = [i not in self.own or self.journal.done(file_entry(i), FILE_ENTRY) is not None for i in numbers]
        total = self.nbytes
        resumed = total - sum(n for n, done in zip(self._sizes, is_done, strict=True) if not done)
        written = resumed
        place = {tensor.name: i for i, shard in enumerate(self.shards) for tensor in shard}
        todo = [piece for piece in self.pieces if not all(is_done[place[t.name]] for t in piece.tensors)]
        opened, record = None, self._record
        if self.fetched is not None:
            self.fetched.begin(total - resumed)
        yield self._progress(written, total, resumed)
        if self.fetched is not None:
            opened, record = self.fetched.arrays.reader, self.fetched.written
        names = {name for name, i in place.items() if not is_done[i]}
        carried = self.beside.read(names, opened) if self.beside else ()
        beside: Iterator[_Made] = ((tensor, values, {}, True) for tensor, values in carried)
        made = chain(self._made(todo), beside)
        left = (each for each in made if each is None or not is_done[place[each[0].name]])
        for number, (name, shard) in enumerate(zip(file_names(len(self.shards)), self.shards, strict=True)):
            if is_done[number]:
                continue
            found: dict[str, Any] = {}
            with self.journal.sink.writer(name) as file:
                file.write(safetensors_header(shard))
                missing = len(shard)
                while missing:
                    if (each := next(left)) is None:
                        yield self._progress(written, total, resumed)
                        continue
                    _, values, figures, is_last = each
                    file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
                    for parameter, part in figures.items():
                        add_statistics(found.setdefault(parameter, {}), part)
                    missing -= is_last
                    written += values.nbytes
                    yield self._progress(written, total, resumed)
            self.journal.sink.sync(["."])
            record(number, {"facts": file.facts(), "figures": found})

    def _record(self, number: int, facts: Mapping[str, Any]) -> None:
        record_file(self.journal, number, len(self.shards), facts)

    def _progress(self, written: int, total: int, resumed: int) -> RunProgress:
        fetching = self.fetched.arrays.reader.fetching if self.fetched is not None else (0, 0)
        return RunProgress(written, total, resumed, WORKING, fetching=fetching)

    def _made(self, pieces: list[ExportPiece]) -> Iterator["_Made | None"]:
        """Yields each tensor, or one after the other its slabs; None, now and then, while it waits for one."""
        waiting: deque[tuple[ExportPiece, Ranges, Future[tuple[list[np.ndarray], dict[str, Any]]]]] = deque()
        rest, nbytes = deque((piece, ranges) for piece in pieces for ranges in piece.slabs), 0
        held: list[_Made] = []  # of all tensors of a piece but the first, which is written first
        with ThreadPoolExecutor(self.room.jobs) as pool, self.fetched or nullcontext():  # ends what threads wait for
            try:
                while rest or waiting:
                    while (
                        rest
                        and len(waiting) <= self.room.jobs
                        and (not waiting or nbytes + rest[0][0].nbytes <= self.room.in_flight)
                    ):
                        piece, ranges = rest.popleft()
                        nbytes += piece.nbytes
                        waiting.append((piece, ranges, pool.submit(make_piece, self.arrays, piece, ranges)))
                    piece, ranges, future = waiting.popleft()
                    while not wait([future], TICK_SECONDS).done:
                        yield None
                    values, figures = future.result()
                    is_last = ranges is piece.slabs[-1]
                    first, *others = zip(piece.tensors, values, strict=True)
                    yield *first, figures, is_last
                    held += [(tensor, made, {}, is_last) for tensor, made in others if is_last or not tensor.fixed]
                    if is_last:
                        order = {tensor.name: i for i, tensor in enumerate(piece.tensors)}
                        yield from sorted(held, key=lambda each: order[each[0].name])
                        held.clear()
                    nbytes -= piece.nbytes
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
