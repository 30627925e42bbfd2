"""The product of an adapter's matrices, as a compiled loop. `tpuconv.encodings.adapted` imports it when it is first
needed."""

import numpy as np

from tpuconv.compiled import compiled_fused


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
