"""Hashes of files, and what tells without reading whether a file is the same as before."""

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
    """Size and hash of a file, as a manifest has them.

    Raises:
        OSError: it cannot be read.
    """
    digest, size = xxhash.xxh3_128(), 0
    for block in blocks(path):
        digest.update(block)
        size += len(block)
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


def open_regular(path: Path) -> FileIO:
    """A regular file, open to be read. Others may block for ever, or never end.

    Raises:
        OSError: it is none, or cannot be read.
    """
    file = FileIO(path, "r", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def blocks(path: Path) -> Iterator[bytes]:
    """The bytes of a regular file.

    Raises:
        OSError: it is none, or cannot be read.
    """
    with open_regular(path) as file:
        while block := file.read(BLOCK):
            yield block


def hash_bytes(data: bytes) -> dict[str, Any]:
    """Size and hash of a file with these bytes, as `hash_file` gives them."""
    return {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}


def stamp(status: os.stat_result) -> tuple[int, ...]:
    """What the file system says of a file: device, inode, size, times of modification and of change, of which nobody
    sets the last. Equal only if it is the same file and was not written to."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
