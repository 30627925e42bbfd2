"""Hashes of files, and the stamp that tells without reading whether a file changed."""

import errno
import os
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import xxhash

BLOCK = 4 << 20


def hash_file(path: Path) -> dict[str, Any]:
    """The size and hash of a file, as a manifest has them: `bytes` and `xxh3_128`.

    Raises:
        OSError: the file cannot be read.
    """
    digest, size = xxhash.xxh3_128(), 0
    for block in blocks(path):
        digest.update(block)
        size += len(block)
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


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


def blocks(path: Path) -> Iterator[bytes]:
    """Yields the bytes of a regular file in blocks.

    Raises:
        OSError: it is not a regular file, or cannot be read.
    """
    with open_regular(path) as file:
        while block := file.read(BLOCK):
            yield block


def hash_bytes(data: bytes) -> dict[str, Any]:
    """The size and hash of a file with these bytes, as `hash_file` returns them."""
    return {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}


def stamp(status: os.stat_result) -> tuple[int, ...]:
    """The stamp of a file: device, inode, size, and times of modification and of change. No program can set the last.
    Two stamps are equal only if it is the same file and nobody wrote to it in between."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
