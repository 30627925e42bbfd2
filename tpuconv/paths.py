"""Paths that other libraries cannot take as they are."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tpuconv.text import has_surrogates


@contextmanager
def plain_path(folder: Path) -> Iterator[Path]:
    """The folder by a path that TensorStore and tokenizers accept: in UTF-8, without a backslash. If its own path is
    not such a path, this is the path of an open descriptor of the folder."""
    path = str(folder.absolute())
    if not has_surrogates(path) and "\\" not in path:
        yield folder
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
