"""The files of a folder that belong to tpuconv, and may be replaced or deleted.

An output is ours by its manifest, and a file in it by being listed there and by having the bytes that are listed. A
work folder is ours by its mark, and a file in it by a name that the journal or its plan knows. A name alone proves
nothing. Everything else is of others: it is never deleted, and an output that holds it is not replaced.
"""

import hashlib
import json
import os
import stat
from base64 import b64decode
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tpuconv import buckets
from tpuconv.errors import BucketError, CorruptOutput, TpuconvError
from tpuconv.jsonfile import read_bytes
from tpuconv.location import BucketPath, Location
from tpuconv.names import MANIFEST, SIGNATURE
from tpuconv.storage import disk
from tpuconv.storage.disk import PARTIAL
from tpuconv.storage.hashes import hash_file
from tpuconv.storage.places import is_file
from tpuconv.storage.sealed import MAX_MANIFEST_BYTES, STAGED, Sealed, read_sealed
from tpuconv.text import some

REWRITTEN = "was changed since tpuconv wrote it"
"""The end of the reason, after the name of a file."""
SHOWN = 5
"""Names of files that an error lists."""


@dataclass(frozen=True)
class Found:
    """A file in a folder: its size in bytes, and when it was last changed, in seconds by the clock of its disk or
    server. A folder without files has the size -1, and a name that ends with a slash."""

    size: int
    changed: float


class Contents(Protocol):
    """The files of an output, as its manifest lists them."""

    @property
    def sizes(self) -> Mapping[str, int | None]:
        """The size of each file but the manifest, by its path in the output. None: the manifest does not say."""

    def changed(self, names: Collection[str]) -> Iterable[str]:
        """Returns the files whose bytes differ from the manifest. Reads the files."""


ContentsOf = Callable[[Location, Sealed], Contents]
"""Returns the contents of an output with this manifest. Raises CorruptOutput if the manifest is not valid."""


@dataclass(frozen=True)
class ListedFiles:
    """The contents of an output whose manifest lists all files, such as an export."""

    folder: Location
    files: Mapping[str, Mapping[str, Any]]

    @property
    def sizes(self) -> dict[str, int | None]:
        """See `Contents`."""
        return {name: facts["bytes"] for name, facts in self.files.items()}

    def changed(self, names: Collection[str]) -> list[str]:
        """See `Contents`."""
        return [name for name in names if _hash_or_none(self.folder / name) != self.files[name]]


def listed_files(folder: Location, sealed: Sealed) -> ListedFiles:
    """See `ContentsOf`."""
    return ListedFiles(folder, sealed.files)


def _hash_or_none(path: Location) -> dict[str, Any] | None:
    try:
        return hash_file(path)
    except OSError:
        return None


# --- what lies in a folder -----------------------------------------------------------------------------------------


def files_in(folder: Location) -> dict[str, Found]:
    """Every file in a folder and its folders, by its path from there, and every folder without files. Links are not
    followed. Markers of folders in a bucket are left out: objects without bytes, which some programs create there.

    Raises:
        OSError: a local folder cannot be read.
    """
    if isinstance(folder, BucketPath):
        return {name: Found(found.size, found.modified.timestamp()) for name, found in objects_in(folder).items()}
    found: dict[str, Found] = {}
    _walk(folder, "", found)
    return found


def objects_in(folder: BucketPath) -> dict[str, buckets.ObjectFacts]:
    """Returns the facts of every object in a folder and its folders, by its name from there, without markers."""
    return without_markers(buckets.listing_facts(folder))


def without_markers(found: Mapping[str, buckets.ObjectFacts]) -> dict[str, buckets.ObjectFacts]:
    """Returns a listing without the markers of folders: objects without bytes that have the name of a folder of others,
    or beside which there is nothing. A listing loses the slash at the end of their names."""
    folders = folders_of(found)
    is_empty = not any(facts.size for facts in found.values())
    return {
        name: facts
        for name, facts in found.items()
        if facts.size or not (is_empty or name in folders or name.endswith("/"))
    }


def _walk(folder: Path, prefix: str, found: dict[str, Found]) -> None:
    # Some file systems give a removed file that is still open such a name, until it is closed.
    entries = [e for e in sorted(os.scandir(folder), key=lambda e: e.name) if not e.name.startswith(disk.LEFTOVERS)]
    if not entries and prefix:
        found[prefix] = Found(-1, 0.0)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            _walk(Path(entry.path), f"{prefix}{entry.name}/", found)
        else:
            status = entry.stat(follow_symlinks=False)
            size = status.st_size if stat.S_ISREG(status.st_mode) else -1
            found[prefix + entry.name] = Found(size, status.st_ctime_ns / 1e9)


