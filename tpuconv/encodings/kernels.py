"""Compiled loops: decoding by tables, which `tpuconv.encodings.decode` imports when it is first needed, and the bits of
bfloat16: numpy has no such type, and ml_dtypes converts number after number."""

import numpy as np

from tpuconv.encodings.compiled import compiled


@compiled  # type: ignore[untyped-decorator]
def look_up(qvalues: np.ndarray, tables: np.ndarray, start: int, columns: int, width: int, out: np.ndarray) -> None:
    """Looks up each quantized value in the table of its block.

    Args:
        qvalues: [bytes] of quantized values: one in a byte, or two if K is 16, the first in the low half.
        tables: [S, B, K] the bits of K numbers for each of B blocks of `width` columns; one table row for each row of
            values, or S = 1 for all rows. K is 256 or 16.
        start: number of the first value within the first row, where `qvalues` begins.
        columns: number of values in a row.
        width: number of columns in a block.
        out: flat, filled with the bits that were found.
    """
    halves = tables.shape[2] == 16
    done = 0
    while done < out.size:
        row, column = (start + done) // columns, (start + done) % columns
        row_tables = tables[min(row, tables.shape[0] - 1)]
        end = min(columns, column + out.size - done)
        while column < end:
            block = column // width
            n = min(end, (block + 1) * width) - column
            table, part = row_tables[block], out[done : done + n]
            if halves:
                for i in range(n):
                    byte, half = (done + i) >> 1, (done + i) & 1
                    part[i] = table[(qvalues[byte] >> np.uint8(4 * half)) & np.uint8(15)]
            else:
                bytes_ = qvalues[done : done + n]
                for i in range(n):
                    part[i] = table[bytes_[i]]
            done += n
            column += n


@compiled  # type: ignore[untyped-decorator]
def to_float32(bits: np.uint16) -> np.float32:
    """Returns the number that the bits of a bfloat16 stand for."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@compiled  # type: ignore[untyped-decorator]
def to_bfloat16(value: np.float32) -> np.uint16:
    """Returns the bits of the nearest bfloat16; the even one if two are equally near."""
    wide = np.float32(value).view(np.uint32)
    return np.uint16((wide + np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
