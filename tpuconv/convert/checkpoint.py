"""A converted checkpoint as the source of another one, which holds the same parameters in another form."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tpuconv.convert.journal import MANIFEST
from tpuconv.convert.manifest import Manifest, element_bytes, read_manifest
from tpuconv.convert.source import DTYPES, Shard, Source, TensorInfo, read_json
from tpuconv.convert.table import Map, MappingTable
from tpuconv.errors import ConfigError, CorruptOutput, SourceError, UsageError

CODES = {dtype.name: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Checkpoint(Source):
    """The arrays of a checkpoint made by `tpuconv convert` as tensors, each a shard of its own. Chunks carry checksums,
    so that nothing needs to be hashed."""

    manifest: Manifest = field(kw_only=True)

    hashed = False

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def encoding(self) -> None:
        """None: what config.json says of it was true of the original."""

    def origin(self, sha256: Mapping[str, str | None]) -> dict[str, Any]:
        """That of the original."""
        return dict(self.manifest.raw["source"])

    def table(self) -> MappingTable:
        """Every parameter becomes the one of the same name."""
        return MappingTable([Map(a.name, a.name, a.axes, buffer=a.buffer) for a in self.manifest.arrays.values()])


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder.

    Raises:
        UsageError: it is none of ours, holds only a part of a model, or is quantized already.
        CorruptOutput: its manifest cannot be understood.
    """
    manifest = read_manifest(folder)
    if manifest.quantization is not None:
        raise UsageError(
            f"{folder} is quantized already, with {manifest.quantization['name']}",
            hint="give the checkpoint that it was made from",
        )
    tensors = {
        a.name: TensorInfo(a.name, CODES[a.dtype], a.shape, a.name, 0, prod(a.shape) * element_bytes(a.dtype))
        for a in manifest.arrays.values()
    }
    shards = tuple(Shard(a.name, tensors[a.name].nbytes, 0, a.xxh3) for a in manifest.arrays.values())
    config = read_json(folder / "config.json", ConfigError)
    return Checkpoint(folder, config, tensors, shards, manifest=manifest)


def open_array(manifest: Manifest, name: str) -> Any:
    """An array as a TensorStore, of which nothing is cached and a missing chunk is an error: a ValueError, as what else
    is wrong with what is stored."""
    import tensorstore as ts

    return ts.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": str((manifest.params / name).absolute())},
            "cache_pool": {"total_bytes_limit": 0},
            "fill_missing_data_reads": False,
        }
    ).result()


def read_box(manifest: Manifest, name: str, box: tuple[slice | int, ...], out: np.ndarray) -> None:
    """Fills `out` with a box of an array.

    Raises:
        CorruptOutput: it cannot be read, or a chunk does not hold its checksum.
    """
    import tensorstore as ts

    try:
        ts.array(out).write(open_array(manifest, name)[box]).result()
    except ValueError as e:
        raise CorruptOutput(
            f"{manifest.params / name} cannot be read: {str(e).splitlines()[0][:200]}",
            hint=f"`tpuconv verify {manifest.folder}` names all damaged arrays",
        ) from None


class CheckpointReader:
    """Reads boxes of arrays from any number of threads."""

    def __init__(self, source: Checkpoint):
        self.source = source
        self._manifest = _identity(source.folder / MANIFEST)

    def read_box(self, name: str, box: tuple[slice, ...], out: np.ndarray) -> None:
        """Fills `out` with a box of an array; see the function `read_box`."""
        read_box(self.source.manifest, name, box, out)

    def check_unchanged(self) -> None:
        """Raises SourceError if the checkpoint was replaced."""
        if _identity(self.source.folder / MANIFEST) != self._manifest:
            raise SourceError(f"{self.source.folder} was replaced while it was read", hint="run again")

    def close(self) -> None:
        """Nothing stays open."""


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
