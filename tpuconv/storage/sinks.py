"""The place of the files of an output until it is published: a folder on a disk, or objects in a bucket."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np

from tpuconv import buckets
from tpuconv.errors import BucketError, ResourceError
from tpuconv.location import BucketPath, Location
from tpuconv.storage import disk
from tpuconv.storage.hashes import FileHash, hash_bytes
from tpuconv.storage.places import size_faults, wrong_size
from tpuconv.text import format_size


class FileWriter(Protocol):
    """Writes a file from start to end and hashes it."""

    def write(self, data: Any) -> None:
        """Writes all bytes of a buffer."""

    def facts(self) -> dict[str, Any]:
        """Returns the size and hash of what was written, as a manifest has them."""


class Sink(Protocol):
    """Files are named by their paths in the output."""

    @property
    def folder(self) -> Location:
        """The folder."""

    def make_folders(self, folders: Collection[str]) -> None:
        """Creates folders."""

    def write(self, name: str, data: bytes | np.ndarray) -> None:
        """Writes a file. `sync` makes it durable."""

    def write_all(self, files: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
        """Writes small files, which the publication makes durable. Returns size and hash of each, as a manifest has
        them."""

    def writer(self, name: str) -> AbstractContextManager[FileWriter]:
        """Writes a large file, which is there when the `with` ends without an error."""

    def sync(self, names: Iterable[str]) -> None:
        """Makes files durable, and the names in folders."""

    def size_faults(self, sizes: Mapping[str, int]) -> Iterable[tuple[str, str]]:
        """Yields each file that is missing or has the wrong size, and what is wrong with it."""

    def check_room(self, need: int, what: str) -> None:
        """Checks that there is room for `need` bytes. Raises ResourceError if there is not."""

    def check_size(self, name: str, nbytes: int) -> None:
        """Checks that a file may have this size. Raises ResourceError if it may not."""


class FolderSink:
    """A folder on a local disk."""

    def __init__(self, folder: Path):
        self.folder = folder

    def make_folders(self, folders: Collection[str]) -> None:
        for name in folders:
            disk.make_folder(self.folder / name)
        parents = {self.folder / parent for name in folders for parent in PurePosixPath(name).parents}
        for folder in sorted(parents, reverse=True):  # up to the folder of the output, whose own name is on the disk
            disk.sync(folder)

    def write(self, name: str, data: bytes | np.ndarray) -> None:
        disk.write_file(self.folder / name, data, flush=False)

    def write_all(self, files: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
        for name, content in files.items():
            self.write(name, content)
        return {name: hash_bytes(content) for name, content in files.items()}

    def writer(self, name: str) -> disk.Writer:
        return disk.Writer(self.folder / name)

    def sync(self, names: Iterable[str]) -> None:
        for name in names:
            disk.sync(self.folder / name)

    def size_faults(self, sizes: Mapping[str, int]) -> Iterable[tuple[str, str]]:
        return size_faults(self.folder, sizes)

    def check_room(self, need: int, what: str) -> None:
        disk.check_room(self.folder.parents[1], need, what)

    def check_size(self, name: str, nbytes: int) -> None:
        """Disks say so when they are full."""


MAX_COPY_BYTES = {"s3": 5 << 30}
"""The largest object that a store copies by one request: outputs are published by copies."""


@dataclass(frozen=True)
class Staged:
    """An object of an output that waits in the work folder of a bucket: its name there, its size in bytes, and its
    version when it was written."""

    key: str
    size: int
    version: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Returns the facts for an entry of the journal."""
        return {"key": self.key, "bytes": self.size, "version": dict(self.version)}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "Staged":
        """Returns the object from an entry of the journal."""
        return cls(facts["key"], facts["bytes"], facts["version"])


class StagedSink:
    """Objects of an output that wait under a prefix of this process alone, until the output is published.

    Args:
        folder: the work folder.
        prefix: of the names of objects there.
        check: called before each request that writes; raises OutputError if this process must not write any more.
        check_held: the same, but asks the store.
    """

    def __init__(self, folder: BucketPath, prefix: str, check: Callable[[], None], check_held: Callable[[], None]):
        self.work, self.prefix, self._check, self._check_held = folder, prefix, check, check_held
        self.staged: dict[str, Staged] = {}

    @property
    def folder(self) -> BucketPath:
        """See `Sink`."""
        return self.work / self.prefix

    def make_folders(self, folders: Collection[str]) -> None:
        """Buckets have none."""

    def write(self, name: str, data: bytes | np.ndarray) -> None:
        self._check()
        version = buckets.put_object(self.folder / name, data)
        self._add(name, len(data) if isinstance(data, bytes) else data.nbytes, version)

    def write_all(self, files: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
        buckets.for_each(lambda name: self.write(name, files[name]), files.keys())
        return {name: hash_bytes(content) for name, content in files.items()}

    @contextmanager
    def writer(self, name: str) -> Iterator[FileWriter]:
        with buckets.upload(self.folder / name) as append:
            upload = _Upload(append, self._check)
            yield upload
        found = buckets.facts(self.folder / name)
        if found is None or found.size != upload.facts()["bytes"]:
            self._check_held()  # whoever took the work over has cleaned up
            raise BucketError(f"{self.folder / name} was written, and is not there as it was", hint="run again")
        self._add(name, found.size, found.version)

    def _add(self, name: str, size: int, version: Mapping[str, str]) -> None:
        self.staged[name] = Staged(f"{self.prefix}/{name}", size, version)

    def sync(self, names: Iterable[str]) -> None:
        """Objects are durable when they are written."""

    def size_faults(self, sizes: Mapping[str, int]) -> Iterable[tuple[str, str]]:
        for name, size in sizes.items():
            found = self.staged.get(name)
            if found is None or found.size != size:
                yield name, "is missing" if found is None else wrong_size(found.size, size)

    def check_room(self, need: int, what: str) -> None:
        """Buckets are never full."""

    def check_size(self, name: str, nbytes: int) -> None:
        limit = MAX_COPY_BYTES.get(self.work.scheme)
        if limit and nbytes > limit:
            raise ResourceError(
                f"{name} would have {format_size(nbytes)}, and {self.work.root} publishes at most {format_size(limit)}",
                hint="write to a local disk, and copy the output",
            )


class _Upload:
    def __init__(self, append: Callable[[Any], object], check: Callable[[], None]):
        self._append, self._check, self._hash = append, check, FileHash()

    def write(self, data: Any) -> None:
        self._check()
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self._append(view)

    def facts(self) -> dict[str, Any]:
        return self._hash.facts()
