"""Local files that are read around the page cache.

Pages that are new to the cache cost more processor time than the read itself, and nobody needs them again. Into huge
pages a disk reads long pieces, on virtual disks up to four times as fast.
"""

import ctypes
import errno
import mmap
import os
import threading
from contextlib import suppress
from io import FileIO

import numpy as np

from tpuconv.storage.disk import DIRECT_BYTES, page_buffer

READ_BYTES = 4 << 20
"""Read at once, to be checked and copied while it is in a processor's cache."""

_libc = ctypes.CDLL(None)
_own = threading.local()


class LocalFile:
    """An open file, which several threads may read. Its methods raise OSError where the system does."""

    def __init__(self, file: FileIO):
        self._file, self.name = file, os.path.basename(file.name)
        self.size = os.fstat(file.fileno()).st_size
        self._direct: FileIO | None = None

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
        """From now on what is not in the page cache is read around it, if the file is large and on a file system that
        can."""
        if self._direct is None and self.size >= DIRECT_BYTES and hasattr(os, "O_DIRECT"):
            with suppress(OSError):
                self._direct = FileIO(os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT))

    def is_cached(self, start: int, stop: int) -> bool:
        """Whether most of the bytes [start, stop) are in the page cache. Unlike a read, this brings nothing there."""
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

    def read(self, start: int, stop: int) -> np.ndarray:
        """The bytes [start, stop), valid until the thread's next read. They are read in complete pages, as O_DIRECT
        needs it.

        Raises:
            ValueError: the file ends before.
        """
        if stop > self.size:
            raise ValueError(f"{self.name} is too short")
        first = start - start % mmap.PAGESIZE
        memory = _memory(stop - first)[: -(-(stop - first) // mmap.PAGESIZE) * mmap.PAGESIZE]
        direct = self._direct is not None and not self.is_cached(first, stop)
        position = first
        while position < stop:
            n = self._read(position, memory[position - first :], direct)
            if n == 0:
                raise ValueError(f"{self.name} became shorter while it was read")
            position += n
        return memory[start - first : stop - first]

    def _read(self, position: int, out: np.ndarray, direct: bool) -> int:
        if direct and self._direct is not None:
            try:
                return os.preadv(self._direct.fileno(), [out.data], position)
            except OSError as e:
                if e.errno != errno.EINVAL:  # the file system does not read around the cache, or not from here
                    raise
        return os.preadv(self.fd, [out.data], position)


def _memory(nbytes: int) -> np.ndarray:
    """Memory of this thread in complete pages, which its next read reuses."""
    memory: np.ndarray | None = getattr(_own, "memory", None)
    if memory is None or memory.nbytes < nbytes:
        memory = _own.memory = page_buffer(max(nbytes, READ_BYTES + mmap.PAGESIZE))
    return memory
