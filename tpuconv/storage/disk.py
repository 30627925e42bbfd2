"""Every change of an output or its work folder. No other module creates, writes, renames or removes a file there, so
that a test can see each system call that changes the disk, and can lose what was not flushed.

If the system refuses, every function raises the error that `write_error` makes: ResourceError, OutputError or
UsageError.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import wraps
from itertools import takewhile
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tpuconv.errors import OutputError, ResourceError, TpuconvError, UsageError, no_descriptors
from tpuconv.storage.hashes import FileHash
from tpuconv.text import format_size

DIRECT_BYTES = 1 << 20
"""Smaller files go through the page cache."""
HUGE_PAGE = 2 << 20
"""The size of most systems' huge pages."""
FLUSHED_AT_ONCE = 8
"""Files that are flushed side by side."""

FULL = (errno.ENOSPC, errno.EDQUOT)
WRONG_PATH = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP)
IN_THE_WAY = (errno.EEXIST, errno.ENOTEMPTY)
UNMOVABLE = "an output appears by a rename of its folder, which this file system refuses: choose an OUT on another disk"
NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
HINTS = {
    errno.EROFS: "the file system is read-only: choose another OUT",
    errno.EACCES: "you may not write there: choose another OUT",
    errno.EPERM: "you may not write there: choose another OUT",
    errno.ENAMETOOLONG: "choose an OUT with a shorter path",
    errno.ENOTDIR: "a part of this path is a file: choose another OUT",
    errno.EIO: "the disk fails: choose an OUT on another one",
    errno.ENOENT: "no folder can be made there, or another program removed it: choose another OUT",
    **dict.fromkeys((errno.EXDEV, errno.EBUSY, errno.ENOSYS, errno.ENOTSUP), UNMOVABLE),
}

Function = TypeVar("Function", bound=Callable[..., Any])


