"""The folder that holds what of a remote source is on the disk."""

import os
import re
import shutil
from collections.abc import Collection, Iterable
from itertools import count
from pathlib import Path
from tempfile import gettempdir

import xxhash

from tpuconv.errors import ResourceError
from tpuconv.location import Location
from tpuconv.sizes import format_size
from tpuconv.sources import schedule
from tpuconv.sources.schedule import Segment
from tpuconv.storage import disk, locks
from tpuconv.storage.ownership import remove_known

FOLDER_IN_WORK = "source"
"""The workspace in the work folder of a local output."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PART, WIDE = ".part", ".wide"
MOST_PLACES = 1024
LOCK = "lock"
_SEGMENT = re.compile(rf"\d{{5}}/(\d{{6}}(-[0-9a-f]{{8}})?({re.escape(WIDE)})?({re.escape(PART)})?)?")
"""A file of a workspace, in the folder of its file of the source, and such a folder."""
_OLD = re.compile(rf"[0-9a-f]{{32}}/({_SEGMENT.pattern})?")
"""The same of a workspace of any source."""


class Workspace:
    """A folder of segments, in use by one process until it is closed. What an earlier run left in it is used again,
    unless the machine was started since: segments are not flushed to the disk.

    Args:
        place: the folder of a user, who may have several outputs; by default the work folder of a local output, or the
            folder for temporary files.
        work: the work folder of the output.
        identity: of the source, and of what is kept of it.

    Raises:
        ResourceError: it cannot be written.
    """

    def __init__(self, place: Path | None, work: Location, identity: str):
        own = place is None and isinstance(work, Path)
        name = FOLDER_IN_WORK if own else f"tpuconv-{xxhash.xxh3_64_hexdigest(str(work).encode())}"
        parent = work if own and isinstance(work, Path) else place or Path(gettempdir())
        self.root, self._lock = claim(parent, name)
        boot = BOOT_ID.read_text() if BOOT_ID.is_file() else os.urandom(16).hex()
        self.folder = self.root / xxhash.xxh3_128_hexdigest(f"{identity} {schedule.SEGMENT_BYTES} {boot}".encode())
        remove_known(self.root, lambda name: bool(_OLD.fullmatch(name)) and not name.startswith(self.folder.name))
        disk.make_folder(self.folder)

    def keep_only(self, paths: Collection[Path]) -> None:
        """Removes what an earlier run left, but for these: what was on the way, or was not dropped any more."""
        remove_known(self.folder, lambda name: bool(_SEGMENT.fullmatch(name)) and self.folder / name not in paths)

    def file_folder(self, number: int) -> Path:
        """Returns the folder of a file of the source, by its number there."""
        return self.folder / f"{number:05d}"

    def path(self, number: int, segment: Segment, *, wide: bool = False) -> Path:
        """Returns the path of a segment of a file, or of its wide part."""
        return self.file_folder(number) / (f"{segment.number:06d}" + (WIDE if wide else ""))

    def has(self, number: int, segment: Segment, *, wide: bool = False) -> bool:
        """Returns True if the segment is on the disk."""
        try:
            size = self.path(number, segment, wide=wide).stat().st_size
        except FileNotFoundError:
            return False
        return size == (segment.wide_bytes if wide else segment.nbytes)

    def used_bytes(self) -> int:
        """Returns the bytes that are there already."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def check_room(self, need: int) -> None:
        """Raises ResourceError if there is no room for `need` bytes in all."""
        more, free = max(0, need - self.used_bytes()), shutil.disk_usage(self.root).free
        if more > free:
            raise ResourceError(
                f"the workspace {self.root} has {format_size(free)} free, and streaming the source takes "
                f"{format_size(more)}",
                hint="free some space, or give `workspace=` on another disk (/dev/shm is one in memory)",
            )

    def remove_file(self, number: int) -> None:
        """Removes all segments of a file."""
        remove_known(self.file_folder(number), lambda name: bool(_SEGMENT.fullmatch(f"{number:05d}/{name}")))
        disk.remove_empty(self.file_folder(number))

    def close(self) -> None:
        """Removes what is empty, and lets other processes use the folder."""
        for path in (*(self.folder / name for name in disk.entries(self.folder)), self.folder):
            disk.remove_empty(path)
        release(self.root, self._lock)


def claim(parent: Path, name: str) -> tuple[Path, int]:
    """Returns the first folder of this name, or of it with a number, that is this user's and not in use, and its open
    lock. Others cannot write to it, even in the folder for temporary files.

    Raises:
        ResourceError: it cannot be written, or the file system has no locks.
    """
    for number in count():
        root = parent / (f"{name}-{number}" if number else name)
        with disk.writing(root):
            parent.mkdir(parents=True, exist_ok=True)
            try:
                root.mkdir(mode=0o700)
            except FileExistsError:
                status = root.lstat()
                is_ours = root.is_dir() and not root.is_symlink() and status.st_uid == os.geteuid()
                if not is_ours and number < MOST_PLACES:
                    continue
                if not is_ours:
                    raise
        lock = disk.open_lock(root / LOCK)
        try:
            if locks.lock(lock, root / LOCK) and locks.same_file(lock, root / LOCK):
                return root, lock
        except ResourceError:
            release(root, lock)
            raise
        os.close(lock)
    raise AssertionError


def release(root: Path, lock: int) -> None:
    """Removes a folder that was claimed, if it is empty, and lets other processes use it."""
    if is_over := disk.entries(root) == [LOCK]:
        disk.remove(root / LOCK)
    os.close(lock)
    if is_over:
        disk.remove_empty(root)


def ranges_text(ranges: Iterable[tuple[int, int]]) -> str:
    """Ranges as text, for an identity."""
    return " ".join(f"{start}-{stop}" for start, stop in ranges)
