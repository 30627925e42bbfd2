"""How an array is divided among shard files: what `store` writes and `checkpoint` reads.

An array is a grid of shards, one file each. A shard is a grid of chunks, which are what a device reads (zarr v3
"sharding_indexed"):

    chunk, crc32c, chunk, crc32c, ..., (offset, size) of each chunk, crc32c
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import crc32c
import numpy as np

from tpuconv.layout import Shape

CHUNK_BYTES = 2 << 20
"""Chunks are what a device reads. Larger ones are divided, so that a device reads little that it does not need."""

CRC_BYTES = 4
INDEX_ENTRY = np.dtype("<u8")
"""The index has two for each chunk: where it begins and how long it is, with its checksum."""
ABSENT = np.iinfo(INDEX_ENTRY).max
"""Both entries of a chunk that lies outside of the array."""


MAX_SLOTS = 1 << 16
"""Of one shard. A shard that tpuconv writes has a few hundred."""


@dataclass(frozen=True)
class ShardedArraySpec:
    """An array in files of the shape `shards`, each divided into chunks of the shape `chunks`: a whole number along
    each axis."""

    shape: Shape
    dtype: np.dtype[Any]
    shards: Shape
    chunks: Shape

    @property
    def grid(self) -> Shape:
        """The number of shards along each axis."""
        return tuple(-(-n // s) for n, s in zip(self.shape, self.shards, strict=True))

    @property
    def slots(self) -> Shape:
        """The number of chunks of a shard along each axis."""
        return tuple(s // c for s, c in zip(self.shards, self.chunks, strict=True))

    @property
    def slot_bytes(self) -> int:
        """The size of a chunk with its checksum."""
        return prod(self.chunks) * self.dtype.itemsize + CRC_BYTES

    @property
    def index_bytes(self) -> int:
        """The size of the index with its checksum."""
        return 2 * INDEX_ENTRY.itemsize * prod(self.slots) + CRC_BYTES

    @property
    def shard_bytes(self) -> int:
        """The size of the file of a shard that holds all its chunks."""
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

    def layout(self, index: Shape) -> np.ndarray:
        """[slots, 2]: the index of a shard as tpuconv writes it, one chunk after the other."""
        inside = self.in_array(index)
        entries = np.full((inside.size, 2), ABSENT, INDEX_ENTRY)
        entries[inside, 0] = np.arange(inside.sum()) * self.slot_bytes
        entries[inside, 1] = self.slot_bytes
        return entries

    def chunks_of(self, index: Shape) -> int:
        """How many chunks of a shard lie, at least partly, in the array."""
        return prod(
            -(-min(s, n - i * s) // c) for i, n, s, c in zip(index, self.shape, self.shards, self.chunks, strict=True)
        )

    def shard_sizes(self) -> dict[str, int]:
        """The sizes of all shard files, by name."""
        return {
            shard_name(index): self.chunks_of(index) * self.slot_bytes + self.index_bytes
            for index in product(*map(range, self.grid))
        }

    def zarr_json(self) -> dict[str, Any]:
        """The array's zarr metadata, as JSON."""
        crc = {"name": "crc32c"}
        little_endian = {"name": "bytes", "configuration": {"endian": "little"}}
        sharding = {
            "chunk_shape": list(self.chunks),
            "codecs": [little_endian, crc],
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


def shard_name(index: Shape) -> str:
    """The file name of a shard, in the folder of its array."""
    return ".".join(("c", *map(str, index)))


class ShardBuilder:
    """A shard under construction in `buffer`, which starts at a page and holds `spec.shard_bytes` in complete pages.
    `index` is the shard's place in the array's grid of shards."""

    def __init__(self, spec: ShardedArraySpec, index: Shape, buffer: np.ndarray):
        self.spec, self.index, self.buffer = spec, index, buffer
        self.offsets = np.full((prod(spec.slots), 2), ABSENT, INDEX_ENTRY)
        self.used = 0

    def chunks(self) -> Iterator[tuple[int, Shape]]:
        """Yields the slot and the first element of every chunk to build; see `ShardedArraySpec.starts`."""
        return self.spec.starts(self.index)

    def place(self, slot: int, bits: np.dtype[Any]) -> np.ndarray:
        """The memory of a chunk, in its shape, as unsigned integers of the dtype `bits`."""
        start, self.used = self.used, self.used + self.spec.slot_bytes
        self.offsets[slot] = start, self.spec.slot_bytes
        return self.buffer[start : self.used - CRC_BYTES].view(bits).reshape(self.spec.chunks)

    def close_chunk(self, slot: int) -> None:
        """Adds the checksum of a chunk that was built."""
        start, nbytes = map(int, self.offsets[slot])
        self._add_crc(start, start + nbytes - CRC_BYTES)

    def crcs(self) -> bytes:
        """The crc32c of each chunk, in the order of the file. Call it after all are built."""
        return self.buffer[: self.used].reshape(-1, self.spec.slot_bytes)[:, -CRC_BYTES:].tobytes()

    def close(self) -> np.ndarray:
        """Adds the index. Returns the file's bytes."""
        start, index = self.used, self.offsets.view(np.uint8).reshape(-1)
        self.buffer[start : start + index.size] = index
        self._add_crc(start, start + index.size)
        return self.buffer[: start + self.spec.index_bytes]

    def _add_crc(self, start: int, end: int) -> None:
        # It holds the interpreter's lock: to get that back takes longer than a chunk.
        crc = crc32c.crc32c(self.buffer[start:end].data, gil_release_mode=0)
        self.buffer[end : end + CRC_BYTES] = np.frombuffer(crc.to_bytes(CRC_BYTES, "little"), np.uint8)


def checked(data: np.ndarray, what: str) -> np.ndarray:
    """`data` without the checksum at its end.

    Raises:
        ValueError: it does not match its checksum; `what` names it.
    """
    content, crc = data[:-CRC_BYTES], data[-CRC_BYTES:]
    if crc32c.crc32c(content.data) != int.from_bytes(crc.tobytes(), "little"):
        raise ValueError(f"{what} does not hold its checksum")
    return content
