"""How an array lies in shard files: what `store` writes and `checkpoint` reads.

An array is a grid of shards, one file each, and a shard a grid of chunks, what a device reads (zarr v3
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
"""Chunks are what a device reads: larger ones are cut further, so that it reads little that it does not need."""

CRC_BYTES = 4
INDEX_ENTRY = np.dtype("<u8")
"""Of the index, which holds two for each chunk: where it begins and how long it is, checksum included."""
ABSENT = np.iinfo(INDEX_ENTRY).max
"""Both entries of a chunk that lies outside of the array."""


MAX_SLOTS = 1 << 16
"""Of a shard; one that is written has a few hundred."""


@dataclass(frozen=True)
class ShardedArraySpec:
    """An array in files of the shape `shards`, which are read by `chunks`, of which a shard has a whole number along
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
        """Of a chunk and its checksum."""
        return prod(self.chunks) * self.dtype.itemsize + CRC_BYTES

    @property
    def index_bytes(self) -> int:
        """Of the index and its checksum."""
        return 2 * INDEX_ENTRY.itemsize * prod(self.slots) + CRC_BYTES

    @property
    def shard_bytes(self) -> int:
        """The size of the file of a shard that holds all its chunks."""
        return prod(self.slots) * self.slot_bytes + self.index_bytes

    def starts(self, index: Shape) -> Iterator[tuple[int, Shape]]:
        """The slot and the first element in the array of every chunk of a shard that lies, in part at least, in the
        array. `index` is the place of the shard in the grid."""
        first = [i * s for i, s in zip(index, self.shards, strict=True)]
        for slot, at in enumerate(product(*map(range, self.slots))):
            start = tuple(f + i * c for f, i, c in zip(first, at, self.chunks, strict=True))
            if all(a < n for a, n in zip(start, self.shape, strict=True)):
                yield slot, start

    def in_array(self, index: Shape) -> np.ndarray:
        """For each slot of a shard whether its chunk lies, in part at least, in the array."""
        inside = np.ones((), bool)
        for i, n, s, c in zip(index, self.shape, self.shards, self.chunks, strict=True):
            inside = inside[..., None] & (np.arange(i * s, (i + 1) * s, c) < n)
        return inside.reshape(-1)

    def layout(self, index: Shape) -> np.ndarray:
        """The index of a shard: its chunks lie one after the other."""
        inside = self.in_array(index)
        entries = np.full((inside.size, 2), ABSENT, INDEX_ENTRY)
        entries[inside, 0] = np.arange(inside.sum()) * self.slot_bytes
        entries[inside, 1] = self.slot_bytes
        return entries

    def chunks_of(self, index: Shape) -> int:
        """How many chunks of a shard lie, in part at least, in the array."""
        return prod(
            -(-min(s, n - i * s) // c) for i, n, s, c in zip(index, self.shape, self.shards, self.chunks, strict=True)
        )

    def shard_sizes(self) -> dict[str, int]:
        """The names and sizes of all shard files."""
        return {
            shard_name(index): self.chunks_of(index) * self.slot_bytes + self.index_bytes
            for index in product(*map(range, self.grid))
        }

    def zarr_json(self) -> dict[str, Any]:
        """The array's metadata, as JSON has it."""
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
    """The file of a shard in the folder of its array."""
    return ".".join(("c", *map(str, index)))


class ShardBuilder:
    """One shard under construction in `buffer`, which starts at a page and holds `cut.shard_bytes` in whole pages.
    `index` is its place in the array's grid of shards."""

    def __init__(self, cut: ShardedArraySpec, index: Shape, buffer: np.ndarray):
        self.cut, self.index, self.buffer = cut, index, buffer
        self.offsets = np.full((prod(cut.slots), 2), ABSENT, INDEX_ENTRY)
        self.used = 0

    def chunks(self) -> Iterator[tuple[int, Shape]]:
        """The slot and the first element of every chunk that is to be built; see `ShardedArraySpec.starts`."""
        return self.cut.starts(self.index)

    def place(self, slot: int, bits: np.dtype[Any]) -> np.ndarray:
        """Where a chunk is to be built, as unsigned integers."""
        start, self.used = self.used, self.used + self.cut.slot_bytes
        self.offsets[slot] = start, self.cut.slot_bytes
        return self.buffer[start : self.used - CRC_BYTES].view(bits).reshape(self.cut.chunks)

    def close_chunk(self, slot: int) -> None:
        """Adds the checksum of a chunk that was built."""
        start, nbytes = map(int, self.offsets[slot])
        self._add_crc(start, start + nbytes - CRC_BYTES)

    def crcs(self) -> bytes:
        """The crc32c of each chunk, once all are built."""
        return self.buffer[: self.used].reshape(-1, self.cut.slot_bytes)[:, -CRC_BYTES:].tobytes()

    def close(self) -> np.ndarray:
        """Adds the index: the file's bytes."""
        start, index = self.used, self.offsets.view(np.uint8).reshape(-1)
        self.buffer[start : start + index.size] = index
        self._add_crc(start, start + index.size)
        return self.buffer[: start + self.cut.index_bytes]

    def _add_crc(self, start: int, end: int) -> None:
        # It holds the interpreter's lock: to get that back takes longer than a chunk.
        crc = crc32c.crc32c(self.buffer[start:end].data, gil_release_mode=0)
        self.buffer[end : end + CRC_BYTES] = np.frombuffer(crc.to_bytes(CRC_BYTES, "little"), np.uint8)


def checked(data: np.ndarray, what: str) -> np.ndarray:
    """Bytes without the checksum that ends them.

    Raises:
        ValueError: they do not hold it.
    """
    own, crc = data[:-CRC_BYTES], data[-CRC_BYTES:]
    if crc32c.crc32c(own.data) != int.from_bytes(crc.tobytes(), "little"):
        raise ValueError(f"{what} does not hold its checksum")
    return own
