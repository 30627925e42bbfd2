"""Exporting a checkpoint of ours to safetensors with Hugging Face's names, by the inverse of the table; or converting a
source to such files, in one pass.

If it was not cast, the exported bytes equal the source: values, or quantized values and scales if they stayed
encoded. A few tensors are in memory at a time.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from tpuconv.casts import check_cast
from tpuconv.checkpoint.manifest import Manifest, add_statistics
from tpuconv.checkpoint.schema import STATISTICS
from tpuconv.convert.export.array_source import ArraySource, CheckpointArrays
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
from tpuconv.convert.export.planned_arrays import PlannedArrays, describe_plan
from tpuconv.convert.export.rows import ExportPiece
from tpuconv.convert.export.serving.formats import IN_COMPRESSED
from tpuconv.convert.export.tensor import ExportRow, ExportTensor
from tpuconv.convert.plan.types import Plan
from tpuconv.convert.run.conversion import PART_DONE, PUBLISHING, RunProgress, check_outside
from tpuconv.convert.run.opening import open_journal
from tpuconv.convert.run.results import HASH_ENTRY
from tpuconv.convert.run.sizing import Limits, TensorRoom, planned_memory_for_tensors, room_for_tensors
from tpuconv.convert.run.stamps import Stale, check_same_files, forget_changed
from tpuconv.convert.run.steps import COMPARE_STEP, proof_step
from tpuconv.convert.run.strided import copy_strided
from tpuconv.errors import OutputError
from tpuconv.hosts import ProcessPart, divided
from tpuconv.jsonfile import Each, Size
from tpuconv.layout import Ranges, cut_sizes
from tpuconv.location import Location
from tpuconv.mapping.table import HasAxes, MappingTable
from tpuconv.names import MANIFEST
from tpuconv.progress import TICK_SECONDS
from tpuconv.sources.headers import DTYPES
from tpuconv.sources.origins import remember
from tpuconv.storage.entries import RunJournal, State
from tpuconv.storage.hashes import hash_bytes
from tpuconv.storage.places import size_faults
from tpuconv.storage.sealed import MANIFEST_FORMAT, SAFETENSORS, raise_damage, read_sealed, seal

_Made = tuple[ExportTensor, np.ndarray, dict[str, Any], bool]
"""Values of a tensor, what was found about the parameters of its piece, and whether they are its last."""


FILE_ENTRY = {"facts": {"bytes": Size, "xxh3_128": str}, "figures": Each(STATISTICS)}
"""The journal's entry of a file: its facts, and the facts of the parameters whose first tensor it has."""


