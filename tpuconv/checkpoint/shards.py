"""The division of an array into shard files, which `store` writes and `checkpoint` reads.

An array is a grid of shards, one file each. A shard is a grid of chunks, which are what a device reads (zarr v3
"sharding_indexed"):

    chunk, crc32c, chunk, crc32c, ..., (offset, size) of each chunk, crc32c

Chunks of compressed arrays are zstd frames. A code of 4 bits takes a byte in a chunk, since TensorStore holds it in
one; of such values zstd leaves less than 4 bits.

For Pathways, which reads zarr's format 2, a shard is one chunk, with its checksum (`tpuconv.checkpoint.frames`).
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import crc32c
import numpy as np
import zstandard

from tpuconv.checkpoint.frames import frame_bytes, frame_values, make_frame
from tpuconv.notation.layout import Shape

CRC_BYTES = 4
INDEX_ENTRY = np.dtype("<u8")
"""The index has two for each chunk: where it begins and how long it is, with its checksum."""
ABSENT = np.iinfo(INDEX_ENTRY).max
"""Both entries of a chunk that lies outside of the array."""


MAX_SLOTS = 1 << 16
"""The most chunks of one shard. A shard that tpuconv writes has a few hundred."""

ZSTD = "zstd"
ZSTD_LEVEL = 1
"""Quantized values are noise: only their entropy can be taken. Higher levels look for matches, which costs more than it
saves."""

ZARR_FILES = ("zarr.json", ".zarray")
"""The files with the metadata of an array in zarr's formats 3 and 2."""

_own = threading.local()


