"""Files in the Hub's cache that do not match what the Hub promises."""

import hashlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from tpuconv.errors import SourceError
from tpuconv.jsonfile import opened
from tpuconv.location import BucketPath, Location
from tpuconv.storage.hashes import BLOCK, HASHES, blocks


class DamagedDownload(SourceError):
    """A file in the cache does not match what the Hub promises."""

    files: Sequence[Path] = ()
    """The files to delete: the blob and, where repositories share it, the shared file under it."""

    def remove(self) -> None:
        """Deletes the file from the cache, so that it is downloaded again.

        Raises:
            DamagedDownload: this error, if nothing can be downloaded (HF_HUB_OFFLINE) or the file may not be deleted.
        """
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            raise self
        try:
            for file in self.files:
                file.unlink(missing_ok=True)
        except OSError:
            raise self from None


GIT_SHA1 = "git_sha1"
"""The hash that the Hub lists for files that git itself stores: the sha1 of git's blob, which begins with the size."""

Promise = tuple[str, str]
"""The hash that the Hub promises for a file: its name (one of `HASHES` or `GIT_SHA1`) and value."""


def wrong_hash(path: Location, expected: str, actual: str, name: str = "sha256") -> DamagedDownload:
    """Returns the error for a file with a wrong hash. It names what to delete from the cache."""
    return damaged(Path(str(path)), f"{name} promised  {expected}", f"{name} found     {actual}")


def damaged(path: Path, *details: str) -> DamagedDownload:
    """Returns the error for a file in the cache that is damaged in this way. It names what to delete."""
    files = link_targets(path)[-2:]
    error = DamagedDownload(
        f"{path} is not the file that the Hub promises",
        details=details,
        hint="it was damaged on the way or on the disk; delete it and run again, only it is downloaded anew:\n"
        f"     rm {' '.join(shlex.quote(str(f)) for f in files)}",
    )
    error.files = files
    return error


def link_targets(path: Path) -> list[Path]:
    """Returns the targets of a symlink, link after link; the path itself if it is no link."""
    targets: list[Path] = []
    while path.is_symlink() and len(targets) < 8:
        path = Path(os.path.normpath(path.parent / os.readlink(path)))
        targets.append(path)
    return targets or [path]


def check_download(path: Location, promise: Promise | None) -> None:
    """Checks the hash of a file, unless None is promised.

    Raises:
        DamagedDownload: it is another one.
    """
    if promise is not None and isinstance(path, Path) and (found := hash_of(path, promise[0])) != promise[1]:
        raise wrong_hash(path, promise[1], found, promise[0])


def hash_of(path: Location, name: str) -> str:
    """Returns the hash of a file, in hex, by its name in `HASHES`; of a local file also `GIT_SHA1`.

    Raises:
        SourceError: it cannot be read.
    """
    if isinstance(path, BucketPath):
        digest = HASHES[name]()
        for block in blocks(path):
            digest.update(block)
        return str(digest.hexdigest())
    with opened(path, SourceError) as (fd, status), open(fd, "rb", closefd=False, buffering=0) as file:
        digest = hashlib.sha1(b"blob %d\0" % status.st_size) if name == GIT_SHA1 else HASHES[name]()
        buffer = memoryview(bytearray(BLOCK))
        while n := file.readinto(buffer):
            digest.update(buffer[:n])
    return str(digest.hexdigest())
