"""A part of one token's product with a matrix, compiled by numba for this processor, as a custom call of XLA:CPU.

Sums are float32. A word of the matrix is a float32, or two bfloat16: each is the upper half of the float32 that it
stands for. Several rows are read at once, each with those after it, since processors fetch few long streams ahead
better than many short ones. Importing numba takes half a second: this is imported where a program is compiled for a
CPU.
"""

from typing import Any

import jax
import numpy as np
from llvmlite import ir
from numba import carray, cfunc, types
from numba.extending import intrinsic

from tpuconv.convert.kernels import compiled
from tpuconv.models.vector import DOTS, LANES, ROWS, TARGET

BLOCK = 2048
"""Words of a row whose sums are added up together, so that they stay in the first cache."""

FLOATS, WORDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)


class Code:
    """Writes what the body of a loop does with vectors; left to the compiler, it is half as fast."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any):
        self.context, self.builder, self.types, self.args = context, builder, signature.args, args
        _, words, *_ = signature.args
        self.halves = 1 if words.dtype == types.float32 else 2

    def address(self, number: int, index: Any) -> Any:
        """Of an element of an array, which is argument `number`."""
        array = self.context.make_array(self.types[number])(self.context, self.builder, self.args[number])
        return self.builder.gep(array.data, [index])

    def vector(self, address: Any, kind: Any = FLOATS) -> Any:
        return self.builder.load(self.builder.bitcast(address, kind.as_pointer()), align=4)

    def store(self, vector: Any, address: Any) -> None:
        self.builder.store(vector, self.builder.bitcast(address, FLOATS.as_pointer()), align=4)

    def spread(self, number: Any) -> Any:
        nothing = ir.Constant(FLOATS, ir.Undefined)
        first = self.builder.insert_element(nothing, number, ir.IntType(32)(0))
        return self.builder.shuffle_vector(first, nothing, ir.Constant(WORDS, [0] * LANES))

    def values(self, address: Any) -> list[Any]:
        """Of the words there: one vector, or those of the lower halves and of the upper ones."""
        words = self.vector(address, WORDS)
        if self.halves == 1:
            return [self.builder.bitcast(words, FLOATS)]
        low = self.builder.shl(words, ir.Constant(WORDS, [16] * LANES))
        high = self.builder.and_(words, ir.Constant(WORDS, [0xFFFF0000] * LANES))
        return [self.builder.bitcast(half, FLOATS) for half in (low, high)]

    def product(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, in one instruction where there is one."""
        flags = ("contract",)
        return self.builder.fadd(self.builder.fmul(a, b, flags=flags), c, flags=flags)

    def at(self, index: Any, count: int, step: Any) -> Any:
        """index + count * step"""
        return self.builder.add(index, self.builder.mul(step, step.type(count)))


@intrinsic  # type: ignore[untyped-decorator]
def add_rows(_: Any, x: Any, words: Any, i: Any, apart: Any, width: Any, j: Any, sums: Any) -> Any:
    """Adds rows i, i + apart, ..., times their elements of x, to the sums from column j on."""

    def body(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args)
        *_, i, apart, width, j, _ = args
        places = [code.address(6, code.at(j, half, width)) for half in range(code.halves)]
        totals = [code.vector(place) for place in places]
        for row in [code.at(i, r, apart) for r in range(ROWS)]:
            factor = code.spread(builder.load(code.address(0, row)))
            values = code.values(code.address(1, builder.add(builder.mul(row, width), j)))
            totals = [code.product(factor, value, total) for value, total in zip(values, totals, strict=True)]
        for total, place in zip(totals, places, strict=True):
            code.store(total, place)
        return context.get_dummy_value()

    return types.void(x, words, i, apart, width, j, sums), body


@intrinsic  # type: ignore[untyped-decorator]
def add_dots(_: Any, x: Any, words: Any, i: Any, apart: Any, width: Any, j: Any, sums: Any) -> Any:
    """Adds the products of rows i, i + apart, ... with x, from column j on, to `LANES` sums of each row."""

    def body(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args)
        *_, i, apart, width, j, _ = args
        factors = [code.vector(code.address(0, code.at(j, half, width))) for half in range(code.halves)]
        for r in range(DOTS):
            row = code.at(i, r, apart)
            place = code.address(6, i.type(r * LANES))
            total = code.vector(place)
            for value, factor in zip(
                code.values(code.address(1, builder.add(builder.mul(row, width), j))), factors, strict=True
            ):
                total = code.product(value, factor, total)
            code.store(total, place)
        return context.get_dummy_value()

    return types.void(x, words, i, apart, width, j, sums), body


