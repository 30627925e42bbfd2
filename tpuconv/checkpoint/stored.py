"""The arrays of a checkpoint, as its manifest describes them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np

from tpuconv.checkpoint.shards import MAX_SLOTS, ShardedArraySpec
from tpuconv.jsonfile import short
from tpuconv.names import QVALUE, SCALE, ZERO_POINT
from tpuconv.notation.layout import Shape, parse_axes
from tpuconv.sources.headers import CODES

MAX_CHUNKS = 10_000_000
"""The most chunks of one array, which would have 5 TB."""


@dataclass(frozen=True)
class StoredArray:
    """An array as the manifest describes it. `shards` and `crc32c` are None in manifests of format 1. `shard_bytes` are
    the sizes of the files of a compressed array, in row-major order of their grid; None for others. `zarr2`: as
    `ShardedArraySpec` has it."""

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
    shard_bytes: tuple[int, ...] | None = None
    zarr2: bool = False

    @property
    def spec(self) -> ShardedArraySpec:
        """The division of the array into files. Not for manifests of format 1."""
        assert self.shards is not None
        return ShardedArraySpec(
            self.shape,
            np.dtype(self.dtype),
            self.shards,
            self.chunks,
            compressed=self.is_compressed,
            file_bytes=self.shard_bytes or (),
            zarr2=self.zarr2,
        )

    @property
    def is_compressed(self) -> bool:
        """True if the chunks are zstd frames."""
        return self.shard_bytes is not None


def stored_arrays(raw: Mapping[str, Any]) -> dict[str, StoredArray]:
    """Returns the arrays of a parsed manifest."""
    zarr2 = bool(raw["options"].get("pathways"))
    return {
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
            shard_bytes=tuple(a.get("shard_bytes", ())) if "compression" in a else None,
            zarr2=zarr2,
        )
        for name, a in raw["arrays"].items()
    }


@cache
def _rank(axes: str) -> int | None:
    """Returns the number of axes that letters stand for; None if they are not valid."""
    try:
        return len(parse_axes(axes)) if len(axes) <= 200 else None
    except ValueError:
        return None


def array_fault(array: StoredArray, is_sealed: bool, raw: Mapping[str, Any]) -> str | None:
    """Returns the fault of the manifest's description of an array; None if it has none."""
    is_quantized = raw.get("quantization") is not None
    is_part = "target" in raw["options"] or array.name.endswith((QVALUE, SCALE, ZERO_POINT))
    if array.dtype not in CODES and not (is_quantized and is_part):
        return f"has the dtype {array.dtype}, which only quantized values have"
    if not re.fullmatch(r"[^/\0]+", array.name) or array.name in (".", ".."):
        return "has a name that cannot be a folder"
    ranks = {len(array.shape), len(array.chunks), *([len(array.shards)] if array.shards is not None else [])}
    if len(ranks) > 1:
        return f"has shape {array.shape}, chunks {array.chunks} and shards {array.shards}"
    if not all((*array.chunks, *(array.shards or ()))):
        return f"has chunks {array.chunks} and shards {array.shards} without elements"
    if _rank(array.axes) != len(array.shape):
        return f"has the axes {short(array.axes)}, which do not match its shape"
    if array.shards is None or array.crc32c is None:
        return "has no shards or no crc32c" if is_sealed else None
    if array.zarr2 and (array.shards != array.chunks or array.is_compressed):
        return "has several chunks in a file or compressed ones, which a checkpoint for Pathways does not have"
    if any(s < c or s % c for s, c in zip(array.shards, array.chunks, strict=True)):
        return f"has shards {array.shards}, which are not multiples of its chunks {array.chunks}"
    if prod(s // c for s, c in zip(array.shards, array.chunks, strict=True)) > MAX_SLOTS:
        return f"has shards {array.shards} of more than {MAX_SLOTS} chunks"
    if prod(-(-n // c) for n, c in zip(array.shape, array.chunks, strict=True)) > MAX_CHUNKS:
        return f"has more than {MAX_CHUNKS} chunks"
    if array.shard_bytes is not None and len(array.shard_bytes) != prod(array.spec.grid):
        return f"has the sizes of {len(array.shard_bytes)} shards, but {prod(array.spec.grid)} shards"
    return None
