"""Paths that other libraries cannot take as they are, and paths that a user mistyped."""

import difflib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import overload

from tpuconv.location import BucketPath, Location
from tpuconv.text import has_surrogates, plain


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
        folders = [p.name for p in path.parent.iterdir() if p.is_dir()]
    except OSError:
        return None
    near = difflib.get_close_matches(path.name, folders, n=3)
    shown = " or ".join(plain(str(path.parent / name)) for name in near)
    return f"did you mean the folder {shown}?" if near else None
