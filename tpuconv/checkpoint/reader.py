"""A converted checkpoint as a source: reading its arrays.

Shard files are read around the page cache if the file system can, as they were written, unless they are in the cache
already. Everything that is read is checked: each chunk, and the index of each shard, has its checksum.
"""

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from tpuconv.checkpoint.shards import (
    CHUNK_BYTES,
    CRC_BYTES,
    INDEX_ENTRY,
    MAX_SLOTS,
    ShardedArraySpec,
    checked,
    shard_name,
)
from tpuconv.errors import ConfigError, CorruptOutput, SourceError, UsageError, shorten
from tpuconv.jsonfile import MIB, check, parse
from tpuconv.mapping.table import Map, MappingTable
from tpuconv.names import collapse
from tpuconv.sources.companions import SOURCE_CARD, find_companions, is_companion
from tpuconv.sources.files import CONFIG_FILE
from tpuconv.sources.headers import DTYPES, TensorInfo
from tpuconv.sources.shard import SourceShard
from tpuconv.sources.source import Source
from tpuconv.storage.disk import DIRECT_BYTES, page_buffer
from tpuconv.storage.hashes import hash_bytes, open_regular
from tpuconv.storage.sealed import copy_file

READ_BYTES = 4 * MIB
"""Read at once, or one chunk more."""

MAX_ZARR_BYTES = 1 * MIB
"""Of a zarr.json, which has about 900 bytes."""

_own = threading.local()

