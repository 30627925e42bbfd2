"""The files of an output of any kind, as its manifest lists them: see `tpuconv.storage.ownership`."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

from tpuconv.checkpoint.manifest import Manifest, manifest_of
from tpuconv.checkpoint.reader import read_checksum
from tpuconv.errors import CorruptOutput
from tpuconv.location import Location
from tpuconv.storage.ownership import Contents, ListedFiles
from tpuconv.storage.sealed import CHECKPOINT, Sealed


@dataclass(frozen=True)
class CheckpointFiles:
    """The contents of a checkpoint: the files that its manifest lists, and the shards of its arrays."""

    manifest: Manifest

    @cached_property
    def sizes(self) -> dict[str, int | None]:
        """See `Contents`."""
        return dict(self.manifest.file_sizes())

    def changed(self, names: Collection[str]) -> Iterator[str]:
        """See `Contents`. All shards are yielded of an array whose checksum differs from the manifest."""
        listed = ListedFiles(self.manifest.folder, self.manifest.sealed.files)
        yield from listed.changed([name for name in names if name in listed.files])
        shards: dict[str, list[str]] = {}
        for name in names:
            if name not in listed.files:
                shards.setdefault(self._array_of[name], []).append(name)
        for array, files in shards.items():
            try:
                is_same = read_checksum(self.manifest, array) == self.manifest.arrays[array].xxh3
            except CorruptOutput:
                is_same = False
            yield from () if is_same else files

    @cached_property
    def _array_of(self) -> dict[str, str]:
        return {
            self.manifest.path_of(f"{array.name}/{name}"): array.name
            for array in self.manifest.arrays.values()
            for name in array.spec.shard_names()
        }


def contents_of(folder: Location, sealed: Sealed) -> Contents:
    """Returns the contents of an output of any kind.

    Raises:
        CorruptOutput: the manifest is not valid.
        UsageError: it is of a newer version of tpuconv.
    """
    if sealed.raw.get("kind", CHECKPOINT) != CHECKPOINT:
        return ListedFiles(folder, sealed.files)
    return CheckpointFiles(manifest_of(folder, sealed))
