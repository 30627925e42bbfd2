"""The manifest `tpuconv.json`: where a checkpoint comes from, how it was made, and what every array and file must hold.

The checksum of an array is the sum, modulo 2^64, of xxh3_64(chunk, seed=i) over its chunks, where i counts the chunks
in row-major order of their grid, and a chunk is its row-major bytes, filled up with zeros where it ends outside of the
array. It can be computed in any order and by parts, and for an array of one chunk it is xxh3_64 of its bytes.

A second sum, over its shards, is of xxh3_64(crcs, seed=i), where crcs are the crc32c that stand behind the chunks in
the file, in the order of the file, and i counts the shards in row-major order. It tells, from a few bytes, whether a
file holds the chunks that the manifest means; that the chunks hold their crc32c is found by whoever reads them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (numpy learns bfloat16 by it)
import numpy as np
import xxhash

from tpuconv.checkpoint.shards import MAX_SLOTS, ShardedArraySpec
from tpuconv.errors import CorruptOutput, UsageError
from tpuconv.jsonfile import MAX_BYTES, AtLeast, Each, OneOf, Optional, Range, Size, check, read_bytes, short
from tpuconv.layout import Shape, parse_axes
from tpuconv.mapping.passthrough import Kept
from tpuconv.names import MANIFEST, QVALUE, SCALE, ZERO_POINT
from tpuconv.sources.source import DTYPES
from tpuconv.storage.hashes import hash_bytes
from tpuconv.storage.sealed import CHECKPOINT, FORMAT, Sealed, check_current, read_sealed, size_faults

PARAMS = "params"
KEPT = "as released"
"""The name, in the place of a config's, under which parameters are quantized that stay encoded."""
LIBRARIES = ("tpuconv", "numpy", "ml_dtypes")
PLAIN = {dtype.name for dtype in DTYPES.values()}
"""Types of elements that a source may have."""
MAX_LAYERS = 1 << 20
MAX_CHUNKS = 10_000_000
"""Of an array, which would have 5 TB."""

