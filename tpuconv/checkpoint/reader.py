"""A converted checkpoint as the source of another one, which holds the same parameters in another form.

Its shard files are read around the page cache where the file system can, as they were written; those that are in it
already, from there. Nothing that is read goes unchecked: each chunk, and the index of each shard, holds its checksum.
"""

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from io import FileIO
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tpuconv.checkpoint.manifest import (
    PARAMS,
    Manifest,
    StoredArray,
    add_checksums,
    chunk_checksum,
    crc_checksum,
    element_bytes,
    read_manifest,
)
from tpuconv.checkpoint.shards import CHUNK_BYTES, CRC_BYTES, ENTRY, MAX_SLOTS, ShardedArraySpec, checked, shard_name
from tpuconv.errors import ConfigError, CorruptOutput, SourceError, UsageError, shorten
from tpuconv.jsonfile import MIB, check, parse
from tpuconv.mapping.table import Map, MappingTable
from tpuconv.names import collapse
from tpuconv.sources.companions import SOURCE_CARD, find_companions, is_companion
from tpuconv.sources.source import CONFIG_FILE, DTYPES, Shard, Source, TensorInfo
from tpuconv.storage.disk import DIRECT_BYTES, page_buffer
from tpuconv.storage.hashes import hash_bytes, open_regular
from tpuconv.storage.sealed import copy_file

READ_BYTES = 4 * MIB
"""Read at once, or a chunk more."""

MAX_ZARR_BYTES = 1 * MIB
"""Of a zarr.json, which has about 900."""

_own = threading.local()