SAFETENSORS_DTYPES = {dtype.name: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Checkpoint(Source):
    """A checkpoint made by `tpuconv convert` as a source: its arrays are the tensors, each a shard of its own. Chunks
    have checksums, so that nothing is hashed."""

    manifest: Manifest = field(kw_only=True)

    hashed = False

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    @cached_property
    def contents_checked(self) -> "Future[None]":
        """The result of `check_contents` for all arrays, which begins beside other work. It raises the same errors."""
        pool = ThreadPoolExecutor(1)
        future = pool.submit(check_contents, self.manifest, self.manifest.arrays)
        pool.shutdown(wait=False)
        return future

    def open(self, check_cancelled: Callable[[], None] = lambda: None, *, hashes: bool = True) -> "CheckpointReader":
        """A reader of the arrays. Waits until their contents are checked.

        Raises:
            CorruptOutput, SourceError: see `check_contents`.
        """
        self.contents_checked.result()
        return CheckpointReader(self.manifest)

    def start_checks(self) -> "Sequence[Future[None]]":
        """Begins `check_contents`; see `contents_checked`."""
        return [self.contents_checked]

    @property
    def encoding(self) -> None:
        """None: config.json describes the encoding of the original source."""

    def origin(self, sha256: Mapping[str, str | None]) -> dict[str, Any]:
        """What the manifest says about the original source."""
        return dict(self.manifest.raw["source"])

    def files(self, info: TensorInfo) -> list[tuple[Path, int, int]]:
        """The shard files of an array: file, first byte and number of bytes."""
        return [(path, 0, path.stat().st_size) for path in sorted((self.manifest.params / info.name).glob("c*"))]

    def copy_companion(self, name: str, target: Path) -> None:
        """Copies a file that came with the weights. Raises SourceError if it was changed."""
        copy_companion(self.manifest, name, target, self.companions[name])

    def table(self) -> MappingTable:
        """A table that maps every array to the parameter of the same name."""
        rows = [Map(a.name, a.name, a.axes, buffer=a.buffer) for a in self.manifest.arrays.values()]
        return MappingTable(rows, variant=self.manifest.variant)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Opens the checkpoint in a folder.

    Raises:
        UsageError: it was not made by tpuconv, or is quantized already.
        CorruptOutput: its manifest or config.json cannot be understood.
    """
    manifest = read_manifest(folder)
    if manifest.quantization is not None:
        raise UsageError(
            f"{folder} is quantized already, with {manifest.quantization['name']}",
            hint="give the checkpoint that it was made from",
        )
    tensors = {
        a.name: TensorInfo(
            a.name, SAFETENSORS_DTYPES[a.dtype], a.shape, a.name, 0, prod(a.shape) * element_bytes(a.dtype)
        )
        for a in manifest.arrays.values()
    }
    shards = tuple(SourceShard(a.name, tensors[a.name].nbytes, digest=a.xxh3) for a in manifest.arrays.values())
    return Checkpoint(
        folder, read_checkpoint_config(manifest), tensors, shards, companions=companions_of(manifest), manifest=manifest
    )


def companions_of(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """The files that came with the weights, with size and hash."""
    if not manifest.sealed.is_sealed:
        return find_companions(manifest.folder, SOURCE_CARD)
    files = manifest.sealed.files.items()
    return {name: dict(facts) for name, facts in files if is_companion(name) or name == SOURCE_CARD}


def copy_companion(manifest: Manifest, name: str, target: Path, facts: Mapping[str, Any]) -> None:
    """Copies a file that came with the weights, whose size and hash are `facts`.

    Raises:
        SourceError: it cannot be read, or was changed; or the checkpoint was replaced.
    """
    try:
        copy_file(manifest.folder / name, target, facts)
    except SourceError:
        manifest.check_current()
        raise


def read_checkpoint_config(manifest: Manifest) -> dict[str, Any]:
    """The parsed config.json of a checkpoint.

    Raises:
        CorruptOutput: it does not match the manifest.
        ConfigError: it holds no JSON object.
    """
    path = str(manifest.folder / CONFIG_FILE)
    raw = parse(manifest.read_file(CONFIG_FILE), path, ConfigError)
    return dict(check(raw, dict, path, ConfigError))


def read_box(manifest: Manifest, name: str, box: Sequence[slice | int], out: np.ndarray) -> None:
    """Reads a box of an array into `out`.

    Args:
        manifest: of the checkpoint.
        name: of the array.
        box: a slice or an integer for each of the first axes. `out` lacks axes with an integer; axes that `box` lacks
            are
            read completely.
        out: in the array's dtype.

    Raises:
        CorruptOutput: the array cannot be read, or a chunk does not match its checksum.
        SourceError: the checkpoint was replaced.
    """
    folder, array = manifest.params / name, manifest.arrays[name]
    dropped = tuple(axis for axis, part in enumerate(box) if isinstance(part, int))
    slices = [slice(part, part + 1) if isinstance(part, int) else part for part in box]
    slices += [slice(0, n) for n in array.shape[len(box) :]]
    try:
        _read_box(folder, _stored_spec(manifest, array), slices, np.expand_dims(out, dropped).view(f"u{out.itemsize}"))
    except (OSError, ValueError) as e:
        manifest.check_current()
        raise CorruptOutput(
            f"{folder} cannot be read: {_error_text(e)}",
            hint=f"`tpuconv verify {manifest.folder}` names all damaged arrays",
        ) from None


def _error_text(error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename).name} is missing"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _stored_spec(manifest: Manifest, array: StoredArray) -> ShardedArraySpec:
    with open_regular(manifest.params / array.name / "zarr.json") as file:
        data = file.read(MAX_ZARR_BYTES)
    if manifest.sealed.is_sealed:
        if hash_bytes(data) != manifest.sealed.files.get(f"{PARAMS}/{array.name}/zarr.json"):
            raise ValueError("zarr.json was changed")
        return array.spec
    try:
        found = parse(data, "zarr.json", CorruptOutput)
        shards = tuple(found["chunk_grid"]["configuration"]["chunk_shape"])
        spec = ShardedArraySpec(array.shape, np.dtype(array.dtype), shards, array.chunks)
        divide = all(s and s % c == 0 for s, c in zip(shards, array.chunks, strict=True))
        if divide and prod(spec.slots) <= MAX_SLOTS and found == spec.zarr_json():
            return spec
    except (CorruptOutput, ValueError, KeyError, TypeError):
        pass
    raise ValueError("zarr.json does not describe the array of the manifest")


def _read_box(folder: Path, spec: ShardedArraySpec, box: Sequence[slice], out: np.ndarray) -> None:
    """`out` has unsigned integers of the size of the elements."""
    for index in product(*(range(b.start // n, -(-b.stop // n)) for b, n in zip(box, spec.shards, strict=True))):
        slots, sources, targets = [], [], []
        for slot, start in spec.starts(index):
            ends = (min(a + c, b.stop) for a, c, b in zip(start, spec.chunks, box, strict=True))
            ranges = [(max(a, b.start), end) for a, b, end in zip(start, box, ends, strict=True)]
            if all(first < end for first, end in ranges):
                slots.append(slot)
                sources.append(tuple(slice(f - a, e - a) for (f, e), a in zip(ranges, start, strict=True)))
                targets.append(tuple(slice(f - b.start, e - b.start) for (f, e), b in zip(ranges, box, strict=True)))
        if not slots:
            continue
        with open_regular(folder / shard_name(index)) as file:
            for chunk, source, target in zip(_read_chunks(file, spec, slots), sources, targets, strict=True):
                out[target] = chunk.view(out.dtype).reshape(spec.chunks)[source]


def read_checksum(manifest: Manifest, name: str) -> str:
    """The checksum of an array as it is stored, in hex. Every byte is read once, past the page cache.

    Raises:
        CorruptOutput: it cannot be read, or a chunk does not match its crc32c.
    """
    folder, array = manifest.params / name, manifest.arrays[name]
    total = 0
    try:
        spec = _stored_spec(manifest, array)
        for index in product(*map(range, spec.grid)):
            slots, starts = zip(*spec.starts(index), strict=True)
            with open_regular(folder / shard_name(index)) as file:
                for start, chunk in zip(starts, _read_chunks(file, spec, slots), strict=True):
                    total += chunk_checksum(spec.shape, spec.chunks, start, chunk)
    except (OSError, ValueError) as e:
        raise CorruptOutput(f"cannot be read: {_error_text(e)}") from None
    return f"{add_checksums((total,)):016x}"


def check_contents(manifest: Manifest, names: Collection[str]) -> None:
    """Checks that the files of some arrays hold the chunks of the manifest, by the crc32c of each: only a few bytes of
    each chunk are read. Whether the chunks match their crc32c is checked when they are read.

    Raises:
        CorruptOutput: files are missing, or hold other chunks. The arrays are named.
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
            f"{manifest.folder} does not hold the arrays of its manifest",
            details=shorten([f"{pattern}: {what}" for what, names in kinds.items() for pattern in collapse(names)]),
            hint=f"`tpuconv verify {manifest.folder}` names all that is wrong; convert it again",
        )


