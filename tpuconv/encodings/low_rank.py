"""The product of an adapter's matrices, and the norms of rows, as compiled loops. `tpuconv.encodings.adapted` imports
them when they are first needed."""

import numpy as np

from tpuconv.compiled import compiled, compiled_fused

FLOAT32_LANES = 8
"""Sums that PyTorch adds up side by side on a CPU with AVX2."""


@compiled_fused  # type: ignore[untyped-decorator]
def multiply(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """Fills `out` [rows, columns] with left [rows, R] times right [R, columns], all in float32. Each sum goes in the
    order of R: the result does not depend on which rows are computed together, and is that of PyTorch on a CPU."""
    for i in range(left.shape[0]):
        row = out[i]
        row[:] = np.float32(0)
        for k in range(left.shape[1]):
            factor, values = left[i, k], right[k]
            for j in range(row.size):
                row[j] += factor * values[j]


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
