"""Local files that are read around the page cache.

Pages that are new to the cache cost more processor time than the read itself, and nobody needs them again. Into huge
pages a disk reads long pieces, on virtual disks up to four times as fast.
"""

import ctypes
import errno
import mmap
import os
import threading
from bisect import bisect_right
from contextlib import suppress
from io import FileIO

import numpy as np

from tpuconv.storage.disk import DIRECT_BYTES, page_buffer

READ_BYTES = 4 << 20
"""Best read at once where the bytes are checked and copied: they stay in a processor's cache meanwhile."""

_libc = ctypes.CDLL(None)
_own = threading.local()


class LocalFile:
    """An open file, which several threads may read. Its methods raise OSError where the system does."""

    def __init__(self, file: FileIO):
        self._file, self.name = file, os.path.basename(file.name)
        status = os.fstat(file.fileno())
        self.size = status.st_size
        # Of files that are another user's mincore says that all of it is in the cache.
        self._is_told = status.st_uid == os.geteuid() or os.access(f"/proc/self/fd/{file.fileno()}", os.W_OK)
        self._direct: FileIO | None = None
        self._kept: list[tuple[int, int]] = []

    @property
    def fd(self) -> int:
        """The descriptor."""
        return self._file.fileno()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        if self._direct is not None:
            self._direct.close()

    def avoid_cache(self) -> None:
        """Reads data that is not in the page cache around the cache from now on, if the file is large and its file
        system supports it."""
        if self._direct is None and self.size >= DIRECT_BYTES:
            with suppress(OSError):
                self._direct = FileIO(os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT))
                # What goes by way of the cache is all that should be there: nothing is read ahead.
                os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def is_cached(self, start: int, stop: int) -> bool:
        """Returns True if most of the bytes [start, stop) are in the page cache, as far as the system tells. Unlike a
        read, this loads nothing into the cache."""
        if not self._is_told:
            return False
        start -= start % mmap.ALLOCATIONGRANULARITY
        resident = np.zeros(-(-(stop - start) // mmap.PAGESIZE), np.uint8)
        with (
            suppress(OSError, ValueError),
            mmap.mmap(self.fd, stop - start, prot=mmap.PROT_READ, offset=start) as memory,
        ):
            address = np.frombuffer(memory, np.uint8).ctypes.data  # nothing is read there
            _libc.mincore(
                ctypes.c_void_p(address), ctypes.c_size_t(stop - start), ctypes.c_void_p(resident.ctypes.data)
            )
        return bool(2 * np.count_nonzero(resident & 1) > resident.size)

    def forget(self, start: int = 0, stop: int = 0) -> None:
        """Lets the system drop the bytes [start, stop) from the page cache; all from `start` on if `stop` is 0."""
        with suppress(OSError):
            os.posix_fadvise(self.fd, start, stop - start if stop else 0, os.POSIX_FADV_DONTNEED)

    def read(self, start: int, stop: int, memory: np.ndarray | None = None, *, again: bool = False) -> np.ndarray:
        """Returns the bytes [start, stop).

        Args:
            start: the first byte.
            stop: the end.
            memory: what they are read into [bytes], as `room_for` has it: the complete pages that they are in. Without
                it they are valid until the thread's next read.
            again: whether they will be read once more: they go by way of the page cache, which they leave then.

        Raises:
            ValueError: the file ends before.
        """
        if stop > self.size:
            raise ValueError(f"{self.name} is too short")
        first = start - start % mmap.PAGESIZE
        memory = _memory(stop - first) if memory is None else memory
        memory = memory[: -(-(stop - first) // mmap.PAGESIZE) * mmap.PAGESIZE]
        was_kept = not again and self._is_kept(first)
        direct = self._direct is not None and not (again or was_kept or self.is_cached(first, stop))
        position = first
        while position < stop:
            n = self._read(position, memory[position - first :], direct)
            if n == 0:
                raise ValueError(f"{self.name} became shorter while it was read")
            position += n
        if again and self._direct is not None:
            self._keep(first, stop)
        elif was_kept:
            self.forget(first, stop)
        return memory[start - first : stop - first]

    def _keep(self, first: int, stop: int) -> None:
        """Remembers what is read again later: the parts of a file that are hashed before they are needed. They come in
        the order of the file."""
        if self._kept and self._kept[-1][1] >= first:
            self._kept[-1] = (self._kept[-1][0], stop)
        else:
            self._kept.append((first, stop))

    def _is_kept(self, place: int) -> bool:
        at = bisect_right(self._kept, place, key=lambda part: part[0]) - 1
        return at >= 0 and place < self._kept[at][1]

    def _read(self, position: int, out: np.ndarray, direct: bool) -> int:
        if direct and self._direct is not None:
            try:
                return os.preadv(self._direct.fileno(), [out.data], position)
            except OSError as e:
                if e.errno != errno.EINVAL:  # the file system does not read around the cache, or not from here
                    raise
        return os.preadv(self.fd, [out.data], position)


def room_for(nbytes: int) -> int:
    """Returns the bytes of memory that so many bytes of a file need, wherever they begin."""
    return nbytes + 2 * mmap.PAGESIZE if nbytes else 0


def _memory(nbytes: int) -> np.ndarray:
    """Memory of this thread in complete pages, which its next read reuses."""
    memory: np.ndarray | None = getattr(_own, "memory", None)
    if memory is None or memory.nbytes < nbytes:
        memory = _own.memory = page_buffer(max(nbytes, room_for(READ_BYTES)))
    return memory
