"""The encoding of a tensor in several stored tensors, and its decoding.

An encoding is a property of the checkpoint, read from config.json's `quantization_config`; it knows no family. All
encodings are one scheme: a quantized value of 8 or 4 bits stands for a number (a table), and a block of values shares a
scale. They differ in the table, the block, and the names and dtypes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from tpuconv.encodings.casts import check_cast
from tpuconv.encodings.flat import OTHER_WRITER, FlatParts
from tpuconv.encodings.scales import check_scales, check_some_scales, place_of
from tpuconv.encodings.scheme import NO_FACTOR, STATED_SHAPE, Scheme, decode_scales
from tpuconv.encodings.words import Span, read_part, spans_of
from tpuconv.errors import SourceError
from tpuconv.jsonfile import short
from tpuconv.notation.layout import Shape
from tpuconv.sources.headers import DTYPES, TensorInfo
from tpuconv.sources.reader import Reader

TABLE_BYTES = 1 << 18
"""Size of the tables that are made together: they stay in the second-level cache until they are used."""

VALUES_AT_ONCE = 1 << 21
"""Values that are decoded to float32 before the scales of their columns are applied, or whose bytes are read
together."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as a family's table sees it: plain, or decoded by `scheme` from `values`, `scales` and perhaps
    `tensor_scale`, one scale of the whole tensor.

    Attributes:
        extra: other stored tensors that belong to it.
        zero_points, group_index, offsets: the tensors of an affine scheme.
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
    offsets: TensorInfo | None = field(default=None, kw_only=True)
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
        parts = (
            *(self.scales, self.tensor_scale, self.zero_points),
            *(self.group_index, self.offsets, self.column_scales),
        )
        return (self.values, *(info for info in parts if info), *self.extra)

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def stored_bytes(self, count: int) -> int:
        """Returns the number of bytes in which `count` values are stored, without scales."""
        return count * self.values.nbytes // max(1, self.size)

    def ranges(self, start: int, stop: int) -> Iterator[tuple[TensorInfo, int, int]]:
        """Yields the stored tensors that values `start` to `stop` are made from, each with the first byte that is
        needed and the one after the last: of an encoded tensor, all."""
        if self.scheme is None and len(self.stored) == 1:
            yield self.values, self.stored_bytes(start), self.stored_bytes(stop)
        else:
            yield from ((info, 0, info.nbytes) for info in self.stored)

    def work_bytes(self, count: int) -> int:
        """Returns the memory that reading `count` values takes beside the arguments of `read`, if it grows with
        them."""
        return 0

    def is_stored_as(self, dtype: np.dtype[Any]) -> bool:
        """True if the stored bytes are values of this dtype."""
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
        if start == 0 and self.scheme is not None and (self.scheme.constants or self.scheme.zeros):
            self._check_constants(reader, self.scheme)
        if start == 0 and self.is_filled_up:
            self._check_stated_shape(reader)
        if start == 0 and not self.any_scales:
            self._check_zero_points(reader)
        if self.scheme is not None and self.scheme.flat is not None:
            self.flat_parts.read(reader, start, raw, out)
        elif self.scheme is not None and self.scheme.quarters is not None:
            self._decode_quarters(reader, start, raw, out)
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
            if self.any_scales:  # else what is not finite is found where it is written
                check_cast(self.name, raw.view(self.dtype), out)

    @property
    def flat_parts(self) -> FlatParts:
        """The stored tensors of a flat scheme."""
        assert self.scheme is not None
        assert self.scales is not None
        base = self.values.name.removesuffix(self.scheme.values)
        extra = {info.name.removeprefix(base): info for info in self.extra}
        return FlatParts(self.scheme, self.shape, self.values, self.scales, extra, self.any_scales)

    @property
    def is_filled_up(self) -> bool:
        """True if the last word of each row has room for more values."""
        scheme = self.scheme
        return scheme is not None and STATED_SHAPE in scheme.extra and scheme.shape(self.values.shape) != self.shape

    def _check_stated_shape(self, reader: Reader) -> None:
        """Checks the shape that is stored beside values in words.

        Raises:
            SourceError: it is another one.
        """
        for info in self.extra:
            if info.name.endswith(STATED_SHAPE):
                stored = np.empty(info.nbytes, np.uint8)
                reader.read(info, 0, stored.data)
                if not np.array_equal(found := stored.view(DTYPES[info.dtype]).reshape(info.shape), self.shape):
                    raise SourceError(
                        f"{info.name} says {found.tolist()}, but the values are {list(self.shape)}",
                        hint="the weights do not belong to this config.json: download both again"
                        if self.is_filled_up
                        else '`encoding="dequantize"` does without it, and ignores it',
                    )

    def _check_constants(self, reader: Reader, scheme: Scheme) -> None:
        base = self.values.name.removesuffix(scheme.values)
        for info in self.extra:
            suffix = info.name.removeprefix(base)
            zeros = np.zeros(info.shape, DTYPES[info.dtype]) if suffix == scheme.zeros else None
            if (expected := scheme.constants.get(suffix, zeros)) is None:
                continue
            stored = np.empty(info.nbytes, np.uint8)
            reader.read(info, 0, stored.data)
            found = stored.view(DTYPES[info.dtype]).reshape(info.shape)
            if not np.array_equal(found, expected):
                wrong = np.argwhere(found != expected) if found.shape == expected.shape else np.empty((0, 0))
                place = tuple(map(int, wrong[0])) if len(wrong) else ()
                raise SourceError(
                    f"{info.name}{list(place) if place else ''} is {short(found[place].tolist())}, not "
                    f"{short(expected[place].tolist())} as for {scheme.title}",
                    hint=OTHER_WRITER,
                )

    def _check_zero_points(self, reader: Reader) -> None:
        """Checks the format of the zero points of symmetric values: read by the other one, all weights would be off by
        a scale.

        Raises:
            SourceError: all of them lie beside the middle.
        """
        affine = self.scheme.affine if self.scheme else None
        if affine is None or affine.misread_middle is None or self.zero_points is None or self.scales is None:
            return
        rows, columns = self.scales.shape
        parts = affine.zero_words.read(reader, self.zero_points, (0, rows), (0, columns))
        if all((affine.zeros_of(stored) == affine.misread_middle).all() for _, stored in parts):
            read, right = ("gptq", "gptq_v2") if affine.zero_shift else ("gptq_v2", "gptq")
            raise SourceError(
                f"{self.zero_points.name} is {affine.misread_middle} everywhere by checkpoint_format {read!r}, but "
                f"config.json says that values are symmetric (sym), about {affine.middle}",
                hint=f"the zero points are in the format {right!r}: if the tool that wrote them confirms it, set "
                "checkpoint_format in the quantization_config of config.json to it",
            )

    def place(self, number: int) -> list[int]:
        """Returns the index of value `number` in the stored tensor that is named in an error."""
        return place_of(number, self.shape)

    def decode_scales(self, reader: Reader, stored: np.ndarray) -> np.ndarray:
        """Stored scales in float32, multiplied or divided by the scale of the whole tensor, if there is one."""
        assert self.scheme is not None
        scales = decode_scales(stored)
        if self.tensor_scale is None:
            return scales
        tensor_scale = self.read_tensor_scale(reader)
        product: np.ndarray = (np.divide if self.scheme.divided else np.multiply)(
            scales, tensor_scale.astype(np.float32)
        )
        return product

    def read_tensor_scale(self, reader: Reader) -> np.ndarray:
        """Returns the scale of the whole tensor, as it is stored, in the shape [1]."""
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
            check_scales(self.tensor_scale.name, self.read_tensor_scale(reader).reshape(self.tensor_scale.shape))

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

    def _decode_quarters(self, reader: Reader, start: int, raw: np.ndarray, out: np.ndarray) -> None:
        """Each value is the product of its number and the scale, or their quotient, in float32, rounded once to the
        dtype of `out`."""
        assert self.scheme is not None
        assert self.scheme.quarters is not None
        assert self.scales is not None
        stored = np.empty(self.scales.nbytes, np.uint8)
        reader.read(self.scales, 0, stored.data)
        scales = stored.view(DTYPES[self.scales.dtype])
        if not self.any_scales:
            self._check_scales(reader, scales)
        apply = np.divide if self.scheme.quarters.divides else np.multiply
        with np.errstate(invalid="ignore", divide="ignore"):  # scales that are not checked may be 0
            values = apply(self.scheme.table, decode_scales(scales).reshape(-1)[0]).astype(out.dtype)
        done = 0
        while done < out.size:
            quarter, first = divmod(start + done, self.values.nbytes)
            count = min(out.size - done, self.values.nbytes - first, VALUES_AT_ONCE)
            if raw.size < count:  # as many bytes as values, of which each has three others too
                raw = np.empty(count, np.uint8)
            reader.read(self.values, first, raw[:count].data)
            codes = raw[:count] >> np.uint8(2 * quarter) & np.uint8(3)
            out[done : done + count] = values[codes]
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
        """Each value is (q - z) * scale, times the scale of its column if there is one, or q * scale + offset, in
        float32, rounded once to the dtype of `out`."""
        assert self.scheme is not None
        assert self.scheme.affine is not None
        height, width = self.scheme.block(self.shape, self.scales.shape if self.scales else ())
        done = 0
        for rows, columns in spans_of(start, out.size, self.shape[-1]):
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
                if self.offsets is None:
                    values = (self.scheme.affine.numbers(qvalues) - zeros) * scales
                else:
                    values = self.scheme.affine.numbers(qvalues) * scales + zeros
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
        """Returns the number of the group of each of some rows."""
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
        """Scales, and zero points or offsets, of a part of the blocks, in float32."""
        assert self.scheme is not None
        assert self.scheme.affine is not None
        assert self.scales is not None
        scales = read_part(reader, self.scales, groups, blocks).astype(np.float32)
        if not self.any_scales:
            check_some_scales(self.scales, scales, (groups[0], blocks[0]), self.scheme.any_sign)
        if self.offsets is not None:
            offsets = read_part(reader, self.offsets, groups, blocks).astype(np.float32)
            if not self.any_scales:
                check_some_scales(self.offsets, offsets, (groups[0], blocks[0]), any_sign=True)
            return scales, offsets
        if self.zero_points is None:
            return scales, np.zeros_like(scales)
        found = self.scheme.affine.zero_words.read(reader, self.zero_points, groups, blocks)
        zeros = np.concatenate([values for _, values in found])
        return scales, self.scheme.affine.zeros_of(zeros).astype(np.float32)
