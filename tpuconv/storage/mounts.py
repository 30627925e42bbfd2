"""File systems: which one a path lies on, and which folders are mount points, as Linux lists them."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tpuconv.errors import UsageError

MOUNTS = Path("/proc/self/mountinfo")


def mount_points_in(folder: Path) -> list[Path]:
    """Returns the mount points at or below a folder, which must be absolute."""
    found = {place for place, _ in _mounts() if place.is_relative_to(folder)}
    with suppress(OSError):  # a system without the list
        if os.path.ismount(folder):
            found.add(folder)
    return sorted(found)


def check_place(out: Path) -> None:
    """Checks that an output can appear at a path by a rename.

    Raises:
        UsageError: it is a mount point, holds one, or is the current folder or one that holds it.
    """
    where = f"give a folder in it: {out}/NAME"
    if mounted := mount_points_in(out):
        what = "is a mount point" if mounted[0] == out else f"holds the mount point {mounted[0]}"
        raise UsageError(f"{out} {what}, which cannot be renamed or replaced", hint=where)
    with suppress(FileNotFoundError):  # the current folder was removed
        if Path(os.getcwd()).is_relative_to(os.path.realpath(out)):
            raise UsageError(f"{out} is the current folder, or holds it, and cannot be replaced", hint=where)


def file_system_of(path: Path) -> str:
    """Returns the type of the file system that a path lies on, such as "ext4" or "overlay"; "unknown" if the system
    does not say."""
    real = Path(os.path.realpath(path))
    kinds = [(len(place.parts), number, kind) for number, (place, kind) in enumerate(_mounts()) if _holds(place, real)]
    return max(kinds)[2] if kinds else "unknown"  # of several mounts at one place the last is seen


def _holds(place: Path, path: Path) -> bool:
    return path.is_relative_to(place)


def _mounts() -> Iterator[tuple[Path, str]]:
    """Yields each mount point with the type of its file system."""
    with suppress(OSError):
        for line in MOUNTS.read_bytes().splitlines():
            about, _, system = line.partition(b" - ")
            place = re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), about.split(b" ")[4])
            yield Path(os.fsdecode(place)), os.fsdecode(system.split(b" ")[0])