def is_known(known: Collection[str]) -> Callable[[str], bool]:
    """Returns whether a file, of `files_in`, is one of the known ones, or one of these that is being written. A folder
    without files is known if a known file lies in it."""
    folders = folders_of(known)
    return lambda name: name in known or name.removesuffix("/") in folders or name.removesuffix(PARTIAL) in known


def folders_of(names: Iterable[str]) -> set[str]:
    """Returns the folders in which files lie, fast: a manifest may list a million files."""
    out: set[str] = set()
    for name in names:
        while (name := name.rpartition("/")[0]) and name not in out:
            out.add(name)
    return out


def unknown(names: Iterable[str], known: Collection[str]) -> list[str]:
    """The files, of `files_in`, that are not known."""
    knows = is_known(known)
    return [name for name in names if not knows(name)]


# --- outputs -------------------------------------------------------------------------------------------------------


def names_of(folder: Location, contents_of: ContentsOf) -> set[str]:
    """The files that an output of ours has by its manifest, with the manifest and its signature. Empty if it has no
    valid one."""
    try:
        return {MANIFEST, STAGED, *contents_of(folder, read_sealed(folder)).sizes, *_signature_in(folder)}
    except BucketError:
        raise
    except TpuconvError:
        return set()


def _signature_in(folder: Location) -> set[str]:
    """Returns the name of the signature in an output, if it is one of this output: it has the sha256 of the manifest
    among those that were signed. Whoever replaces the output needs no key to say that it is not signed any more."""
    if not is_file(folder / SIGNATURE):
        return set()
    try:
        bundle = json.loads(read_bytes(folder / SIGNATURE, MAX_MANIFEST_BYTES, CorruptOutput))
        statement = json.loads(b64decode(bundle["dsseEnvelope"]["payload"]))
        signed = {each["name"]: each["digest"] for each in statement["predicate"]["resources"]}
        manifest = hashlib.sha256(read_bytes(folder / MANIFEST, MAX_MANIFEST_BYTES, CorruptOutput)).hexdigest()
    except BucketError:
        raise
    except (TpuconvError, ValueError, KeyError, TypeError, RecursionError):
        return set()
    return {SIGNATURE} if signed.get(MANIFEST) == manifest else set()


def strangers(folder: Location, contents_of: ContentsOf) -> list[str]:
    """The reasons why an output must not be replaced: files that tpuconv did not write, or that were changed since.
    Empty if it may be.

    Bytes are read of the files alone that were changed after the manifest was written: no program can set the time of
    a change.
    """
    if isinstance(folder, Path) and not folder.is_dir():
        return ["it is not a folder"]
    found = files_in(folder)
    if not found:
        return []
    try:
        contents = contents_of(folder, read_sealed(folder))
    except BucketError:
        raise
    except CorruptOutput as e:
        return [f"its {MANIFEST} cannot be trusted: {e.message}"]
    except TpuconvError:
        return [f"it holds {some(list(found), SHOWN)}, and no manifest of tpuconv"]
    sizes = contents.sizes
    ours = {MANIFEST, STAGED, *sizes, *(_signature_in(folder) if SIGNATURE in found else ())}
    reasons = [f"it holds {name}, which tpuconv did not write" for name in unknown(found, ours)]
    there = [name for name in sizes if name in found]
    resized = [name for name in there if sizes[name] not in (None, found[name].size)]
    since = found[MANIFEST].changed
    later = [name for name in there if name not in resized and found[name].changed >= since]
    changed = sorted({*resized, *contents.changed(later)})
    return reasons + [f"{name} {REWRITTEN}" for name in changed]


# --- deleting ------------------------------------------------------------------------------------------------------


def remove_known(folder: Path, is_ours: Callable[[str], bool]) -> list[str]:
    """Removes files of a local folder and its folders, then the folders that became empty; links are not followed. A
    manifest goes last: it tells what else is ours.

    Args:
        folder: where. It need not exist.
        is_ours: says of the path of a file in the folder, or of a folder without files, which ends with a slash,
            whether it is removed.

    Returns:
        What is left: the paths of files that are not ours.

    Raises:
        TpuconvError: of `disk.write_error`.
    """
    if not os.path.lexists(folder):
        return []
    if folder.is_symlink() or not folder.is_dir():
        return [folder.name]
    with disk.writing(folder):
        names = list(files_in(folder))
    left = [name for name in names if not is_ours(name)]
    gone = sorted((name for name in names if is_ours(name)), key=lambda name: (name == MANIFEST, name))
    for name in gone:
        if not name.endswith("/"):
            disk.remove(folder / name)
    for name in sorted(folders_of(gone), key=lambda name: (-name.count("/"), name)):
        disk.remove_empty(folder / name)
    if gone:
        disk.remove_empty(folder)
    return left
