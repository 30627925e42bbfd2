"""The scales of groups by the least squared error of their weights, without data: the calibration method `mse`.

Each group takes the best of fixed multiples of the scale that its largest absolute value gives. An integer type has one
value more below zero than above it, so a negative scale can fit a group better: both signs are tried.

A few groups at a time are copied side by side, and stay in the cache for all multiples. The order of a group's weights
is the order of the parameter's axes, whatever the order of memory: so sums of errors do not depend on it.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from tpuconv.encodings.compiled import compiled, compiled_sum
from tpuconv.encodings.kernels import to_bfloat16

SCALE_FACTORS = np.linspace(0.5, 1.1, 25, dtype=np.float32)
"""Multiples of the scale of the largest absolute value, 1 among them."""

COPIED_WEIGHTS = 1 << 18
"""Weights that are copied at a time, unless a group has more."""


def encode_with_least_error(
    values: np.ndarray,
    group_shape: Sequence[int],
    *,
    bound: float,
    integers: int,
    tables: tuple[np.ndarray, np.ndarray],
    dtype: np.dtype[Any],
) -> tuple[list[np.ndarray], dict[str, float]]:
    """Returns the bytes of the quantized values, their scales in float32, which `dtype` can hold, and statistics to add
    up. Groups of zeros have the scale 1.

    Args:
        values: the weights, in complete groups.
        group_shape: the number of weights along each axis that share a scale.
        bound: the quotient of the largest absolute value and its scale, for a factor of 1.
        integers: n for the integers from -n to n - 1; 0 if values are looked up.
        tables: the byte of each bfloat16 quotient [65536], and the number that each byte stands for [256].
        dtype: the dtype of stored scales.

    Raises:
        FloatingPointError: a weight is infinite or NaN.
    """
    counts = [n // group for n, group in zip(values.shape, group_shape, strict=True)]
    qbytes, scales = np.empty_like(values, np.uint8, subok=False), np.empty(counts, np.float32)
    numbers = tables[1] if integers else tables[1][tables[0]]
    factors = SCALE_FACTORS[::-1] / np.float32(bound)
    sums = np.zeros(3)
    order = sorted(range(values.ndim), key=lambda axis: -abs(values.strides[axis]))
    for box in _boxes(counts, group_shape, order):
        inside = tuple(slice(s.start * g, s.stop * g) for s, g in zip(box, group_shape, strict=True))
        groups = _by_group(values[inside], group_shape).astype(np.float32, order="C").reshape(-1, prod(group_shape))
        largest = np.empty(len(groups), np.float32)
        _largest(groups.view(np.uint32), largest.view(np.uint32))
        if not np.isfinite(largest).all():
            raise FloatingPointError
        tried = (largest[:, None] * factors).astype(dtype).astype(np.float32)
        chosen, encoded = np.where(largest == 0, np.float32(1), np.float32(0)), np.empty(groups.shape, np.uint8)
        _search(groups, tried, integers, numbers, chosen)
        sums += _encode(groups, chosen, integers, *tables, np.float32(bound), encoded)
        scales[box] = chosen.reshape(scales[box].shape)
        places = _by_group(qbytes[inside], group_shape)
        places[...] = encoded.reshape(places.shape)
    statistics = dict(zip(("signal", "noise", "clipped"), sums.tolist(), strict=True))
    return [qbytes, scales], {**statistics, "count": float(values.size)}


def _boxes(counts: Sequence[int], group_shape: Sequence[int], order: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Yields the boxes of scales whose weights are copied at a time; `order` has the axes by their place in memory."""
    steps, size = list(counts), prod(counts) * prod(group_shape)
    for axis in order:
        size //= steps[axis]
        steps[axis] = min(steps[axis], max(1, COPIED_WEIGHTS // size))
        size *= steps[axis]
    for starts in product(*(range(0, n, step) for n, step in zip(counts, steps, strict=True))):
        yield tuple(slice(a, min(a + step, n)) for a, step, n in zip(starts, steps, counts, strict=True))


def _by_group(values: np.ndarray, group_shape: Sequence[int]) -> np.ndarray:
    """Returns a view with the axes of the groups first, and the axes within a group behind them."""
    split = values.reshape([size for n, g in zip(values.shape, group_shape, strict=True) for size in (n // g, g)])
    return split.transpose(*range(0, split.ndim, 2), *range(1, split.ndim, 2))


@compiled  # type: ignore[untyped-decorator]
def _largest(groups: np.ndarray, largest: np.ndarray) -> None:
    """Sets `largest` [G] to the largest absolute value of each of `groups` [G, N], all by their bits."""
    for i in range(len(groups)):
        most = np.uint32(0)
        for j in range(groups.shape[1]):
            most = max(most, groups[i, j] & np.uint32(0x7FFFFFFF))
        largest[i] = most


@compiled_sum  # type: ignore[untyped-decorator]
def _search(groups: np.ndarray, tried: np.ndarray, integers: int, numbers: np.ndarray, scales: np.ndarray) -> None:
    """Sets `scales` [G] to the scale of the least error of each of `groups` [G, N], if there is one but 0. `tried`
    [G, F] are positive; `numbers` [65536] has the number of each bfloat16 quotient, for types without `integers`."""
    lost = np.empty(groups.shape[1], np.float32)
    for i in range(len(groups)):
        least = least_turned = np.float32(np.inf)
        found = turned = np.float32(0)
        for scale in tried[i]:
            if scale == 0:
                continue
            if integers:
                error, error_turned = _errors_of_integers(groups[i], scale, np.float32(integers))
                if error_turned < least_turned:
                    least_turned, turned = error_turned, -scale
            else:
                error = _error_by_numbers(groups[i], scale, numbers, lost)
            if error < least:
                least, found = error, scale
        if least_turned < least:
            found = turned
        if found != 0:
            scales[i] = found


@compiled_sum  # type: ignore[untyped-decorator]
def _errors_of_integers(values: np.ndarray, scale: np.float32, n: np.float32) -> tuple[np.float32, np.float32]:
    """Returns the sums of squared errors of a group with a scale, and with the negative scale: quotients are the same
    but for their sign, so the integers are clipped at the other end."""
    total = turned = np.float32(0)
    for j in range(values.size):
        value = values[j]
        integer = np.rint(value / scale)
        lost = max(min(integer, n - np.float32(1)), -n) * scale - value
        total += lost * lost
        lost = max(min(integer, n), np.float32(1) - n) * scale - value
        turned += lost * lost
    return total, turned


@compiled_sum  # type: ignore[untyped-decorator]
def _error_by_numbers(values: np.ndarray, scale: np.float32, numbers: np.ndarray, lost: np.ndarray) -> np.float32:
    """Returns the sum of squared errors of a group, whose quotients are looked up. `lost` [N] is filled with errors."""
    total = np.float32(0)
    for j in range(values.size):
        lost[j] = numbers[to_bfloat16(values[j] / scale)] * scale - values[j]
    for j in range(values.size):
        total += lost[j] * lost[j]
    return total


@compiled_sum  # type: ignore[untyped-decorator]
def _encode(
    groups: np.ndarray,
    scales: np.ndarray,
    integers: int,
    qbyte_table: np.ndarray,
    value_table: np.ndarray,
    bound: np.float32,
    qbytes: np.ndarray,
) -> tuple[float, float, float]:
    """Fills `qbytes` [G, N], and returns the sums of the squares of values and of errors, and how many are clipped."""
    n, signal, noise, clipped = np.float32(integers), 0.0, 0.0, 0
    for i in range(len(groups)):
        group, scale = groups[i], scales[i]
        power = error = np.float32(0)
        far = np.int32(0)
        for j in range(group.size):
            quotient = group[j] / scale
            far += np.int32(abs(quotient) > bound)
            if integers:
                number = max(min(np.rint(quotient), n - np.float32(1)), -n)
                qbytes[i, j] = np.uint8(np.int8(np.int32(number)))
            else:
                qbytes[i, j] = qbyte_table[to_bfloat16(quotient)]
                number = value_table[qbytes[i, j]]
            lost = number * scale - group[j]
            power += group[j] * group[j]
            error += lost * lost
        signal, noise, clipped = signal + float(power), noise + float(error), clipped + int(far)
    return signal, noise, float(clipped)
