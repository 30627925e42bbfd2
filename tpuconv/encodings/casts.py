"""Casts of weights to another float dtype. A finite value never becomes infinite in silence."""

from typing import Any

import ml_dtypes
import numpy as np

from tpuconv.errors import SourceError
from tpuconv.storage.disk import aligned_array


def largest(dtype: "np.dtype[Any]") -> float:
    """Returns the largest finite number of a float dtype."""
    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def overflows(before: np.ndarray, after: np.ndarray) -> bool:
    """Returns True if a cast or another change has made a finite value infinite or NaN."""
    if before.dtype == after.dtype and np.shares_memory(before, after):
        return False
    wrong = ~np.isfinite(after)
    return bool(wrong.any()) and bool(np.isfinite(before[wrong]).any())


def too_large(name: str, dtype: "np.dtype[Any]") -> SourceError:
    """Returns the error for a parameter whose values a dtype cannot hold."""
    return SourceError(
        f"{name} has finite values that {dtype.name} cannot hold: its largest number is {largest(dtype):g}",
        hint='give `dtype="float32"`',
    )


def check_cast(name: str, before: np.ndarray, after: np.ndarray) -> None:
    """Raises SourceError if a cast of a parameter's values has made finite ones infinite."""
    if after.itemsize <= before.itemsize and overflows(before, after):
        raise too_large(name, after.dtype)


def cast(values: np.ndarray, dtype: "np.dtype[Any]") -> tuple[np.ndarray, bool]:
    """Returns the values in a dtype, and whether finite ones became infinite. Without a copy if they have the dtype."""
    if values.dtype == dtype:
        return values, False
    out = aligned_array(values.shape, dtype)  # which a CPU takes without another copy
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is returned
        np.copyto(out, values, casting="unsafe")
    return out, out.dtype.itemsize <= values.dtype.itemsize and overflows(values, out)
