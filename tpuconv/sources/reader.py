"""Reading the weights of a source, by offset.

Weights are never memory-mapped: a file that shrinks under a map kills the process, where a read raises an error.
"""

import os
import resource
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tpuconv import buckets
from tpuconv.errors import SourceError, no_descriptors
from tpuconv.location import BucketPath, Location
from tpuconv.notation.layout import Shape
from tpuconv.sources.damaged import hash_of
from tpuconv.sources.headers import TensorInfo
from tpuconv.sources.schedule import ReadStep, Spans
from tpuconv.sources.shard import CHANGED_HINT, SourceShard, check_object, hash_stamp, shard_changed
from tpuconv.storage.hashes import HASHES, open_regular
from tpuconv.storage.local_file import READ_BYTES, LocalFile

BUCKET_READS = 4
"""Reads of a slab of many tensors, such as experts, that wait for a bucket at a time; and pieces of a large read."""
PIECE_BYTES = 8 << 20
"""The most bytes of a request, whose answer a bucket sends at a limited rate."""


class Reader(Protocol):
    """Reads the tensors of a source, from any number of threads.

    Attributes:
        reads_at_a_time: how many tensors of a slab are read at a time.
    """

    reads_at_a_time: int = 1

    def read(self, info: TensorInfo, start: int, out: memoryview) -> None:
        """Fills `out` with the bytes of a tensor from byte `start` on.

        Raises:
            SourceError: they cannot be read, or the source changed.
        """

    def view(self, info: TensorInfo, start: int, nbytes: int, memory: np.ndarray) -> np.ndarray:
        """`nbytes` bytes of a tensor from byte `start` on, wherever they are read to in `memory` [bytes], which has
        `room_for` them. Unlike `read` it may do without a copy.

        Raises:
            SourceError: see `read`.
        """
        self.read(info, start, memory[:nbytes].data)
        return memory[:nbytes]

    def read_box(self, info: TensorInfo, box: Sequence[slice], out: np.ndarray) -> None:
        """Fills `out`, in the dtype of the tensor, with a box of it: one slice per axis.

        Raises:
            SourceError: it cannot be read, or the source changed.
        """

    def hash_of(self, shard: str) -> str | None:
        """Returns the hash of a shard in hex, named by `SourceShard.hash_name`; None if the source has checksums of its
        own."""

    def check_unchanged(self, shards: Collection[str] | None = None) -> None:
        """Raises SourceError if one of the shards, all if None, is no longer what was planned from."""

    def close(self) -> None:
        """Closes the files."""

    def begin(self, steps: Sequence[ReadStep], wide: Mapping[str, Spans], work: Location, reserved: int = 0) -> None:
        """Says what will be read, before anything is. Only a source that is fetched meanwhile needs to know, and is
        fetched from here on.

        Args:
            steps: what is left to do, in order.
            wide: the ranges of files that wide steps read, of these and of those that are done.
            work: the work folder of the output.
            reserved: bytes that the output takes on its disk.

        Raises:
            ResourceError: there is no room for what is fetched.
        """
        return

    def finish(self, step: str) -> None:
        """Says that a step is done for good, and what it read is not needed again."""
        return

    @property
    def fetching(self) -> tuple[int, int]:
        """The bytes that have come of a source that is fetched, and the bytes of all files that are needed."""
        return 0, 0


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


