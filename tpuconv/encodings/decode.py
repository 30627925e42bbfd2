"""How a checkpoint encodes a tensor in several stored ones, and decoding it.

An encoding is a property of the checkpoint, read from config.json's `quantization_config`; it knows no family. All
encodings are one scheme: a quantized value of 8 or 4 bits stands for a number (a table), and a block of values shares a
scale. They differ in the table, the block, and the names and dtypes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from tpuconv.encodings.flat import MAX_STATE_BYTES, FlatParts
from tpuconv.encodings.scales import check_scales, check_some_scales, place_of
from tpuconv.encodings.scheme import NESTED_SCALES, NO_FACTOR, Scheme, decode_scales
from tpuconv.encodings.schemes import schemes
from tpuconv.encodings.words import Span, read_part, spans_of
from tpuconv.errors import SourceError
from tpuconv.jsonfile import short
from tpuconv.layout import Shape
from tpuconv.names import collapse
from tpuconv.sizes import format_count
from tpuconv.sources.headers import DTYPES, TensorInfo
from tpuconv.sources.reader import Reader

AFFINE_SCALE_DTYPES = ("F16", "BF16", "F32")
"""Dtypes of the scales of values in words, and of columns."""

TABLE_BYTES = 1 << 18
"""Size of the tables that are made together: they stay in the second-level cache until they are used."""

VALUES_AT_ONCE = 1 << 21
"""Values that are decoded to float32 before the scales of their columns are applied."""


@dataclass(frozen=True)
class Tensor:
    """A tensor as a family's table sees it: plain, or decoded by `scheme` from `values`, `scales` and perhaps
    `tensor_scale`, one scale of the whole tensor.

    Attributes:
        extra: other stored tensors that belong to it.
        zero_points, group_index: the tensors of an affine scheme.
        column_scales: of what the inputs are multiplied by, if there is such a tensor.
        any_scales: whether scales that no quantizer writes, not positive or not finite, are decoded without an error.
        passthrough: whether it stays encoded, and so is never cast.
    """

    name: str
    shape: Shape
    values: TensorInfo
    scales: TensorInfo | None = None
    extra: tuple[TensorInfo, ...] = ()
    scheme: Scheme | None = None
    tensor_scale: TensorInfo | None = None
    zero_points: TensorInfo | None = field(default=None, kw_only=True)
    group_index: TensorInfo | None = field(default=None, kw_only=True)
    column_scales: TensorInfo | None = field(default=None, kw_only=True)
    any_scales: bool = field(default=False, kw_only=True)

    passthrough = False

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values: the stored one, or bfloat16 if they are decoded."""
        return DTYPES[self.values.dtype] if self.scheme is None else np.dtype(ml_dtypes.bfloat16)

    @property
    def stored(self) -> tuple[TensorInfo, ...]:
        """The tensors of the source that it is made of."""
        parts = (self.scales, self.tensor_scale, self.zero_points, self.group_index, self.column_scales)
        return (self.values, *(info for info in parts if info), *self.extra)

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def stored_bytes(self, count: int) -> int:
        """The number of bytes in which `count` values are stored, without scales."""
        return count * self.values.nbytes // max(1, self.size)

    def ranges(self, start: int, stop: int) -> Iterator[tuple[TensorInfo, int, int]]:
        """Yields the stored tensors that values `start` to `stop` are made from, each with the first byte that is
        needed and the one after the last: of an encoded tensor, all."""
        if self.scheme is None and len(self.stored) == 1:
            yield self.values, self.stored_bytes(start), self.stored_bytes(stop)
        else:
            yield from ((info, 0, info.nbytes) for info in self.stored)

    def work_bytes(self, count: int) -> int:
        """The memory that reading `count` values takes beside the arguments of `read`, if it grows with them."""
        return 0

    def is_stored_as(self, dtype: np.dtype[Any]) -> bool:
        """Whether its stored bytes are values of that dtype."""
        return self.scheme is None and self.dtype == dtype

    def read(self, reader: Reader, start: int, raw: np.ndarray, out: np.ndarray) -> None:
        """Reads values.

        Args:
            reader: of the source.
            start: number of the first value.
            raw: memory [bytes] for the stored bytes. Not used if the values are stored in the dtype of `out`.
            out: flat, of any float dtype, filled with values.

        Raises:
            SourceError: a scale, unless `any_scales`, or a constant is wrong; or the source cannot be read.
        """
        if start == 0 and self.scheme is not None and self.scheme.constants:
            self._check_constants(reader, self.scheme)
        if self.scheme is not None and self.scheme.flat is not None:
            self.flat_parts.read(reader, start, raw, out)
        elif self.scheme is not None and self.scheme.affine is not None:
            self._decode_affine(reader, start, raw, out)
        elif self.scheme is not None and self.column_scales is not None:
            self._decode_by_columns(reader, start, raw, out)
        elif self.scheme is not None:
            self._decode(reader, start, raw, out)
        elif out.dtype == self.dtype:
            reader.read(self.values, start * out.itemsize, out.view(np.uint8).data)
        else:
            raw = raw[: out.size * self.dtype.itemsize]
            reader.read(self.values, start * self.dtype.itemsize, raw.data)
            np.copyto(out, raw.view(self.dtype), casting="unsafe")

    @property
    def flat_parts(self) -> FlatParts:
        """The stored tensors of a flat scheme."""
        assert self.scheme is not None
        assert self.scales is not None
        base = self.values.name.removesuffix(self.scheme.values)
        extra = {info.name.removeprefix(base): info for info in self.extra}
        return FlatParts(self.scheme, self.shape, self.values, self.scales, extra, self.any_scales)

    def _check_constants(self, reader: Reader, scheme: Scheme) -> None:
        base = self.values.name.removesuffix(scheme.values)
        for info in self.extra:
            if (expected := scheme.constants.get(info.name.removeprefix(base))) is None:
                continue
            stored = np.empty(info.nbytes, np.uint8)
            reader.read(info, 0, stored.data)
            found = stored.view(DTYPES[info.dtype]).reshape(info.shape)
            if not np.array_equal(found, expected):
                raise SourceError(
                    f"{info.name} is {short(found.tolist())}, not {short(expected.tolist())} as for {scheme.title}",
                    hint="the tensor was written by another version of its library, or is damaged: convert an "
                    "unquantized release",
                )

    def place(self, number: int) -> list[int]:
        """The index of value `number` in the stored tensor that is named in an error."""
        return place_of(number, self.shape)

    def decode_scales(self, reader: Reader, stored: np.ndarray) -> np.ndarray:
        """Stored scales in float32, multiplied or divided by the scale of the whole tensor, if there is one."""
        assert self.scheme is not None
        scales = decode_scales(stored)
        if self.tensor_scale is None:
            return scales
        tensor_scale = self._tensor_scale(reader)
        product: np.ndarray = (np.divide if self.scheme.divided else np.multiply)(
            scales, tensor_scale.astype(np.float32)
        )
        return product

    def _tensor_scale(self, reader: Reader) -> np.ndarray:
        assert self.tensor_scale is not None
        scale = np.empty(1, DTYPES[self.tensor_scale.dtype])
        reader.read(self.tensor_scale, 0, scale.view(np.uint8).data)
        return scale

    def _check_scales(self, reader: Reader, stored: np.ndarray) -> None:
        assert self.scales is not None
        assert self.scheme is not None
        scales = decode_scales(stored).reshape(self.scales.shape)
        check_scales(self.scales.name, scales, any_sign=self.scheme.any_sign)
        if self.tensor_scale is not None:
            check_scales(self.tensor_scale.name, self._tensor_scale(reader).reshape(self.tensor_scale.shape))

    def _decode(self, reader: Reader, start: int, raw: np.ndarray, out: np.ndarray) -> None:
        """Each value is the product of its number in the table and its scale, in float32, rounded once to the dtype of
        `out`. The products are looked up: a table of all of them is made for each block."""
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
        height = (
            self.shape[-2] if len(self.scales.shape) > 2 else prod(self.shape[:-1])
        )  # of the matrix that is divided into blocks
        rows, width = self.scheme.block(self.shape, self.scales.shape)
        scales_SB = self.decode_scales(reader, stored.view(DTYPES[self.scales.dtype])).reshape(-1, -(-columns // width))
        at_once = max(1, TABLE_BYTES // (4 * scales_SB.shape[1] * self.scheme.table.size))
        bits, done = np.dtype(f"u{out.itemsize}"), 0
        while done < out.size:
            row, first = divmod(start + done, columns)
            matrix, row_in_matrix = divmod(row, height)
            scale = matrix * -(-height // rows) + row_in_matrix // rows
            # Rows with scales of their own; or those that share them, up to the end of the block or of the matrix.
            last = (
                row + at_once
                if rows == 1
                else row - row_in_matrix + min(height, row_in_matrix - row_in_matrix % rows + rows)
            )
            count = min(out.size - done, last * columns - row * columns - first)
            scales_SB1 = scales_SB[scale : scale + (at_once if rows == 1 else 1), :, None]
            products = scales_SB1 * self.scheme.table
            if self.scheme.factor != NO_FACTOR:
                products *= self.scheme.factor
            tables = products.astype(out.dtype).view(bits)
            qvalues = raw[self.stored_bytes(done) : self.stored_bytes(done + count)]
            look_up(qvalues, tables, first, columns, width, out[done : done + count].view(bits))
            done += count

    def _decode_by_columns(self, reader: Reader, start: int, raw: np.ndarray, out: np.ndarray) -> None:
        """As `_decode`, times the scale of the column of each value, in float32, and rounded once."""
        for first in range(0, out.size, VALUES_AT_ONCE):
            part = out[first : first + VALUES_AT_ONCE]
            values, done = np.empty(part.size, np.float32), 0
            self._decode(reader, start + first, raw, values)
            for rows, columns in spans_of(start + first, part.size, self.shape[1]):
                column_scales_C = self._column_scales(reader, columns)
                assert column_scales_C is not None
                count = (rows[1] - rows[0]) * column_scales_C.size
                values[done : done + count].reshape(-1, column_scales_C.size)[...] *= column_scales_C
                done += count
            np.copyto(part, values, casting="unsafe")

    def _decode_affine(self, reader: Reader, start: int, raw: np.ndarray, out: np.ndarray) -> None:
        """Each value is (q - z) * scale, times the scale of its column if there is one, in float32, rounded once to the
        dtype of `out`."""
        assert self.scheme is not None
        assert self.scheme.affine is not None
        height, width = self.scheme.block(self.shape, self.scales.shape if self.scales else ())
        done = 0
        for rows, columns in spans_of(start, out.size, self.shape[1]):
            groups_R = self._groups(reader, rows, height)
            groups = (int(groups_R.min()), int(groups_R.max()) + 1)
            blocks = (columns[0] // width, -(-columns[1] // width))
            scales_GB, zeros_GB = self._affine_parts(reader, groups, blocks)
            blocks_C = np.arange(*columns) // width - blocks[0]
            column_scales_C = self._column_scales(reader, columns)
            for some, qvalues in self.scheme.affine.words.read(reader, self.values, rows, columns, raw):
                own = groups_R[some[0] - rows[0] : some[1] - rows[0]] - groups[0]
                scales, zeros = (
                    parts[own] if width == 1 else parts[own].take(blocks_C, 1) for parts in (scales_GB, zeros_GB)
                )
                part = out[done : done + qvalues.size].reshape(qvalues.shape)
                values = (self.scheme.affine.numbers(qvalues) - zeros) * scales
                if column_scales_C is not None:
                    values *= column_scales_C
                np.copyto(part, values, casting="unsafe")
                done += qvalues.size

    def _column_scales(self, reader: Reader, columns: Span) -> np.ndarray | None:
        if self.column_scales is None:
            return None
        stored = np.empty(columns[1] - columns[0], DTYPES[self.column_scales.dtype])
        reader.read(self.column_scales, columns[0] * stored.itemsize, stored.view(np.uint8).data)
        if not self.any_scales:
            check_scales(self.column_scales.name, stored, self.column_scales.shape, columns[0])
        return stored.astype(np.float32)

    def _groups(self, reader: Reader, rows: Span, height: int) -> np.ndarray:
        """The number of the group of each of some rows."""
        if self.group_index is None:
            return np.arange(*rows) // height
        stored = np.empty(rows[1] - rows[0], DTYPES[self.group_index.dtype])
        reader.read(self.group_index, rows[0] * stored.itemsize, stored.view(np.uint8).data)
        assert self.scales is not None
        bad = (stored < 0) | (stored >= self.scales.shape[0])
        if bad.any():
            row = int(bad.argmax())
            raise SourceError(
                f"{self.group_index.name}[{rows[0] + row}] is {stored[row]}, of {self.scales.shape[0]} groups",
                hint="the checkpoint is damaged: download it again, or tell its owner",
            )
        return stored

    def _affine_parts(self, reader: Reader, groups: Span, blocks: Span) -> tuple[np.ndarray, np.ndarray]:
        """Scales and zero points of a part of the blocks, in float32."""
        assert self.scheme is not None
        assert self.scheme.affine is not None
        assert self.scales is not None
        scales = read_part(reader, self.scales, groups, blocks).astype(np.float32)
        if not self.any_scales:
            check_some_scales(self.scales, scales, (groups[0], blocks[0]), self.scheme.any_sign)
        if self.zero_points is None:
            return scales, np.zeros_like(scales)
        found = self.scheme.affine.zero_words.read(reader, self.zero_points, groups, blocks)
        zeros = np.concatenate([values for _, values in found])
        return scales, self.scheme.affine.zeros_of(zeros).astype(np.float32)


def decode_names(
    tensors: Mapping[str, TensorInfo], quantization: Mapping[str, Any] | None, *, any_scales: bool = False
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a source as tables see them.

    Args:
        tensors: what is stored, by name.
        quantization: what config.json says about the encoding.
        any_scales: whether the scales are decoded without a check.

    Returns:
        The tensors by name, and the faults: values without scales, scales without values, and scales whose shape does
            not
        fit the blocks.

    Raises:
        UnsupportedConfig: an encoding that is not implemented.
    """
    known = schemes(quantization)
    suffixes = [suffix for scheme in known for suffix in scheme.suffixes]
    out: dict[str, Tensor] = {}
    taken: set[str] = set()
    unused: set[str] = set()
    faults: dict[str, list[str]] = {}
    for name, info in tensors.items():
        candidates = [scheme for scheme in known if scheme.encodes(info)]
        if not candidates:
            continue
        candidates.sort(key=lambda scheme: scheme.affine is None)  # values without zero points fit others too
        scheme = next((s for s in candidates if _has_scales_of(s, info, tensors)), candidates[0])
        base = name.removesuffix(scheme.values)
        scales = tensors.get(base + scheme.scales)
        extra = tuple(tensors[base + suffix] for suffix in scheme.extra if base + suffix in tensors)
        tensor_scale = tensors.get(base + scheme.tensor_scale) if scheme.tensor_scale else None
        affine = {suffix: tensors.get(base + suffix) for suffix in scheme.affine.suffixes} if scheme.affine else {}
        column_scales = tensors.get(base + scheme.column_scales) if scheme.column_scales else None
        parts = (*extra, tensor_scale, *affine.values(), column_scales)
        taken |= {name, base + scheme.scales, *(part.name for part in parts if part)}
        unused |= {base + suffix for suffix in scheme.unused}
        shape = scheme.shape(info.shape)
        if scales is None:
            faults.setdefault(f"has no {scheme.scales.removeprefix('.')}", []).append(name)
        elif scales.shape != (want := scheme.scale_shape(shape, scales.shape)):
            faults.setdefault(f"should be {list(want)} by the block size", []).append(scales.name)
        elif scheme.tensor_scale and tensor_scale is None:
            faults.setdefault(f"has no {scheme.tensor_scale.removeprefix('.')}", []).append(name)
        elif tensor_scale is not None and prod(tensor_scale.shape) != 1:
            faults.setdefault("should be one number", []).append(tensor_scale.name)
        elif found := _affine_fault(scheme, affine, shape, scales, name) or _flat_fault(scheme, extra, info, scales):
            faults.setdefault(found[1], []).append(found[0])
        elif column_scales is not None and (column_scales.shape, column_scales.dtype in AFFINE_SCALE_DTYPES) != (
            (shape[-1],),
            True,
        ):
            faults.setdefault(f"should be one of {', '.join(AFFINE_SCALE_DTYPES)}, [{shape[-1]}]", []).append(
                column_scales.name
            )
        else:
            tensor = Tensor(
                *(base + scheme.name, shape, info, scales, extra, scheme, tensor_scale),
                zero_points=affine.get(scheme.affine.zero_points) if scheme.affine else None,
                group_index=affine.get(scheme.affine.group_index) if scheme.affine else None,
                column_scales=column_scales,
                any_scales=any_scales,
            )
            out[tensor.name] = tensor
    for name, info in tensors.items():
        if name in taken:
            continue
        is_part = any(name.endswith(suffix) for suffix in suffixes if suffix != ".weight")
        if is_part and name not in unused:
            faults.setdefault("has no values that it belongs to", []).append(name)
        else:
            out[name] = Tensor(name, info.shape, info)
    words = [
        f"{pattern}  {tensors[names[0]].dtype} {list(tensors[names[0]].shape)} "
        f"({format_count(len(names), 'tensor')}) {fault}"
        for fault, all_names in faults.items()
        for pattern, names in collapse(all_names).items()
    ]
    return out, words


def _has_scales_of(scheme: Scheme, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether the stored values have scales, and zero points, as the scheme wants them. A checkpoint may use several
    schemes."""
    base, shape = info.name.removesuffix(scheme.values), scheme.shape(info.shape)
    scales = tensors.get(base + scheme.scales)
    if scales is None or scales.shape != scheme.scale_shape(shape, scales.shape):
        return False
    affine = {suffix: tensors.get(base + suffix) for suffix in scheme.affine.suffixes} if scheme.affine else {}
    return _affine_fault(scheme, affine, shape, scales, info.name) is None


def _flat_fault(
    scheme: Scheme, extra: Sequence[TensorInfo], values: TensorInfo, scales: TensorInfo
) -> tuple[str, str] | None:
    """What is wrong with the tensors beside flat values: the name of one, and the fault; None if nothing."""
    if scheme.flat is None:
        return None
    base = values.name.removesuffix(scheme.values)
    found = {info.name.removeprefix(base): info for info in extra}
    own = replace(scheme, scale_dtype=scales.dtype)
    if scales.dtype not in ("F32", NESTED_SCALES):
        return scales.name, f"should be F32 or {NESTED_SCALES}"
    for suffix, kind in own.extra_kinds((), scales.shape).items():
        info = found.get(suffix)
        if info is None:
            return values.name, f"has no {suffix.removeprefix('.')}"
        if suffix == scheme.flat.state:
            if info.dtype != "U8" or len(info.shape) != 1 or info.nbytes > MAX_STATE_BYTES:
                return info.name, f"should be U8, of {MAX_STATE_BYTES} bytes at most"
        elif (info.dtype, info.shape) != kind:
            return info.name, f"should be {kind[0]} {list(kind[1])}"
    return None


def _affine_fault(
    scheme: Scheme, parts: Mapping[str, TensorInfo | None], shape: Shape, scales: TensorInfo, name: str
) -> tuple[str, str] | None:
    """What is wrong with the zero points of a tensor or with the groups of its rows: the name of a stored tensor, and
    the fault; None if nothing."""
    if scheme.affine is None:
        return None
    if scales.dtype not in AFFINE_SCALE_DTYPES:
        return scales.name, f"should be one of {', '.join(AFFINE_SCALE_DTYPES)}"
    for suffix, want in scheme.affine_shapes(shape, scales.shape).items():
        part = parts.get(suffix)
        if part is None:
            if suffix == scheme.affine.zero_points or scheme.affine.any_order:
                return name, f"has no {suffix.removeprefix('.')}"
        elif (part.dtype, part.shape) != ("I32", want):
            return part.name, f"should be I32 {list(want)} by the values and their groups"
    return None


_OF_ACTIVATIONS = re.compile(r".*\.((activation|(input|output|[qkv])(_global)?)_(scale|zero_point)|weight_scale_2)")


def unused_reason(name: str) -> str | None:
    """Why a tensor of a quantized checkpoint does not concern the weights; None if it may. A second scale that no
    scheme takes brings weights to the range of FP8, for products with activations in FP8."""
    return "of quantized activations, which the model computes without" if _OF_ACTIVATIONS.fullmatch(name) else None
