"""Compiled loops over weights: one pass that stays in registers is faster than the ten passes of numpy.

Weights are the bits of bfloat16, [R, C]. Row r has its scales in row `group_row[r]` of [S, C / group].
"""

import numpy as np

from tpuconv.encodings.compiled import compiled, compiled_sum
from tpuconv.encodings.kernels import to_bfloat16, to_float32


@compiled  # type: ignore[untyped-decorator]
def absmax(bits: np.ndarray, group_row: np.ndarray, group: int, out: np.ndarray) -> None:
    """Sets `out` [S, C / group], zeros at first, to the largest absolute value of every group, by its bits."""
    rows, columns = bits.shape
    for r in range(rows):
        row, largest = bits[r], out[group_row[r]]
        if group == 1:
            for j in range(columns):
                largest[j] = max(largest[j], row[j] & np.uint16(0x7FFF))
        else:
            for i in range(columns // group):
                largest[i] = max(largest[i], absmax_of_run(row[i * group : (i + 1) * group]))


@compiled  # type: ignore[untyped-decorator]
def absmax_of_run(bits: np.ndarray) -> np.uint16:
    """Returns the largest absolute value of adjacent weights [n], by its bits."""
    most = np.uint16(0)
    for j in range(bits.size):
        most = np.uint16(max(most, np.uint16(bits[j] & np.uint16(0x7FFF))))
    return most


# Steps that can be done for many values at once are one loop, since loops of their own are passes over memory; what is
# looked up is a loop apart, since it cannot. Only sums may be reordered: `reassoc` leaves quotients as IEEE has them.


@compiled_sum  # type: ignore[untyped-decorator]
def encode_integers(
    bits: np.ndarray, scales: np.ndarray, least: np.float32, most: np.float32, qvalues: np.ndarray
) -> tuple[np.float32, np.float32]:
    """Fills `qvalues` [C] of a row of values [C] with the scales `scales` [C].

    Returns:
        The sum of the squares of the values, and of the rounding errors.
    """
    signal, noise = np.float32(0), np.float32(0)
    for j in range(bits.size):
        value, scale = to_float32(bits[j]), scales[j]
        quotient = value / scale
        qvalue = max(min(np.rint(to_float32(to_bfloat16(quotient))), most), least)
        qvalues[j] = np.uint8(np.int8(np.int32(qvalue)))
        lost = (qvalue - quotient) * scale
        signal += value * value
        noise += lost * lost
    return signal, noise


@compiled_sum  # type: ignore[untyped-decorator]
def encode_by_tables(
    bits: np.ndarray, scales: np.ndarray, qvalue_table: np.ndarray, value_table: np.ndarray, qvalues: np.ndarray
) -> tuple[np.float32, np.float32]:
    """As `encode_integers`, by tables: see `encode`."""
    quotients, decoded = np.empty(bits.size, np.uint16), np.empty(bits.size, np.float32)
    for j in range(bits.size):
        quotients[j] = to_bfloat16(to_float32(bits[j]) / scales[j])
    for j in range(bits.size):
        qvalues[j] = qvalue_table[quotients[j]]
    for j in range(bits.size):
        decoded[j] = value_table[qvalues[j]]
    signal, noise = np.float32(0), np.float32(0)
    for j in range(bits.size):
        value, scale = to_float32(bits[j]), scales[j]
        lost = (decoded[j] - value / scale) * scale
        signal += value * value
        noise += lost * lost
    return signal, noise


@compiled  # type: ignore[untyped-decorator]
def count_clipped(bits: np.ndarray, scales: np.ndarray, bound: np.float32) -> np.int32:
    """Returns the number of weights of a row [C] that are larger than `bound` times their scales [C]."""
    count = np.int32(0)
    for j in range(bits.size):
        count = np.int32(count + np.int32(abs(to_float32(bits[j]) / scales[j]) > bound))
    return count


@compiled  # type: ignore[untyped-decorator]
def encode(
    bits: np.ndarray,
    group_row: np.ndarray,
    group: int,
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
        row_scales = scales[group_row[r]]
        if group > 1:
            for i in range(columns // group):
                spread[i * group : (i + 1) * group] = row_scales[i]
            row_scales = spread
        if integers:
            a, b = encode_integers(bits[r], row_scales, least, most, qvalues[r])
        else:
            a, b = encode_by_tables(bits[r], row_scales, qvalue_table, value_table, qvalues[r])
        signal, noise = signal + a, noise + b
        if largest < np.inf:
            clipped += count_clipped(bits[r], row_scales, largest)
    return signal, noise, clipped
