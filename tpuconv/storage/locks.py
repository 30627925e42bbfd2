"""Locks of open files (`flock`), which a killed process loses. No other module takes one."""

import errno
import fcntl
import os
from pathlib import Path

from tpuconv.errors import ResourceError
from tpuconv.storage.disk import write_error
from tpuconv.storage.mounts import file_system_of

NOT_SUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY)


class NoLocks(ResourceError):
    """The file system has no locks."""


def lock(fd: int, path: Path, *, shared: bool = False, wait: bool = False) -> bool:
    """Locks an open file, or changes its lock.

    Args:
        fd: the descriptor.
        path: of the file, for errors.
        shared: whether others may hold a shared lock too.
        wait: whether to wait until others let it go.

    Returns:
        False if it is in use.

    Raises:
        NoLocks: the file system has no locks.
        ResourceError: the file cannot be locked.
    """
    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    try:
        fcntl.flock(fd, how)
    except BlockingIOError:
        return False
    except OSError as e:
        if e.errno not in NOT_SUPPORTED:
            raise write_error(path, e) from e
        raise NoLocks(
            f"{path} is on a file system without locks ({file_system_of(path)}): {e.strerror}",
            hint="choose a folder on another disk, or an OUT in a bucket; Lustre has locks if it is mounted with "
            "`-o flock`, NFS with its lock service",
        ) from e
    return True


def unlock(fd: int) -> None:
    """Lets a lock go."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def same_file(fd: int, path: Path) -> bool:
    """Returns whether a path is still the file that was opened: whoever held its lock may have removed it."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except OSError:
        return False
