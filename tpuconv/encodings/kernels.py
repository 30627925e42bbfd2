"""Decoding by tables, as a compiled loop. `tpuconv.encodings.decode` imports it when it is first needed."""

import numpy as np

from tpuconv.compiled import compiled


@compiled  # type: ignore[untyped-decorator]
def look_up(qvalues: np.ndarray, tables: np.ndarray, at: int, columns: int, width: int, out: np.ndarray) -> None:
    """Values of codes, each from the table of its block.

    `tables` [S, B, K] holds the bits of K values for each of B blocks of `width` columns, and is for the rows one by
    one, or with S = 1 for all; K is 256, or 16 of codes that lie two in a byte, the first one in the low half. `out` is
    flat; its first value is number `at` of the first row, and a byte of `qvalues` [bytes] begins there.
    """
    halves = tables.shape[2] == 16
    done = 0
    while done < out.size:
        row, column = (at + done) // columns, (at + done) % columns
        own = tables[min(row, tables.shape[0] - 1)]
        end = min(columns, column + out.size - done)
        while column < end:
            block = column // width
            n = min(end, (block + 1) * width) - column
            table, part = own[block], out[done : done + n]
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
