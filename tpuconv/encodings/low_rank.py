"""The product of an adapter's matrices, its sum with weights, and the norms of rows, as compiled loops.
`tpuconv.encodings.adapted` imports them when they are first needed."""

import numpy as np

from tpuconv.encodings.compiled import compiled, compiled_fused
from tpuconv.encodings.kernels import to_bfloat16, to_float32

COLUMNS_AT_ONCE = 512
"""The columns of the product that are computed at once: they take 32 KB for 16 rows of the right matrix."""
NAN = np.uint16(0x7FC0)
"""NaN in bfloat16."""
FLOAT32_LANES = 8
"""Sums that PyTorch adds up side by side on a CPU with AVX2."""


@compiled_fused  # type: ignore[untyped-decorator]
def multiply_row(left: np.ndarray, right: np.ndarray, start: int, out: np.ndarray) -> None:
    """Fills `out` [n] with left [R] times n columns of right [R, columns] from `start`, all in float32. Each sum goes
    in the order of R: the result does not depend on what is computed together, and equals PyTorch on a CPU."""
    stop, whole = start + out.size, left.size - left.size % 4
    out[:] = np.float32(0)
    for k in range(0, whole, 4):  # four products at a time stay in registers
        a, b, c, d = left[k], left[k + 1], left[k + 2], left[k + 3]
        v, w, x, y = right[k, start:stop], right[k + 1, start:stop], right[k + 2, start:stop], right[k + 3, start:stop]
        for j in range(out.size):
            out[j] = out[j] + a * v[j] + b * w[j] + c * x[j] + d * y[j]
    for k in range(whole, left.size):
        factor, values = left[k], right[k, start:stop]
        for j in range(out.size):
            out[j] += factor * values[j]


@compiled  # type: ignore[untyped-decorator]
def multiply(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """Fills `out` [rows, columns] with left [rows, R] times right [R, columns]; see `multiply_row`."""
    for start in range(0, out.shape[1], COLUMNS_AT_ONCE):
        for i in range(left.shape[0]):
            multiply_row(left[i], right, start, out[i, start : start + COLUMNS_AT_ONCE])


@compiled  # type: ignore[untyped-decorator]
def add_scaled_to_bfloat16(values: np.ndarray, factor: np.float32, bits: np.ndarray) -> None:
    """Adds values [n] times a factor, in float32, to numbers whose bits in bfloat16 are `bits` [n], and rounds the
    sums. The loop begins at 0 in both arrays: numba vectorizes no index that is a sum, since that may be negative."""
    for j in range(bits.size):
        total = to_float32(bits[j]) + values[j] * factor
        bits[j] = NAN if np.isnan(total) else to_bfloat16(total)


@compiled  # type: ignore[untyped-decorator]
def add_product_to_bfloat16(
    left: np.ndarray, right: np.ndarray, factor: np.float32, start: int, bits: np.ndarray
) -> None:
    """Adds a part of left [rows, R] times right [R, columns] times a factor to `bits`; see `add_scaled_to_bfloat16`.
    The part begins at `start`, rows being counted through."""
    columns, place = right.shape[1], 0
    part = np.empty(COLUMNS_AT_ONCE, np.float32)
    while place < bits.size:
        row, column = (start + place) // columns, (start + place) % columns
        count = min(COLUMNS_AT_ONCE, columns - column, bits.size - place)
        multiply_row(left[row], right, column, part[:count])
        add_scaled_to_bfloat16(part[:count], factor, bits[place : place + count])
        place += count


@compiled  # type: ignore[untyped-decorator]
def row_norms(values: np.ndarray, out: np.ndarray) -> None:
    """Fills `out` [rows] with the Euclidean norms of `values` [rows, columns], in float32, as PyTorch computes them."""
    columns = values.shape[1]
    whole = columns - columns % FLOAT32_LANES
    sums = np.empty(FLOAT32_LANES, np.float32)
    for i in range(values.shape[0]):
        row = values[i]
        sums[:] = np.float32(0)
        for start in range(0, whole, FLOAT32_LANES):
            for lane in range(FLOAT32_LANES):
                sums[lane] += row[start + lane] * row[start + lane]
        total = sums[0]
        for lane in range(1, FLOAT32_LANES):
            total += sums[lane]
        for j in range(whole, columns):
            total += row[j] * row[j]
        out[i] = np.sqrt(total)
