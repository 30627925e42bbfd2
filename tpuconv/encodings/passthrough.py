"""Encoded tensors that stay encoded: their quantized values, one per byte, and their scales, each as a tensor of its
own.

Both are exact and have an inverse. Scales in powers of two (E8M0) become bfloat16, which holds all of them; those in
float16 become float32; all others keep their dtype. If a tensor has scales of blocks and one of its own, their product
in float32 is stored, as values are multiplied by it. That is exact; the inverse needs the tensor's own scale, which the
manifest has. Zero points are a third tensor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from tpuconv.encodings.affine import Affine
from tpuconv.encodings.decode import Tensor
from tpuconv.encodings.flat import FlatParts
from tpuconv.encodings.scales import check_scales, place_of
from tpuconv.encodings.scheme import NO_FACTOR, POWERS_OF_TWO, Scheme
from tpuconv.encodings.words import spans_of
from tpuconv.errors import SourceError
from tpuconv.notation.layout import Shape
from tpuconv.sources.headers import DTYPES
from tpuconv.sources.reader import Reader

BF16 = np.dtype(ml_dtypes.bfloat16)
E8M0_BIAS = 127


@dataclass(frozen=True)
class QValues(Tensor):
    """The quantized values of an encoded tensor, in the shape of its values. `grid` is the shape of its scales; `parts`
    are the stored tensors of flat values."""

    scheme: Scheme = field(kw_only=True)
    grid: Shape = ()
    parts: FlatParts | None = None
    passthrough = True

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the quantized values."""
        return np.dtype(STORED_AS.get(self.scheme.qtype, self.scheme.qtype))

    def is_stored_as(self, dtype: np.dtype[Any]) -> bool:
        """True if each stored byte is one quantized value."""
        return self.scheme.affine is None and self._per_byte == 1

    @property
    def _per_byte(self) -> int:
        return self.scheme.per_element // DTYPES[self.scheme.dtype].itemsize

    def read(self, reader: Reader, start: int, raw: np.ndarray, out: np.ndarray) -> None:
        """Fills `out`, flat and of one byte per element, with quantized values from number `start` on. `raw` [bytes] is
        memory for the stored bytes.

        Raises:
            SourceError: the source cannot be read, or a tensor that describes the values contradicts them.
        """
        if start == 0 and self.parts is not None:
            self._check_constants(reader, self.scheme)
            self.parts.state(reader)
        elif start == 0:
            self._check_extra(reader)
        out = out.view(np.uint8)
        if self.scheme.affine is not None:
            done = 0
            for rows, columns in spans_of(start, out.size, self.shape[1]):
                for _, qvalues in self.scheme.affine.words.read(reader, self.values, rows, columns, raw):
                    centered = from_middle(self.scheme.affine, self.scheme.qtype, qvalues)
                    out[done : done + centered.size] = centered.reshape(-1)
                    done += centered.size
            return
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
        self._check_constants(reader, self.scheme)
        self._check_stated_shape(reader)
        base = self.values.name.removesuffix(self.scheme.values)
        for info in self.extra:
            suffix = info.name.removeprefix(base)
            if suffix == self.scheme.zeros:
                continue
            stored = np.empty(info.nbytes, np.uint8)
            reader.read(info, 0, stored.data)
            found = stored.view(DTYPES[info.dtype]).reshape(info.shape)
            expected = self.scheme.expected(suffix, self.shape, self.grid, info.dtype)
            if np.array_equal(found, expected):
                continue
            assert self.scheme.affine is not None
            is_zeros = info.name.endswith(self.scheme.affine.zero_points)
            raise SourceError(
                f"{info.name} does not hold {'zero points in the middle' if is_zeros else 'groups in order'}, as "
                "config.json says",
                hint='`encoding="dequantize"` decodes it as it is',
            )


