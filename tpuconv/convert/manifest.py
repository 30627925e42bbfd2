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
from tpuconv.convert.keep import Kept
from tpuconv.convert.names import QVALUE, SCALE, ZERO_POINT
from tpuconv.convert.plan import FORMAT, Plan
from tpuconv.errors import CorruptOutput, UsageError
from tpuconv.layout import Shape

PARAMS = "params"
KEPT = "as released"
"""The name, in the place of a config's, under which parameters are quantized that stay encoded."""
LIBRARIES = ("tpuconv", "numpy", "ml_dtypes")


def chunk_checksum(shape: Shape, chunks: Shape, start: Shape, chunk: np.ndarray) -> int:
    """The share of the chunk at `start` in the checksum of its array. `chunk` is contiguous and whole."""
    index = 0
    for n, c, at in zip(shape, chunks, start, strict=True):
        index = index * -(-n // c) + at // c
    return xxhash.xxh3_64_intdigest(chunk.reshape(-1).view(np.uint8).data, seed=index)


def add_checksums(parts: Iterable[int]) -> int:
    return sum(parts) % (1 << 64)


def add_figures(total: dict[str, float], part: Mapping[str, float]) -> None:
    """Adds what an encoder found in a part of a parameter to what it found in others."""
    for name, value in part.items():
        total[name] = total.get(name, 0) + value


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
    buffer: bool


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
    def include_mtp(self) -> bool:
        """Whether the layers that predict further tokens are there."""
        return bool(self.raw["options"].get("include_mtp"))

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """The rules by which parameters were quantized, and what became of each; without rules where they are kept as
        they were released; None where none is quantized."""
        quantization: Mapping[str, Any] | None = self.raw.get("quantization")
        return quantization

    @property
    def is_rounded(self) -> bool:
        """Whether parameters were quantized by rules, so that values are not the source's."""
        return self.quantization is not None and "rules" in self.quantization

    @property
    def kept(self) -> Mapping[str, Any]:
        """Of each parameter that is encoded as it was released, how."""
        parameters = (self.quantization or {}).get("parameters", {})
        return {name: facts for name, facts in parameters.items() if "kept" in facts}

    @property
    def dtype(self) -> str:
        """The dtype in which the model computes: that of most of the bytes, quantized ones aside."""
        total: dict[str, int] = {}
        for array in self.arrays.values():
            if array.name.endswith((QVALUE, SCALE, ZERO_POINT)):
                continue
            total[array.dtype] = total.get(array.dtype, 0) + prod(array.shape) * element_bytes(array.dtype)
        return max(total, key=lambda name: total[name])

    @property
    def layers(self) -> list[int] | None:
        """First and last layer, where only a part of the model was converted."""
        layers: list[int] | None = self.raw["options"]["layers"]
        return layers

    def check_whole(self) -> None:
        """Raises UsageError if only a part of the model was converted."""
        if self.layers is not None:
            raise UsageError(
                f"{self.folder} holds only layers {self.layers[0]} to {self.layers[1]}, a part of the layers: "
                "a trial and no model",
                hint="convert without --layers",
            )

    @property
    def layer_range(self) -> range | None:
        """The same as a range."""
        return None if self.layers is None else range(self.layers[0], self.layers[1] + 1)


def element_bytes(dtype: str) -> int:
    return np.dtype(dtype).itemsize


def build(
    plan: Plan,
    sha256: Mapping[str, str | None],
    checksums: Mapping[str, int],
    figures: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """What the manifest says. `sha256` is None for shards of which only a part was read; `checksums` holds the sum over
    the chunks of each array, `figures` what was found when parameters were quantized."""
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "fingerprint": plan.fingerprint,
        "source": plan.source.origin(sha256),
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
                **({"buffer": True} if array.buffer else {}),
            }
            for array in plan.arrays.values()
        },
    }
    if plan.quantization:
        parameters = {
            name: encoder.to_json() | _undone(plan, name) | {"figures": figures[name]}
            for name, encoder in plan.quantization.encoders.items()
        } | {
            name: kept.to_json() | {"rule": plan.quantization.kept[name], "figures": _nothing_lost(plan, name)}
            for name, kept in plan.kept.items()
        }
        manifest["quantization"] = {**plan.quantization.config, "parameters": parameters}
    elif plan.kept:
        manifest["quantization"] = as_released(plan.kept)
    return manifest


def as_released(kept: Mapping[str, Kept]) -> dict[str, Any]:
    """What the manifest says of parameters that stay encoded."""
    titles = dict.fromkeys(own.scheme.title for own in kept.values())
    return {
        "name": KEPT,
        "summary": f"codes and scales as released: {', '.join(titles)}",
        "parameters": {name: own.to_json() for name, own in kept.items()},
    }


def _undone(plan: Plan, name: str) -> dict[str, str]:
    """The encoding of the source that a parameter had before it was quantized to another."""
    source = plan.arrays[plan.stored_names(name)[0]].sources[0]
    scheme = plan.tensors[source].scheme
    return {"requantized": scheme.title} if scheme else {}


def _nothing_lost(plan: Plan, name: str) -> dict[str, float]:
    return {"signal": 0.0, "noise": 0.0, "clipped": 0.0, "count": float(prod(plan.arrays[name + QVALUE].shape))}


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
                name=name,
                shape=tuple(a["shape"]),
                dtype=a["dtype"],
                axes=a["axes"],
                chunks=tuple(a["chunks"]),
                sources=tuple(a["sources"]),
                xxh3=a["xxh3"],
                buffer=a.get("buffer", False),
            )
            for name, a in raw["arrays"].items()
        }
    except (KeyError, TypeError, AttributeError) as e:
        raise CorruptOutput(f"{path} lacks what a manifest holds: {e}", hint="convert the checkpoint again") from None
    return Manifest(folder, raw, arrays)
