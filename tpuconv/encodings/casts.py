"""Casts of weights to another float dtype, and searches for NaN and infinite values. A finite value never becomes
infinite in silence."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from tpuconv.errors import SourceError
from tpuconv.storage.disk import aligned_array

CAN_BE_NAN = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn")
"""Stored dtypes that have NaN and are searched for it. Other quantized values have none."""


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


def all_finite(bits: np.ndarray, dtype: np.dtype[Any]) -> bool:
    """Returns True if no element is infinite or NaN, from the bit patterns of a dtype; those that are not in
    `CAN_BE_NAN` are not searched.

    Such elements have the pattern of infinity (of NaN, if the dtype has no infinity) or a larger one, of either sign.
    So the largest signed and the largest unsigned pattern decide: two passes at the speed of memory, without a copy.
    """
    if dtype.name not in CAN_BE_NAN or not bits.size:
        return True
    infinity = int(np.array(np.inf, dtype).view(bits.dtype))
    sign = 1 << (8 * dtype.itemsize - 1)
    return int(bits.view(f"i{dtype.itemsize}").max()) < infinity and int(bits.max()) < (sign | infinity)


def refuse_nonfinite(name: str, values: np.ndarray, box: Sequence[slice], hint: str) -> None:
    """Raises SourceError if a box of an array holds NaN or infinite values. It names the first one."""
    if all_finite(values.view(f"u{values.itemsize}"), values.dtype):
        return
    first = tuple(int(i) for i in np.argwhere(~np.isfinite(values.astype(np.float64)))[0])
    place = [i + part.start for i, part in zip(first, box, strict=True)]
    raise values_not_finite(
        name, [f"the first is {name}{place}, which is {values[first]} in {values.dtype.name}"], hint
    )


def values_not_finite(name: str, details: Sequence[str], hint: str) -> SourceError:
    """Returns the error for an array that holds NaN or infinite values."""
    return SourceError(f"{name} is not finite: there are NaN or infinite values", details=list(details), hint=hint)