@dataclass(frozen=True)
class Scales(Tensor):
    """The scales of an encoded tensor, stored in `values`. `grid` is their shape with the axes of the tensor; along
    each axis each scale is repeated as often as `refine` says. `parts` are the stored tensors of flat values."""

    scheme: Scheme = field(kw_only=True)
    grid: Shape = ()
    refine: Shape = ()
    parts: FlatParts | None = None
    passthrough = True

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype in which the scales are kept."""
        return scale_dtype(self.values.dtype, self.tensor_scale is not None or self.parts is not None)

    def is_stored_as(self, dtype: np.dtype[Any]) -> bool:
        """False: scales are decoded and refined."""
        return False

    def read(self, reader: Reader, start: int, raw: np.ndarray, out: np.ndarray) -> None:
        """Fills `out`, flat, with the refined scales from number `start` on. Complete rows of stored scales are read;
        `raw` [bytes] is memory for them.

        Raises:
            SourceError: a scale is zero or negative, unless `any_scales`; or the source cannot be read.
        """
        inner = prod(self.shape[1:])
        first = start // inner // self.refine[0]
        last = -(-(start + out.size) // (inner * self.refine[0]))
        scales = self._rows(reader, first, min(last, self.grid[0]), raw).reshape(-1, *self.grid[1:])
        for axis, n in enumerate(self.refine):
            scales = np.repeat(scales, n, axis=axis) if n > 1 else scales
        scales = scales[:, *map(slice, self.shape[1:])]
        out[...] = scales.reshape(-1)[start - first * self.refine[0] * inner :][: out.size]

    def _rows(self, reader: Reader, first: int, last: int, raw: np.ndarray) -> np.ndarray:
        """Rows of the grid, decoded."""
        stored_inner, itemsize = prod(self.grid[1:]), DTYPES[self.values.dtype].itemsize
        if self.parts is not None:
            return self.parts.block_scales(reader, first * stored_inner, last * stored_inner, self.parts.state(reader))
        nbytes = (last - first) * stored_inner * itemsize
        raw = raw[:nbytes] if raw.size >= nbytes else np.empty(nbytes, np.uint8)
        reader.read(self.values, first * stored_inner * itemsize, raw.data)
        decoded = self.decode_scales(reader, raw.view(DTYPES[self.values.dtype])).astype(self.dtype)
        if self.scheme.factor != NO_FACTOR:
            decoded *= self.scheme.factor
        # Those that are not finite are found with all other values that are not.
        if not self.any_scales and not self.scheme.any_sign:
            checked = np.where(np.isfinite(decoded), decoded, 1)
            check_scales(self.values.name, checked, self.values.shape, first * stored_inner)
        return decoded

    def place(self, number: int) -> list[int]:
        """Returns the index of scale `number` in the stored tensor of scales."""
        index = [i // n for i, n in zip(np.unravel_index(number, self.shape), self.refine, strict=True)]
        return place_of(int(np.ravel_multi_index(index, self.grid)), self.values.shape)


class ZeroPoints(Scales):
    """The zero points of an encoded tensor, one for each scale. `grid` and `refine` describe the scales."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the quantized values."""
        return np.dtype(self.scheme.qtype)

    def _rows(self, reader: Reader, first: int, last: int, raw: np.ndarray) -> np.ndarray:
        affine = self.scheme.affine
        assert affine is not None
        found = affine.zero_words.read(reader, self.values, (first, last), (0, self.grid[1]), raw)
        stored = np.concatenate([values for _, values in found])
        return from_middle(affine, self.scheme.qtype, affine.zeros_of(stored)).view(self.dtype)


STORED_AS = {"nf4": "uint8"}
"""The dtypes of kept quantized values of which no checkpoint stores the type."""


def scale_dtype(stored: str, has_tensor_scale: bool) -> np.dtype[Any]:
    """Returns the dtype in which scales are kept. `stored` is safetensors' name of the stored dtype."""
    if has_tensor_scale or stored == "F16":  # bfloat16 would round what a TPU has no other type for
        return np.dtype(np.float32)
    return BF16 if stored in POWERS_OF_TWO else DTYPES[stored]


QTYPE_MASKS = {"int4": 15, "int8": 255}


def from_middle(affine: Affine, qtype: str, stored: np.ndarray) -> np.ndarray:
    """Bytes in two's complement of the bits of `qtype`, from unsigned quantized values or zero points."""
    centered: np.ndarray = (stored - np.uint8(affine.middle)) & np.uint8(QTYPE_MASKS[qtype])
    return centered


def to_middle(affine: Affine, qvalues: np.ndarray) -> np.ndarray:
    """Returns the inverse of `from_middle`."""
    stored: np.ndarray = (qvalues.view(np.uint8) + np.uint8(affine.middle)) & np.uint8(affine.words.mask)
    return stored


def unpack(scheme: Scheme, packed: np.ndarray, out: np.ndarray) -> None:
    """Fills `out` [2 * bytes] with the quantized values of bytes [bytes] that hold two, the low half first unless the
    scheme has it otherwise."""
    low, high = (1, 0) if scheme.high_first else (0, 1)
    np.bitwise_and(packed, 15, out=out[low::2])
    np.right_shift(packed, 4, out=out[high::2])
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
    """Returns the bytes of scales that are powers of two, as exponents with a bias (E8M0)."""
    found = np.frexp(scales.astype(np.float32))[1] - 1  # 2^e is 0.5 * 2^(e + 1) to frexp
    return (found + E8M0_BIAS).astype(np.uint8)


