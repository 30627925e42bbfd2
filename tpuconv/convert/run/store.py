"""Writes Orbax checkpoints: zarr arrays in shard files, and the small files that Orbax reads. No other module does.

A shard is complete in memory before it is written, and may be written again. No two slabs share one, so that units need
no merging and any process may do them.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from tpuconv.checkpoint.manifest import ORBAX_FILES, path_in
from tpuconv.checkpoint.shards import ShardBuilder
from tpuconv.convert.plan.types import OutputArray
from tpuconv.errors import OutputError
from tpuconv.private import INTERFACES
from tpuconv.storage.sinks import Sink

LIST_PLACE, DICT_KEY = 1, 2
"""Orbax's numbers for the kinds of keys in a tree."""


@dataclass(frozen=True)
class OrbaxTree:
    """The facts of Orbax's metadata about the tree of a checkpoint besides its arrays.

    Attributes:
        empty: names that are in the tree without an array.
        has_lists: whether numbers in names are places in lists; else they are keys of dicts.
        custom_metadata: the metadata that Orbax keeps for the program that loads the checkpoint.
    """

    empty: Sequence[str] = ()
    has_lists: bool = False
    custom_metadata: Mapping[str, Any] = field(default_factory=dict)


class Store:
    """An Orbax checkpoint under construction, in the folder `inside` of an output."""

    def __init__(self, sink: Sink, inside: str, arrays: Mapping[str, OutputArray], tree: OrbaxTree = OrbaxTree()):
        self.sink, self.inside, self.arrays, self.tree = sink, inside, arrays, tree

    def _path(self, name: str) -> str:
        return path_in(self.inside, name)

    def make_folders(self) -> None:
        """Creates a folder for every array."""
        self.sink.make_folders([self._path(name) for name in self.arrays])

    def write(self, name: str, shard: ShardBuilder) -> str:
        """Writes a finished shard of an array. Returns its path in the output, for `sync`."""
        path = self._path(f"{name}/{shard.spec.shard_name(shard.index)}")
        self.sink.write(path, shard.close())
        return path

    def sync(self, paths: Collection[str]) -> None:
        """Makes shards durable, with their names."""
        self.sink.sync(paths)
        self.sink.sync(dict.fromkeys(str(PurePosixPath(path).parent) for path in paths))

    def finish(self, shard_bytes: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, Any]]:
        """Checks that every shard exists, and makes the folder an Orbax checkpoint. May be called again.

        Args:
            shard_bytes: the sizes of the files of compressed arrays, by name.

        Returns:
            Size and hash of the small files, all but the shards, by their paths in the output.

        Raises:
            OutputError: a file is missing, by a bug or because another process removed it.
        """
        sizes: dict[str, int] = {}
        for array in self.arrays.values():
            shards = shard_bytes[array.name] if array.compressed else array.shard_sizes()
            sizes |= {self._path(f"{array.name}/{name}"): n for name, n in shards.items()}
        for name, fault in self.sink.size_faults(sizes):
            raise OutputError(
                f"a file of the output is not as it was written: {self.sink.folder / name} {fault}",
                hint=f"remove {self.sink.folder.parent} and convert again",
            )
        # Without its metadata nobody takes an array that lacks shards for one of zeros.
        arrays = self.arrays.values()
        files = {self._path(f"{a.name}/{a.metadata_name}"): json.dumps(a.metadata()).encode() for a in arrays}
        files |= {self._path(name): data for name, data in _orbax_files(self.arrays, self.tree).items()}
        return self.sink.write_all(files)


def step_files(item: str, custom_metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns the files that make a folder a step of a `CheckpointManager` with one item; for `custom_metadata` see
    `OrbaxTree`."""
    handlers = {item: INTERFACES["PyTreeCheckpointHandler"].name}
    contents = (json.dumps(_checkpoint_metadata(handlers, custom_metadata)).encode(), b"ok")
    return dict(zip(ORBAX_FILES[1:], contents, strict=True))


def _orbax_files(arrays: Mapping[str, OutputArray], form: OrbaxTree) -> dict[str, bytes]:
    """Returns the files that make a folder of arrays an Orbax checkpoint; the mark of success last."""
    kinds = {name: ("np.ndarray", False) for name in arrays} | {name: ("None", True) for name in form.empty}
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
        "use_zarr3": not any(array.zarr2 for array in arrays.values()),
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