NUMBERS = (
    *("bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint4", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn", "float16", "bfloat16", "float32", "float64"),
)
"""Types of stored elements."""

_SUM = AtLeast(0, finite=False)
FIGURES = {"signal": _SUM, "noise": _SUM, "clipped": _SUM, "count": AtLeast(1)}
"""What was found when a parameter was quantized; sums over values that are not finite, where these are allowed, are
not."""

_ENCODED = {"qtype": str, "tiles": [Range(1)], "bits": AtLeast(0)}
_QUANTIZED = {**_ENCODED, "kept": Optional(OneOf()), "rule": Size, "figures": FIGURES}
_KEPT = {
    **_ENCODED,
    "qtype": OneOf(*NUMBERS),
    "kept": str,
    "stored": [{"dtype": OneOf(*DTYPES), "shape": [Size], "extra": [OneOf(*DTYPES)], "tensor_scale": Optional(bool)}],
}
_NAMED = {"name": str, "summary": str}
QUANTIZATIONS = (
    {
        **_NAMED,
        "rules": [dict],
        "scale_dtype": Optional(str | None),
        "gates": Optional(Each(float)),
        "parameters": Each((_QUANTIZED, {**_KEPT, "rule": Size, "figures": FIGURES})),
    },
    {**_NAMED, "rules": Optional(OneOf()), "parameters": Each(_KEPT)},
)
"""Of parameters that were quantized by rules, which `quantize.config` reads, and of those that are as released."""

SCHEMA = {
    "source": {
        "name": str,
        "repo": str | None,
        "commit": str | None,
        "folder": str | None,
        "shards": Each({"bytes": Size, "sha256": str | None}),
    },
    "family": str,
    "options": {
        "dtype": str,
        "scan_layers": bool,
        "layers": ([Size], None),
        "include_mtp": Optional(bool),
        "encoding": Optional(str),
        "allow_config": Optional([str]),
    },
    "versions": Each(str),
    "parameters": Size,
    "bytes": Size,
    "skipped": [{"pattern": str, "count": Size, "reason": str}],
    "arrays": Each(
        {
            "shape": [Size],
            "dtype": OneOf(*NUMBERS),
            "axes": str,
            "chunks": [Size],
            "shards": Optional([Size]),
            "sources": [str],
            "xxh3": str,
            "crc32c": Optional(str),
            "buffer": Optional(bool),
        }
    ),
    "quantization": Optional(QUANTIZATIONS),
}
"""Of a checkpoint."""


def chunk_checksum(shape: Shape, chunks: Shape, start: Shape, chunk: np.ndarray) -> int:
    """The share of the chunk at `start` in the checksum of its array. `chunk` is contiguous and whole."""
    index = 0
    for n, c, at in zip(shape, chunks, start, strict=True):
        index = index * -(-n // c) + at // c
    return xxhash.xxh3_64_intdigest(chunk.reshape(-1).view(np.uint8).data, seed=index)


def crc_checksum(grid: Shape, index: Shape, crcs: bytes) -> int:
    """The share of a shard, at `index` in the grid of shards, in the sum over the crc32c of its chunks."""
    number = 0
    for n, i in zip(grid, index, strict=True):
        number = number * n + i
    return xxhash.xxh3_64_intdigest(crcs, seed=number)


def add_checksums(parts: Iterable[int]) -> int:
    return sum(parts) % (1 << 64)


def add_figures(total: dict[str, float], part: Mapping[str, float]) -> None:
    """Adds what an encoder found in a part of a parameter to what it found in others."""
    for name, value in part.items():
        total[name] = total.get(name, 0) + value


@dataclass(frozen=True)
class StoredArray:
    """What the manifest says of one array. `shards` and `crc32c` are None in manifests of format 1."""

    name: str
    shape: Shape
    dtype: str
    axes: str
    chunks: Shape
    sources: tuple[str, ...]
    xxh3: str
    buffer: bool
    shards: Shape | None
    crc32c: str | None

    @property
    def cut(self) -> ShardedArraySpec:
        """How it lies in files. Only of a format that says so."""
        assert self.shards is not None
        return ShardedArraySpec(self.shape, np.dtype(self.dtype), self.shards, self.chunks)


@dataclass(frozen=True)
class Manifest:
    """A manifest that was read; `raw` is all of it."""

    folder: Path
    sealed: Sealed
    arrays: Mapping[str, StoredArray]

    @property
    def raw(self) -> Mapping[str, Any]:
        return self.sealed.raw

    def check_current(self) -> None:
        """Raises SourceError if the folder holds another checkpoint by now: what was read since is of both."""
        check_current(self.folder, self.sealed)

    def read_file(self, name: str) -> bytes:
        """The bytes of a small file beside the arrays.

        Raises:
            CorruptOutput: it cannot be read, or is not the one that the manifest means.
            SourceError: the checkpoint was replaced.
        """
        path = self.folder / name
        try:
            data = read_bytes(path, MAX_BYTES, CorruptOutput)
        except CorruptOutput as e:
            self.check_current()
            raise CorruptOutput(e.message, hint="copy it from the source, or convert again") from None
        if self.sealed.is_sealed and hash_bytes(data) != self.sealed.files.get(name):
            self.check_current()
            raise CorruptOutput(
                f"{path} was changed since the checkpoint was made",
                hint=f"if that was meant, run `tpuconv verify --update {self.folder}`",
            )
        return data

    def size_faults(self) -> Iterator[tuple[str, str]]:
        """Files that are missing or not of their size, by their path in the folder; nothing is read. Of a manifest of
        format 1, which lists none, only whether the folders of arrays are there."""
        if not self.sealed.is_sealed:
            missing = (name for name in self.arrays if not (self.params / name).is_dir())
            yield from ((f"{PARAMS}/{name}", "is missing") for name in missing)
            return
        sizes = {name: facts["bytes"] for name, facts in self.sealed.files.items()}
        for array in self.arrays.values():
            sizes |= {f"{PARAMS}/{array.name}/{name}": size for name, size in array.cut.shard_sizes().items()}
        yield from size_faults(self.folder, sizes)

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
    def allow_config(self) -> tuple[str, ...]:
        """The keys of config.json that are read as if they were not there."""
        return tuple(self.raw["options"].get("allow_config", ()))

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


def as_released(kept: Mapping[str, Kept]) -> dict[str, Any]:
    """What the manifest says of parameters that stay encoded."""
    titles = dict.fromkeys(own.scheme.title for own in kept.values())
    return {
        "name": KEPT,
        "summary": f"codes and scales as released: {', '.join(titles)}",
        "parameters": {name: own.to_json() for name, own in kept.items()},
    }


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a converted checkpoint.

    Raises:
        UsageError: the folder is none.
        CorruptOutput: the manifest cannot be understood, or does not hold its seal.
    """
    sealed, path = read_sealed(folder), folder / MANIFEST
    raw = sealed.raw
    if raw["format"] > FORMAT:
        raise UsageError(f"{folder} was made by a newer tpuconv (format {raw['format']})", hint="update tpuconv")
    if raw.get("kind", CHECKPOINT) != CHECKPOINT:
        raise UsageError(
            f"{folder} holds safetensors that `tpuconv export` wrote", hint="give the checkpoint that it was made from"
        )
    check(raw, SCHEMA, str(path), CorruptOutput)
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
            shards=tuple(a["shards"]) if "shards" in a else None,
            crc32c=a.get("crc32c"),
        )
        for name, a in raw["arrays"].items()
    }
    layers = raw["options"]["layers"]
    if layers is not None and not (len(layers) == 2 and layers[0] <= layers[1] <= MAX_LAYERS):
        raise CorruptOutput(f"{path}: options.layers is no range of layers, but {short(layers)}")
    for name, array in arrays.items():
        if fault := _fault(array, sealed.is_sealed, raw.get("quantization") is not None):
            raise CorruptOutput(f"{path}: arrays.{name} {fault}", hint="convert the checkpoint again, with --overwrite")
    return Manifest(folder, sealed, arrays)


@cache
def _rank(axes: str) -> int | None:
    """How many axes letters stand for; None where they are none."""
    try:
        return len(parse_axes(axes)) if len(axes) <= 200 else None
    except ValueError:
        return None


def _fault(array: StoredArray, is_sealed: bool, is_quantized: bool) -> str | None:
    """What in a manifest's description of an array cannot be."""
    if array.dtype not in PLAIN and not (is_quantized and array.name.endswith((QVALUE, SCALE, ZERO_POINT))):
        return f"has the dtype {array.dtype}, which only quantized values have"
    if not re.fullmatch(r"[^/\0]+", array.name) or array.name in (".", ".."):
        return "has a name that is none of a folder"
    ranks = {len(array.shape), len(array.chunks), *([len(array.shards)] if array.shards is not None else [])}
    if len(ranks) > 1:
        return f"has shape {array.shape}, chunks {array.chunks} and shards {array.shards}"
    if not all((*array.chunks, *(array.shards or ()))):
        return f"has chunks {array.chunks} and shards {array.shards} without elements"
    if _rank(array.axes) != len(array.shape):
        return f"has the axes {short(array.axes)}, which are not those of its shape"
    if array.shards is None or array.crc32c is None:
        return "has no shards or no crc32c" if is_sealed else None
    if any(s < c or s % c for s, c in zip(array.shards, array.chunks, strict=True)):
        return f"has shards {array.shards}, which are no multiples of its chunks {array.chunks}"
    if prod(s // c for s, c in zip(array.shards, array.chunks, strict=True)) > MAX_SLOTS:
        return f"has shards {array.shards} of more than {MAX_SLOTS} chunks"
    if prod(-(-n // c) for n, c in zip(array.shape, array.chunks, strict=True)) > MAX_CHUNKS:
        return f"has more than {MAX_CHUNKS} chunks"
    return None
