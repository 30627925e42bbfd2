"""Where the files of an output are written until it is published: a folder on a disk, or objects in a bucket."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np

from tpuconv import buckets
from tpuconv.location import BucketPath, Location
from tpuconv.names import MANIFEST
from tpuconv.storage import disk
from tpuconv.storage.hashes import FileHash, hash_bytes
from tpuconv.storage.places import size_faults

COMMIT_MARK = "commit_success.txt"
"""The file by which Orbax tells, in a bucket, that a checkpoint is complete."""


class FileWriter(Protocol):
    """Writes a file from start to end and hashes it."""

    def write(self, data: Any) -> None:
        """Writes all bytes of a buffer."""

    def facts(self) -> dict[str, Any]:
        """The size and hash of what was written, as a manifest has them."""


class Sink(Protocol):
    """Files are named by their paths in the output."""

    @property
    def folder(self) -> Location:
        """The folder."""

    @property
    def is_hidden(self) -> bool:
        """Whether nobody sees the files before all are there."""

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
        """Each file that is missing or has the wrong size, and what is wrong with it."""

    def keep_only(self, names: Collection[str]) -> None:
        """Removes all at the top but these names: files of an earlier run."""

    def check_room(self, need: int, what: str) -> None:
        """Checks that there is room for `need` bytes. Raises ResourceError if there is not."""


class FolderSink:
    """A folder on a local disk."""

    is_hidden = True

    def __init__(self, folder: Path):
        self.folder = folder

    def make_folders(self, folders: Collection[str]) -> None:
        for name in folders:
            disk.make_folder(self.folder / name)
        parents = {self.folder / parent for name in folders for parent in PurePosixPath(name).parents}
        for folder in sorted(parents, reverse=True):  # up to that of the output, whose own name is on the disk
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

    def keep_only(self, names: Collection[str]) -> None:
        for name in disk.entries(self.folder):
            if name not in names:
                disk.remove(self.folder / name)

    def check_room(self, need: int, what: str) -> None:
        disk.check_room(self.folder.parents[1], need, what)


class BucketSink:
    """A folder in a bucket. If it is not hidden, the marks of a complete output, COMMIT_MARK and the manifest, are held
    back until `write_marks`."""

    def __init__(self, folder: BucketPath, is_hidden: bool):
        self.folder, self.is_hidden = folder, is_hidden
        self.held: dict[str, bytes] = {}

    def make_folders(self, folders: Collection[str]) -> None:
        """Buckets have none."""

    def write(self, name: str, data: bytes | np.ndarray) -> None:
        if is_mark(name) and not self.is_hidden:
            self.held[name] = bytes(data)
        else:
            buckets.put_object(self.folder / name, data)

    def write_all(self, files: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
        buckets.for_each(lambda name: self.write(name, files[name]), files.keys())
        return {name: hash_bytes(content) for name, content in files.items()}

    @contextmanager
    def writer(self, name: str) -> Iterator[FileWriter]:
        with buckets.upload(self.folder / name) as append:
            yield _Upload(append)

    def sync(self, names: Iterable[str]) -> None:
        """Objects are durable when they are written."""

    def size_faults(self, sizes: Mapping[str, int]) -> Iterable[tuple[str, str]]:
        return size_faults(self.folder, {name: size for name, size in sizes.items() if name not in self.held})

    def keep_only(self, names: Collection[str]) -> None:
        others = [name for name in buckets.listing(self.folder) if name.partition("/")[0] not in names]
        buckets.remove_objects(self.folder, others)

    def check_room(self, need: int, what: str) -> None:
        """Buckets are never full."""

    def write_marks(self) -> None:
        """Writes the marks, the manifest last."""
        for name in sorted(self.held, key=lambda name: name == MANIFEST):
            buckets.put_object(self.folder / name, self.held[name])


class _Upload:
    def __init__(self, append: Callable[[Any], object]):
        self._append, self._hash = append, FileHash()

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self._append(view)

    def facts(self) -> dict[str, Any]:
        return self._hash.facts()


def is_mark(name: str) -> bool:
    """Whether a file says that an output is complete."""
    return name == MANIFEST or PurePosixPath(name).name == COMMIT_MARK
