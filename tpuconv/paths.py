"""Paths that other libraries cannot take as they are."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import overload

from tpuconv.location import BucketPath, Location
from tpuconv.text import has_surrogates


@overload
def plain_path(folder: Path) -> AbstractContextManager[Path]: ...


@overload
def plain_path(folder: Location) -> AbstractContextManager[Location]: ...


@contextmanager  # type: ignore[misc]  # a Path for a Path
def plain_path(folder: Location) -> Iterator[Location]:
    """The folder by a path that TensorStore and tokenizers accept: in UTF-8, without a backslash. If its own path is
    not such a path, this is the path of an open descriptor of the folder. A URL is such a path."""
    path = str(folder.absolute())
    if isinstance(folder, BucketPath) or (not has_surrogates(path) and "\\" not in path):
        yield folder
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
