"""The loop: reads pieces of the source, transforms them, writes chunks, and publishes the output when all is there.

Threads do the work, since reading, copying, hashing and writing all release the interpreter's lock. Each holds memory
that is allocated once: for values, for their bytes where they are stored in another form, and for two shards, of which
one is built while the other is written.
"""

import json
import os
import queue
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tpuconv.convert import manifest
from tpuconv.convert.card import COPIED, SOURCE_CARD, model_card
from tpuconv.convert.checkpoint import Checkpoint, CheckpointReader
from tpuconv.convert.hub import wrong_hash
from tpuconv.convert.journal import MANIFEST, Journal, write_durably
from tpuconv.convert.plan import FLOATS, MIB, REPORT, Array, Piece, Plan, Unit
from tpuconv.convert.shards import Shard
from tpuconv.convert.source import Reader
from tpuconv.convert.source import Shard as SourceShard
from tpuconv.convert.store import Store, page_buffer
from tpuconv.convert.strided import copy_strided
from tpuconv.errors import ResourceError, SourceError, UsageError
from tpuconv.sizes import format_size

CAN_BE_NAN = {*FLOATS, "float8_e4m3fn"}
"""Stored types that have NaN and are searched for it; the other types of codes have none."""

AHEAD_BYTES = 768 * MIB
"""Of the source, read while the rules of a quantization are resolved: what a disk gives in a second."""


@dataclass(frozen=True)
class Progress:
    """How far a conversion is, in bytes of the source; those of an earlier run are `resumed`."""

    done: int
    total: int
    resumed: int
    stage: str


