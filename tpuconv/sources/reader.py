"""Reading the weights of a source, by offset.

Weights are never memory-mapped: a file that shrinks under a map kills the process, where a read raises an error.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tpuconv.errors import SourceError
from tpuconv.sources.headers import TensorInfo
from tpuconv.sources.shard import SourceShard, hash_stamp


class Reader(Protocol):
    """Reads the tensors of a source, from any number of threads."""

    def read(self, info: TensorInfo, start: int, out: memoryview) -> None:
        """Fills `out` with the bytes of a tensor from byte `start` on.

        Raises:
            SourceError: they cannot be read, or the source changed.
        """

    def read_box(self, info: TensorInfo, box: Sequence[slice], out: np.ndarray) -> None:
        """Fills `out`, in the dtype of the tensor, with a box of it: one slice per axis.

        Raises:
            SourceError: it cannot be read, or the source changed.
        """

    def sha256(self, shard: str) -> str | None:
        """The sha256 of a shard; None if the source has checksums of its own."""

    def check_unchanged(self, shards: Collection[str] | None = None) -> None:
        """Raises SourceError if one of the shards, all if None, is no longer what was planned from."""

    def close(self) -> None:
        """Closes the files."""


HASH_BLOCK = 4 << 20


@dataclass
class _OpenShard:
    """An open shard. Its first `hashed` bytes are in `digest`."""

    fd: int
    size: int
    digest: Any = field(default_factory=hashlib.sha256)
    hashed: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


WAIT = "wait until nothing writes to the source, then run again"


class SafetensorsReader:
    """Reads the weights of safetensors files, and hashes the files at the same time: each byte is fetched from the disk
    once.

    Args:
        folder: the checkpoint.
        shards: its files, with their stamps.
        check_cancelled: raises an exception when the work must stop.
        hashes: whether files are hashed while they are read. Of no use if only a part of them is read.
    """

    def __init__(
        self,
        folder: Path,
        shards: Sequence[SourceShard],
        check_cancelled: Callable[[], None] = lambda: None,
        *,
        hashes: bool = True,
    ):
        self.folder = folder
        self.hashes = hashes
        self._check_cancelled = check_cancelled
        self._shards = {shard.name: shard for shard in shards}
        self._files: dict[str, _OpenShard] = {}
        self._lock = threading.Lock()

    def read(self, info: TensorInfo, start: int, out: memoryview) -> None:
        """Fills `out` with the bytes of a tensor from byte `start` on.

        Raises:
            SourceError: they cannot be read, or the file changed.
        """
        file, offset = self._open(info.shard), info.offset + start
        with file.lock:
            is_next = self.hashes and file.hashed <= offset
            if is_next:
                self._hash_to(file, info.shard, offset)
                self._fill(file, info.shard, offset, out)
                file.digest.update(out)
                file.hashed = offset + len(out)
        if not is_next:
            self._fill(file, info.shard, offset, out)
        # The bytes are not needed again: new pages in the cache cost more than the read itself.
        os.posix_fadvise(file.fd, offset, len(out), os.POSIX_FADV_DONTNEED)

    def read_box(self, info: TensorInfo, box: Sequence[slice], out: np.ndarray) -> None:
        """Fills `out`, contiguous and in the dtype of the tensor, with a box of it: a slice for each axis."""
        divided = [axis for axis, (s, n) in enumerate(zip(box, info.shape, strict=True)) if (s.start, s.stop) != (0, n)]
        axis = divided[-1] if divided else 0  # from here on a box is contiguous in the file
        strides = [prod(info.shape[i + 1 :]) * out.itemsize for i in range(axis + 1)]
        nbytes = (box[axis].stop - box[axis].start) * strides[axis] if box else out.nbytes
        data, done = out.reshape(-1).view(np.uint8).data, 0
        for index in product(*(range(s.start, s.stop) for s in box[:axis])):
            start = (*index, box[axis].start) if box else ()
            self.read(info, sum(i * n for i, n in zip(start, strides, strict=bool(box))), data[done : done + nbytes])
            done += nbytes

    def sha256(self, shard: str) -> str:
        """The sha256 of a shard, in hex. Reads the bytes that were not read yet."""
        file = self._open(shard)
        with file.lock:
            self._hash_to(file, shard, file.size)
            return str(file.digest.hexdigest())

    def check_unchanged(self, shards: Collection[str] | None = None) -> None:
        """Checks that the shards, or all if None, are still the files that the plan was made from.

        Raises:
            SourceError: one of them is missing or changed.
        """
        for shard in self._shards.values():
            if shards is not None and shard.name not in shards:
                continue
            try:
                status = os.stat(self.folder / shard.name)
            except OSError as e:
                raise SourceError(f"{self.folder / shard.name} is missing now: {e.strerror}", hint=WAIT) from None
            self._check_stamp(shard, status)

    def _check_stamp(self, shard: SourceShard, status: os.stat_result) -> None:
        if hash_stamp(status) != shard.stamp:
            raise SourceError(f"{self.folder / shard.name} changed while it was converted", hint=WAIT)

    def _hash_to(self, file: _OpenShard, shard: str, end: int) -> None:
        buffer = memoryview(bytearray(min(HASH_BLOCK, end - file.hashed)))
        while file.hashed < end:
            self._check_cancelled()
            block = buffer[: end - file.hashed]
            self._fill(file, shard, file.hashed, block)
            file.digest.update(block)
            file.hashed += len(block)

    def _fill(self, file: _OpenShard, shard: str, offset: int, out: memoryview) -> None:
        while out:
            try:
                n = os.preadv(file.fd, [out], offset)
            except OSError as e:
                raise SourceError(
                    f"{self.folder / shard} cannot be read at byte {offset}: {e.strerror}",
                    hint="check the disk, then run again to resume",
                ) from None
            if n == 0:
                raise SourceError(f"{self.folder / shard} became shorter while it was read", hint=WAIT)
            out, offset = out[n:], offset + n

    def _open(self, shard: str) -> _OpenShard:
        with self._lock:
            if shard not in self._files:
                try:
                    fd = os.open(self.folder / shard, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as e:
                    raise SourceError(f"{self.folder / shard} cannot be read: {e.strerror}", hint=WAIT) from None
                status = os.fstat(fd)
                self._files[shard] = _OpenShard(fd, status.st_size)
                self._check_stamp(self._shards[shard], status)
            return self._files[shard]

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            os.close(file.fd)
        self._files.clear()
