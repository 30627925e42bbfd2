"""Shard files, open to be read, on a local disk or in a bucket.

On a disk they are read around the page cache if the file system can, as they were written, unless they are in the cache
already. From a bucket, a shard of which much is needed comes by one request.
"""

import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tpuconv import buckets
from tpuconv.jsonfile import MIB
from tpuconv.location import BucketPath, Location
from tpuconv.storage.hashes import open_regular
from tpuconv.storage.local_file import READ_BYTES, LocalFile
from tpuconv.storage.places import wrong_size


class ShardFile(Protocol):
    """A shard that is open; closed at the end of a `with`. Its errors are OSErrors, or ValueErrors where it is shorter
    than it should be. A bucket that cannot be reached is a BucketError."""

    name: str
    size: int
    read_bytes: int
    """The number of bytes that is best read at once."""

    def __enter__(self) -> "ShardFile":
        """Itself."""

    def __exit__(self, *_: object) -> None:
        """Closes it."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the bytes [start, stop), valid until the thread's next read."""

    def expect(self, nbytes: int) -> None:
        """Says how many bytes will be read, one after the other."""

    def begin_samples(self) -> None:
        """Says that only a few bytes here and there will be read."""

    def samples(self, starts: Sequence[int], length: int) -> list[bytes | memoryview]:
        """`length` bytes from each of `starts` on."""

    def end_samples(self) -> None:
        """Says that no more samples are needed."""


def open_shard(path: Location, size: int) -> ShardFile:
    """Opens a shard, which in a bucket is taken to have `size` bytes.

    Raises:
        OSError: it is missing, not a regular file, or cannot be read.
    """
    return BucketShard(path, size) if isinstance(path, BucketPath) else LocalShard(LocalFile(open_regular(path)))


class BucketShard:
    """An object. Nothing is asked of the store until bytes are needed."""

    read_bytes = 64 * MIB

    def __init__(self, path: BucketPath, size: int):
        self.path, self.name, self.size = path, path.name, size
        self._all: np.ndarray | None = None

    def __enter__(self) -> "BucketShard":
        return self

    def __exit__(self, *_: object) -> None:
        self._all = None

    def expect(self, nbytes: int) -> None:
        if 2 * nbytes >= self.size:
            self._all = np.frombuffer(buckets.read(self.path), np.uint8)
            if self._all.size != self.size:
                raise ValueError(f"{self.name} {wrong_size(self._all.size, self.size)}")

    def read(self, start: int, stop: int) -> np.ndarray:
        if self._all is not None:
            return self._all[start:stop]
        data = np.frombuffer(buckets.read(self.path, start, stop), np.uint8)
        if data.size != stop - start:
            raise ValueError(f"{self.name} is too short")
        return data

    def begin_samples(self) -> None:
        """Nothing: each read asks for its bytes alone."""

    def samples(self, starts: Sequence[int], length: int) -> list[bytes | memoryview]:
        return list(buckets.read_ranges(self.path, starts, length))

    def end_samples(self) -> None:
        """Nothing."""


class LocalShard:
    """A file."""

    read_bytes = READ_BYTES

    def __init__(self, file: LocalFile):
        self._file, self.name, self.size = file, file.name, file.size
        self._was_cached = True

    def __enter__(self) -> "LocalShard":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def expect(self, nbytes: int) -> None:
        self._file.avoid_cache()

    def begin_samples(self) -> None:
        self._was_cached = self._file.is_cached(0, self.size)
        os.posix_fadvise(self._file.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def samples(self, starts: Sequence[int], length: int) -> list[bytes | memoryview]:
        return [os.pread(self._file.fd, length, start) for start in starts]

    def end_samples(self) -> None:
        if not self._was_cached:  # else who reads it next takes the few pages that are there for all
            self._file.forget()

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._file.read(start, stop)
