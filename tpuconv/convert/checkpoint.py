"""A converted checkpoint as the source of another one, which holds the same parameters in another form.

Its shard files are read around the page cache where the file system can, as they were written; those that are in it
already, from there. Nothing that is read goes unchecked: each chunk, and the index of each shard, holds its checksum.
"""

import errno
import fcntl
import json
import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tpuconv.convert.journal import MANIFEST
from tpuconv.convert.manifest import Manifest, StoredArray, element_bytes, read_manifest
from tpuconv.convert.plan import CHUNK_BYTES, MIB
from tpuconv.convert.shards import ENTRY, Cut, checked, shard_path
from tpuconv.convert.source import DTYPES, Shard, Source, TensorInfo, read_json
from tpuconv.convert.store import DIRECT_BYTES, page_buffer
from tpuconv.convert.table import Map, MappingTable
from tpuconv.errors import ConfigError, CorruptOutput, SourceError, UsageError

READ_BYTES = 4 * MIB
"""Read at once, or a chunk more."""

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

    @property
    def encoding(self) -> None:
        """None: what config.json says of it was true of the original."""

    def origin(self, sha256: Mapping[str, str | None]) -> dict[str, Any]:
        """That of the original."""
        return dict(self.manifest.raw["source"])

    def files(self, info: TensorInfo) -> list[tuple[Path, int, int]]:
        return [(path, 0, path.stat().st_size) for path in sorted((self.manifest.params / info.name).glob("c*"))]

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
    shards = tuple(Shard(a.name, tensors[a.name].nbytes, 0, a.xxh3) for a in manifest.arrays.values())
    config = read_json(folder / "config.json", ConfigError)
    return Checkpoint(folder, config, tensors, shards, manifest=manifest)


def read_box(manifest: Manifest, name: str, box: Sequence[slice | int], out: np.ndarray) -> None:
    """Fills `out` with a box of an array. An axis with an integer in `box` is none of `out`; those that `box` lacks are
    whole.

    Raises:
        CorruptOutput: it cannot be read, or a chunk does not hold its checksum.
    """
    folder, array = manifest.params / name, manifest.arrays[name]
    dropped = [axis for axis, part in enumerate(box) if isinstance(part, int)]
    slices = [slice(part, part + 1) if isinstance(part, int) else part for part in box]
    slices += [slice(0, n) for n in array.shape[len(box) :]]
    try:
        _read_box(folder, _read_cut(folder, array), slices, np.expand_dims(out, dropped).view(f"u{out.itemsize}"))
    except (OSError, ValueError) as e:
        raise CorruptOutput(
            f"{folder} cannot be read: {_reason(e)}",
            hint=f"`tpuconv verify {manifest.folder}` names all damaged arrays",
        ) from None


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename).name} is missing"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _read_cut(folder: Path, array: StoredArray) -> Cut:
    try:
        found = json.loads((folder / "zarr.json").read_bytes())
        shards = tuple(found["chunk_grid"]["configuration"]["chunk_shape"])
        cut = Cut(array.shape, np.dtype(array.dtype), shards, array.chunks)
        if all(s and s % c == 0 for s, c in zip(shards, array.chunks, strict=True)) and found == cut.zarr_json():
            return cut
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError("zarr.json does not describe the array of the manifest")


def _read_box(folder: Path, cut: Cut, box: Sequence[slice], out: np.ndarray) -> None:
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
        with shard_path(folder, index).open("rb", buffering=0) as file:
            for chunk, source, target in zip(_chunks(file, cut, slots), sources, targets, strict=True):
                out[target] = chunk.view(out.dtype).reshape(cut.chunks)[source]


def _chunks(file: FileIO, cut: Cut, slots: Sequence[int]) -> Iterator[np.ndarray]:
    """The bytes of some chunks of a shard, each until the next one. Those that lie side by side are read together."""
    name, size = Path(file.name).name, os.fstat(file.fileno()).st_size
    if size >= DIRECT_BYTES and hasattr(os, "O_DIRECT") and not _is_cached(file, size):
        _set_flags(file, os.O_DIRECT)
    end = size - cut.index_bytes
    if end < 0:
        raise ValueError(f"{name} is too short")
    index = checked(_read(file, end, size), f"the index of {name}").copy().view(ENTRY).reshape(-1, 2)
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
        self._manifest = _identity(source.folder / MANIFEST)

    def read_box(self, name: str, box: Sequence[slice], out: np.ndarray) -> None:
        """Fills `out` with a box of an array; see the function `read_box`."""
        read_box(self.source.manifest, name, box, out)

    def check_unchanged(self) -> None:
        """Raises SourceError if the checkpoint was replaced."""
        if _identity(self.source.folder / MANIFEST) != self._manifest:
            raise SourceError(f"{self.source.folder} was replaced while it was read", hint="run again")

    def close(self) -> None:
        """Nothing stays open."""


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