CHECKERS = 8
"""Number of threads: each waits for the disk most of the time."""


def _content_fault(manifest: Manifest, name: str) -> tuple[str, str] | None:
    folder, array = manifest.params / name, manifest.arrays[name]
    total = 0
    try:
        spec = _stored_spec(manifest, array)
        for index in product(*map(range, spec.grid)):
            with open_regular(folder / shard_name(index)) as file:
                size = os.fstat(file.fileno()).st_size
                was_cached = _is_cached(file, size)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                entries = _read_shard_index(file, spec, size)
                if not np.array_equal(entries, spec.layout(index)):
                    raise ValueError(f"{shard_name(index)} does not hold the chunks that tpuconv writes")
                ends = (entries[spec.in_array(index)].sum(axis=1) - CRC_BYTES).tolist()
                crcs = b"".join([os.pread(file.fileno(), CRC_BYTES, end) for end in ends])
                total += crc_checksum(spec.grid, index, crcs)
                if not was_cached:  # else who reads it next takes the few pages that are there for all
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except (OSError, ValueError) as e:
        return name, _error_text(e)
    return None if f"{add_checksums((total,)):016x}" == array.crc32c else (name, "holds other values")


def _read_chunks(file: FileIO, spec: ShardedArraySpec, slots: Sequence[int]) -> Iterator[np.ndarray]:
    """Yields the bytes of some chunks of a shard, each valid until the next. Adjacent chunks are read together."""
    name, size = Path(file.name).name, os.fstat(file.fileno()).st_size
    if size >= DIRECT_BYTES and hasattr(os, "O_DIRECT") and not _is_cached(file, size):
        _set_flags(file, os.O_DIRECT)
    end = size - spec.index_bytes
    index = _read_shard_index(file, spec, size)
    spans = []
    for slot in slots:
        start, length = map(int, index[slot])
        if length != spec.slot_bytes or start + length > end:
            raise ValueError(f"a chunk of {name} is missing")
        spans.append((start, start + length))
    while spans:
        count = 1
        while count < len(spans) and spans[count][0] == spans[count - 1][1] <= spans[0][0] + READ_BYTES:
            count += 1
        first = spans[0][0]
        data = _read_pages(file, first, spans[count - 1][1])
        for start, stop in spans[:count]:
            yield checked(data[start - first : stop - first], f"a chunk of {name}")
        del spans[:count]