def write_error(path: Path, error: OSError) -> TpuconvError:
    """Returns the error to raise for a path that could not be written, created or removed: it says what to do."""
    if error.errno in FULL:
        return ResourceError(
            f"the disk of {path} is full", hint="free some space and run the same command: it resumes where it stopped"
        )
    if error.errno == errno.EFBIG:
        return ResourceError(
            f"{path} would be larger than the file size that is allowed",
            hint="raise the limit of this process (`ulimit -f unlimited`), or choose an OUT on another file "
            "system; the same command resumes",
        )
    if exhausted := no_descriptors(path, error):
        return exhausted
    if error.errno in IN_THE_WAY:
        return OutputError(f"{path} exists already", hint="choose another OUT")
    hint = HINTS.get(error.errno or 0)
    if error.errno in WRONG_PATH:
        return UsageError(f"{path} cannot be written: {error.strerror}", hint=hint)
    return ResourceError(f"{path} cannot be written: {error.strerror}", hint=hint)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError within the `with` into the error for `path`; see `write_error`."""
    try:
        yield
    except OSError as e:
        raise write_error(path, e) from e


def _translated(function: Function) -> Function:
    """Returns a decorator for functions whose first argument is the path: their OSErrors become `write_error`s."""

    @wraps(function)
    def call(path: Path, *args: Any, **kwargs: Any) -> Any:
        with writing(path):
            return function(path, *args, **kwargs)

    return call  # type: ignore[return-value]


@_translated
def check_room(path: Path, need: int, what: str, other: str = "an OUT") -> None:
    """Checks that the disk of a folder has `need` bytes free, for `what`. `other` is what may be on another disk.

    Raises:
        ResourceError: it has fewer.
    """
    free = shutil.disk_usage(path).free
    if free < need:
        raise ResourceError(
            f"the disk of {path} has {format_size(free)} free, {what} needs {format_size(need)}",
            hint=f"free some space, or give {other} on another disk",
        )


@_translated
def make_folder(path: Path) -> None:
    """Creates a folder and its parents, unless they exist."""
    for folder in reversed([path, *takewhile(lambda parent: not parent.is_dir(), path.parents)]):
        if folder.is_dir():
            continue
        try:
            os.mkdir(folder)
        except FileExistsError:  # of another process, or no folder
            if not folder.is_dir():
                raise


@_translated
def write_file(path: Path, data: bytes | np.ndarray, *, flush: bool = True) -> None:
    """Writes a file and flushes it; without `flush`, `sync` does that later. A disk serves nothing else while it
    flushes, so that many files are better flushed one after the other when all are written.

    An array of DIRECT_BYTES or more, which must start at a page, is written around the page cache if the file system
    can.
    """
    array = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    if not isinstance(data, bytes) and array.nbytes >= DIRECT_BYTES:
        try:
            return _write_new(path, array, os.O_DIRECT, flush)
        except OSError as e:
            if e.errno != errno.EINVAL:  # the file system has no O_DIRECT, or none for pages: tmpfs, for one
                raise
    return _write_new(path, array, 0, flush)


@_translated
def replace_file(path: Path, data: bytes, partial: Path | None = None) -> None:
    """Replaces a file atomically: after a crash it is the old one or the new one, complete.

    Args:
        path: the file.
        data: its new bytes.
        partial: its path until it is complete; by default with the suffix PARTIAL, which is known in our folders.
    """
    partial = partial or path.with_name(path.name + PARTIAL)
    write_file(partial, data)
    rename(partial, path)
    sync(path.parent)


PARTIAL = ".partial"
"""Suffix of a file that `replace_file` writes, until it is complete."""


STAGED_BYTES = 8 << 20
"""The bytes that are written at a time to a file from start to end: they stay in a cache."""


class Writer:
    """Writes a file from start to end and hashes it. It is flushed when the `with` ends without an error.

    A file of more than STAGED_BYTES is written around the page cache if the file system can, unless it is
    `read_soon`: the cache costs as much processor time as all else that the system does for a file.
    """

    def __init__(self, path: Path, *, read_soon: bool = False):
        self.path, self.read_soon = path, read_soon
        self._hash = FileHash()
        self._used = self._written = 0

    def facts(self) -> dict[str, Any]:
        """Returns the size and hash of what was written, as a manifest has them: `bytes` and `xxh3_128`."""
        return self._hash.facts()

    def __enter__(self) -> "Writer":
        self._pages = page_buffer(STAGED_BYTES)
        with writing(self.path):
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        return self

    def write(self, data: Any) -> None:
        """Writes all bytes of a buffer."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        while view:
            count = min(len(view), STAGED_BYTES - self._used)
            self._pages[self._used : self._used + count] = np.frombuffer(view[:count], np.uint8)
            self._used, view = self._used + count, view[count:]
            if self._used == STAGED_BYTES:
                self._write_staged()

    def _write_staged(self) -> None:
        data = self._pages[: self._used]
        with writing(self.path):
            if self._written == 0 and self._used == STAGED_BYTES and not self.read_soon:
                with suppress(OSError):
                    fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_DIRECT)
            try:
                (_write_pages if self._written else _write_all)(self._fd, data.data)
            except OSError as e:
                if e.errno != errno.EINVAL:  # the file system has no O_DIRECT, or none for pages
                    raise
                fcntl.fcntl(self._fd, fcntl.F_SETFL, 0)
                os.lseek(self._fd, self._written, os.SEEK_SET)
                _write_all(self._fd, data.data)
        self._written, self._used = self._written + self._used, 0

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                if self._used:
                    self._write_staged()
                with writing(self.path):
                    os.fsync(self._fd)
        finally:
            os.close(self._fd)
            del self._pages


@_translated
def rename(path: Path, target: Path) -> None:
    """Renames a file or folder."""
    os.rename(path, target)


@_translated
def exchange(path: Path, other: Path) -> bool:
    """Swaps two folders atomically (Linux renameat2). Returns False if the system or file system cannot."""
    return _exchanged(path, other)


def _exchanged(path: Path, other: Path) -> bool:
    try:
        _renameat2(path, other)
    except OSError as e:
        if e.errno in NO_EXCHANGE:
            return False
        raise
    return True


@_translated
def try_moves(place: Path) -> None:
    """Tries what publishing does, on two folders that are made at `place` and removed again: a swap, if the file system
    can, and a rename into another folder."""
    made, old = place / "from" / "made", place / "old"
    for folder in (made, old):
        make_folder(folder)
    _exchanged(made, old)
    os.rename(made, place / "moved")
    remove_folders(place)


@_translated
def is_movable(path: Path, full: Path) -> bool:
    """Returns whether the file system renames a folder. Nothing is changed: `full` is a folder that is not empty, which
    none can replace. On an overlay file system a folder of a lower layer cannot be renamed."""
    try:
        os.rename(path, full)
    except OSError as e:
        if e.errno not in (*IN_THE_WAY, errno.EXDEV, errno.EBUSY):
            raise
        return e.errno in IN_THE_WAY
    os.rename(full, path)  # it replaced a folder with contents
    return True