@dataclass(frozen=True)
class Limits:
    """What the machine gives: neither changes the output."""

    jobs: int
    max_memory: int

    @classmethod
    def of_this_machine(cls, jobs: int | None = None, max_memory: int | None = None) -> "Limits":
        """By default a job for each processor and one that reads meanwhile, and 60% of the memory."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(jobs or len(os.sched_getaffinity(0)) + 1, max_memory or int(0.6 * memory))


def read_ahead(plan: Plan) -> None:
    """Begins to bring what `run` reads first to the page cache, while other work leaves the disk idle."""

    def read() -> None:
        left = AHEAD_BYTES
        names = dict.fromkeys(name for unit in plan.units for piece in unit.pieces for name in piece.names())
        with suppress(OSError):  # whoever reads it in earnest says what is wrong
            for path, start, size in (at for n in names for i in plan.tensors[n].stored for at in plan.source.files(i)):
                with path.open("rb", buffering=0) as file:
                    os.posix_fadvise(file.fileno(), start, min(size, left), os.POSIX_FADV_WILLNEED)
                left -= size
                if left <= 0:
                    return

    threading.Thread(target=read, daemon=True).start()


def run(plan: Plan, out: Path, limits: Limits, *, overwrite: bool = False) -> Iterator[Progress]:
    """Converts, yielding progress. Killed at any moment and run again, it goes on where it was.

    Raises:
        MappingError: the plan has faults.
        SourceError: the source changed, cannot be read, or holds values that are not finite.
        ResourceError: too little disk or memory.
        OutputError: `out` exists, is locked or belongs to another plan.
    """
    plan.check()
    jobs = plan.jobs(limits.jobs, limits.max_memory)
    inside = plan.source.folder.resolve()
    if out.resolve() == inside or inside in out.resolve().parents:
        raise UsageError(f"{out} lies in the source folder", hint="give an OUT outside of it")
    with Journal(out, plan.fingerprint, overwrite=overwrite) as journal:
        if not journal.begin():
            yield Progress(plan.source_bytes, plan.source_bytes, plan.source_bytes, "published")
            return
        if journal.done("complete") is None:
            yield from _work(plan, journal, jobs)
        yield Progress(plan.source_bytes, plan.source_bytes, 0, "publish")
        journal.publish()
    yield Progress(plan.source_bytes, plan.source_bytes, 0, "published")


def _work(plan: Plan, journal: Journal, jobs: int) -> Iterator[Progress]:
    store = Store(journal.staging / manifest.PARAMS, plan.arrays)
    todo = [unit for unit in plan.units if journal.done(unit.uid) is None]
    resumed = plan.source_bytes - sum(unit.nbytes for unit in todo)
    _check_disk(plan, journal.staging, todo)
    yield Progress(resumed, plan.source_bytes, resumed, "convert")
    store.make_folders()
    for done in _Workers(plan, journal, store, jobs).run(todo):
        yield Progress(resumed + done, plan.source_bytes, resumed, "convert")
    yield Progress(plan.source_bytes, plan.source_bytes, resumed, "merge")
    store.finish()
    _write_rest(plan, journal)


class _Cancelled(Exception):
    """Another worker failed, or the user interrupted."""


class _Workers:
    def __init__(self, plan: Plan, journal: Journal, store: Store, jobs: int):
        self.plan, self.journal, self.store, self.jobs = plan, journal, store, jobs
        self.stop = threading.Event()
        self.reader = _open(plan, self._check_cancelled)
        self.done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.memories: queue.SimpleQueue[_Memory] = queue.SimpleQueue()
        self.writers = ThreadPoolExecutor(jobs)

    def run(self, units: Sequence[Unit]) -> Iterator[int]:
        """Does all that is left; yields the bytes converted so far about ten times a second."""
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

    def _tasks(self, units: Sequence[Unit]) -> list[Callable[[], None]]:
        """Units in the order of the source on disk; the hash of a shard, mostly done by then, after its last unit."""
        shards = self.plan.source.shards if self.plan.hashes_shards else ()
        last = {shard: i for i, unit in enumerate(units) for shard in self._shards(unit)}
        tasks: list[Callable[[], None]] = [self._describe]
        tasks += [partial(self._compare, *copy) for copy in self.plan.copies.items()]
        for i, unit in enumerate(units):
            tasks.append(partial(self._unit, unit))
            tasks += [partial(self._check_hash, shard) for shard in shards if last.get(shard.name) == i]
        return tasks + [partial(self._check_hash, shard) for shard in shards if shard.name not in last]

    def _shards(self, unit: Unit) -> set[str]:
        tensors = self.plan.tensors
        return {info.shard for piece in unit.pieces for name in piece.names() for info in tensors[name].stored}

    def _describe(self) -> None:
        if self.journal.done("metadata") is None:
            self.store.write_metadata()
            self.journal.record("metadata", {})

    def _check_hash(self, shard: SourceShard) -> None:
        if self.journal.done(f"sha256-{shard.name}") is None:
            assert isinstance(self.reader, Reader)
            digest = self.reader.sha256(shard.name)
            if shard.sha256 is not None and digest != shard.sha256:
                raise wrong_hash(self.plan.source.folder / shard.name, shard.sha256, digest)
            self.journal.record(f"sha256-{shard.name}", {"sha256": digest})

    def _compare(self, copy: str, original: str) -> None:
        assert isinstance(self.reader, Reader)
        a, b = (self.plan.tensors[name].values for name in (copy, original))
        buffers = [memoryview(bytearray(min(4 * MIB, a.nbytes))) for _ in range(2)]
        for at in range(0, a.nbytes, 4 * MIB):
            self._check_cancelled()
            views = [buffer[: a.nbytes - at] for buffer in buffers]
            for info, view in zip((a, b), views, strict=True):
                self.reader.read(info, at, view)
            if views[0] != views[1]:
                raise SourceError(
                    f"{copy} should be a copy of {original}, but holds other values",
                    hint="set tie_word_embeddings in config.json to what the model was trained with"
                    + (", or leave out --include-mtp" if self.plan.options.include_mtp else ""),
                )

    def _unit(self, unit: Unit) -> None:
        checksums: dict[str, int] = {}
        figures: dict[str, dict[str, float]] = {}
        memory = self.memories.get()
        try:
            for piece in unit.pieces:
                self._check_cancelled()
                self._piece(piece, memory, checksums, figures)
                self.done.put(self.plan.stored_bytes(piece))
            memory.wait_until_written()
        finally:
            self.memories.put(memory)
        for name in figures:
            self.plan.encoders[name].check()
        self.store.sync(checksums)
        own = {name: f"{part:016x}" for name, part in checksums.items()}
        self.journal.record(unit.uid, {"checksums": own, "figures": figures})

    def _piece(
        self, piece: Piece, memory: "_Memory", checksums: dict[str, int], figures: dict[str, dict[str, float]]
    ) -> None:
        bits = _bits(piece.dtype)  # plain integers move faster than bfloat16 and keep every bit
        sources = [source.view(bits) for source in memory.read(self.reader, self.plan, piece)]
        targets = piece.binding.layout(sources, piece.sizes)
        for stack, box, target in zip(piece.binding.dst, piece.boxes(), targets, strict=True):
            name = stack.names[0]
            encoder = self.plan.encoders.get(name)
            if encoder is None:
                self._write(self.plan.arrays[name], box, target, memory, checksums)
                continue
            try:
                parts, own = encoder(target.view(piece.dtype))
            except FloatingPointError:
                raise _not_finite(name, piece.binding.src[0].names) from None
            manifest.add_figures(figures.setdefault(name, {}), own)
            for part, values, full_name in zip(encoder.parts, parts, self.plan.stored_names(name), strict=True):
                part_box = tuple(slice(s.start // n, s.stop // n) for s, n in zip(box, part.blocks, strict=True))
                array = self.plan.arrays[full_name]
                self._write(array, part_box, values.view(_bits(part.dtype)), memory, checksums)

    def _write(
        self, array: Array, box: tuple[slice, ...], values: np.ndarray, memory: "_Memory", checksums: dict[str, int]
    ) -> None:
        """Builds one shard, of the values, as unsigned integers, that lie in `box`, and begins to write it."""
        if array.dtype.name in CAN_BE_NAN and not all_finite(values, array.dtype):
            raise _not_finite(array.name, array.sources)
        index = tuple(s.start // n for s, n in zip(box, array.shards, strict=True))
        shard = Shard(array, index, memory.room_for_shard())
        built, copies = [], []
        for slot, start in shard.chunks():
            ranges = zip(start, box, array.chunks, strict=True)
            view = values[tuple(slice(a - s.start, a - s.start + c) for a, s, c in ranges)]
            chunk = shard.place(slot, values.dtype)
            if view.shape != chunk.shape:  # the last one along an axis, which zarr fills up with zeros
                chunk[...] = 0
            built.append((slot, start, chunk))
            copies.append((chunk[tuple(map(slice, view.shape))], view))
        copy_strided(copies)
        for slot, start, chunk in built:
            part = manifest.chunk_checksum(array.shape, array.chunks, start, chunk)
            checksums[array.name] = manifest.add_checksums((checksums.get(array.name, 0), part))
            shard.close_chunk(slot)
        memory.write(partial(self.store.write, array.name, shard))

    def _check_cancelled(self) -> None:
        if self.stop.is_set():
            raise _Cancelled


def _open(plan: Plan, check_cancelled: Callable[[], None]) -> Reader | CheckpointReader:
    if isinstance(plan.source, Checkpoint):
        return CheckpointReader(plan.source)
    return Reader(plan.source, check_cancelled, hashes=plan.hashes_shards)


class _Memory:
    """What one worker holds, allocated once: fresh memory costs more than the copy into it."""

    def __init__(self, plan: Plan, writers: Executor):
        self.values, self.raw, *shards = map(page_buffer, plan.buffers[:4])
        self.shards, self.writers = deque(shards), writers
        self.writes: deque[Future[None]] = deque()

    def room_for_shard(self) -> np.ndarray:
        """What was built there before is written by now. Raises what went wrong then."""
        if len(self.writes) == len(self.shards):
            self.writes.popleft().result()
        return self.shards[0]

    def write(self, write: Callable[[], None]) -> None:
        """Begins to write what was built in the room; the next shard gets another."""
        self.writes.append(self.writers.submit(write))
        self.shards.rotate(-1)

    def wait_until_written(self) -> None:
        while self.writes:
            self.writes.popleft().result()

    def read(self, reader: Reader | CheckpointReader, plan: Plan, piece: Piece) -> list[np.ndarray]:
        """The piece's source tensors, in the dtype of its values."""
        dtype = piece.dtype
        if isinstance(reader, CheckpointReader):  # one array, of which the piece is a box
            (box,) = piece.boxes()
            values = self.values[: piece.nbytes].view(dtype).reshape([s.stop - s.start for s in box])
            reader.read_box(piece.binding.src[0].names[0], box, values)
            return [values]
        sources, at = [], 0
        for parts, shape in zip(piece.reads(), piece.binding.layout.src_shapes(piece.sizes), strict=True):
            first = at
            for name, start, count in parts:
                out = self.values[at : at + count * dtype.itemsize].view(dtype)
                with np.errstate(all="ignore"):  # what is not finite is found in the chunks, and named
                    plan.tensors[name].read(reader, start, self.raw, out)
                at += out.nbytes
            sources.append(self.values[first:at].view(dtype).reshape(shape))
        return sources