def export(
    arrays: ArraySource,
    what: Exporting,
    layout: FileLayout,
    out: Location,
    room: TensorRoom,
    *,
    overwrite: bool = False,
    part: ProcessPart | None = None,
    streamed: PlannedArrays | None = None,
) -> Iterator[RunProgress]:
    """Writes arrays as safetensors to the folder `out`, and yields progress.

    `out` appears complete or not at all, and an old one stays until it does. Of a run that was killed, complete files
    stay.

    Args:
        arrays: the arrays of a checkpoint or of a plan.
        what: what is written of them.
        layout: how, from `lay_out`.
        out: the output folder.
        room: threads and memory.
        overwrite: replace an existing output of ours.
        part: which of several processes this is. Each writes some of the files; the last one publishes.
        streamed: the arrays again, if their source is fetched meanwhile.

    Raises:
        UsageError: the checkpoint holds only a part of a model, cannot be exported so, or lacks the source's scales.
        CorruptOutput: an array is missing, cannot be read, or does not match its checksum.
        SourceError: the checkpoint or the source changed while it was read, or holds values that are not finite.
        OutputError: `out` exists, and must not be replaced.
        ResourceError: there is too little disk space.
    """
    beside, manifest = what.beside, arrays.manifest
    pieces, shards, scheme = layout.pieces, layout.files, layout.scheme
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    facts = {
        "format": MANIFEST_FORMAT,
        "kind": SAFETENSORS,
        "checkpoint": manifest.sealed.identity,
        "table": what.table.fingerprint,
        **({"scheme": scheme} if scheme and scheme != IN_COMPRESSED else {}),
        **({"carried": sorted(tensor.name for tensor in beside.tensors)} if beside else {}),
    }
    names = [[tensor.name for tensor in shard] for shard in shards]  # another version may divide them otherwise
    fingerprint = hash_bytes(json.dumps([facts, names]).encode())["xxh3_128"]
    stamps = arrays.stamps_for_hosts
    planned = exported_names(arrays, len(shards))
    with open_journal(out, fingerprint, facts, planned, part, overwrite=overwrite) as journal:
        state = journal.begin()
        if state is State.PUBLISHED:
            _check_exported(arrays, journal.out)
            yield RunProgress(total, total, total, "published")
            return
        if state is State.JOINED:
            check_same_files(journal, stamps)
        elif forget_changed(
            journal, arrays.stamps, partial(_all_done, arrays, journal, len(shards)), stamps, is_part=part is not None
        ):
            state = State.BEGUN
        if state is not State.COMPLETE:
            companions = sum(facts["bytes"] for facts in arrays.companions.values())
            journal.sink.check_room(total + companions, "the export")
            for name, shard in zip(file_names(len(shards)), shards, strict=True):
                journal.sink.check_size(name, sum(tensor.nbytes for tensor in shard))
            arrays.check()
            journal.share()
            writing = _Run(arrays, pieces, beside, shards, journal, room, part)
            if streamed is not None:
                reads = file_reads(streamed, layout, beside)
                writing.fetched = FetchedFiles(streamed, reads, writing.own, part, journal)
            with writing.fetched or nullcontext():
                yield from writing.write()
            entry_of = {name: proof_step(i) for i, name in enumerate(arrays.hashed)}
            hashes = arrays.finish_part()
            for name in hashes if part else ():
                journal.record(entry_of[name], {"hash": hashes[name]})
            compared = [COMPARE_STEP] if streamed is not None and streamed.plan.copies else []
            if not journal.gather([*(file_entry(i) for i in range(len(shards))), *entry_of.values(), *compared]):
                size = writing.nbytes
                yield RunProgress(size, size, 0, "published" if journal.is_published() else PART_DONE)
                return
            yield RunProgress(total, total, 0, PUBLISHING)
            others = {name: journal.done(entry, HASH_ENTRY) for name, entry in entry_of.items() if name not in hashes}
            hashes |= {name: found["hash"] for name, found in others.items() if found}
            done = (journal.done(file_entry(i), FILE_ENTRY) for i in range(len(shards)))
            entries = [entry for entry in done if entry is not None]
            if len(entries) < len(shards):
                raise OutputError(
                    f"entries in {journal.work} are gone: another process took this export over",
                    hint="run the same command again, once that has ended",
                )
            files = {name: entry["facts"] for name, entry in zip(file_names(len(shards)), entries, strict=True)}
            write_index_and_companions(arrays, shards, journal.sink, total, files, layout.encoding)
            figures: dict[str, Any] = {}
            for entry in entries:
                for name, found in entry["figures"].items():
                    add_statistics(figures.setdefault(name, {}), found)
            source = arrays.finish(hashes)
            further, texts = arrays.describe(figures)
            files |= journal.sink.write_all({name: text.encode() for name, text in texts.items()})
            known = {"fingerprint": fingerprint, "source": source, "family": what.family}
            journal.sink.write(MANIFEST, seal({**facts, **known, **further, "files": files}))
        journal.publish()
        remember(read_sealed(journal.out), manifest.folder, arrays.stamps)
    yield RunProgress(total, total, 0, "published")


def export_checkpoint(
    manifest: Manifest,
    table: MappingTable,
    config: HasAxes,
    out: Location,
    jobs: int = 1,
    *,
    overwrite: bool = False,
    beside: Carried | None = None,
) -> Iterator[RunProgress]:
    """Exports a checkpoint; see `export`.

    Args:
        manifest: of the checkpoint.
        table: of the target that the checkpoint is for, from the tensors of the release.
        config: the family's, made of `released_config`, with the letters of the table.
        out, jobs, overwrite: as of `export`.
        beside: tensors of the source that are written too.
    """
    what = Exporting(table, config, manifest.family, beside)
    arrays = CheckpointArrays(manifest)
    return export(arrays, what, lay_out(arrays, what), out, TensorRoom(jobs), overwrite=overwrite)


