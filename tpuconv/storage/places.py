"""Questions about a folder, on a local disk or in a bucket. Nothing is written."""

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from tpuconv import buckets
from tpuconv.errors import AccessRefused, SourceError, UsageError
from tpuconv.location import BucketPath, Location
from tpuconv.storage.hashes import stamp


def real(location: Location) -> Location:
    """Returns the location without links."""
    return location if isinstance(location, BucketPath) else Path(os.path.realpath(location))


def is_there(location: Location) -> bool:
    """Returns True if a path exists, even as a broken link; in a bucket, if there is an object of this name."""
    if isinstance(location, BucketPath):
        return buckets.facts(location) is not None
    return os.path.lexists(location)


def is_readable(location: Location) -> bool:
    """As `is_there`, but for a file that may be missing: S3 refuses to say so to those who may not list a bucket."""
    try:
        return is_there(location)
    except AccessRefused:
        return False


def is_file(location: Location) -> bool:
    """Returns True if there is a regular file, or an object, of this name."""
    return location.is_file() if isinstance(location, Path) else is_there(location)


def work_folder(out: Location) -> Location:
    """Returns the folder of the unfinished work of an output, beside it: `.NAME.tpuconv`, in a bucket
    `NAME.tpuconv`."""
    return out.with_name(f"{'' if isinstance(out, BucketPath) else '.'}{out.name}{WORK_SUFFIX}")


def is_work_name(out: Location) -> bool:
    """Returns True if a folder has the name of a work folder."""
    is_hidden = isinstance(out, BucketPath) or out.name.startswith(".")
    return is_hidden and out.name.endswith(WORK_SUFFIX)


WORK_SUFFIX = ".tpuconv"
CLAIM = "claim"
"""The mark of a work folder in a bucket."""


def check_finished(out: Location) -> None:
    """Checks that a folder to read, in a bucket one without a manifest, is no unfinished output.

    Raises:
        UsageError: its work folder is there alone.
    """
    work = work_folder(out)
    if is_readable(work / CLAIM) if isinstance(work, BucketPath) else work.is_dir() and not is_there(out):
        raise UsageError(
            f"{out} is not finished: the work on it is in {work}",
            hint="wait for the command that makes it, or run it again: it continues",
        )


def names_in(folder: Location) -> list[str]:
    """Returns the names of what a folder holds, sorted. A folder in a bucket that does not exist holds nothing.

    Raises:
        OSError: a local folder cannot be read.
    """
    if isinstance(folder, BucketPath):
        return buckets.names(folder)
    return sorted(os.listdir(folder))


def files_below(folder: Path) -> Iterator[Path]:
    """Yields each file in a folder and the folders in it, links to folders left out.

    Raises:
        SourceError: one of them cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise SourceError(f"{error.filename} cannot be read: {error.strerror}") from None

    for parent, _, names in os.walk(folder, onerror=refuse):
        yield from (Path(parent, name) for name in names)


def stamp_of(location: Location) -> tuple[object, ...] | None:
    """Returns the stamp of a file, or the version of an object; None if it does not exist."""
    if isinstance(location, BucketPath):
        found = buckets.facts(location)
        return None if found is None else (found.size, *sorted(found.version.items()))
    try:
        return stamp(os.stat(location))
    except (OSError, ValueError):
        return None


def size_faults(folder: Location, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yields each file, by its path in the folder, that is missing or has the wrong size, and what is wrong with it."""
    if isinstance(folder, BucketPath):
        found = buckets.listing(folder)
        for name, size in sizes.items():
            if name not in found:
                yield name, "is missing"
            elif found[name] != size:
                yield name, wrong_size(found[name], size)
        return
    for name, size in sizes.items():
        try:
            status = os.stat(Path(folder, name))
        except OSError as e:
            yield name, "is missing" if isinstance(e, FileNotFoundError) else f"cannot be read: {e.strerror}"
            continue
        if not stat.S_ISREG(status.st_mode):
            yield name, "is not a regular file"
        elif status.st_size != size:
            yield name, wrong_size(status.st_size, size)


def wrong_size(found: int, size: int) -> str:
    """Says that a file does not have its size in bytes."""
    return f"has {found} bytes instead of {size}"
