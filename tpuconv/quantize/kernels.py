"""The loops over weights: compiled, since one pass that stays in a register beats ten that numpy makes.

Values are the bits of bfloat16, [R, C]; row r has its scales in row `tile_row[r]` of [S, C / tile].
"""

import numpy as np

from tpuconv.compiled import compiled, compiled_sum


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
                largest[i] = max(largest[i], absmax_of_run(own[i * tile : (i + 1) * tile]))


@compiled  # type: ignore[untyped-decorator]
def absmax_of_run(bits: np.ndarray) -> np.uint16:
    """The same of values side by side."""
    most = np.uint16(0)
    for j in range(bits.size):
        most = np.uint16(max(most, np.uint16(bits[j] & np.uint16(0x7FFF))))
    return most


@compiled  # type: ignore[untyped-decorator]
def to_float32(bits: np.uint16) -> np.float32:
    """The value of a bfloat16 by its bits."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@compiled  # type: ignore[untyped-decorator]
def to_bfloat16(value: np.float32) -> np.uint16:
    """The bits of the bfloat16 nearest to a float32; even where two are as near."""
    wide = np.float32(value).view(np.uint32)
    return np.uint16((wide + np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


# Steps that can be done for many values at once are one loop, since loops of their own are passes over memory; what is
# looked up is a loop apart, since it cannot. Only sums may be reordered: `reassoc` leaves quotients as IEEE has them.


@compiled_sum  # type: ignore[untyped-decorator]
def encode_integers(
    bits: np.ndarray, own: np.ndarray, least: np.float32, most: np.float32, qvalues: np.ndarray
) -> tuple[np.float32, np.float32]:
    """Fills `qvalues` [C] of a row of values [C] with the scales `scales` [C].

    Returns:
        The sum of the squares of the values, and of the rounding errors.
    """
    signal, noise = np.float32(0), np.float32(0)
    for j in range(bits.size):
        value, scale = to_float32(bits[j]), own[j]
        quotient = value / scale
        code = max(min(np.rint(to_float32(to_bfloat16(quotient))), most), least)
        qvalues[j] = np.uint8(np.int8(np.int32(code)))
        lost = (code - quotient) * scale
        signal += value * value
        noise += lost * lost
    return signal, noise


@compiled_sum  # type: ignore[untyped-decorator]
def encode_by_tables(
    bits: np.ndarray, own: np.ndarray, qvalue_table: np.ndarray, value_table: np.ndarray, qvalues: np.ndarray
) -> tuple[np.float32, np.float32]:
    """The same by tables."""
    quotients, decoded = np.empty(bits.size, np.uint16), np.empty(bits.size, np.float32)
    for j in range(bits.size):
        quotients[j] = to_bfloat16(to_float32(bits[j]) / own[j])
    for j in range(bits.size):
        qvalues[j] = qvalue_table[quotients[j]]
    for j in range(bits.size):
        decoded[j] = value_table[qvalues[j]]
    signal, noise = np.float32(0), np.float32(0)
    for j in range(bits.size):
        value, scale = to_float32(bits[j]), own[j]
        lost = (decoded[j] - value / scale) * scale
        signal += value * value
        noise += lost * lost
    return signal, noise


@compiled  # type: ignore[untyped-decorator]
def count_clipped(bits: np.ndarray, own: np.ndarray, bound: np.float32) -> np.int32:
    """How many values of a row are larger than `bound` times their scales."""
    count = np.int32(0)
    for j in range(bits.size):
        count = np.int32(count + np.int32(abs(to_float32(bits[j]) / own[j]) > bound))
    return count


@compiled  # type: ignore[untyped-decorator]
def encode(
    bits: np.ndarray,
    tile_row: np.ndarray,
    tile: int,
    scales: np.ndarray,
    integers: int,
    qvalue_table: np.ndarray,
    value_table: np.ndarray,
    bound: float,
    qvalues: np.ndarray,
) -> tuple[float, float, int]:
    """Fills `qvalues` [R, C].

    Quantized values are the integers from -`integers` to `integers` - 1; if that is 0, they are looked up:
    `qvalue_table` [65536] holds them for each bfloat16 quotient, `value_table` [256] the number that each stands for.

    Returns:
        The sums of the squares of the values and of the rounding errors, and how many values are clipped: larger than
        `bound` times their scales.
    """
    rows, columns = bits.shape
    spread = np.empty(columns, np.float32)
    signal, noise, clipped = 0.0, 0.0, 0
    least, most, largest = np.float32(-integers), np.float32(integers - 1), np.float32(bound)
    for r in range(rows):
        own = scales[tile_row[r]]
        if tile > 1:
            for i in range(columns // tile):
                spread[i * tile : (i + 1) * tile] = own[i]
            own = spread
        if integers:
            a, b = encode_integers(bits[r], own, least, most, qvalues[r])
        else:
            a, b = encode_by_tables(bits[r], own, qvalue_table, value_table, qvalues[r])
        signal, noise = signal + a, noise + b
        if largest < np.inf:
            clipped += count_clipped(bits[r], own, largest)
    return signal, noise, clipped