def _read_shard_index(file: FileIO, spec: ShardedArraySpec, size: int) -> np.ndarray:
    """[chunks, 2]: where each chunk of a shard begins, and how long it is."""
    name = Path(file.name).name
    if size < spec.index_bytes:
        raise ValueError(f"{name} is too short")
    data = _read_pages(file, size - spec.index_bytes, size)
    return checked(data, f"the index of {name}").copy().view(INDEX_ENTRY).reshape(-1, 2)


def _is_cached(file: FileIO, size: int) -> bool:
    """Whether the end of a file is in the page cache, and so most likely all of it."""
    try:
        return bool(os.preadv(file.fileno(), [bytearray(1)], size - 1, os.RWF_NOWAIT))
    except OSError:  # it is not, or this file system does not say
        return False


def _read_pages(file: FileIO, start: int, stop: int) -> np.ndarray:
    """Bytes [start, stop) of a file. They are read in complete pages, as O_DIRECT needs it, into memory that the
    thread's next read reuses."""
    first = start - start % mmap.PAGESIZE
    memory: np.ndarray | None = getattr(_own, "memory", None)
    if memory is None or memory.nbytes < stop - first:
        memory = _own.memory = page_buffer(max(stop - first, READ_BYTES + CHUNK_BYTES + mmap.PAGESIZE))
    position = first
    while position < stop:
        rest = memory[position - first : -(-(stop - first) // mmap.PAGESIZE) * mmap.PAGESIZE]
        try:
            n = os.preadv(file.fileno(), [rest.data], position)
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            _set_flags(file, 0)  # the file system has no O_DIRECT, or none from here
            n = os.preadv(file.fileno(), [rest.data], position)
        if n == 0:
            raise ValueError(f"{Path(file.name).name} became shorter while it was read")
        position += n
    return memory[start - first : stop - first]


def _set_flags(file: FileIO, flags: int) -> None:
    with suppress(OSError):  # without O_DIRECT all is read by way of the page cache
        fcntl.fcntl(file, fcntl.F_SETFL, flags)


class CheckpointReader:
    """Reads the arrays of a checkpoint, from any number of threads; see `tpuconv.sources.reader.Reader`."""

    def __init__(self, manifest: Manifest):
        self.manifest = manifest

    def read(self, info: TensorInfo, start: int, out: memoryview) -> None:
        """Fills `out` with the bytes of an array from byte `start` on. Complete rows are read."""
        dtype = DTYPES[info.dtype]
        row_bytes = max(1, prod(info.shape[1:]) * dtype.itemsize)
        first, last = start // row_bytes, -(-(start + len(out)) // row_bytes)
        rows = np.empty((last - first, *info.shape[1:]) if info.shape else (), dtype)
        self.read_box(info, [slice(first, last)] if info.shape else [], rows)
        skip = start - first * row_bytes
        out[:] = rows.reshape(-1).view(np.uint8)[skip : skip + len(out)].data

    def read_box(self, info: TensorInfo, box: Sequence[slice], out: np.ndarray) -> None:
        """Fills `out` with a box of an array; see the function `read_box`."""
        read_box(self.manifest, info.name, box, out)

    def sha256(self, shard: str) -> None:
        """None: chunks have checksums, which are checked when they are read."""

    def check_unchanged(self, shards: Collection[str] | None = None) -> None:
        """Raises SourceError if the checkpoint was replaced."""
        self.manifest.check_current()

    def close(self) -> None:
        """Nothing stays open."""
