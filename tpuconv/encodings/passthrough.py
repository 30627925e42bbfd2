"""Encoded tensors that stay encoded: their quantized values, one per byte, and their scales, each as a tensor of its
own.

Both are exact and have an inverse. Scales in powers of two (E8M0) become bfloat16, which holds all of them; all others
keep their dtype. If a tensor has scales of blocks and one of its own, their product in float32 is stored, as values are
multiplied by it. That is exact, but the two scales cannot be separated again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from tpuconv.encodings.decode import Tensor, check_scales, place_of
from tpuconv.encodings.scheme import Scheme
from tpuconv.errors import SourceError
from tpuconv.layout import Shape
from tpuconv.sources.headers import DTYPES
from tpuconv.sources.reader import Reader

BF16 = np.dtype(ml_dtypes.bfloat16)
POWERS_OF_TWO = ("U8", "F8_E8M0")
E8M0_BIAS = 127


@dataclass(frozen=True)
class QValues(Tensor):
    """The quantized values of an encoded tensor, in the shape of its values."""

    scheme: Scheme = field(kw_only=True)
    passthrough = True

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the quantized values."""
        return np.dtype(self.scheme.qtype)

    @property
    def stored(self) -> tuple[Any, ...]:
        """The stored tensor of values and the others that belong to it."""
        return (self.values, *self.extra)

    def is_stored_as(self, dtype: np.dtype[Any]) -> bool:
        """Whether each stored byte is one quantized value."""
        return self._per_byte == 1

    @property
    def _per_byte(self) -> int:
        return self.scheme.per_element // DTYPES[self.scheme.dtype].itemsize

    def read(self, reader: Reader, start: int, raw: np.ndarray, out: np.ndarray) -> None:
        """Fills `out`, flat and of one byte per element, with quantized values from number `start` on. `raw` [bytes] is
        memory for the stored bytes.

        Raises:
            SourceError: the source cannot be read, or a tensor that describes the values contradicts them.
        """
        if start == 0:
            self._check_extra(reader)
        out = out.view(np.uint8)
        n = self._per_byte
        if n == 1:
            reader.read(self.values, start, out.data)
            apply_xor_mask(self.scheme, out)
            return
        first, last = start // n, -(-(start + out.size) // n)
        raw = raw[: last - first] if raw.size >= last - first else np.empty(last - first, np.uint8)
        reader.read(self.values, first, raw.data)
        if first * n == start and last * n == start + out.size:
            unpack(self.scheme, raw, out)
        else:  # a row, or a cut of one, may begin in the middle of a byte
            qvalues = np.empty(raw.size * n, np.uint8)
            unpack(self.scheme, raw, qvalues)
            out[...] = qvalues[start - first * n :][: out.size]

    def _check_extra(self, reader: Reader) -> None:
        for info in self.extra:
            stored = np.empty(info.nbytes, np.uint8)
            reader.read(info, 0, stored.data)
            shape = stored.view(DTYPES[info.dtype]).tolist()
            if tuple(shape) != self.shape:
                raise SourceError(
                    f"{info.name} says {shape}, but the values are {list(self.shape)}",
                    hint="--encoding dequantize does without it, and ignores it",
                )


