"""The only writer of Orbax checkpoints: zarr3 arrays in shard files, and the small files that Orbax reads.

Files are written around the page cache where the file system can (O_DIRECT): filling the cache costs as much processor
time as all the rest of a conversion. A shard is complete in memory before it is written, written again if in doubt, and
no two pieces of work share one, so that units need no merging and any process may run them.
"""

import errno
import json
import mmap
import os
import time
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path

import numpy as np

from tpuconv.convert.plan import Array
from tpuconv.convert.shards import Shard, shard_path
from tpuconv.errors import OutputError, ResourceError, TpuconvError

DIRECT_BYTES = 1 << 20
"""Smaller files are left to the page cache."""


class Store:
    """An Orbax checkpoint under construction in `folder`."""

    def __init__(self, folder: Path, arrays: Mapping[str, Array]):
        self.folder = folder
        self.arrays = arrays

    def make_folders(self) -> None:
        """One for every array."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for array in self.arrays.values():
                (self.folder / array.name).mkdir(exist_ok=True)
            sync(self.folder)
        except OSError as e:
            raise write_error(self.folder, e) from e

    def write_metadata(self) -> None:
        """Describes every array."""
        try:
            for array in self.arrays.values():
                _write_text(self.folder / array.name / "zarr.json", json.dumps(array.zarr_json()))
                sync(self.folder / array.name)
        except OSError as e:
            raise write_error(self.folder, e) from e

    def write(self, name: str, shard: Shard) -> None:
        """Writes a finished shard of an array to the disk; `sync` makes its name durable."""
        try:
            _write_file(shard_path(self.folder / name, shard.index), shard.close())
        except OSError as e:
            raise write_error(self.folder, e) from e

    def sync(self, names: Iterable[str]) -> None:
        """Makes the shards of some arrays durable, names included."""
        for name in names:
            sync(self.folder / name)

    def finish(self) -> None:
        """Checks that every shard is there, and makes the folder an Orbax checkpoint. May be called again.

        Raises:
            OutputError: a shard is missing, which would be a bug of ours or a meddling process.
        """
        for array in self.arrays.values():
            for index in product(*map(range, array.grid)):
                path = shard_path(self.folder / array.name, index)
                if not path.is_file():
                    raise OutputError(f"{path} was not written", hint="remove the unfinished output and convert again")
        try:
            for name, content in _orbax_files(self.arrays.values()).items():
                _write_text(self.folder / name, content)
            sync(self.folder)
        except OSError as e:
            raise write_error(self.folder, e) from e


def page_buffer(nbytes: int) -> np.ndarray:
    """Private memory in whole pages, as O_DIRECT needs it; given back to the system when it is dropped."""
    pages = max(1, -(-nbytes // mmap.PAGESIZE))
    return np.frombuffer(mmap.mmap(-1, pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def sync(path: Path) -> None:
    """Flushes a file or a folder's entries to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_error(path: Path, error: OSError) -> TpuconvError:
    """The error for a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(
            f"the disk of {path} is full", hint="free some space and run the same command: it goes on where it stopped"
        )
    return OutputError(f"{path} cannot be written: {error.strerror}")


def _write_text(path: Path, text: str) -> None:
    _write_file(path, np.frombuffer(text.encode(), np.uint8))


def _write_file(path: Path, data: np.ndarray) -> None:
    """Writes a whole file and flushes it to the disk. An array of DIRECT_BYTES or more must start at a page, with room
    to the end of its last one."""
    if data.nbytes >= DIRECT_BYTES and hasattr(os, "O_DIRECT"):
        try:
            return _write_through(path, _whole_pages(data), data.nbytes, os.O_DIRECT)
        except OSError as e:
            if e.errno != errno.EINVAL:  # the file system has no O_DIRECT, or none for pages: tmpfs, for one
                raise
    return _write_through(path, data, data.nbytes, 0)


def _write_through(path: Path, data: np.ndarray, size: int, flags: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o644)
    try:
        rest = data.data
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.ftruncate(fd, size)
        os.fsync(fd)
    finally:
        os.close(fd)


def _whole_pages(data: np.ndarray) -> np.ndarray:
    pages = -(-data.nbytes // mmap.PAGESIZE)
    return np.lib.stride_tricks.as_strided(data, (pages * mmap.PAGESIZE,), (1,))


def _orbax_files(arrays: Iterable[Array]) -> dict[str, str]:
    """The files that make a folder of arrays an Orbax checkpoint; the mark of success last."""
    tree = {
        str(tuple(array.name.split("."))): {
            # Key type 2 is a key of a dict. No sharding is stored: a restore must not need the mesh of whoever saved.
            "key_metadata": [{"key": key, "key_type": 2} for key in array.name.split(".")],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        for array in arrays
    }
    now = time.time_ns()
    metadata = {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    checkpoint = {
        "item_handlers": "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler",
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": now,
        "commit_timestamp_nsecs": now,
        "custom_metadata": {},
    }
    return {
        "_METADATA": json.dumps(metadata),
        "_CHECKPOINT_METADATA": json.dumps(checkpoint),
        "commit_success.txt": "ok",
    }