@dataclass
class _OpenShard:
    """An open shard on a disk. Its first `hashed` bytes are in `digest`."""

    file: LocalFile
    size: int
    digest: Any
    hashed: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class SafetensorsReader(Reader):
    """Reads the weights of safetensors files, and hashes the files at the same time. Each byte comes from the disk
    once: what is hashed before it is needed stays in the page cache until then.

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
        self.reads_at_a_time = BUCKET_READS if isinstance(folder, BucketPath) else 1
        self._check_cancelled = check_cancelled
        self._shards = {shard.name: shard for shard in shards}
        # Around the page cache a file needs a second descriptor.
        self._avoids_cache = 4 * len(shards) < resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._opened: dict[str, _OpenShard] = {}
        self._files: list[LocalFile] = []
        self._lock = threading.Lock()

    def read(self, info: TensorInfo, start: int, out: memoryview) -> None:
        """Fills `out` with the bytes of a tensor from byte `start` on.

        Raises:
            SourceError: they cannot be read, or the file changed.
        """
        if isinstance(self.folder, BucketPath):
            self._fetch(info.shard, info.offset + start, out)
            return
        target = np.frombuffer(out, np.uint8)
        for first, data in self._pieces(info, start, target.size, READ_BYTES):
            target[first : first + data.size] = data

    def view(self, info: TensorInfo, start: int, nbytes: int, memory: np.ndarray) -> np.ndarray:
        """See `Reader`."""
        if isinstance(self.folder, BucketPath) or not nbytes:
            return super().view(info, start, nbytes, memory)
        ((_, data),) = self._pieces(info, start, nbytes, nbytes, memory)
        return data

    def _pieces(
        self, info: TensorInfo, start: int, nbytes: int, step: int, memory: np.ndarray | None = None
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yields bytes of a tensor from byte `start` on, in pieces of `step`, each valid until the next is read to the
        same memory, with their places. If they follow what is hashed, they are hashed too, and no other thread reads
        the shard meanwhile: two that read one after the other are served sooner than side by side."""
        shard, offset = self._open(info.shard), info.offset + start
        places = [(first, min(nbytes, first + step)) for first in range(0, nbytes, step or 1)]
        with shard.lock:
            if info.shard in self.hashes and shard.hashed <= offset:
                self._hash_to(shard, info.shard, offset, again=True)
                for first, stop in places:
                    data = self._bytes(shard, info.shard, offset + first, offset + stop, memory)
                    shard.digest.update(data)
                    shard.hashed = offset + stop
                    yield first, data
                return
        for first, stop in places:
            yield first, self._bytes(shard, info.shard, offset + first, offset + stop, memory)

    def read_box(self, info: TensorInfo, box: Sequence[slice], out: np.ndarray) -> None:
        """Fills `out`, contiguous and in the dtype of the tensor, with a box of it: a slice for each axis."""
        for start, part in box_runs(info.shape, box, out):
            self.read(info, start, part)

    def hash_of(self, shard: str) -> str | None:
        """The hash of a shard, in hex. Reads the bytes that were not read yet; all of an object in a bucket."""
        if isinstance(path := self.folder / shard, BucketPath):
            return hash_of(path, self._shards[shard].hash_name)
        opened = self._open(shard)
        with opened.lock:
            self._hash_to(opened, shard, opened.size)
            return str(opened.digest.hexdigest())

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
                check_object(path, shard.stamp)
                continue
            try:
                status = os.stat(path)
            except OSError as e:
                raise SourceError(f"{path} is missing now: {e.strerror}", hint=CHANGED_HINT) from None
            self._check_stamp(shard, hash_stamp(status))

    def _check_stamp(self, shard: SourceShard, stamp: str) -> None:
        if stamp != shard.stamp:
            raise shard_changed(self.folder / shard.name)

    def _hash_to(self, shard: _OpenShard, name: str, end: int, *, again: bool = False) -> None:
        """Hashes the bytes up to `end`, which are read `again` later. The lock is held."""
        while shard.hashed < end:
            self._check_cancelled()
            block = self._bytes(shard, name, shard.hashed, min(end, shard.hashed + READ_BYTES), again=again)
            shard.digest.update(block)
            shard.hashed += block.nbytes

    def _bytes(
        self,
        shard: _OpenShard,
        name: str,
        start: int,
        stop: int,
        memory: np.ndarray | None = None,
        *,
        again: bool = False,
    ) -> np.ndarray:
        """The bytes [start, stop) of a shard on a disk; see `LocalFile.read`."""
        try:
            return shard.file.read(start, stop, memory, again=again)
        except OSError as e:
            raise SourceError(
                f"{self.folder / name} cannot be read at byte {start}: {e.strerror}",
                hint="check the disk, then run again to resume",
            ) from None
        except ValueError:
            raise SourceError(f"{self.folder / name} became shorter while it was read", hint=CHANGED_HINT) from None

    def _fetch(self, name: str, offset: int, out: memoryview) -> None:
        """Fills `out` from a bucket, pieces side by side."""
        path = self.folder / name
        assert isinstance(path, BucketPath)
        starts = range(0, len(out), PIECE_BYTES)
        pieces = [(offset + start, out[start : start + PIECE_BYTES]) for start in starts]
        buckets.for_each(lambda piece: self._fetch_piece(path, *piece), pieces, BUCKET_READS)

    def _fetch_piece(self, path: BucketPath, offset: int, out: memoryview) -> None:
        self._check_cancelled()
        try:
            data = buckets.read(path, offset, offset + len(out))
        except FileNotFoundError:
            raise SourceError(f"{path} is missing now", hint=CHANGED_HINT) from None
        if len(data) != len(out):
            raise SourceError(f"{path} became shorter while it was read", hint=CHANGED_HINT)
        out[:] = data

    def _open(self, name: str) -> _OpenShard:
        with self._lock:
            if name not in self._opened:
                self._opened[name] = self._opened_now(self._shards[name])
            return self._opened[name]

    def _opened_now(self, shard: SourceShard) -> _OpenShard:
        path = self.folder / shard.name
        assert isinstance(path, Path)
        try:
            file = LocalFile(open_regular(path))
        except OSError as e:
            raise no_descriptors(path, e) or SourceError(
                f"{path} cannot be read: {e.strerror}", hint=CHANGED_HINT
            ) from None
        opened = _OpenShard(file, file.size, HASHES[shard.hash_name]())
        self._files.append(file)
        self._check_stamp(shard, hash_stamp(os.fstat(file.fd)))
        if self._avoids_cache:
            file.avoid_cache()
        return opened

    def add(self, shard: SourceShard) -> None:
        """Adds a file that came to the folder, which is not hashed."""
        with self._lock:
            self._shards[shard.name] = shard

    def drop(self, shard: str) -> None:
        """Closes a file that nobody reads any more."""
        with self._lock:
            opened = self._opened.pop(shard, None)
            if opened is not None:
                self._files.remove(opened.file)
                opened.file.close()

    def close(self) -> None:
        """Closes the files."""
        for file in self._files:
            file.close()
        self._files.clear()
