"""Reading the weights of a source, by offset.

Weights are never memory-mapped: a file that shrinks under a map kills the process, where a read raises an error.
"""

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, Protocol

import numpy as np

from tpuconv import buckets
from tpuconv.errors import SourceError
from tpuconv.layout import Shape
from tpuconv.location import BucketPath, Location
from tpuconv.sources.headers import TensorInfo
from tpuconv.sources.schedule import ReadStep
from tpuconv.sources.shard import SourceShard, hash_stamp, object_stamp
from tpuconv.storage.hashes import HASHES


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

    def hash_of(self, shard: str) -> str | None:
        """The hash of a shard, in hex, that of `SourceShard.hash_name`; None if the source has checksums of its own."""

    def check_unchanged(self, shards: Collection[str] | None = None) -> None:
        """Raises SourceError if one of the shards, all if None, is no longer what was planned from."""

    def close(self) -> None:
        """Closes the files."""

    def begin(
        self, steps: Sequence[ReadStep], wide: Mapping[str, list[tuple[int, int]]], work: Location, reserved: int = 0
    ) -> set[str]:
        """Says what will be read, before anything is. Only a source that is fetched meanwhile needs to know.

        Args:
            steps: what is left to do, in order.
            wide: the ranges of files that wide steps read, of these and of those that are done.
            work: the work folder of the output.
            reserved: bytes that the output takes on its disk.

        Returns:
            The shards that must be proved again, since something that was fetched is gone: call it again with steps
            that do. Else nothing, and the source is being fetched.

        Raises:
            ResourceError: there is no room for what is fetched.
        """
        return set()

    def finish(self, step: str) -> None:
        """Says that a step is done for good, and what it read is not needed again."""
        return

    def unproved(self, shards: Collection[str]) -> set[str]:
        """Those of the shards whose bytes are not known to be the promised ones yet: what is made from them does not
        count before."""
        return set()

    def unbound(self) -> None:
        """Says that the work ends with an error, so that the rest need not fit into the planned room."""
        return


def box_runs(shape: Shape, box: Sequence[slice], out: np.ndarray) -> Iterator[tuple[int, memoryview]]:
    """Yields the contiguous runs of a box of a tensor: the first byte in the tensor, and the part of `out` for it.

    Args:
        shape: of the tensor.
        box: one slice per axis.
        out: contiguous, of the shape of the box and the dtype of the tensor.
    """
    divided = [axis for axis, (s, n) in enumerate(zip(box, shape, strict=True)) if (s.start, s.stop) != (0, n)]
    axis = divided[-1] if divided else 0  # from here on a box is contiguous in the file
    strides = [prod(shape[i + 1 :]) * out.itemsize for i in range(axis + 1)]
    nbytes = (box[axis].stop - box[axis].start) * strides[axis] if box else out.nbytes
    data, done = out.reshape(-1).view(np.uint8).data, 0
    for index in product(*(range(s.start, s.stop) for s in box[:axis])):
        start = (*index, box[axis].start) if box else ()
        yield sum(i * n for i, n in zip(start, strides, strict=bool(box))), data[done : done + nbytes]
        done += nbytes


HASH_BLOCK = 4 << 20


@dataclass
class _OpenShard:
    """An open shard. Its first `hashed` bytes are in `digest`. `fd` is -1 in a bucket."""

    fd: int
    size: int
    digest: Any
    hashed: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


WAIT = "wait until nothing writes to the source, then run again"


class SafetensorsReader(Reader):
    """Reads the weights of safetensors files, and hashes the files at the same time: each byte is fetched from the disk
    once.

    Args:
        folder: the checkpoint.
        shards: its files, with their stamps.
        check_cancelled: raises an exception when the work must stop.
        hashes: the files to be hashed while they are read; all if None. Of no use where only a part of one is read.
    """

    def __init__(
        self,
        folder: Location,
        shards: Sequence[SourceShard],
        check_cancelled: Callable[[], None] = lambda: None,
        *,
        hashes: Collection[str] | None = None,
    ):
        self.folder = folder
        named = {shard.name for shard in shards} if hashes is None else set(hashes)
        self.hashes = set() if isinstance(folder, BucketPath) else named
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
            is_next = info.shard in self.hashes and file.hashed <= offset
            if is_next:
                self._hash_to(file, info.shard, offset)
                self._fill(file, info.shard, offset, out)
                file.digest.update(out)
                file.hashed = offset + len(out)
        if not is_next:
            self._fill(file, info.shard, offset, out)
        if isinstance(self.folder, BucketPath):
            return
        # The bytes are not needed again: new pages in the cache cost more than the read itself.
        os.posix_fadvise(file.fd, offset, len(out), os.POSIX_FADV_DONTNEED)

    def read_box(self, info: TensorInfo, box: Sequence[slice], out: np.ndarray) -> None:
        """Fills `out`, contiguous and in the dtype of the tensor, with a box of it: a slice for each axis."""
        for start, part in box_runs(info.shape, box, out):
            self.read(info, start, part)

    def hash_of(self, shard: str) -> str | None:
        """The hash of a shard, in hex. Reads the bytes that were not read yet. None in a bucket, where the version of
        an object tells whether it was replaced."""
        if isinstance(self.folder, BucketPath):
            return None
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
            path = self.folder / shard.name
            if isinstance(path, BucketPath):
                self._check_object(shard, path)
                continue
            try:
                status = os.stat(path)
            except OSError as e:
                raise SourceError(f"{path} is missing now: {e.strerror}", hint=WAIT) from None
            self._check_stamp(shard, hash_stamp(status))

    def _check_object(self, shard: SourceShard, path: BucketPath) -> int:
        """The size of a shard in a bucket, which must be the planned one."""
        found = buckets.facts(path)
        if found is None:
            raise SourceError(f"{path} is missing now", hint=WAIT)
        self._check_stamp(shard, object_stamp(found))
        return found.size

    def _check_stamp(self, shard: SourceShard, stamp: str) -> None:
        if stamp != shard.stamp:
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
        if isinstance(self.folder, BucketPath):
            self._fetch(self.folder / shard, offset, out)
            return
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

    def _fetch(self, path: BucketPath, offset: int, out: memoryview) -> None:
        """Fills `out` from a bucket."""
        self._check_cancelled()
        if not out:
            return
        try:
            data = buckets.read(path, offset, offset + len(out))
        except FileNotFoundError:
            raise SourceError(f"{path} is missing now", hint=WAIT) from None
        if len(data) != len(out):
            raise SourceError(f"{path} became shorter while it was read", hint=WAIT)
        out[:] = data

    def _open(self, shard: str) -> _OpenShard:
        with self._lock:
            if shard not in self._files:
                path = self.folder / shard
                if isinstance(path, BucketPath):
                    self._files[shard] = _OpenShard(-1, self._check_object(self._shards[shard], path), None)
                    return self._files[shard]
                try:
                    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as e:
                    raise SourceError(f"{path} cannot be read: {e.strerror}", hint=WAIT) from None
                status = os.fstat(fd)
                self._files[shard] = _OpenShard(fd, status.st_size, HASHES[self._shards[shard].hash_name]())
                self._check_stamp(self._shards[shard], hash_stamp(status))
            return self._files[shard]

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            if file.fd >= 0:
                os.close(file.fd)
        self._files.clear()