def convert_to_safetensors(
    plan: Plan, out: Location, limits: Limits, *, overwrite: bool = False, part: ProcessPart | None = None
) -> Iterator[RunProgress]:
    """Converts a source to safetensors in one pass: cast, with adapters merged, or quantized. What the table leaves out
    and is not encoded, such as the towers of a multimodal model, is written as it is. Raises as `export` and
    `tpuconv.convert.run.conversion.run` do.

    Args:
        plan: of the conversion to a target that holds safetensors.
        out: the output folder.
        limits: jobs and memory.
        overwrite, part: as of `export`.
    """
    plan.check()
    check_outside(plan.source.folder, out)
    with closing(PlannedArrays(plan, part)) as arrays:
        what = describe_exporting(arrays, plan.options.scheme, skipped_tensors(plan))
        layout = lay_out(arrays, what)
        streamed = arrays if plan.source.remote else None
        room = room_for_layout(plan.source.name, arrays, layout, limits)
        yield from export(arrays, what, layout, out, room, overwrite=overwrite, part=part, streamed=streamed)


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


def _all_done(arrays: ArraySource, journal: RunJournal, count: int, changed: set[str]) -> Stale:
    """Returns all files that are done: each may hold tensors of a file of the source that changed."""
    hashes = [proof_step(i) for i, name in enumerate(arrays.hashed) if name in changed]
    return Stale([file_entry(i) for i in range(count) if journal.done(file_entry(i), FILE_ENTRY)], hashes)


def _check_exported(arrays: ArraySource, out: Location) -> None:
    """Raises CorruptOutput if files of an earlier export are missing or have the wrong size, and OutputError if it was
    made from a source that was changed since."""
    sealed = read_sealed(out)
    sizes = {name: facts["bytes"] for name, facts in sealed.files.items()}
    raise_damage(out, size_faults(out, sizes))
    arrays.check_made(out, sealed)


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
        return RunProgress(written, total, resumed, "export", fetching=fetching)

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
                        waiting.append((piece, ranges, pool.submit(self._make, piece, ranges)))
                    piece, ranges, future = waiting.popleft()
                    while not wait([future], TICK_SECONDS).done:
                        yield None
                    values, figures = future.result()
                    is_last = ranges is piece.slabs[-1]
                    first, *others = zip(piece.tensors, values, strict=True)
                    yield *first, figures, is_last
                    held += [(tensor, made, {}, is_last) for tensor, made in others]
                    if is_last:
                        order = {tensor.name: i for i, tensor in enumerate(piece.tensors)}
                        yield from sorted(held, key=lambda each: order[each[0].name])
                        held.clear()
                    nbytes -= piece.nbytes
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _make(self, piece: ExportPiece, ranges: Ranges) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Returns the values of all tensors of a piece, or of a slab of them; and what was found about its
        parameters."""
        made: dict[str, np.ndarray] = {}
        figures: dict[str, Any] = {}
        values = []
        own = {letter: each for letter, each in ranges.items() if letter == piece.letter}
        for row in piece.rows:
            inverse = replace(row.inverse, sizes=cut_sizes(row.inverse.sizes, own))
            results = inverse(lambda name, row=row: self._array(row, name, ranges, made, figures))  # type: ignore[misc]
            for tensor in row.tensors:
                value = tensor.make(self._contiguous(results[tensor.of], row))
                shape = tensor.shape
                if own:
                    start, stop = own[piece.letter]
                    shape = (stop - start, *shape[1:])
                if value.shape != shape or value.dtype.itemsize != DTYPES[tensor.dtype].itemsize:
                    raise OutputError(f"{tensor.name} would be {value.shape}, not {shape}: a bug of tpuconv")
                values.append(value)
        return values, figures

    def _array(
        self, row: ExportRow, name: str, ranges: Ranges, made: dict[str, np.ndarray], figures: dict[str, Any]
    ) -> np.ndarray:
        """Returns an array without the changes that its row makes, as unsigned integers: these are faster to move than
        floats and keep every bit."""
        values = self.arrays.read(name, ranges, made, figures)
        if (change := row.inverse.inverse.arithmetic.get(name)) is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                undone = change.undo(values, row.inverse.sizes)
            check_cast(name, values, undone)
            values = undone
        for axis, count in enumerate(row.repeats.get(name, ())):
            values = values if count == 1 else np.repeat(values, count, axis)
        return values.view(f"u{values.itemsize}")

    def _contiguous(self, array: np.ndarray, row: ExportRow) -> np.ndarray:
        """Returns the values in the dtype of the row's arrays; a contiguous copy if they are not contiguous."""
        out = array
        if not array.flags.c_contiguous:  # what comes back as it was read is
            out = np.empty(array.shape, array.dtype)
            copy_strided([(out, array)])
        return out.view(np.dtype(self.arrays.manifest.arrays[row.inverse.src[0].names[0]].dtype))
