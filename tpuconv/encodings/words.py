"""Quantized values packed in words of 32 bits: how AWQ, GPTQ and compressed-tensors store matrices and zero points; and
in bytes, as ModelOpt does it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import Any

import numpy as np

from tpuconv.notation.layout import Shape
from tpuconv.sources.headers import DTYPES, TensorInfo
from tpuconv.sources.reader import Reader

WORD_BITS = 32
WORD_DTYPE, BYTE_DTYPE = np.dtype(np.int32), np.dtype(np.uint8)
PART_VALUES = 1 << 18
"""The number of values of a matrix that are unpacked together: they stay in a cache."""

Span = tuple[int, int]
"""The first row or column, and the one after the last."""


@dataclass(frozen=True)
class Words:
    """Unsigned quantized values of a matrix, packed along an axis in words, from the lowest bit on. If their bits do
    not divide a word, values lie across words (3 bits: 32 values in 3 words of 32 bits).

    Attributes:
        bits: of one value.
        axis: along which neighbours share a word: 0 for rows, 1 for columns, which are the last axes.
        order: the place, among the values of a word, of each value from the lowest bit on. Empty: in order.
        dtype: of a stored word.
    """

    bits: int
    axis: int
    order: tuple[int, ...] = ()
    dtype: np.dtype[Any] = WORD_DTYPE

    @property
    def mask(self) -> int:
        """The largest value."""
        return (1 << self.bits) - 1

    @property
    def word_bits(self) -> int:
        """The number of bits of a word."""
        return 8 * self.dtype.itemsize

    @property
    def _unsigned(self) -> np.dtype[Any]:
        """The dtype of words whose bits are shifted."""
        return np.dtype(f"u{self.dtype.itemsize}")

    @property
    def per_group(self) -> int:
        """The number of values that fill whole words."""
        return lcm(self.word_bits, self.bits) // self.bits

    @property
    def words_per_group(self) -> int:
        """The number of these words."""
        return lcm(self.word_bits, self.bits) // self.word_bits

    def shape(self, stored: Shape) -> Shape:
        """Returns the shape of the values that words of the shape `stored` hold."""
        return self._resized(stored, stored[self.axis - 2] // self.words_per_group * self.per_group)

    def stored_shape(self, shape: Shape) -> Shape:
        """Returns the shape of the words that hold values of this shape. The last ones may be filled up."""
        return self._resized(shape, -(-shape[self.axis - 2] // self.per_group) * self.words_per_group)

    def _resized(self, shape: Shape, size: int) -> Shape:
        return tuple(size if axis == self.axis - 2 else n for axis, n in zip(range(-len(shape), 0), shape, strict=True))

    def unpack(self, words: np.ndarray) -> np.ndarray:
        """Returns the values [rows, columns], as bytes, of whole groups of words."""
        values = np.empty(self.shape(words.shape), np.uint8)
        words, out = (np.moveaxis(array, self.axis, 0) for array in (words.view(self._unsigned), values))
        for number, (word, shift) in enumerate(self._places()):
            found = words[word :: self.words_per_group] >> self._unsigned.type(shift)
            if shift + self.bits > self.word_bits:
                found |= words[word + 1 :: self.words_per_group] << self._unsigned.type(self.word_bits - shift)
            np.bitwise_and(found, self.mask, out=out[self._place(number) :: self.per_group], casting="unsafe")
        return values

    def pack(self, values: np.ndarray) -> np.ndarray:
        """Returns the inverse of `unpack`: values [rows, columns] in words, zeros after the last."""
        word_type = self._unsigned.type
        words = np.zeros(self.stored_shape(values.shape), word_type)
        out, values = (np.moveaxis(array, self.axis, 0) for array in (words, values))
        for number, (word, shift) in enumerate(self._places()):
            own = values[self._place(number) :: self.per_group].astype(word_type)
            for extra in (0, 1) if shift + self.bits > self.word_bits else (0,):
                part = own >> word_type(self.word_bits - shift) if extra else own << word_type(shift)
                out[word + extra :: self.words_per_group][: len(part)] |= part
        return words.view(self.dtype)

    def _places(self) -> Iterator[tuple[int, int]]:
        """Yields the word and the lowest bit of each value of a group."""
        return (divmod(self.bits * number, self.word_bits) for number in range(self.per_group))

    def _place(self, number: int) -> int:
        return self.order[number] if self.order else number

    def read(
        self, reader: Reader, info: TensorInfo, rows: Span, columns: Span, raw: np.ndarray | None = None
    ) -> Iterator[tuple[Span, np.ndarray]]:
        """Reads the values [rows, columns] of a part of a stored matrix.

        Args:
            reader: of the source.
            info: the stored matrix, or stacked ones, whose rows follow each other.
            rows, columns: the part.
            raw: memory [bytes] for the words; if it is too small, other memory is allocated.

        Yields:
            Some rows, and their values.
        """
        spans = [list(rows), list(columns)]
        first, last = spans[self.axis]
        first, last = first // self.per_group, -(-last // self.per_group)
        begin = first * self.per_group
        spans[self.axis] = [first * self.words_per_group, last * self.words_per_group]
        shape = tuple(last - first for first, last in spans)
        nbytes = shape[0] * shape[1] * self.dtype.itemsize
        memory = raw[:nbytes] if raw is not None and raw.size >= nbytes else np.empty(nbytes, np.uint8)
        words = memory.view(self.dtype).reshape(shape)
        reader.read_box(as_matrix(info), [slice(*span) for span in spans], words)
        per_row = self.per_group if self.axis == 0 else 1
        step = max(1, PART_VALUES // max(1, columns[1] - columns[0]) // per_row)  # rows of words
        step *= self.words_per_group if self.axis == 0 else 1
        for start in range(0, shape[0], step):
            values = self.unpack(words[start : start + step])
            if self.axis == 1:
                yield (
                    (rows[0] + start, rows[0] + start + len(values)),
                    values[:, columns[0] - begin :][:, : columns[1] - columns[0]],
                )
                continue
            row = begin + start // self.words_per_group * self.per_group
            inside = max(rows[0] - row, 0), min(rows[1] - row, len(values))
            yield (row + inside[0], row + inside[1]), values[slice(*inside)]


def as_matrix(info: TensorInfo) -> TensorInfo:
    """Returns stacked matrices as one, whose rows follow each other."""
    *stack, columns = info.shape
    return info if len(stack) < 2 else replace(info, shape=(prod(stack), columns))


def spans_of(start: int, count: int, columns: int) -> Iterator[tuple[Span, Span]]:
    """Yields the rows and columns of `count` values of a matrix from number `start` on: complete rows, or a part of
    one."""
    stop = start + count
    while start < stop:
        row, column = divmod(start, columns)
        rows = 0 if column else (stop - start) // columns
        last = column + min(columns - column, stop - start)
        yield ((row, row + rows), (0, columns)) if rows else ((row, row + 1), (column, last))
        start += rows * columns or last - column


def read_part(reader: Reader, info: TensorInfo, rows: Span, columns: Span) -> np.ndarray:
    """Returns a part [rows, columns] of a stored matrix, or of stacked ones, in its dtype."""
    out: np.ndarray[Any, Any] = np.empty((rows[1] - rows[0], columns[1] - columns[0]), DTYPES[info.dtype])
    reader.read_box(as_matrix(info), (slice(*rows), slice(*columns)), out)
    return out