def all_finite(bits: np.ndarray, dtype: np.dtype[Any]) -> bool:
    """Whether no element is infinite or not a number, from the bit patterns of floats.

    Those are the patterns from that of infinity on (of NaN, where a type has no infinity), of either sign, so that the
    largest signed and the largest unsigned pattern decide: two passes at the speed of memory and no temporary.
    """
    if not bits.size:
        return True
    infinity = int(np.array(np.inf, dtype).view(bits.dtype))
    sign = 1 << (8 * dtype.itemsize - 1)
    return int(bits.view(f"i{dtype.itemsize}").max()) < infinity and int(bits.max()) < (sign | infinity)


def _not_finite(name: str, sources: Sequence[str]) -> SourceError:
    return SourceError(
        f"{name} is not finite: there are NaN or infinite values",
        details=[f"made from {sources[0]}" + (f" and {len(sources) - 1} more" if len(sources) > 1 else "")],
        hint="the checkpoint is damaged, or --dtype too small for its values: download it again, or try float32",
    )


def _bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Unsigned integers of the same size."""
    return np.dtype(f"u{dtype.itemsize}")


def _check_disk(plan: Plan, folder: Path, todo: Sequence[Unit]) -> None:
    written = sum(plan.written_bytes(piece) for unit in todo for piece in unit.pieces)
    need = written + written // 100 + 16 * MIB
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ResourceError(
            f"{folder.parent.parent} has {format_size(free)} free, the conversion needs {format_size(need)}",
            hint="free some space, or give an OUT on another disk",
        )


def _write_rest(plan: Plan, journal: Journal) -> None:
    """All that the output holds besides the arrays."""
    checksums: dict[str, int] = {}
    figures: dict[str, dict[str, float]] = {}
    for unit in plan.units:
        done = journal.done(unit.uid) or {"checksums": {}, "figures": {}}
        for name, part in done["checksums"].items():
            checksums[name] = manifest.add_checksums((checksums.get(name, 0), int(part, 16)))
        for name, own in done["figures"].items():
            manifest.add_figures(figures.setdefault(name, {}), own)
    sha256 = {s.name: (journal.done(f"sha256-{s.name}") or {"sha256": None})["sha256"] for s in plan.source.shards}
    for pattern in COPIED:
        for path in sorted(plan.source.folder.glob(pattern)):
            shutil.copyfile(path, journal.staging / path.name)
    card = plan.source.folder / (SOURCE_CARD if isinstance(plan.source, Checkpoint) else "README.md")
    if card.is_file():
        shutil.copyfile(card, journal.staging / SOURCE_CARD)
    facts = manifest.build(plan, sha256, checksums, figures)
    (journal.staging / "README.md").write_text(model_card(facts))
    if plan.quantization:
        (journal.staging / REPORT).write_text(plan.quantization.report(facts))
    write_durably(journal.staging / MANIFEST, json.dumps(facts, indent=1))
