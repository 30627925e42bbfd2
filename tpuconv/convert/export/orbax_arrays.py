"""The arrays of an Orbax checkpoint that a trainer saved, without a manifest of ours."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.checkpoint.orbax_tree import TrainedTree
from tpuconv.checkpoint.stored import StoredArray
from tpuconv.convert.export.array_source import IdentifiedArrays
from tpuconv.convert.export.lora.tree import MergedPairs
from tpuconv.convert.export.way_back import Explained, Parameter
from tpuconv.convert.run.engine import RunProgress
from tpuconv.errors import ConfigError, OutputError
from tpuconv.location import Location
from tpuconv.sources.config import read_json, without_encoding
from tpuconv.sources.files import CONFIG_FILE
from tpuconv.sources.origins import known_stamps
from tpuconv.sources.source import CHANGED, Source
from tpuconv.storage.sealed import Sealed
from tpuconv.storage.sinks import Sink


class OrbaxArrays(IdentifiedArrays):
    """See `tpuconv.convert.export.array_source.ArraySource`. `read` may be called from several threads.

    Args:
        tree: what was saved.
        explained: by which target.
        parameters: the arrays of its table.
        source: what was trained: config.json, the tokenizer, and headers if there are any.
        family: of the model.
        merged: LoRA that is added to the arrays.
    """

    def __init__(
        self,
        tree: TrainedTree,
        explained: Explained,
        parameters: Sequence[Parameter],
        source: Source,
        family: str,
        merged: MergedPairs | None = None,
    ):
        self.tree, self.source, self._merged = tree, source, merged
        self.companions, self.companions_folder = source.companions, source.folder
        self.file_config: Mapping[str, Any] = read_json(source.folder / CONFIG_FILE, ConfigError)
        self._names = explained.names
        raw = {
            "family": family,
            "release": explained.form.table.release.to_json(),
            "returns": explained.form.table.returns,
            "parts": list(getattr(explained.form.config, "parts", {})),
            "source": source.origin(dict.fromkeys(shard.name for shard in source.shards))
            | {"verified": CHANGED, "changed": True},
            "options": {
                "dtype": "auto",
                "layers": None,
                "scan_layers": explained.form.scan_layers,
                "include_mtp": explained.form.include_mtp,
                "target": explained.form.target.name,
            },
        }
        arrays = {
            each.name: StoredArray(
                name=each.name,
                shape=each.shape,
                dtype=each.stored.dtype,
                axes=each.axes,
                chunks=each.stored.chunks,
                sources=each.sources,
                xxh3="",
                buffer=each.buffer,
                shards=None,
                crc32c=None,
            )
            for each in parameters
        }
        identity = tree.identity if merged is None else merged.identity(tree.identity)
        self.manifest = Manifest(tree.folder, Sealed(raw, identity, None), arrays)

    @property
    def config(self) -> Mapping[str, Any]:
        """See `ArraySource`. It describes no encoding."""
        return without_encoding(self.source.config)

    def copy_companion(self, name: str, sink: Sink, target: str) -> None:
        """See `ArraySource`. Raises SourceError if it was changed."""
        self.source.copy_companion(name, sink, target)

    def check(self) -> None:
        """Nothing: names and shapes are known, and there are no checksums."""

    def read_box(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        """See `BoxSource`. Raises SourceError if it cannot be read."""
        values = self.tree.read(self._names[name], box)
        return values if self._merged is None else self._merged.added(name, box, values)

    def finish(self, hashes: Mapping[str, str]) -> dict[str, Any]:
        """See `ArraySource`. Raises SourceError if the tree was changed."""
        self.tree.check_unchanged()
        return dict(self.manifest.raw["source"])

    @property
    def memory(self) -> int:  # type: ignore[override]
        """See `ArraySource`."""
        return self.tree.memory

    @property
    def stamps(self) -> dict[str, str]:
        """See `ArraySource`."""
        return self.tree.stamps

    @property
    def stamps_for_hosts(self) -> dict[str, str]:
        """See `ArraySource`."""
        return self.tree.stamps_for_hosts

    def check_made(self, out: Location, made: Sealed) -> Iterator[RunProgress]:
        """See `ArraySource`. Raises OutputError if that is not known: nobody hashes what a trainer saved."""
        yield from check_made_from(self.tree.folder, self.stamps, out, made)


def check_made_from(folder: Location, stamps: Mapping[str, str], out: Location, made: Sealed) -> Iterator[RunProgress]:
    """Checks that an output was made of a trainer's files as they are now; see `Work.check_made`."""
    yield from ()
    if known_stamps(made, folder) != stamps:
        raise OutputError(
            f"{out} exists already, and {folder} may have changed since it was made",
            hint="choose another OUT, or give `overwrite=True` to replace it",
        )
