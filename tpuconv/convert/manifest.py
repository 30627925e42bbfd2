"""The manifest `tpuconv.json`: where a checkpoint comes from, how it was made, and what every array must hold.

The checksum of an array is the sum, modulo 2^64, of xxh3_64(chunk, seed=i) over its chunks, where i counts the chunks
in row-major order of their grid, and a chunk is its row-major bytes, filled up with zeros where it ends outside of the
array. It can be computed in any order and by parts, and for an array of one chunk it is xxh3_64 of its bytes.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (numpy learns bfloat16 by it)
import numpy as np
import xxhash

from tpuconv.convert.journal import MANIFEST
from tpuconv.convert.plan import FORMAT, Plan
from tpuconv.errors import CorruptOutput, UsageError
from tpuconv.layout import Shape

PARAMS = "params"
LIBRARIES = ("tpuconv", "numpy", "ml_dtypes")


def chunk_checksum(shape: Shape, chunks: Shape, start: Shape, chunk: np.ndarray) -> int:
    """The share of the chunk at `start` in the checksum of its array. `chunk` is contiguous and whole."""
    index = 0
    for n, c, at in zip(shape, chunks, start, strict=True):
        index = index * -(-n // c) + at // c
    return xxhash.xxh3_64_intdigest(chunk.reshape(-1).view(np.uint8).data, seed=index)


def add_checksums(parts: Iterable[int]) -> int:
    return sum(parts) % (1 << 64)


@dataclass(frozen=True)
class StoredArray:
    """What the manifest says of one array."""

    name: str
    shape: Shape
    dtype: str
    axes: str
    chunks: Shape
    sources: tuple[str, ...]
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """A manifest that was read; `raw` is all of it."""

    folder: Path
    raw: Mapping[str, Any]
    arrays: Mapping[str, StoredArray]

    @property
    def params(self) -> Path:
        """The Orbax checkpoint."""
        return self.folder / PARAMS

    @property
    def family(self) -> str:
        return str(self.raw["family"])

    @property
    def scan_layers(self) -> bool:
        return bool(self.raw["options"]["scan_layers"])

    @property
    def dtype(self) -> str:
        """The dtype of most of the bytes, in which the model computes."""
        total: dict[str, int] = {}
        for array in self.arrays.values():
            total[array.dtype] = total.get(array.dtype, 0) + prod(array.shape) * element_bytes(array.dtype)
        return max(total, key=lambda name: total[name])

    @property
    def layers(self) -> list[int] | None:
        """First and last layer, where only a part of the model was converted."""
        layers: list[int] | None = self.raw["options"]["layers"]
        return layers


def element_bytes(dtype: str) -> int:
    return np.dtype(dtype).itemsize


def build(plan: Plan, sha256: Mapping[str, str | None], checksums: Mapping[str, int]) -> str:
    """The manifest's text. `sha256` is None for shards of which only a part was read; `checksums`
    holds the sum over the chunks of each array."""
    source = plan.source
    manifest = {
        "format": FORMAT,
        "fingerprint": plan.fingerprint,
        "source": {
            "name": source.name,
            "repo": source.repo,
            "commit": source.commit,
            "folder": None if source.repo else str(source.folder.resolve()),
            "shards": {s.name: {"bytes": s.size, "sha256": sha256[s.name]} for s in source.shards},
            "tensors": len(source.tensors),
            "bytes": source.nbytes,
        },
        "family": plan.family,
        "table": plan.table.fingerprint,
        "options": plan.options.to_json(),
        "versions": {library: version(library) for library in LIBRARIES},
        "parameters": plan.parameters,
        "bytes": plan.output_bytes,
        "skipped": [vars(skip) for skip in plan.skipped],
        "arrays": {
            array.name: {
                "shape": array.shape,
                "dtype": array.dtype.name,
                "axes": array.axes,
                "chunks": array.chunks,
                "sources": [info.name for name in array.sources for info in plan.tensors[name].stored],
                "xxh3": f"{checksums[array.name]:016x}",
            }
            for array in plan.arrays.values()
        },
    }
    return json.dumps(manifest, indent=1)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a converted checkpoint.

    Raises:
        UsageError: the folder is none.
        CorruptOutput: the manifest cannot be understood.
    """
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"{folder} is no checkpoint made by tpuconv: it has no {MANIFEST}",
            hint="make one with `tpuconv convert SRC`",
        ) from None
    except ValueError as e:
        raise CorruptOutput(f"{path} is no valid JSON: {e}", hint="convert the checkpoint again") from None
    try:
        if raw["format"] > FORMAT:
            raise UsageError(
                f"{folder} was made by a newer tpuconv ({raw['versions']['tpuconv']})", hint="update tpuconv"
            )
        arrays = {
            name: StoredArray(
                name, tuple(a["shape"]), a["dtype"], a["axes"], tuple(a["chunks"]), tuple(a["sources"]), a["xxh3"]
            )
            for name, a in raw["arrays"].items()
        }
    except (KeyError, TypeError, AttributeError) as e:
        raise CorruptOutput(f"{path} lacks what a manifest holds: {e}", hint="convert the checkpoint again") from None
    return Manifest(folder, raw, arrays)