CODES = {dtype.name: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Checkpoint(Source):
    """The arrays of a checkpoint made by `tpuconv convert` as tensors, each a shard of its own. Chunks carry checksums,
    so that nothing needs to be hashed."""

    manifest: Manifest = field(kw_only=True)

    hashed = False

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @cached_property
    def contents_checked(self) -> "Future[None]":
        """Begins `check_contents` of all arrays beside other work; its result raises what it does."""
        pool = ThreadPoolExecutor(1)
        future = pool.submit(check_contents, self.manifest, self.manifest.arrays)
        pool.shutdown(wait=False)
        return future

    @property
    def encoding(self) -> None:
        """None: what config.json says of it was true of the original."""

    def origin(self, sha256: Mapping[str, str | None]) -> dict[str, Any]:
        """That of the original."""
        return dict(self.manifest.raw["source"])

    def files(self, info: TensorInfo) -> list[tuple[Path, int, int]]:
        return [(path, 0, path.stat().st_size) for path in sorted((self.manifest.params / info.name).glob("c*"))]

    def copy_companion(self, name: str, target: Path) -> None:
        copy_companion(self.manifest, name, target, self.companions[name])

    def table(self) -> MappingTable:
        """Every parameter becomes the one of the same name."""
        return MappingTable([Map(a.name, a.name, a.axes, buffer=a.buffer) for a in self.manifest.arrays.values()])


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder.

    Raises:
        UsageError: it is none of ours, holds only a part of a model, or is quantized already.
        CorruptOutput: its manifest cannot be understood.
    """
    manifest = read_manifest(folder)
    if manifest.quantization is not None:
        raise UsageError(
            f"{folder} is quantized already, with {manifest.quantization['name']}",
            hint="give the checkpoint that it was made from",
        )
    tensors = {
        a.name: TensorInfo(a.name, CODES[a.dtype], a.shape, a.name, 0, prod(a.shape) * element_bytes(a.dtype))
        for a in manifest.arrays.values()
    }
    shards = tuple(Shard(a.name, tensors[a.name].nbytes, digest=a.xxh3) for a in manifest.arrays.values())
    return Checkpoint(
        folder, read_config(manifest), tensors, shards, companions=companions_of(manifest), manifest=manifest
    )


def companions_of(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """The files that came with the weights, with size and hash."""
    if not manifest.sealed.is_sealed:
        return find_companions(manifest.folder, SOURCE_CARD)
    own = manifest.sealed.files.items()
    return {name: dict(facts) for name, facts in own if is_companion(name) or name == SOURCE_CARD}


def copy_companion(manifest: Manifest, name: str, target: Path, facts: Mapping[str, Any]) -> None:
    """Copies a file that came with the weights, of which size and hash are known.

    Raises:
        SourceError: it cannot be read, or was changed; or the checkpoint was replaced.
    """
    try:
        copy_file(manifest.folder / name, target, facts)
    except SourceError:
        manifest.check_current()
        raise


def read_config(manifest: Manifest) -> dict[str, Any]:
    """The config.json of a checkpoint.

    Raises:
        CorruptOutput: it is not the one that the manifest means.
        ConfigError: it is no JSON object.
    """
    path = str(manifest.folder / CONFIG_FILE)
    raw = parse(manifest.read_file(CONFIG_FILE), path, ConfigError)
    return dict(check(raw, dict, path, ConfigError))


def read_box(manifest: Manifest, name: str, box: Sequence[slice | int], out: np.ndarray) -> None:
    """Fills `out` with a box of an array. An axis with an integer in `box` is none of `out`; those that `box` lacks are
    whole.

    Raises:
        CorruptOutput: it cannot be read, or a chunk does not hold its checksum.
        SourceError: the checkpoint was replaced.
    """
    folder, array = manifest.params / name, manifest.arrays[name]
    dropped = tuple(axis for axis, part in enumerate(box) if isinstance(part, int))
    slices = [slice(part, part + 1) if isinstance(part, int) else part for part in box]
    slices += [slice(0, n) for n in array.shape[len(box) :]]
    try:
        _read_box(folder, _read_cut(manifest, array), slices, np.expand_dims(out, dropped).view(f"u{out.itemsize}"))
    except (OSError, ValueError) as e:
        manifest.check_current()
        raise CorruptOutput(
            f"{folder} cannot be read: {_reason(e)}",
            hint=f"`tpuconv verify {manifest.folder}` names all damaged arrays",
        ) from None


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename).name} is missing"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _read_cut(manifest: Manifest, array: StoredArray) -> ShardedArraySpec:
    with open_regular(manifest.params / array.name / "zarr.json") as file:
        data = file.read(MAX_ZARR_BYTES)
    if manifest.sealed.is_sealed:
        if hash_bytes(data) != manifest.sealed.files.get(f"{PARAMS}/{array.name}/zarr.json"):
            raise ValueError("zarr.json was changed")
        return array.cut
    try:
        found = parse(data, "zarr.json", CorruptOutput)
        shards = tuple(found["chunk_grid"]["configuration"]["chunk_shape"])
        cut = ShardedArraySpec(array.shape, np.dtype(array.dtype), shards, array.chunks)
        divide = all(s and s % c == 0 for s, c in zip(shards, array.chunks, strict=True))
        if divide and prod(cut.slots) <= MAX_SLOTS and found == cut.zarr_json():
            return cut
    except (CorruptOutput, ValueError, KeyError, TypeError):
        pass
    raise ValueError("zarr.json does not describe the array of the manifest")


def _read_box(folder: Path, cut: ShardedArraySpec, box: Sequence[slice], out: np.ndarray) -> None:
    """`out` is of unsigned integers as large as the elements."""
    for index in product(*(range(b.start // n, -(-b.stop // n)) for b, n in zip(box, cut.shards, strict=True))):
        slots, sources, targets = [], [], []
        for slot, start in cut.starts(index):
            ends = (min(a + c, b.stop) for a, c, b in zip(start, cut.chunks, box, strict=True))
            both = [(max(a, b.start), end) for a, b, end in zip(start, box, ends, strict=True)]
            if all(first < end for first, end in both):
                slots.append(slot)
                sources.append(tuple(slice(f - a, e - a) for (f, e), a in zip(both, start, strict=True)))
                targets.append(tuple(slice(f - b.start, e - b.start) for (f, e), b in zip(both, box, strict=True)))
        if not slots:
            continue
        with open_regular(folder / shard_name(index)) as file:
            for chunk, source, target in zip(_chunks(file, cut, slots), sources, targets, strict=True):
                out[target] = chunk.view(out.dtype).reshape(cut.chunks)[source]


def read_checksum(manifest: Manifest, name: str) -> str:
    """The checksum of the array that is stored under a name, whose every byte is read once, past the page cache.

    Raises:
        CorruptOutput: it cannot be read, or a chunk does not hold its crc32c.
    """
    folder, array = manifest.params / name, manifest.arrays[name]
    total = 0
    try:
        cut = _read_cut(manifest, array)
        for index in product(*map(range, cut.grid)):
            slots, starts = zip(*cut.starts(index), strict=True)
            with open_regular(folder / shard_name(index)) as file:
                for start, chunk in zip(starts, _chunks(file, cut, slots), strict=True):
                    total += chunk_checksum(cut.shape, cut.chunks, start, chunk)
    except (OSError, ValueError) as e:
        raise CorruptOutput(f"cannot be read: {_reason(e)}") from None
    return f"{add_checksums((total,)):016x}"


def check_contents(manifest: Manifest, names: Collection[str]) -> None:
    """Whether the files of some arrays hold the chunks that the manifest means, told by the crc32c of each: a few bytes
    of each chunk are read. Whoever reads the chunks finds whether they hold their crc32c.

    Raises:
        CorruptOutput: files are missing, or hold other chunks; the arrays are named.
        SourceError: the checkpoint was replaced.
    """
    if not manifest.sealed.is_sealed:
        return
    with ThreadPoolExecutor(CHECKERS) as pool:
        faults = [fault for fault in pool.map(lambda name: _content_fault(manifest, name), names) if fault]
    if faults:
        manifest.check_current()
        kinds: dict[str, list[str]] = {}
        for name, fault in faults:
            kinds.setdefault(fault, []).append(name)
        raise CorruptOutput(
            f"{manifest.folder} does not hold the arrays that its manifest means",
            details=shorten([f"{pattern}: {what}" for what, names in kinds.items() for pattern in collapse(names)]),
            hint=f"`tpuconv verify {manifest.folder}` names all that is wrong; convert it again",
        )


CHECKERS = 8
"""Threads: each waits for the disk most of the time."""


def _content_fault(manifest: Manifest, name: str) -> tuple[str, str] | None:
    folder, array = manifest.params / name, manifest.arrays[name]
    total = 0
    try:
        cut = _read_cut(manifest, array)
        for index in product(*map(range, cut.grid)):
            with open_regular(folder / shard_name(index)) as file:
                size = os.fstat(file.fileno()).st_size
                was_cached = _is_cached(file, size)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                entries = _read_index(file, cut, size)
                if not np.array_equal(entries, cut.layout(index)):
                    raise ValueError(f"{shard_name(index)} does not hold the chunks that tpuconv writes")
                ends = (entries[cut.in_array(index)].sum(axis=1) - CRC_BYTES).tolist()
                crcs = b"".join([os.pread(file.fileno(), CRC_BYTES, end) for end in ends])
                total += crc_checksum(cut.grid, index, crcs)
                if not was_cached:  # else who reads it next takes the few pages that are there for all
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except (OSError, ValueError) as e:
        return name, _reason(e)
    return None if f"{add_checksums((total,)):016x}" == array.crc32c else (name, "holds other values")


def _chunks(file: FileIO, cut: ShardedArraySpec, slots: Sequence[int]) -> Iterator[np.ndarray]:
    """The bytes of some chunks of a shard, each until the next one. Those that lie side by side are read together."""
    name, size = Path(file.name).name, os.fstat(file.fileno()).st_size
    if size >= DIRECT_BYTES and hasattr(os, "O_DIRECT") and not _is_cached(file, size):
        _set_flags(file, os.O_DIRECT)
    end = size - cut.index_bytes
    index = _read_index(file, cut, size)
    spans = []
    for slot in slots:
        start, length = map(int, index[slot])
        if length != cut.slot_bytes or start + length > end:
            raise ValueError(f"a chunk of {name} is missing")
        spans.append((start, start + length))
    while spans:
        count = 1
        while count < len(spans) and spans[count][0] == spans[count - 1][1] <= spans[0][0] + READ_BYTES:
            count += 1
        first = spans[0][0]
        data = _read(file, first, spans[count - 1][1])
        for start, stop in spans[:count]:
            yield checked(data[start - first : stop - first], f"a chunk of {name}")
        del spans[:count]


def _read_index(file: FileIO, cut: ShardedArraySpec, size: int) -> np.ndarray:
    """Where each chunk of a shard begins, and how long it is."""
    name = Path(file.name).name
    if size < cut.index_bytes:
        raise ValueError(f"{name} is too short")
    data = _read(file, size - cut.index_bytes, size)
    return checked(data, f"the index of {name}").copy().view(ENTRY).reshape(-1, 2)


def _is_cached(file: FileIO, size: int) -> bool:
    """Whether the end of a file is in the page cache, and so most likely all of it."""
    try:
        return bool(os.preadv(file.fileno(), [bytearray(1)], size - 1, os.RWF_NOWAIT))
    except OSError:  # it is not, or this file system does not say
        return False


def _read(file: FileIO, start: int, stop: int) -> np.ndarray:
    """Bytes of a file, in whole pages as O_DIRECT needs it, in memory of the thread that its next read reuses."""
    first = start - start % mmap.PAGESIZE
    memory: np.ndarray | None = getattr(_own, "memory", None)
    if memory is None or memory.nbytes < stop - first:
        memory = _own.memory = page_buffer(max(stop - first, READ_BYTES + CHUNK_BYTES + mmap.PAGESIZE))
    at = first
    while at < stop:
        rest = memory[at - first : -(-(stop - first) // mmap.PAGESIZE) * mmap.PAGESIZE]
        try:
            n = os.preadv(file.fileno(), [rest.data], at)
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            _set_flags(file, 0)  # the file system has no O_DIRECT, or none from here
            n = os.preadv(file.fileno(), [rest.data], at)
        if n == 0:
            raise ValueError(f"{Path(file.name).name} became shorter while it was read")
        at += n
    return memory[start - first : stop - first]


def _set_flags(file: FileIO, flags: int) -> None:
    with suppress(OSError):  # without O_DIRECT all is read by way of the page cache
        fcntl.fcntl(file, fcntl.F_SETFL, flags)


class CheckpointReader:
    """Reads boxes of arrays from any number of threads."""

    def __init__(self, source: Checkpoint):
        self.source = source
        source.contents_checked.result()

    def read_box(self, name: str, box: Sequence[slice], out: np.ndarray) -> None:
        """Fills `out` with a box of an array; see the function `read_box`."""
        read_box(self.source.manifest, name, box, out)

    def check_unchanged(self, shards: Collection[str] | None = None) -> None:
        """Raises SourceError if the checkpoint was replaced."""
        self.source.manifest.check_current()

    def close(self) -> None:
        """Nothing stays open."""
