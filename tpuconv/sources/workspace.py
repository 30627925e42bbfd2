"""The folder that holds what of a remote source is on the disk."""

import os
import re
import shutil
import stat
from collections.abc import Collection
from itertools import count
from pathlib import Path
from tempfile import gettempdir

import xxhash

from tpuconv.errors import ResourceError
from tpuconv.location import Location
from tpuconv.storage import disk, locks
from tpuconv.storage.ownership import remove_known
from tpuconv.text import format_size

FOLDER_IN_WORK = "source"
"""The workspace in the work folder of a local output."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PART, WIDE = ".part", ".wide"
MOST_PLACES = 1024
LOCK = "lock"
_FILE = re.compile(rf"[^/]+\.safetensors({re.escape(PART)}(/.*)?|{re.escape(WIDE)}({re.escape(PART)})?)?")
"""A file of a workspace: of the source, its wide part, or what is in the folder of a download."""
_OLD = re.compile(rf"[0-9a-f]{{32}}/({_FILE.pattern})?")
"""The same of a workspace of any source."""


class Workspace:
    """A folder of whole files of a source, in use by one process until it is closed. What an earlier run left in it is
    used again, unless the machine was started since: files are not flushed to the disk.

    Args:
        place: the folder of a user, who may have several outputs; by default the work folder of a local output, or the
            folder for temporary files.
        work: the work folder of the output.
        identity: of the source, and of what is kept of it.

    Raises:
        ResourceError: it cannot be written.
    """

    def __init__(self, place: Path | None, work: Location, identity: str):
        if place is None and isinstance(work, Path):
            self.root, self._lock = claim(work, FOLDER_IN_WORK)
        else:
            self.root, self._lock = claim_for(work, place)
        boot = BOOT_ID.read_text() if BOOT_ID.is_file() else os.urandom(16).hex()
        self.folder = self.root / xxhash.xxh3_128_hexdigest(f"{identity} {boot}".encode())
        remove_known(self.root, lambda name: bool(_OLD.fullmatch(name)) and not name.startswith(self.folder.name))
        disk.make_folder(self.folder)

    def path(self, name: str) -> Path:
        """Returns the path of a file of the source. What is there is complete and proved."""
        return self.folder / name

    def wide(self, name: str) -> Path:
        """Returns the path of the wide part of a file: its bytes at their places, with holes between them."""
        return self.folder / f"{name}{WIDE}"

    def part(self, name: str) -> Path:
        """Returns the folder in which a file is while it is fetched."""
        return self.folder / f"{name}{PART}"

    def keep_only(self, names: Collection[str]) -> None:
        """Removes what an earlier run left, but for complete files with these names and their wide parts."""
        kept = {*names, *(f"{name}{WIDE}" for name in names)}
        remove_known(self.folder, lambda name: bool(_FILE.fullmatch(name)) and name not in kept)
        disk.make_folder(self.folder)

    def remove_part(self, name: str) -> None:
        """Removes what was fetched of a file and is not complete."""
        remove_known(self.part(name), lambda _: True)
        disk.remove_empty(self.part(name))

    def check_room(self, need: int) -> None:
        """Raises ResourceError if there is no room for `need` bytes in all."""
        used = sum(path.stat().st_blocks * 512 for path in self.folder.rglob("*") if path.is_file())
        more, free = max(0, need - used), shutil.disk_usage(self.root).free
        if more > free:
            raise ResourceError(
                f"the workspace {self.root} has {format_size(free)} free, and streaming the source takes "
                f"{format_size(more)}",
                hint="free some space, or give `workspace=` on another disk (/dev/shm is one in memory)",
            )

    def close(self) -> None:
        """Removes what is empty, and lets other processes use the folder."""
        disk.remove_empty(self.folder)
        release(self.root, self._lock)


def claim_for(work: Location, place: Path | None) -> tuple[Path, int]:
    """Returns a folder outside of a work folder, and its open lock, as `claim` does: in `place`, by default in the
    folder for temporary files. The next run of the same work finds it by its name."""
    return claim(place or Path(gettempdir()), f"tpuconv-{xxhash.xxh3_64_hexdigest(str(work).encode())}")


def claim(parent: Path, name: str) -> tuple[Path, int]:
    """Returns the first folder of this name, or of it with a number, that is this user's and not in use, and its open
    lock. Others cannot write to it, even in the folder for temporary files. One that its owner removes meanwhile counts
    as in use.

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
                try:
                    status = root.lstat()
                except FileNotFoundError:
                    continue
                is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
                if not is_ours and number < MOST_PLACES:
                    continue
                if not is_ours:
                    raise
        try:
            lock = disk.open_lock(root / LOCK)
        except ResourceError:
            if root.exists():
                raise
            continue
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
