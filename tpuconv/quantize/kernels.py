"""The loops over weights: compiled, since one pass that stays in a register beats ten that numpy makes.

Values are the bits of bfloat16, [R, C]; row r has its scales in row `tile_row[r]` of [S, C / tile].
"""

from typing import Any

import numba
import numpy as np

compiled = numba.njit(nogil=True, cache=True, error_model="numpy")
summing = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc"})


@compiled  # type: ignore[untyped-decorator]
def absmax(bits: np.ndarray, tile_row: np.ndarray, tile: int, out: np.ndarray) -> None:
    """The largest absolute value of every tile, by its bits, into `out`, which begins as zeros."""
    rows, columns = bits.shape
    for r in range(rows):
        own, largest = bits[r], out[tile_row[r]]
        if tile == 1:
            for j in range(columns):
                largest[j] = max(largest[j], own[j] & np.uint16(0x7FFF))
        else:
            for i in range(columns // tile):
                most = np.uint16(0)
                for j in range(i * tile, (i + 1) * tile):
                    most = max(most, own[j] & np.uint16(0x7FFF))
                largest[i] = max(largest[i], most)


@compiled  # type: ignore[untyped-decorator]
def quotients(bits: np.ndarray, scales: np.ndarray, tile: int, wide: np.ndarray, own: np.ndarray) -> None:
    """Of one row: the values by their scales, in float32, whose bits are `wide`; and the scale of each value."""
    floats = wide.view(np.float32)
    columns = bits.size
    if tile == 1:
        own[:] = scales
    else:
        for i in range(columns // tile):
            own[i * tile : (i + 1) * tile] = scales[i]
    for j in range(columns):
        wide[j] = np.uint32(bits[j]) << np.uint32(16)
    for j in range(columns):
        floats[j] /= own[j]


@compiled  # type: ignore[untyped-decorator]
def rounded(wide: np.uint32) -> np.uint32:
    """The bits of a bfloat16 nearest to a float32 with these bits; even where two are as near."""
    return (wide + np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@summing  # type: ignore[untyped-decorator]
def figures(wide: np.ndarray, own: np.ndarray, decoded: np.ndarray, bound: float) -> Any:
    """Of one row: the sums of the squares of its values and of what is lost of them, and how many are clipped."""
    floats = wide.view(np.float32)
    signal, noise, clipped = np.float32(0), np.float32(0), 0
    for j in range(floats.size):
        value, lost = floats[j] * own[j], (decoded[j] - floats[j]) * own[j]
        signal += value * value
        noise += lost * lost
        clipped += abs(floats[j]) > bound
    return signal, noise, clipped


@compiled  # type: ignore[untyped-decorator]
def encode(
    bits: np.ndarray,
    tile_row: np.ndarray,
    tile: int,
    scales: np.ndarray,
    integers: int,
    code_of: np.ndarray,
    value_of: np.ndarray,
    bound: float,
    codes: np.ndarray,
) -> tuple[float, float, int]:
    """Fills `codes`; returns the sums of `figures`. Codes are integers from -`integers` to `integers` - 1, or where
    that is 0 those of the tables: of each bfloat16 quotient [65536], and the value of each code [256]."""
    rows, columns = bits.shape
    wide, own = np.empty(columns, np.uint32), np.empty(columns, np.float32)
    decoded = np.empty(columns, np.float32)
    nearest = np.empty(columns, np.uint32)
    floats = nearest.view(np.float32)
    signal, noise, clipped = 0.0, 0.0, 0
    least, most = np.float32(-integers), np.float32(integers - 1)
    for r in range(rows):
        quotients(bits[r], scales[tile_row[r]], tile, wide, own)
        code = codes[r]
        if integers:
            for j in range(columns):
                nearest[j] = rounded(wide[j]) << np.uint32(16)
            for j in range(columns):
                decoded[j] = max(min(np.rint(floats[j]), most), least)
            for j in range(columns):
                code[j] = np.uint8(np.int8(np.int32(decoded[j])))
        else:
            for j in range(columns):
                code[j] = code_of[rounded(wide[j])]
            for j in range(columns):
                decoded[j] = value_of[code[j]]
        a, b, c = figures(wide, own, decoded, bound)
        signal, noise, clipped = signal + a, noise + b, clipped + c
    return signal, noise, clipped