def pack(scheme: Scheme, qvalues: np.ndarray) -> np.ndarray:
    """Returns the stored tensor of values, from quantized values in the shape of the tensor: the inverse of
    `QValues`."""
    if scheme.affine is not None:
        return scheme.affine.words.pack(to_middle(scheme.affine, np.ascontiguousarray(qvalues)))
    dtype = DTYPES[scheme.dtype]
    stored: np.ndarray = np.ascontiguousarray(qvalues).view(np.uint8)
    if scheme.xor_mask:
        stored = stored ^ scheme.xor_mask
    if scheme.per_element > dtype.itemsize:
        stored = pack_halves(stored)
    if scheme.groups_apart:
        return stored.reshape(scheme.stored_shape(qvalues.shape))
    return stored.view(dtype)


def unrefine(
    scales: np.ndarray, refine: Sequence[int], dtype: str, shape: Shape, factor: np.float32 = NO_FACTOR
) -> np.ndarray:
    """Returns the stored tensor of scales, of the shape `shape`, from refined scales: the inverse of `Scales`."""
    stored: np.ndarray = np.ascontiguousarray(scales[tuple(slice(None, None, n) for n in refine)])
    if factor != NO_FACTOR:
        stored = without_factor(stored, factor)
    if dtype in POWERS_OF_TWO:
        stored = exponents(stored).view(DTYPES[dtype])
    return stored.astype(DTYPES[dtype], copy=False).reshape(shape)


def separate_scales(
    products: np.ndarray, *, divided: bool, tensor_scale: float | None = None
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the inverse of multiplying the scales of blocks, in float8_e4m3fn, by one scale of the tensor, or of
    dividing them by it if `divided`: scales in the shape of `products`, and one in float32 of shape [1]. Their products
    are `products`, bit for bit. None if no such scales exist.

    Without `tensor_scale`, several may: the largest scale of a block is tried as each number of its type, from 448
    down, which is what quantizers give the largest of the tensors that share a scale.
    """
    unique = np.unique(products)
    undone = np.multiply if divided else np.divide
    done = np.divide if divided else np.multiply
    with np.errstate(all="ignore"):
        tried = _tensor_scales(unique[-1], divided=divided) if tensor_scale is None else [np.float32(tensor_scale)]
        for whole in tried:
            scales = undone(unique, whole).astype(FLOAT8)
            if np.array_equal(done(scales.astype(np.float32), whole), unique):
                return undone(products, whole).astype(FLOAT8), np.array([whole], np.float32)
    return None


def _tensor_scales(top: np.float32, *, divided: bool) -> Iterator[np.float32]:
    """Yields the scales of a tensor that make `top` of a number of float8_e4m3fn, and their neighbors."""
    for code in FLOAT8_NUMBERS[::-1]:
        near = code / top if divided else top / code
        yield from ((near.view(np.int32) + np.int32(step)).view(np.float32) for step in (0, 1, -1, 2, -2))


HALF_PRECISION_REST = 13
"""Bits of a float32's fraction that a float16 lacks."""


def without_factor(products: np.ndarray, factor: np.float32) -> np.ndarray:
    """Scales in float32 that times a factor are `products`, bit for bit. Of several the one that float16 holds, in
    which LLM.int8 finds its scales."""
    near = products / factor
    rest = np.int32((1 << HALF_PRECISION_REST) - 1)
    halves = ((near.view(np.int32) + (rest + 1) // 2) & ~rest).view(np.float32)
    found = near.copy()
    for step in (2, -2, 1, -1, 0):
        other = (near.view(np.int32) + np.int32(step)).view(np.float32)
        found = np.where(other * factor == products, other, found)
    scales: np.ndarray = np.where(halves * factor == products, halves, found)
    return scales


FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_NUMBERS = np.arange(1, 127, dtype=np.uint8).view(FLOAT8).astype(np.float32)
"""The positive numbers of the type, in their order."""


def pack_zero_points(affine: Affine, zeros: np.ndarray, refine: Sequence[int]) -> np.ndarray:
    """Returns the stored tensor of zero points, from refined ones: the inverse of `ZeroPoints`."""
    stored = np.ascontiguousarray(zeros[tuple(slice(None, None, n) for n in refine)])
    return affine.stored_zeros(to_middle(affine, stored))
