"""The loops over bytes that numpy has not: compiled, without the interpreter's lock, so that threads run side by side.

Importing numba takes half a second: whoever calls these imports them then. What was compiled is kept on the disk.
"""

from contextlib import suppress

import numba
import numpy as np

from tpuconv import private

# With the first kernel numba imports all that it can compile, and looks for scipy's BLAS: 0.4 s. No kernel here
# multiplies matrices, and where another one does, numba looks again.
with suppress(ImportError, AttributeError):
    _linalg = private.numba_linalg
    _ensure_blas, _linalg.ensure_blas = _linalg.ensure_blas, lambda: None
    try:
        _ = private.numba_arraymath
    finally:
        _linalg.ensure_blas = _ensure_blas

compiled = numba.njit(nogil=True, cache=True, error_model="numpy")

WIDE = 64
"""Words of each row that are transposed together: eight lines of the cache, so that it fetches ahead."""
HIGH = 256
"""Rows of a tile: with WIDE, 128 kB, which stay in the second-level cache."""


@compiled  # type: ignore[untyped-decorator]
def look_up(codes: np.ndarray, tables: np.ndarray, at: int, columns: int, width: int, out: np.ndarray) -> None:
    """Values of codes, each from the table of its block.

    `tables` [S, B, K] holds the bits of K values for each of B blocks of `width` columns, and is for the rows one by
    one, or with S = 1 for all; K is 256, or 16 of codes that lie two in a byte, the first one in the low half. `out` is
    flat; its first value is number `at` of the first row, and a byte of `codes` [bytes] begins there.
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
                    part[i] = table[(codes[byte] >> np.uint8(4 * half)) & np.uint8(15)]
            else:
                bytes_ = codes[done : done + n]
                for i in range(n):
                    part[i] = table[bytes_[i]]
            done += n
            column += n


@compiled  # type: ignore[untyped-decorator]
def exchange(a: np.ndarray, b: np.ndarray, low: np.uint64, shift: np.uint64) -> None:
    """Of two rows of words: what lies high in those of `a` changes places with what lies low in those of `b`."""
    for i in range(a.size):
        x, y = a[i], b[i]
        a[i] = (x & low) | ((y & low) << shift)
        b[i] = ((x >> shift) & low) | (y & ~low)


@compiled  # type: ignore[untyped-decorator]
def transpose(
    rows: np.ndarray, at: np.ndarray, pitch: int, out: np.ndarray, to: np.ndarray, height: int, width: int, per: int
) -> None:
    """Transposes matrices of `height` rows and `width` columns. A word of 64 bits holds `per` elements of a row; row i
    of matrix k begins at word `at[k] + i * pitch` of `rows`. Its transposed rows, one after the other, go to `out` from
    byte `to[k]` on. Both sizes are multiples of `per`.

    A tile is copied first, its rows an odd number of words apart: where it lies they may be a multiple of 4 kB apart,
    which a cache keeps in the same few places. Squares of `per` rows and one word are transposed by exchanging halves,
    then quarters of words (Warren, Hacker's Delight, 7-3), many side by side.
    """
    lows = (np.uint64(0x00000000FFFFFFFF), np.uint64(0x0000FFFF0000FFFF), np.uint64(0x00FF00FF00FF00FF))
    tile = np.empty((per, HIGH // per, WIDE + 1), np.uint64)
    for matrix in range(at.size):
        words = out[to[matrix] : to[matrix] + 8 * (height * width // per)].view(np.uint64)
        for i0 in range(0, width // per, WIDE):
            wide = min(WIDE, width // per - i0)
            for j0 in range(0, height, HIGH):
                squares = min(HIGH, height - j0) // per
                for k in range(squares):
                    for x in range(per):
                        first = at[matrix] + (j0 + per * k + x) * pitch + i0
                        source, staged = rows[first : first + wide], tile[x, k]
                        for i in range(wide):
                            staged[i] = source[i]
                    half, stage = per // 2, 0
                    while half > 0:
                        for x in range(per):
                            if x & half == 0:
                                shift = np.uint64(64 * half // per)
                                exchange(tile[x, k, :wide], tile[x + half, k, :wide], lows[stage], shift)
                        half, stage = half // 2, stage + 1
                for i in range(wide):
                    for x in range(per):
                        first = ((per * (i0 + i) + x) * height + j0) // per
                        target = words[first : first + squares]
                        for k in range(squares):
                            target[k] = tile[x, k, i]
