"""Safetensors headers, read strictly: the dtype, shape and place of every tensor of a file."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from sys import intern
from typing import Any

import ml_dtypes
import numpy as np

from tpuconv import buckets
from tpuconv.errors import SourceError, shorten
from tpuconv.jsonfile import Each, check, opened, parse, refuse_placeholder
from tpuconv.location import BucketPath, Location
from tpuconv.notation.layout import Shape
from tpuconv.sources.files import MAX_HEADER_BYTES

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""Safetensors' names of dtypes (safetensors README, "Format")."""
CODES = {dtype.name: code for code, dtype in DTYPES.items()}
"""The same the other way round, by numpy's names."""
MAX_NAME_LENGTH = 512
MAX_AXES = 64
MAX_SHARD_TENSORS = 250_000
"""The most tensors of one source file. The largest real checkpoints have as many in all their files together."""
MAX_SIGNS = {b"{": MAX_SHARD_TENSORS + 2, b":": 5 * MAX_SHARD_TENSORS, b",": 10 * MAX_SHARD_TENSORS}
"""The most occurrences of these characters in a header: each tensor is an object of three keys and a few numbers."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the source and where its bytes are. `offset` counts from the start of the shard's file."""

    name: str
    dtype: str
    shape: Shape
    shard: str
    offset: int
    nbytes: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)


def read_header(path: Location) -> tuple[int, dict[str, str], list[TensorInfo]]:
    """Reads the header of a safetensors file.

    Returns:
        The file's size, its metadata, and its tensors in the order of the file.

    Raises:
        SourceError: the file cannot be read, or its header is not exactly what the format allows.
    """
    with _random_access(path) as (file_bytes, pread):
        start = pread(64, 0)
        length = int.from_bytes(start[:8], "little")
        if len(start) < 8 or 8 + length > file_bytes:
            refuse_placeholder(path, start, SourceError)
            raise SourceError(f"{path} is truncated: {file_bytes} bytes do not hold its header")
        if length > MAX_HEADER_BYTES:
            raise SourceError(f"{path} has a header of {length} bytes, more than any real checkpoint")
        raw = pread(length, 8)
    where = f"the header of {path}"
    if any(raw.count(sign) > most for sign, most in MAX_SIGNS.items()):  # before a parser makes objects of them
        raise SourceError(f"{where} describes more than {MAX_SHARD_TENSORS} tensors, more than any real checkpoint")
    if not raw.startswith(b"{"):
        raise SourceError(f"{where} is not a JSON object")
    header = parse(raw, where, SourceError, constants=False)
    metadata = header.pop("__metadata__", None)
    check(metadata, (Each(str), None), f"{where}, __metadata__", SourceError)
    infos, faults = [], []
    for name, value in header.items():
        try:
            infos.append(_tensor_info(name, value, path.name, 8 + length))
        except ValueError as e:
            faults.append(str(e))
    infos.sort(key=lambda info: (info.offset, info.nbytes))
    end = 8 + length
    for info in infos:
        if info.offset != end:
            faults.append(f"{info.name} {'overlaps the one before' if info.offset < end else 'follows a gap'}")
        end = info.offset + info.nbytes
    if faults:
        raise SourceError(
            f"the header of {path} is malformed: {faults[0]}",
            details=shorten([f"{path.name}: {fault}" for fault in faults[1:]]),
        )
    if end != file_bytes:
        fault = "is truncated" if end > file_bytes else "has bytes that no tensor owns"
        raise SourceError(f"{path} {fault}: its header describes {end} bytes, the file has {file_bytes}")
    return file_bytes, metadata or {}, infos


@contextmanager
def _random_access(path: Location) -> Iterator[tuple[int, Callable[[int, int], bytes]]]:
    """Yields the size of a file, and a function that reads bytes of it: how many, from where."""
    if isinstance(path, BucketPath):
        found = buckets.facts(path)
        if found is None:
            raise SourceError(f"{path} is missing")
        file_bytes = found.size
        yield file_bytes, lambda n, start: bytes(buckets.read(path, start, min(start + n, file_bytes)))
        return
    with opened(path, SourceError) as (fd, status):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # else the system would read on where the header ends
        yield status.st_size, lambda n, start: os.pread(fd, n, start)


def is_safe_name(name: str) -> bool:
    """Returns whether a tensor may have a name."""
    return name.isprintable() and ".." not in name and 0 < len(name) <= MAX_NAME_LENGTH


def _tensor_info(name: str, value: Any, shard: str, data_start: int) -> TensorInfo:
    if not is_safe_name(name):
        raise ValueError(f"unsafe tensor name {name[:80]!r}")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} is not described by dtype, shape and data_offsets alone")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name} has the unknown dtype {str(dtype)[:80]!r}")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
            raise ValueError(f"{name} has a shape or offsets that are no list of sizes")
    if len(shape) > MAX_AXES:
        raise ValueError(f"{name} has {len(shape)} axes")
    if len(offsets) != 2 or offsets[1] - offsets[0] != prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{name}: offsets {offsets[:3]} do not hold {dtype} {shape}")
    return TensorInfo(name, intern(dtype), _one(tuple(shape)), shard, data_start + offsets[0], offsets[1] - offsets[0])


@lru_cache(maxsize=1 << 16)
def _one(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns one object for all equal shapes: a model has hundreds of thousands of tensors of a few shapes."""
    return shape
