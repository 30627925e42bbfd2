"""Shard files, open to be read, on a local disk or in a bucket.

On a disk they are read around the page cache if the file system can, as they were written, unless they are in the cache
already. From a bucket, a shard of which much is needed comes by one request.
"""

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from typing import Protocol

import numpy as np

from tpuconv import buckets
from tpuconv.checkpoint.shards import CHUNK_BYTES
from tpuconv.jsonfile import MIB
from tpuconv.location import BucketPath, Location
from tpuconv.storage.disk import DIRECT_BYTES, page_buffer
from tpuconv.storage.hashes import open_regular

READ_BYTES = 4 * MIB
"""Read from a disk at once, or one chunk more."""

_own = threading.local()


class ShardFile(Protocol):
    """A shard that is open; closed at the end of a `with`. Its errors are OSErrors, or ValueErrors where it is shorter
    than it should be. A bucket that cannot be reached is a BucketError."""

    name: str
    size: int
    read_bytes: int
    """How much is best read at once."""

    def __enter__(self) -> "ShardFile":
        """Itself."""

    def __exit__(self, *_: object) -> None:
        """Closes it."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """The bytes [start, stop), valid until the thread's next read."""

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
    return BucketShard(path, size) if isinstance(path, BucketPath) else LocalShard(open_regular(path))


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
                raise ValueError(f"{self.name} has {self._all.size} bytes instead of {self.size}")

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

    def __init__(self, file: FileIO):
        self.file, self.name = file, os.path.basename(file.name)
        self.size = os.fstat(file.fileno()).st_size
        self._was_cached = True

    def __enter__(self) -> "LocalShard":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def expect(self, nbytes: int) -> None:
        if self.size >= DIRECT_BYTES and hasattr(os, "O_DIRECT") and not self._is_cached():
            self._set_flags(os.O_DIRECT)

    def begin_samples(self) -> None:
        self._was_cached = self._is_cached()
        os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

    def samples(self, starts: Sequence[int], length: int) -> list[bytes | memoryview]:
        return [os.pread(self.file.fileno(), length, start) for start in starts]

    def end_samples(self) -> None:
        if not self._was_cached:  # else who reads it next takes the few pages that are there for all
            os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _is_cached(self) -> bool:
        """Whether the end of the file is in the page cache, and so most likely all of it."""
        try:
            return bool(os.preadv(self.file.fileno(), [bytearray(1)], self.size - 1, os.RWF_NOWAIT))
        except OSError:  # it is not, or this file system does not say
            return False

    def read(self, start: int, stop: int) -> np.ndarray:
        """Bytes are read in complete pages, as O_DIRECT needs it, into memory that the thread's next read reuses."""
        first = start - start % mmap.PAGESIZE
        memory: np.ndarray | None = getattr(_own, "memory", None)
        if memory is None or memory.nbytes < stop - first:
            memory = _own.memory = page_buffer(max(stop - first, READ_BYTES + CHUNK_BYTES + mmap.PAGESIZE))
        position = first
        while position < stop:
            rest = memory[position - first : -(-(stop - first) // mmap.PAGESIZE) * mmap.PAGESIZE]
            try:
                n = os.preadv(self.file.fileno(), [rest.data], position)
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                self._set_flags(0)  # the file system has no O_DIRECT, or none from here
                n = os.preadv(self.file.fileno(), [rest.data], position)
            if n == 0:
                raise ValueError(f"{self.name} became shorter while it was read")
            position += n
        return memory[start - first : stop - first]

    def _set_flags(self, flags: int) -> None:
        with suppress(OSError):  # without O_DIRECT all is read by way of the page cache
            fcntl.fcntl(self.file, fcntl.F_SETFL, flags)
