"""The location of files: a local path, or the URL of a folder or object in a bucket.

to_location("out")            Path("out")
to_location("gs://b/models")  BucketPath("gs", "b", "models")
"""

import difflib
import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

from tpuconv.errors import UsageError
from tpuconv.text import has_surrogates, plain

SCHEMES = {"gs": "Google Cloud Storage", "s3": "Amazon S3", "az": "Azure Blob Storage"}
"""The schemes of URLs of buckets. In Azure a bucket is called a container."""

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(/?)(.*)", re.DOTALL)
"""A scheme, a colon, and one or two slashes. `my-lora:0.5` is no address."""
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NOT_IN_KEYS = re.compile(r"[\0-\x1f\x7f*?\\]")


@dataclass(frozen=True, order=True)
class BucketPath:
    """A folder or an object in a bucket: `scheme://bucket/key`. It has the methods of a `Path` that only change text;
    what reads and writes is in `tpuconv.buckets`. `key` is empty for the bucket itself, and ends without a
    slash."""

    scheme: str
    bucket: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.root}/{self.key}".rstrip("/")

    def __truediv__(self, name: "str | Path") -> "BucketPath":
        added = str(name).strip("/")
        return self if added in ("", ".") else replace(self, key=f"{self.key}/{added}".lstrip("/"))

    @property
    def root(self) -> str:
        """The URL of the bucket."""
        return f"{self.scheme}://{self.bucket}"

    @property
    def name(self) -> str:
        """The last part of the key, or the name of the bucket."""
        return self.key.rpartition("/")[2] or self.bucket

    @property
    def suffix(self) -> str:
        """As of a `Path`."""
        return Path(self.name).suffix

    @property
    def parent(self) -> "BucketPath":
        """The folder that holds it; of a bucket itself the bucket."""
        return replace(self, key=self.key.rpartition("/")[0])

    @property
    def parents(self) -> "list[BucketPath]":
        """The folders that hold it, from the nearest to the bucket."""
        if not self.key:
            return []
        return [self.parent, *self.parent.parents]

    def with_name(self, name: str) -> "BucketPath":
        """Returns the same with another last part of the key."""
        return self.parent / name

    def absolute(self) -> "BucketPath":
        """Itself."""
        return self

    def resolve(self) -> "BucketPath":
        """Itself: buckets have no links."""
        return self


Location = Path | BucketPath


def to_location(place: "str | Path | BucketPath") -> Location:
    """Returns the location that a user gives.

    Raises:
        UsageError: it is an address that is not of a bucket.
    """
    if isinstance(place, BucketPath):
        return place
    found = _ADDRESS.match(str(place))
    if found is None:
        return Path(place)
    scheme, slash, rest = found[1].lower(), found[2], found[3]
    if scheme not in SCHEMES:
        names = ", ".join(f"{name}://" for name in SCHEMES)
        if scheme == "hf":
            raise UsageError(
                f"{place} cannot be used here: the Hub is no file system",
                hint="give ORG/NAME as a source; make an output in a folder, then `tpuconv push FOLDER ORG/NAME`",
            )
        first = "download it, and " if scheme in ("http", "https") else ""
        raise UsageError(
            f"{place} cannot be used: tpuconv does not know the scheme {found[1]}:",
            hint=f"{first}give a local path, or the URL of a bucket ({names})",
        )
    if not slash:
        hint = f"write {scheme}://{rest}"
        if isinstance(place, Path):
            hint += ", as text: a pathlib.Path drops one of the two slashes"
        raise UsageError(f"{place} is not the URL of a bucket: a slash is missing", hint=hint)
    bucket, _, key = rest.partition("/")
    parts = key.rstrip("/").split("/") if key.rstrip("/") else []
    if why := _why_no_folder(bucket, parts):
        raise UsageError(
            f"{str(place)!r} is not the URL of a folder in a bucket: {why}", hint=f"write {scheme}://BUCKET/FOLDER"
        )
    return BucketPath(scheme, bucket, "/".join(parts))


def _why_no_folder(bucket: str, parts: Sequence[str]) -> str:
    """Returns the reason why a bucket has no folder of these names; empty if it can have one."""
    if not _BUCKET.fullmatch(bucket):
        return f"no bucket can be named {bucket!r}" if bucket else "it names no bucket"
    for part in parts:
        if part in ("", ".", ".."):
            return f"'{part}' is no folder there" if part else "a folder has no name"
        if found := _NOT_IN_KEYS.search(part):
            return f"{found[0]!r} cannot be in a name there"
    return ""


def path_problem(path: "str | os.PathLike[str]") -> str | None:
    """Returns the reason why no file can have this path; None if one can."""
    if not os.fspath(path):
        return "it is empty"
    try:
        os.lstat(path)
    except ValueError as e:  # a NUL, or a character that the encoding of names does not have
        return str(e)
    except OSError as e:
        if e.errno == errno.ENAMETOOLONG:
            return e.strerror
    return None


def local_path(place: "str | Path | BucketPath", why: str = "only a local path can be used here") -> Path:
    """Returns the local path that a user gives.

    Raises:
        UsageError: it is an address. `why` says why it must be a local path.
    """
    location = to_location(place)
    if isinstance(location, BucketPath):
        raise UsageError(f"{place} is in a bucket: {why}", hint="give a local path")
    return location


@overload
def plain_path(folder: Path) -> AbstractContextManager[Path]: ...


@overload
def plain_path(folder: Location) -> AbstractContextManager[Location]: ...


@contextmanager  # type: ignore[misc]  # a Path for a Path
def plain_path(folder: Location) -> Iterator[Location]:
    """Yields the folder by a path that TensorStore and tokenizers accept: in UTF-8, without a backslash. If its own
    path is not such a path, this is the path of an open descriptor of the folder. A URL is such a path."""
    path = str(folder.absolute())
    if isinstance(folder, BucketPath) or (not has_surrogates(path) and "\\" not in path):
        yield folder
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def named_path(folder: Location) -> Location:
    """Returns the folder by a path that ends in its name, as `.` and `..` do not."""
    return Path(os.path.abspath(folder)) if folder.name in ("", "..") and isinstance(folder, Path) else folder


def near_folders(path: Path) -> str | None:
    """Returns a hint that names folders with a similar name beside `path`; None if there are none."""
    try:
        folders = [p.name for p in path.parent.iterdir() if p.is_dir() and not p.name.startswith(".")]
    except OSError:
        return None
    near = difflib.get_close_matches(path.name, folders, n=3)
    shown = " or ".join(plain(str(path.parent / name)) for name in near)
    return f"did you mean the folder {shown}?" if near else None
