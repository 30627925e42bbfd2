"""Encodings: how a checkpoint stores a tensor in several, and the values that they stand for.

An encoding is a property of the checkpoint, found from config.json's `quantization_config`, and knows no family. All of
them are one scheme: a code of 8 or 4 bits stands for a value (a table), and a block of values shares a scale.
What differs is the table, the block, the names and the dtype of the scales.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from tpuconv.encodings.scheme import Scheme, decode_scales
from tpuconv.encodings.schemes import schemes
from tpuconv.errors import SourceError
from tpuconv.layout import Shape
from tpuconv.names import collapse
from tpuconv.sources.headers import DTYPES, TensorInfo
from tpuconv.sources.reader import Reader

TABLE_BYTES = 1 << 18
"""Of tables made at a time: they stay in the second-level cache until they are used."""


@dataclass(frozen=True)
class Tensor:
    """A tensor as a family's table sees it: plain, or decoded from `values`, `scales` and perhaps the one scale of the
    whole tensor, by `scheme`."""

    name: str
    shape: Shape
    values: TensorInfo
    scales: TensorInfo | None = None
    extra: tuple[TensorInfo, ...] = ()
    scheme: Scheme | None = None
    tensor_scale: TensorInfo | None = None
    any_scales: bool = field(default=False, kw_only=True)
    """Whether scales that no quantizer makes, which are not positive or not finite, are decoded all the same."""

    passthrough = False
    """Whether it stays encoded, so that it is never cast."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the values: the stored one, or bfloat16 where they are decoded."""
        return DTYPES[self.values.dtype] if self.scheme is None else np.dtype(ml_dtypes.bfloat16)

    @property
    def stored(self) -> tuple[TensorInfo, ...]:
        """The tensors of the source that it is made of."""
        return (self.values, *(info for info in (self.scales, self.tensor_scale) if info), *self.extra)

    @property
    def size(self) -> int:
        return prod(self.shape)

    def stored_bytes(self, count: int) -> int:
        """Bytes in which `count` values are stored, scales aside."""
        return count * self.values.nbytes // max(1, self.size)

    def is_stored_as(self, dtype: np.dtype[Any]) -> bool:
        """Whether its bytes are values of that dtype."""
        return self.scheme is None and self.dtype == dtype

    def read(self, reader: Reader, start: int, raw: np.ndarray, out: np.ndarray) -> None:
        """Fills `out`, flat and of any float dtype, with the values from number `start` on. `raw` is room for their
        bytes, unless they are stored as they are wanted.

        Raises:
            SourceError: a scale is zero, negative or not finite, unless `any_scales`; or the source cannot be read.
        """
        if self.scheme is not None:
            self._decode(reader, start, raw, out)
        elif out.dtype == self.dtype:
            reader.read(self.values, start * out.itemsize, out.view(np.uint8).data)
        else:
            raw = raw[: out.size * self.dtype.itemsize]
            reader.read(self.values, start * self.dtype.itemsize, raw.data)
            np.copyto(out, raw.view(self.dtype), casting="unsafe")

    def place(self, at: int) -> list[int]:
        """The index, in the tensor that is named, of value number `at`."""
        return place_of(at, self.shape)

    def decode_scales(self, reader: Reader, stored: np.ndarray) -> np.ndarray:
        """In float32 what some stored scales stand for, with that of the whole tensor where it has one."""
        assert self.scheme is not None
        scales = decode_scales(stored)
        if self.tensor_scale is None:
            return scales
        one = self._tensor_scale(reader)
        both: np.ndarray = (np.divide if self.scheme.divided else np.multiply)(scales, one.astype(np.float32))
        return both

    def _tensor_scale(self, reader: Reader) -> np.ndarray:
        assert self.tensor_scale is not None
        one = np.empty(1, DTYPES[self.tensor_scale.dtype])
        reader.read(self.tensor_scale, 0, one.view(np.uint8).data)
        return one

    def _check_scales(self, reader: Reader, stored: np.ndarray) -> None:
        assert self.scales is not None
        check_scales(self.scales.name, decode_scales(stored).reshape(self.scales.shape))
        if self.tensor_scale is not None:
            check_scales(self.tensor_scale.name, self._tensor_scale(reader).reshape(self.tensor_scale.shape))

    def _decode(self, reader: Reader, start: int, raw: np.ndarray, out: np.ndarray) -> None:
        """The product of a code's value and the scale in float32, rounded once to the dtype of `out`: for each block of
        values a table of its products, in which they are looked up."""
        from tpuconv.encodings.kernels import look_up

        assert self.scheme is not None
        assert self.scales is not None
        raw = raw[: self.stored_bytes(out.size)]
        reader.read(self.values, self.stored_bytes(start), raw.data)
        stored = np.empty(self.scales.nbytes, np.uint8)
        reader.read(self.scales, 0, stored.data)
        if not self.any_scales:
            self._check_scales(reader, stored.view(DTYPES[self.scales.dtype]))
        columns = self.shape[-1] if self.shape else 1
        height = self.shape[-2] if len(self.scales.shape) > 2 else prod(self.shape[:-1])  # of what blocks lie in
        rows, width = self.scheme.block(self.shape, self.scales.shape)
        scales_SB = self.decode_scales(reader, stored.view(DTYPES[self.scales.dtype])).reshape(-1, -(-columns // width))
        at_once = max(1, TABLE_BYTES // (4 * scales_SB.shape[1] * self.scheme.table.size))
        bits, done = np.dtype(f"u{out.itemsize}"), 0
        while done < out.size:
            row, first = divmod(start + done, columns)
            matrix, own = divmod(row, height)
            scale = matrix * -(-height // rows) + own // rows
            # Rows with scales of their own; or those that share them, up to the end of the block or of the matrix.
            last = row + at_once if rows == 1 else row - own + min(height, own - own % rows + rows)
            count = min(out.size - done, last * columns - row * columns - first)
            scales_SB1 = scales_SB[scale : scale + (at_once if rows == 1 else 1), :, None]
            tables = (scales_SB1 * self.scheme.table).astype(out.dtype).view(bits)
            qvalues = raw[self.stored_bytes(done) : self.stored_bytes(done + count)]
            look_up(qvalues, tables, first, columns, width, out[done : done + count].view(bits))
            done += count


def place_of(at: int, shape: Shape) -> list[int]:
    """The index of element number `at`."""
    return list(map(int, np.unravel_index(at, shape)))


def check_scales(name: str, scales: np.ndarray, shape: Shape | None = None, start: int = 0) -> None:
    """That scales are what a quantizer makes. They may be some of a tensor of this shape, from number `start` on.

    Raises:
        SourceError: one of them is zero, negative, infinite or not a number; with the index of the first.
    """
    scales = scales.astype(np.float32)
    bad = ~((scales > 0) & (scales < np.inf))  # what is not a number is neither
    if bad.any():
        at, count = int(bad.argmax()), int(bad.sum())
        raise SourceError(
            f"{name}{place_of(start + at, shape or scales.shape)} is {scales.flat[at]:g}, which is no scale"
            + (f"; {count} of {scales.size} are none" if count > 1 else ""),
            hint="the checkpoint is damaged, or was quantized badly: download it again, or tell its owner",
        )


def decode_names(
    tensors: Mapping[str, TensorInfo], quantization: Mapping[str, Any] | None, *, any_scales: bool = False
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a source as tables see them, and the faults: values without scales, scales without values, scales
    of another shape than the blocks have. With `any_scales` what scales hold is not checked when they are read.

    Raises:
        UnsupportedConfig: an encoding that is not implemented.
    """
    known = schemes(quantization)
    suffixes = [s for scheme in known for s in (scheme.values, scheme.scales, scheme.tensor_scale, *scheme.extra) if s]
    out: dict[str, Tensor] = {}
    taken: set[str] = set()
    faults: dict[str, list[str]] = {}
    for name, info in tensors.items():
        own = [scheme for scheme in known if scheme.encodes(info)]
        if not own:
            continue
        scheme = next((s for s in own if _has_scales_of(s, info, tensors)), own[0])
        base = name.removesuffix(scheme.values)
        scales = tensors.get(base + scheme.scales)
        extra = tuple(tensors[base + suffix] for suffix in scheme.extra if base + suffix in tensors)
        over = tensors.get(base + scheme.tensor_scale) if scheme.tensor_scale else None
        taken |= {name, base + scheme.scales, *(part.name for part in (*extra, *((over,) if over else ())))}
        shape = scheme.shape(info.shape)
        if scales is None:
            faults.setdefault(f"has no {scheme.scales.removeprefix('.')}", []).append(name)
        elif scales.shape != (want := scheme.scale_shape(shape, scales.shape)):
            faults.setdefault(f"should be {list(want)} by the block size", []).append(scales.name)
        elif scheme.tensor_scale and over is None:
            faults.setdefault(f"has no {scheme.tensor_scale.removeprefix('.')}", []).append(name)
        elif over is not None and prod(over.shape) != 1:
            faults.setdefault("should be one number", []).append(over.name)
        else:
            whole = Tensor(base + scheme.name, shape, info, scales, extra, scheme, over, any_scales=any_scales)
            out[whole.name] = whole
    for name, info in tensors.items():
        if name in taken:
            continue
        if any(name.endswith(suffix) for suffix in suffixes if suffix != ".weight"):
            faults.setdefault("has no values that it belongs to", []).append(name)
        else:
            out[name] = Tensor(name, info.shape, info)
    words = [
        f"{pattern}  {tensors[names[0]].dtype} {list(tensors[names[0]].shape)} ({len(names)} tensors) {fault}"
        for fault, all_names in faults.items()
        for pattern, names in collapse(all_names).items()
    ]
    return out, words


def _has_scales_of(scheme: Scheme, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether the values have the scales that the scheme asks for: a checkpoint may have several schemes."""
    scales = tensors.get(info.name.removesuffix(scheme.values) + scheme.scales)
    return scales is not None and scales.shape == scheme.scale_shape(scheme.shape(info.shape), scales.shape)


_OF_ACTIVATIONS = re.compile(r".*\.(activation|(input|output|[qkv])(_global)?)_(scale|zero_point)")


def unused_reason(name: str) -> str | None:
    """Why a tensor that a quantized checkpoint may have says nothing of the weights; None where it may."""
    return "of quantized activations, which the model computes without" if _OF_ACTIVATIONS.fullmatch(name) else None