@dataclass(frozen=True)
class ShardedArraySpec:
    """An array in files of the shape `shards`, each divided into chunks of the shape `chunks`: a whole number along
    each axis. Those of a `compressed` array are zstd frames; when it is written, `file_bytes` are the sizes of its
    files in row-major order. With `zarr2` the files have zarr's format 2: one chunk each, not compressed."""

    shape: Shape
    dtype: np.dtype[Any]
    shards: Shape
    chunks: Shape
    compressed: bool = field(default=False, kw_only=True)
    file_bytes: tuple[int, ...] = field(default=(), kw_only=True)
    zarr2: bool = field(default=False, kw_only=True)

    @property
    def grid(self) -> Shape:
        """The number of shards along each axis."""
        return tuple(-(-n // s) for n, s in zip(self.shape, self.shards, strict=True))

    @property
    def slots(self) -> Shape:
        """The number of chunks of a shard along each axis."""
        return tuple(s // c for s, c in zip(self.shards, self.chunks, strict=True))

    @property
    def chunk_bytes(self) -> int:
        """The size of a chunk in memory."""
        return prod(self.chunks) * self.dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """The size of a chunk with its checksum, the largest possible one if it is compressed."""
        if self.zarr2:
            return frame_bytes(self.chunk_bytes)
        overhead = 8 * (self.chunk_bytes // 2048 + 16) if self.compressed else 0  # more than ZSTD_compressBound
        return self.chunk_bytes + overhead + CRC_BYTES

    @property
    def index_bytes(self) -> int:
        """The size of the index with its checksum."""
        if self.zarr2:
            return 0
        return 2 * INDEX_ENTRY.itemsize * prod(self.slots) + CRC_BYTES

    @property
    def shard_bytes(self) -> int:
        """The size of the file of a shard that holds all its chunks, the largest possible one if it is compressed."""
        return prod(self.slots) * self.slot_bytes + self.index_bytes

    def starts(self, index: Shape) -> Iterator[tuple[int, Shape]]:
        """Yields the slot and the first element in the array of every chunk of a shard that lies, at least partly, in
        the array. `index` is the shard's place in the grid."""
        first = [i * s for i, s in zip(index, self.shards, strict=True)]
        for slot, slot_index in enumerate(product(*map(range, self.slots))):
            start = tuple(f + i * c for f, i, c in zip(first, slot_index, self.chunks, strict=True))
            if all(a < n for a, n in zip(start, self.shape, strict=True)):
                yield slot, start

    def in_array(self, index: Shape) -> np.ndarray:
        """[slots]: whether the chunk of each slot of a shard lies, at least partly, in the array."""
        inside = np.ones((), bool)
        for i, n, s, c in zip(index, self.shape, self.shards, self.chunks, strict=True):
            inside = inside[..., None] & (np.arange(i * s, (i + 1) * s, c) < n)
        return inside.reshape(-1)

    def is_dense(self, index: Shape, entries: np.ndarray, size: int) -> bool:
        """Returns True if the file of a shard, of `size` bytes, has the index that tpuconv writes: exactly the chunks
        in the array, one after the other. `entries` are [slots, 2]."""
        inside = self.in_array(index)
        starts, lengths = entries[inside].T
        ends = np.cumsum(lengths)
        whole = (lengths > CRC_BYTES) & (lengths <= self.slot_bytes) if self.compressed else lengths == self.slot_bytes
        return bool(
            whole.all()
            and (starts == ends - lengths).all()
            and (entries[~inside] == ABSENT).all()
            and ends[-1] == size - self.index_bytes
        )

    def chunks_of(self, index: Shape) -> int:
        """Returns the number of chunks of a shard that lie, at least partly, in the array."""
        return prod(
            -(-min(s, n - i * s) // c) for i, n, s, c in zip(index, self.shape, self.shards, self.chunks, strict=True)
        )

    def shard_names(self) -> list[str]:
        """Returns the names of all shard files."""
        return [self.shard_name(index) for index in product(*map(range, self.grid))]

    def size_of(self, index: Shape) -> int:
        """Returns the size of the file of a shard as tpuconv writes it; the largest possible one if it is compressed
        and not written yet."""
        if self.file_bytes:
            return self.file_bytes[int(np.ravel_multi_index(index, self.grid)) if index else 0]
        return self.chunks_of(index) * self.slot_bytes + self.index_bytes

    def shard_sizes(self) -> dict[str, int]:
        """Returns the sizes of all shard files, by name; see `size_of`."""
        return {self.shard_name(index): self.size_of(index) for index in product(*map(range, self.grid))}

    def shard_name(self, index: Shape) -> str:
        """Returns the file name of a shard, in the folder of its array."""
        return ".".join(map(str, index or (0,))) if self.zarr2 else ".".join(("c", *map(str, index)))

    @property
    def metadata_name(self) -> str:
        """The file with the array's zarr metadata."""
        return ZARR_FILES[self.zarr2]

    def metadata(self) -> dict[str, Any]:
        """Returns the array's zarr metadata, as JSON."""
        if self.zarr2:
            return {
                "zarr_format": 2,
                "shape": list(self.shape),
                "chunks": list(self.chunks),
                "dtype": self.dtype.str if self.dtype.isbuiltin == 1 else self.dtype.name,
                "compressor": {"id": ZSTD, "level": ZSTD_LEVEL},
                "fill_value": None,
                "filters": None,
                "order": "C",
                "dimension_separator": ".",
            }
        crc = {"name": "crc32c"}
        little_endian = {"name": "bytes", "configuration": {"endian": "little"}}
        zstd = {"name": ZSTD, "configuration": {"level": ZSTD_LEVEL, "checksum": False}}
        sharding = {
            "chunk_shape": list(self.chunks),
            "codecs": [little_endian, *([zstd] if self.compressed else []), crc],
            "index_codecs": [little_endian, crc],
            "index_location": "end",
        }
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.shards)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": 0,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "attributes": {},
        }


class ShardBuilder:
    """A shard under construction in `buffer`, which starts at a page and holds `spec.shard_bytes` in complete pages.
    `index` is the shard's place in the array's grid of shards."""

    def __init__(self, spec: ShardedArraySpec, index: Shape, buffer: np.ndarray):
        self.spec, self.index, self.buffer = spec, index, buffer
        self.offsets = np.full((prod(spec.slots), 2), ABSENT, INDEX_ENTRY)
        self._places: dict[int, int] = {}
        self._used = 0
        self._crcs = bytearray()

    def chunks(self) -> Iterator[tuple[int, Shape]]:
        """Yields the slot and the first element of every chunk to build; see `ShardedArraySpec.starts`."""
        return self.spec.starts(self.index)

    def place(self, slot: int, bits: np.dtype[Any]) -> np.ndarray:
        """Returns the memory of a chunk, in its shape, as unsigned integers of the dtype `bits`."""
        start = self._places[slot] = len(self._places) * self.spec.slot_bytes
        return self.buffer[start : start + self.spec.chunk_bytes].view(bits).reshape(self.spec.chunks)

    def close_chunk(self, slot: int) -> None:
        """Compresses a chunk that was built, if the array is compressed, and adds its checksum. Call it in the order of
        `place`: compressed chunks move to the end of those before, where their own values are not overwritten."""
        if self.spec.zarr2:
            self._crcs += make_frame(self.buffer, self.spec.chunk_bytes)
            self._used = self.spec.shard_bytes
            return
        first, start = self._places[slot], self._used
        content = self.buffer[first : first + self.spec.chunk_bytes]
        if self.spec.compressed:
            packed = np.frombuffer(_compressor().compress(content.data), np.uint8)
            content = self.buffer[start : start + packed.size]
            content[:] = packed
        end = start + content.size
        self._crcs += self._add_crc(start, end)
        self._used = end + CRC_BYTES
        self.offsets[slot] = start, self._used - start

    def crcs(self) -> bytes:
        """Returns the checksum of each chunk, in the order of the file. Call it after all are built."""
        return bytes(self._crcs)

    @property
    def nbytes(self) -> int:
        """The size of the file, when all chunks are built."""
        return self._used + self.spec.index_bytes

    def close(self) -> np.ndarray:
        """Adds the index. Returns the file's bytes."""
        if self.spec.zarr2:
            return self.buffer[: self.nbytes]
        start, index = self._used, self.offsets.view(np.uint8).reshape(-1)
        self.buffer[start : start + index.size] = index
        self._add_crc(start, start + index.size)
        return self.buffer[: self.nbytes]

    def _add_crc(self, start: int, end: int) -> bytes:
        # It holds the interpreter's lock: to get that back takes longer than a chunk.
        crc = crc32c.crc32c(self.buffer[start:end].data, gil_release_mode=0).to_bytes(CRC_BYTES, "little")
        self.buffer[end : end + CRC_BYTES] = np.frombuffer(crc, np.uint8)
        return crc


def chunk_values(data: np.ndarray, spec: ShardedArraySpec, what: str) -> np.ndarray:
    """Returns the values of a chunk as bytes, from what its file holds. They may take its place in memory.

    Raises:
        ValueError: it does not hold a chunk of the array; `what` names it.
    """
    return frame_values(data, spec.chunk_bytes, what) if spec.zarr2 else _decoded(checked(data, what), spec, what)


def checked(data: np.ndarray, what: str) -> np.ndarray:
    """`data` without the checksum at its end.

    Raises:
        ValueError: it does not match its checksum; `what` names it.
    """
    content, crc = data[:-CRC_BYTES], data[-CRC_BYTES:]
    if crc32c.crc32c(content.data) != int.from_bytes(crc.tobytes(), "little"):
        raise ValueError(f"{what} does not hold its checksum")
    return content


def _decoded(data: np.ndarray, spec: ShardedArraySpec, what: str) -> np.ndarray:
    """Returns the values of a chunk without its checksum, decompressed."""
    if not spec.compressed:
        return data
    try:
        if zstandard.frame_content_size(data.data) == spec.chunk_bytes:  # else it could fill the memory
            return np.frombuffer(_decompressor().decompress(data.data), np.uint8)
    except zstandard.ZstdError:
        pass
    raise ValueError(f"{what} cannot be decompressed")


def _compressor() -> zstandard.ZstdCompressor:
    """Returns the compressor of this thread."""
    if not hasattr(_own, "compressor"):
        _own.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    compressor: zstandard.ZstdCompressor = _own.compressor
    return compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_own, "decompressor"):
        _own.decompressor = zstandard.ZstdDecompressor()
    decompressor: zstandard.ZstdDecompressor = _own.decompressor
    return decompressor