@dataclass(frozen=True)
class Scales(Tensor):
    """The scales of an encoded tensor, stored in `values`. `grid` is their shape with the axes of the tensor; along
    each axis each scale is repeated as often as `refine` says."""

    scheme: Scheme = field(kw_only=True)
    grid: Shape = ()
    refine: Shape = ()
    passthrough = True

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype in which the scales are kept."""
        return scale_dtype(self.values.dtype, self.tensor_scale is not None)

    @property
    def stored(self) -> tuple[Any, ...]:
        """The stored tensors of scales."""
        return (self.values, *((self.tensor_scale,) if self.tensor_scale else ()))

    def is_stored_as(self, dtype: np.dtype[Any]) -> bool:
        """False: scales are decoded and refined."""
        return False

    def read(self, reader: Reader, start: int, raw: np.ndarray, out: np.ndarray) -> None:
        """Fills `out`, flat, with the refined scales from number `start` on. Complete rows of stored scales are read;
        `raw` [bytes] is memory for them.

        Raises:
            SourceError: a scale is zero or negative, unless `any_scales`; or the source cannot be read.
        """
        inner, stored_inner = prod(self.shape[1:]), prod(self.grid[1:])
        first = start // inner // self.refine[0]
        last = -(-(start + out.size) // (inner * self.refine[0]))
        itemsize = DTYPES[self.values.dtype].itemsize
        nbytes = (min(last, self.grid[0]) - first) * stored_inner * itemsize
        raw = raw[:nbytes] if raw.size >= nbytes else np.empty(nbytes, np.uint8)
        reader.read(self.values, first * stored_inner * itemsize, raw.data)
        decoded = self.decode_scales(reader, raw.view(DTYPES[self.values.dtype])).astype(self.dtype)
        if not self.any_scales:  # those that are not finite are found with all other values that are not
            checked = np.where(np.isfinite(decoded), decoded, 1)
            check_scales(self.values.name, checked, self.values.shape, first * stored_inner)
        scales = decoded.reshape(-1, *self.grid[1:])
        for axis, n in enumerate(self.refine):
            scales = np.repeat(scales, n, axis=axis) if n > 1 else scales
        scales = scales[:, *map(slice, self.shape[1:])]
        out[...] = scales.reshape(-1)[start - first * self.refine[0] * inner :][: out.size]

    def place(self, number: int) -> list[int]:
        """The index of scale `number` in the stored tensor of scales."""
        index = [i // n for i, n in zip(np.unravel_index(number, self.shape), self.refine, strict=True)]
        return place_of(int(np.ravel_multi_index(index, self.grid)), self.values.shape)


def scale_dtype(stored: str, has_tensor_scale: bool) -> np.dtype[Any]:
    """The dtype in which scales are kept. `stored` is safetensors' name of the stored dtype."""
    if has_tensor_scale:
        return np.dtype(np.float32)
    return BF16 if stored in POWERS_OF_TWO else DTYPES[stored]


def unpack(scheme: Scheme, packed: np.ndarray, out: np.ndarray) -> None:
    """Fills `out` [2 * bytes] with the quantized values of bytes [bytes] that hold two, the low half first."""
    np.bitwise_and(packed, 15, out=out[0::2])
    np.right_shift(packed, 4, out=out[1::2])
    apply_xor_mask(scheme, out)


def apply_xor_mask(scheme: Scheme, qvalues: np.ndarray) -> None:
    """Converts stored integers to two's complement or back, in place. Its own inverse."""
    if scheme.xor_mask:
        np.bitwise_xor(qvalues, scheme.xor_mask, out=qvalues)


def pack_halves(values: np.ndarray) -> np.ndarray:
    """Bytes that hold two 4-bit values each, the first in the low half."""
    bits = values.view(np.uint8)
    packed: np.ndarray = (bits[..., 0::2] & 15) | (bits[..., 1::2] << 4)
    return packed


def exponents(scales: np.ndarray) -> np.ndarray:
    """The bytes of scales that are powers of two, as exponents with a bias (E8M0)."""
    found = np.frexp(scales.astype(np.float32))[1] - 1  # 2^e is 0.5 * 2^(e + 1) to frexp
    return (found + E8M0_BIAS).astype(np.uint8)


def pack(scheme: Scheme, qvalues: np.ndarray) -> np.ndarray:
    """The stored tensor of values, from quantized values in the shape of the tensor: the inverse of `QValues`."""
    dtype = DTYPES[scheme.dtype]
    stored: np.ndarray = np.ascontiguousarray(qvalues).view(np.uint8)
    if scheme.xor_mask:
        stored = stored ^ scheme.xor_mask
    if scheme.per_element > dtype.itemsize:
        stored = pack_halves(stored)
    if scheme.groups_apart:
        return stored.reshape(scheme.stored_shape(qvalues.shape))
    return stored.view(dtype)


def unrefine(scales: np.ndarray, refine: Sequence[int], dtype: str, shape: Shape) -> np.ndarray:
    """The stored tensor of scales, of the shape `shape`, from refined scales: the inverse of `Scales`."""
    stored: np.ndarray = np.ascontiguousarray(scales[tuple(slice(None, None, n) for n in refine)])
    if dtype in POWERS_OF_TWO:
        stored = exponents(stored).view(DTYPES[dtype])
    return stored.reshape(shape)
