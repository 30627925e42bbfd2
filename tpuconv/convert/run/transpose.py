"""Transposing matrices in memory, by a compiled loop. `strided` imports it when it is first needed."""

import numpy as np

from tpuconv.encodings.compiled import compiled

PANEL_WORDS = 64
"""Words of each row that are transposed together: eight cache lines, so that the processor fetches ahead."""
PANEL_ROWS = 256
"""Rows of a tile: with TILE_WORDS, 128 kB, which stay in the second-level cache."""


@compiled  # type: ignore[untyped-decorator]
def exchange_halves(a: np.ndarray, b: np.ndarray, low: np.uint64, shift: np.uint64) -> None:
    """Exchanges the high parts of the words of `a` with the low parts of the words of `b`, for two rows [words]."""
    for i in range(a.size):
        x, y = a[i], b[i]
        a[i] = (x & low) | ((y & low) << shift)
        b[i] = ((x >> shift) & low) | (y & ~low)


@compiled  # type: ignore[untyped-decorator]
def transpose(
    rows: np.ndarray,
    starts: np.ndarray,
    pitch: int,
    out: np.ndarray,
    out_starts: np.ndarray,
    out_pitch: int,
    height: int,
    width: int,
    per: int,
) -> None:
    """Transposes matrices of `height` rows and `width` columns.

    Args:
        rows: words of 64 bits, each of `per` elements of a row. Row i of matrix k begins at word `starts[k] + i *
            pitch`.
        starts: [matrices], where each begins.
        pitch: words from one row to the next.
        out: bytes. The transposed rows of matrix k begin at byte `out_starts[k]`.
        out_starts: [matrices].
        out_pitch: words from one transposed row to the next.
        height, width: multiples of `per`.
        per: elements in a word.

    A panel is copied first, its rows an odd number of words apart: in place they may be a multiple of 4 kB apart, which
    a cache keeps in the same few lines. Squares of `per` rows and one word are transposed by exchanging halves, then
    quarters of words (Warren, Hacker's Delight, 7-3), many side by side.
    """
    lows = (np.uint64(0x00000000FFFFFFFF), np.uint64(0x0000FFFF0000FFFF), np.uint64(0x00FF00FF00FF00FF))
    tile = np.empty((per, PANEL_ROWS // per, PANEL_WORDS + 1), np.uint64)
    for matrix in range(starts.size):
        length = 8 * ((width - 1) * out_pitch + height // per)
        words = out[out_starts[matrix] : out_starts[matrix] + length].view(np.uint64)
        for i0 in range(0, width // per, PANEL_WORDS):
            wide = min(PANEL_WORDS, width // per - i0)
            for j0 in range(0, height, PANEL_ROWS):
                squares = min(PANEL_ROWS, height - j0) // per
                for k in range(squares):
                    for x in range(per):
                        first = starts[matrix] + (j0 + per * k + x) * pitch + i0
                        source, staged = rows[first : first + wide], tile[x, k]
                        for i in range(wide):
                            staged[i] = source[i]
                    half, stage = per // 2, 0
                    while half > 0:
                        for x in range(per):
                            if x & half == 0:
                                shift = np.uint64(64 * half // per)
                                exchange_halves(tile[x, k, :wide], tile[x + half, k, :wide], lows[stage], shift)
                        half, stage = half // 2, stage + 1
                for i in range(wide):
                    for x in range(per):
                        first = (per * (i0 + i) + x) * out_pitch + j0 // per
                        target = words[first : first + squares]
                        for k in range(squares):
                            target[k] = tile[x, k, i]