@compiled  # type: ignore[untyped-decorator]
def sum_rows(x: np.ndarray, words: np.ndarray, first: int, last: int, out: np.ndarray) -> None:
    """The rows [first, last) of `words` [K, W], each times its element of x [K], added up: `out` [H, W] has the sums of
    the lower halves of words and of the upper ones. A number of rows that `ROWS` divides, W a multiple of `LANES`."""
    width = out.shape[1]
    sums = out.reshape(out.size)
    sums[:] = 0
    apart = (last - first) // ROWS
    for start in range(0, width, BLOCK):
        for i in range(first, first + apart):
            for j in range(start, min(start + BLOCK, width), LANES):
                add_rows(x, words, i, apart, width, j, sums)


@compiled  # type: ignore[untyped-decorator]
def dot_rows(halves: np.ndarray, words: np.ndarray, first: int, last: int, out: np.ndarray) -> None:
    """The products of rows [first, last) of `words` [V, W] with x, whose elements are in `halves` [H, W] as those of a
    row are in words. `DOTS` rows or more, W a multiple of `LANES`."""
    width = halves.shape[1]
    x = halves.reshape(halves.size)
    sums = np.empty(DOTS * LANES, np.float32)
    apart = (last - first) // DOTS
    for t in range(-(-(last - first) // DOTS)):
        i, step = (first + t, apart) if t < apart else (last - DOTS, 1)
        sums[:] = 0
        for j in range(0, width, LANES):
            add_dots(x, words, i, step, width, j, sums)
        for r in range(DOTS):
            total = np.float32(0)
            for k in range(LANES):
                total += sums[r * LANES + k]
            out[i - first + r * step] = total


# What XLA hands over, by xla/ffi/api/c_api.h, read as words of 64 bits: structures begin with their size and the
# address of an extension.

VERSION = 3 << 32
"""Of the interface: 0.3."""
FLOAT32 = 11


@intrinsic  # type: ignore[untyped-decorator]
def pointer(_: Any, address: Any) -> Any:
    def body(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.uintp), body


@compiled  # type: ignore[untyped-decorator]
def fields(address: int, count: int) -> Any:
    """So many words at an address."""
    return carray(pointer(address), (count,), np.uintp)


@compiled  # type: ignore[untyped-decorator]
def member(list_: int, number: int) -> Any:
    """The structure at that place of a list of addresses."""
    return fields(fields(list_, number + 1)[number], 6)


@compiled  # type: ignore[untyped-decorator]
def attribute(frame: Any, number: int) -> Any:
    """An integer; they are sorted by name."""
    return np.intp(fields(member(frame[20], number)[1], 1)[0])


@compiled  # type: ignore[untyped-decorator]
def widened(address: int, size: int) -> np.ndarray:
    """The float32 of so many bfloat16."""
    bits = carray(pointer(address), (size,), np.uint16)
    out = np.empty(size, np.float32)
    for i in range(size):
        word = np.uint32(np.uint32(bits[i]) << np.uint32(16))
        out[i] = word.view(np.float32)
    return out


@cfunc(types.uintp(types.CPointer(types.uintp)), cache=True)  # type: ignore[untyped-decorator]
def vector_product(frame: Any) -> int:
    """Of x and a matrix, over its `axis`: the rows from `first` up to `last`. Returns the address of an error: none."""
    if frame[1] != 0:  # a question before the first call: which version of the interface is this?
        metadata = fields(fields(frame[1], 4)[3], 4)
        metadata[3] = VERSION
        return 0
    x, matrix, out = member(frame[9], 0), member(frame[9], 1), member(frame[14], 0)
    axis, first, last = attribute(frame, 0), attribute(frame, 1), attribute(frame, 2)
    shape = fields(matrix[5], 2)
    rows, columns = np.intp(shape[0]), np.intp(shape[1])
    y = carray(pointer(out[3]), (columns if axis == 0 else last - first,), np.float32)
    if np.uint32(matrix[2]) == np.uint32(FLOAT32):
        floats = carray(pointer(matrix[3]), (rows * columns,), np.float32)
        if axis == 0:
            sum_rows(carray(pointer(x[3]), (rows,), np.float32), floats, first, last, y.reshape(1, columns))
        else:
            dot_rows(carray(pointer(x[3]), (1, columns), np.float32), floats, first, last, y)
    else:
        width = columns // 2
        words = carray(pointer(matrix[3]), (rows * width,), np.uint32)
        if axis == 0:
            sum_rows(widened(x[3], rows), words, first, last, y.reshape(2, width))
        else:
            values, halves = widened(x[3], columns), np.empty((2, width), np.float32)
            halves[0], halves[1] = values[0::2], values[1::2]
            dot_rows(halves, words, first, last, y)
    return 0


capsule = jax.ffi.pycapsule(vector_product.ctypes)  # type: ignore[no-untyped-call]
jax.ffi.register_ffi_target(TARGET, capsule, platform="cpu")
