"""The scales of groups by the least squared error of their weights, without data: the calibration method `mse`.

Each group takes the best of fixed multiples of the scale that its largest absolute value gives. An integer type has one
value more below zero than above it, so a negative scale can fit a group better: both signs are tried.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tpuconv.encodings.compiled import compiled_sum
from tpuconv.encodings.kernels import to_bfloat16
from tpuconv.encodings.passthrough import BF16

SCALE_FACTORS = np.linspace(0.5, 1.1, 25, dtype=np.float32)
"""Multiples of the scale of the largest absolute value, 1 among them."""


def best_scales(
    values: np.ndarray,
    group_row: np.ndarray,
    group: int,
    counts: Sequence[int],
    *,
    bound: float,
    signed: bool,
    grid: tuple[int, np.ndarray],
    dtype: np.dtype[Any],
) -> np.ndarray:
    """Returns the scales [S, C / group] in float32, which `dtype` can hold. Groups of zeros have the scale 1.

    Args:
        values: the weights [R, C] in float32.
        group_row: the row of the scales of each row.
        group: adjacent weights of a row that share a scale.
        counts: the shape of the scales, S and C / group.
        bound: the quotient of the largest absolute value and its scale, for a factor of 1.
        signed: whether negative scales are tried.
        grid: the integers from -n to n - 1 as n, or 0 and the number that each bfloat16 quotient is rounded to [65536].
        dtype: the dtype of stored scales.
    """
    largest = np.zeros(counts, np.float32)
    _largest(values, group_row, group, largest)
    best = np.full(counts, np.inf, np.float32)
    scales = np.zeros(counts, np.float32)
    for factor in (*SCALE_FACTORS[::-1], *(-SCALE_FACTORS[::-1] if signed else ())):
        tried = (largest * (factor / np.float32(bound))).astype(dtype).astype(np.float32)
        errors = np.zeros(counts, np.float32)
        _add_errors(values, group_row, group, np.where(tried == 0, np.float32(1), tried), *grid, errors)
        better = (errors < best) & (tried != 0)
        np.copyto(best, errors, where=better)
        np.copyto(scales, tried, where=better)
    return np.where(largest == 0, np.float32(1), scales)


def encode_with_least_error(
    values: np.ndarray,
    group_row: np.ndarray,
    group: int,
    counts: Sequence[int],
    *,
    bound: float,
    integers: int,
    tables: tuple[np.ndarray, np.ndarray],
    dtype: np.dtype[Any],
) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns the bytes of the quantized values [R, C], their scales [S, C / group], and how many values are clipped.
    For the arguments see `best_scales`.

    Args:
        integers: n for the integers from -n to n - 1; 0 if values are looked up.
        tables: the byte of each bfloat16 quotient [65536], and the number that each byte stands for [256].
    """
    qbytes, numbers = tables
    grid = integers, numbers if integers else numbers[qbytes]
    signed = bool(integers)
    scales = best_scales(values, group_row, group, counts, bound=bound, signed=signed, grid=grid, dtype=dtype)
    with np.errstate(all="ignore"):  # the encoder finds scales of 0
        quotients = values / np.repeat(scales[group_row], group, 1)
    clipped = int(np.sum(np.abs(quotients) > bound))
    if integers:
        rounded = np.clip(np.rint(np.nan_to_num(quotients)), -integers, integers - 1)
        return rounded.astype(np.int8).view(np.uint8), scales, clipped
    return qbytes[quotients.astype(BF16).view(np.uint16)], scales, clipped


@compiled_sum  # type: ignore[untyped-decorator]
def _largest(values: np.ndarray, group_row: np.ndarray, group: int, out: np.ndarray) -> None:
    """Raises `out` [S, C / group] to the largest absolute value of each group."""
    rows, columns = values.shape
    for r in range(rows):
        row, largest = values[r], out[group_row[r]]
        for i in range(columns // group):
            most = largest[i]
            for j in range(i * group, (i + 1) * group):
                most = max(most, abs(row[j]))
            largest[i] = most


@compiled_sum  # type: ignore[untyped-decorator]
def _add_errors(
    values: np.ndarray,
    group_row: np.ndarray,
    group: int,
    scales: np.ndarray,
    integers: int,
    table: np.ndarray,
    errors: np.ndarray,
) -> None:
    """Adds the squared error of each weight with the scales of its group to `errors` [S, C / group]."""
    rows, columns = values.shape
    least, most = np.float32(-integers), np.float32(integers - 1)
    lost = np.empty(columns, np.float32)
    for r in range(rows):
        row, row_scales, row_errors = values[r], scales[group_row[r]], errors[group_row[r]]
        if integers and group == 1:
            for j in range(columns):
                error = max(min(np.rint(row[j] / row_scales[j]), most), least) * row_scales[j] - row[j]
                row_errors[j] += error * error
            continue
        for i in range(columns // group):
            scale, total = row_scales[i], np.float32(0)
            for j in range(i * group, (i + 1) * group):
                quotient = row[j] / scale
                if integers:
                    lost[j] = max(min(np.rint(quotient), most), least) * scale - row[j]
                else:
                    lost[j] = table[to_bfloat16(quotient)] * scale - row[j]
            for j in range(i * group, (i + 1) * group):
                total += lost[j] * lost[j]
            row_errors[i] += total
