"""Writes Orbax checkpoints: zarr3 arrays in shard files, and the small files that Orbax reads. No other module does.

A shard is complete in memory before it is written, and may be written again. No two slabs share one, so that units need
no merging and any process may do them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpuconv.checkpoint.manifest import ORBAX_FILES
from tpuconv.checkpoint.shards import ShardBuilder, shard_name
from tpuconv.convert.plan.types import OutputArray
from tpuconv.errors import OutputError
from tpuconv.private import INTERFACES
from tpuconv.storage import disk
from tpuconv.storage.sealed import size_faults

LIST_PLACE, DICT_KEY = 1, 2
"""Orbax's numbers for the kinds of keys in a tree."""


@dataclass(frozen=True)
class OrbaxTree:
    """What Orbax's metadata say about the tree of a checkpoint besides its arrays.

    Attributes:
        empty: names that are in the tree without an array.
        has_lists: whether numbers in names are places in lists; else they are keys of dicts.
        custom_metadata: what Orbax keeps for the program that loads it.
    """

    empty: Sequence[str] = ()
    has_lists: bool = False
    custom_metadata: Mapping[str, Any] = field(default_factory=dict)


class Store:
    """An Orbax checkpoint under construction in `folder`."""

    def __init__(self, folder: Path, arrays: Mapping[str, OutputArray], tree: OrbaxTree = OrbaxTree()):
        self.folder, self.arrays, self.tree = folder, arrays, tree

    def make_folders(self) -> None:
        """Creates a folder for every array."""
        disk.make_folder(self.folder)
        for array in self.arrays.values():
            disk.make_folder(self.folder / array.name)
        disk.sync(self.folder)
        disk.sync(self.folder.parent)

    def write_metadata(self) -> None:
        """Writes the zarr.json of every array."""
        for name, content in self._array_files().items():
            disk.write_file(self.folder / name, content)
        self.sync(self.arrays)

    def write(self, name: str, shard: ShardBuilder) -> None:
        """Writes a finished shard of an array. `sync` makes its name durable."""
        disk.write_file(self.folder / name / shard_name(shard.index), shard.close())

    def sync(self, names: Iterable[str]) -> None:
        """Makes the shards of some arrays durable, with their names."""
        for name in names:
            disk.sync(self.folder / name)

    def finish(self) -> dict[str, bytes]:
        """Checks that every file of every array exists, and makes the folder an Orbax checkpoint. May be called again.

        Returns:
            The contents of the small files: all but the shards.

        Raises:
            OutputError: a file is missing, by a bug or because another process removed it.
        """
        sizes = {name: len(content) for name, content in self._array_files().items()}
        sizes |= {
            f"{array.name}/{name}": n for array in self.arrays.values() for name, n in array.shard_sizes().items()
        }
        for name, fault in size_faults(self.folder, sizes):
            raise OutputError(
                f"{self.folder / name} {fault}", hint=f"remove {self.folder.parent.parent} and convert again"
            )
        orbax_files = _orbax_files(self.arrays, self.tree)
        for name, content in orbax_files.items():
            disk.write_file(self.folder / name, content)
        disk.sync(self.folder)
        return orbax_files | self._array_files()

    def _array_files(self) -> dict[str, bytes]:
        return {f"{a.name}/zarr.json": json.dumps(a.zarr_json()).encode() for a in self.arrays.values()}


def step_files(item: str) -> dict[str, bytes]:
    """The files that make a folder a step of a `CheckpointManager` with one item."""
    handlers = {item: INTERFACES["PyTreeCheckpointHandler"].name}
    contents = (json.dumps(_checkpoint_metadata(handlers, {})).encode(), b"ok")
    return dict(zip(ORBAX_FILES[1:], contents, strict=True))


def _orbax_files(names: Iterable[str], form: OrbaxTree) -> dict[str, bytes]:
    """The files that make a folder of arrays an Orbax checkpoint; the mark of success last."""
    kinds = {name: ("np.ndarray", False) for name in names} | {name: ("None", True) for name in form.empty}
    tree = {
        str(tuple(name.split("."))): {
            # No sharding is stored: a restore must not need the mesh of whoever saved.
            "key_metadata": [
                {"key": key, "key_type": LIST_PLACE if form.has_lists and key.isdigit() else DICT_KEY}
                for key in name.split(".")
            ],
            "value_metadata": {"value_type": kind, "skip_deserialize": is_empty},
        }
        for name, (kind, is_empty) in kinds.items()
    }
    metadata = {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    checkpoint = _checkpoint_metadata(INTERFACES["StandardCheckpointHandler"].name, form.custom_metadata)
    contents = (json.dumps(metadata).encode(), json.dumps(checkpoint).encode(), b"ok")
    return dict(zip(ORBAX_FILES, contents, strict=True))


def _checkpoint_metadata(handlers: str | Mapping[str, str], custom_metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Without times: the same plan writes the same bytes, whenever and on whichever host it runs."""
    return {
        "item_handlers": handlers,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": None,
        "commit_timestamp_nsecs": None,
        "custom_metadata": dict(custom_metadata),
    }