def _renameat2(path: Path, other: Path) -> None:
    at_cwd, rename_exchange = -100, 2
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if libc.renameat2(at_cwd, os.fsencode(path), at_cwd, os.fsencode(other), rename_exchange):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))


@_translated
def open_lock(path: Path) -> int:
    """Opens a file to be locked, and creates it if needed. Does not follow links. Returns the descriptor."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


LEFTOVERS = (".nfs", ".fuse_hidden")
"""The beginnings of the names that some file systems give to a file which is removed while it is open, until it is
closed."""
LEFTOVER_SECONDS = 2.0
"""The time that such a name may stay after a file is closed: FUSE closes it a little later."""


def is_leftover(path: Path) -> bool:
    """Returns whether a path is a removed file that is still open, or a folder that holds only such files."""
    if not path.is_dir() or path.is_symlink():
        return path.name.startswith(LEFTOVERS)
    with writing(path), suppress(FileNotFoundError):  # another process of the same conversion removed it
        return all(is_leftover(path / name) for name in os.listdir(path))
    return True


@_translated
def remove_empty(path: Path) -> None:
    """Removes a folder if it is empty, but for files that were closed just now."""
    deadline = time.monotonic() + LEFTOVER_SECONDS
    with suppress(FileNotFoundError):
        while True:
            try:
                os.rmdir(path)
                return
            except OSError as e:
                if e.errno not in IN_THE_WAY:
                    raise
            if time.monotonic() > deadline or not is_leftover(path):
                return
            time.sleep(0.05)


@_translated
def remove(path: Path) -> None:
    """Removes a file or a link, if it exists. Links are not followed."""
    with suppress(FileNotFoundError):
        os.unlink(path)


@_translated
def remove_folders(path: Path) -> None:
    """Removes a folder that holds nothing but folders."""
    if path.is_dir() and not path.is_symlink():
        for name in entries(path):
            remove_folders(path / name)
        remove_empty(path)


@_translated
def sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_all(folder: Path) -> None:
    """Flushes a folder with all files in it, several at a time: flushes that wait together are one for the disk."""
    with ThreadPoolExecutor(FLUSHED_AT_ONCE) as pool:
        for _ in pool.map(sync, _inside(folder)):
            pass


def _inside(folder: Path) -> Iterator[Path]:
    """Yields the files and folders in a folder, and the folder itself."""
    for name in entries(folder):
        path = folder / name
        if path.is_dir():
            yield from _inside(path)
        else:
            yield path
    yield folder


@_translated
def entries(path: Path) -> list[str]:
    """Returns the names in an output or work folder, sorted."""
    return sorted(os.listdir(path))


def page_buffer(nbytes: int) -> np.ndarray:
    """Private memory [bytes] in complete pages, as O_DIRECT needs it. It is returned to the system when it is freed.

    A large buffer lies in huge pages: the system provides them in less time, and gives a disk a few long pieces instead
    of one for each page, which virtual disks read up to four times as fast.
    """
    size = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
    if size < HUGE_PAGE:
        return np.frombuffer(_anonymous(size), np.uint8)
    memory = _anonymous(size + HUGE_PAGE)
    with suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(memory, np.uint8)
    start = -buffer.ctypes.data % HUGE_PAGE
    return buffer[start : start + size]


def _anonymous(nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:  # which a caller would take for an error of the file that it reads or writes
        raise MemoryError(f"{format_size(nbytes)} of memory: {e.strerror}") from None


def aligned_array(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns an array without values. A large one is a `page_buffer`."""
    nbytes = prod(shape) * dtype.itemsize
    return page_buffer(nbytes)[:nbytes].view(dtype).reshape(shape) if nbytes >= HUGE_PAGE else np.empty(shape, dtype)


def _write_new(path: Path, data: np.ndarray, flags: int, flush: bool) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o666)
    try:
        (_write_pages if flags & os.O_DIRECT else _write_all)(fd, data.data)
        if flush:
            os.fsync(fd)
    finally:
        os.close(fd)


def _write_pages(fd: int, data: memoryview) -> None:
    """Writes complete pages as the file was opened, and what is left, which O_DIRECT does not take, by way of the page
    cache. To write it as a page and cut the file would make the system read that page first."""
    whole = data.nbytes - data.nbytes % mmap.PAGESIZE
    _write_all(fd, data[:whole])
    if whole < data.nbytes:
        fcntl.fcntl(fd, fcntl.F_SETFL, 0)
        _write_all(fd, data[whole:])


def _write_all(fd: int, rest: memoryview) -> None:
    while rest:
        rest = rest[os.write(fd, rest) :]
