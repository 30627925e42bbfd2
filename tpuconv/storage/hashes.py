"""Hashes of files, and the stamp that tells without reading whether a file changed."""

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import xxhash

from tpuconv import buckets
from tpuconv.location import BucketPath, Location

BLOCK = 4 << 20

HASHES: Mapping[str, Callable[[], Any]] = {"sha256": hashlib.sha256, "xxh3_128": xxhash.xxh3_128}
"""By name in a manifest. XXH3 is as fast as memory, sha256 takes a second of a processor for each gigabyte or two: it
is for files of which someone promises it."""


def known_hash(facts: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the name and the value of the hash that facts about a file have; None if they have none."""
    return next(((name, facts[name]) for name in HASHES if facts.get(name) is not None), None)


def hash_file(path: Location) -> dict[str, Any]:
    """Returns the size and hash of a file, as a manifest has them: `bytes` and `xxh3_128`.

    Raises:
        OSError: the file cannot be read.
    """
    file_hash = FileHash()
    for block in blocks(path):
        file_hash.update(block)
    return file_hash.facts()


class FileHash:
    """The size and hash of a file whose bytes come in order."""

    def __init__(self) -> None:
        self._size, self._digest = 0, xxhash.xxh3_128()

    def update(self, data: bytes | memoryview) -> None:
        """Adds the next bytes."""
        self._size += len(data)
        self._digest.update(data)

    def facts(self) -> dict[str, Any]:
        """As `hash_file` returns them."""
        return {"bytes": self._size, "xxh3_128": self._digest.hexdigest()}


def open_regular(path: Path) -> FileIO:
    """Opens a regular file to be read. Other kinds, such as pipes, may block for ever or never end.

    Raises:
        OSError: it is not a regular file, or cannot be read.
    """
    file = FileIO(path, "r", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def blocks(path: Location, block_bytes: int = BLOCK) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a regular file, or of an object, in blocks: a first one of `block_bytes`, if it has as many.

    Raises:
        OSError: it is not a regular file, or cannot be read.
    """
    if isinstance(path, BucketPath):
        yield from buckets.stream(path, block_bytes)
        return
    with open_regular(path) as file:
        while block := file.read(block_bytes):
            yield block


def hash_bytes(data: bytes) -> dict[str, Any]:
    """Returns the size and hash of a file with these bytes, as `hash_file` returns them."""
    return {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}


def stamp(status: os.stat_result) -> tuple[int, ...]:
    """Returns the stamp of a file: device, inode, size, and times of modification and of change. No program can set the
    last. Two stamps are equal only if it is the same file and nobody wrote to it in between."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
