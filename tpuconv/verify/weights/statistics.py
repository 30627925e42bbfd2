"""Statistics of values in one pass: parts are measured in any order and merged.

A histogram needs no range: its bins are the exponents of two of absolute values, by sign. Means and squares are merged
as by Chan, Golub and LeVeque (Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, reduce
from math import inf, log10, sqrt
from typing import Any

import ml_dtypes  # noqa: F401  (numpy learns bfloat16 by it)
import numpy as np

PART_ELEMENTS = 1 << 18
"""Values that are measured at once: as float64 they stay in a cache."""

EXPONENT_BITS, EXPONENT_SHIFT, EXPONENT_BIAS = 11, 52, 1023
"""The exponent of a float64 (IEEE 754-2019, table 3.5)."""

Bins = Mapping[int, tuple[int, int]]
"""By exponent e the number of values v with 2^e <= |v| < 2^(e+1): negative ones, and positive ones."""


@dataclass(frozen=True)
class WeightStatistics:
    """Statistics of some values.

    Attributes:
        count: the number of values.
        zeros, nonfinite: how many of them are zero; NaN or infinite.
        minimum, maximum: of the finite ones; inf and -inf if there are none.
        mean: of the finite ones.
        squares: the sum of their squared distances from the mean.
        bins: the histogram of the finite values that are not zero.
    """

    count: int = 0
    zeros: int = 0
    nonfinite: int = 0
    minimum: float = inf
    maximum: float = -inf
    mean: float = 0.0
    squares: float = 0.0
    bins: Bins = field(default_factory=dict)

    @property
    def finite(self) -> int:
        """The number of finite values."""
        return self.count - self.nonfinite

    @property
    def deviation(self) -> float:
        """The standard deviation of the finite values, of all of them and not of a sample."""
        return sqrt(self.squares / self.finite) if self.finite else 0.0

    @property
    def largest(self) -> float:
        """The largest absolute value of the finite ones; 0 if there are none."""
        return max(-self.minimum, self.maximum) if self.finite else 0.0

    def __add__(self, other: "WeightStatistics") -> "WeightStatistics":
        """Returns the statistics of the values of both."""
        finite, distance = self.finite + other.finite, other.mean - self.mean
        share = other.finite / finite if finite else 0.0
        bins = dict(self.bins)
        for exponent, (negative, positive) in other.bins.items():
            before = bins.get(exponent, (0, 0))
            bins[exponent] = before[0] + negative, before[1] + positive
        with np.errstate(over="ignore", invalid="ignore"):
            return WeightStatistics(
                count=self.count + other.count,
                zeros=self.zeros + other.zeros,
                nonfinite=self.nonfinite + other.nonfinite,
                minimum=min(self.minimum, other.minimum),
                maximum=max(self.maximum, other.maximum),
                mean=self.mean + distance * share,
                squares=self.squares + other.squares + distance * distance * self.finite * share,
                bins=bins,
            )

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists; what no finite value has is null."""
        known = self.finite > 0
        return {
            "count": self.count,
            "zeros": self.zeros,
            "nonfinite": self.nonfinite,
            "minimum": self.minimum if known else None,
            "maximum": self.maximum if known else None,
            "mean": self.mean if known else None,
            "deviation": self.deviation if known else None,
            "histogram": {str(exponent): list(pair) for exponent, pair in sorted(self.bins.items())},
        }


def merged_statistics(parts: Iterable[WeightStatistics]) -> WeightStatistics:
    """Returns the statistics of the values of all parts."""
    return reduce(WeightStatistics.__add__, parts, WeightStatistics())


def statistics_of(values: np.ndarray) -> WeightStatistics:
    """Returns the statistics of an array of any shape and dtype of numbers. Values of at most 16 bits are counted by
    their bits; wider ones are measured in parts."""
    flat = np.ascontiguousarray(values).reshape(-1)
    if flat.dtype.itemsize <= 2:
        return coded_statistics(flat.view(f"u{flat.dtype.itemsize}"), _values_by_bits(flat.dtype))
    parts = (flat[first : first + PART_ELEMENTS] for first in range(0, flat.size, PART_ELEMENTS))
    return merged_statistics(_measured(part.astype(np.float64), None) for part in parts)


def coded_statistics(codes: np.ndarray, values: np.ndarray) -> WeightStatistics:
    """Returns the statistics of numbers that are stored as codes.

    Args:
        codes: flat, unsigned integers.
        values: the number that each code stands for.
    """
    counts = np.zeros(len(values), np.int64)
    for first in range(0, codes.size, PART_ELEMENTS):
        counts += np.bincount(codes[first : first + PART_ELEMENTS], minlength=len(values))
    return _measured(np.asarray(values, np.float64)[counts > 0], counts[counts > 0])


@cache
def _values_by_bits(dtype: "np.dtype[Any]") -> np.ndarray:
    bits = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}")
    with np.errstate(invalid="ignore"):  # NaN stays NaN
        return bits.view(dtype).astype(np.float64)


def _measured(values: np.ndarray, counts: np.ndarray | None) -> WeightStatistics:
    """Returns the statistics of float64 values, each of which occurs once or as often as `counts` says."""
    total = values.size if counts is None else int(counts.sum())
    is_finite = np.isfinite(values)
    if not is_finite.all():
        values, counts = values[is_finite], None if counts is None else counts[is_finite]
    finite = values.size if counts is None else int(counts.sum())
    if not finite:
        return WeightStatistics(total, nonfinite=total)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(values.sum() if counts is None else values @ counts) / finite
        squared = np.square(values - mean)
        squares = float(squared.sum() if counts is None else squared @ counts)
    nonzero = values != 0
    numbers, weights = values[nonzero], None if counts is None else counts[nonzero]
    codes = (numbers.view(np.int64) >> EXPONENT_SHIFT) & ((2 << EXPONENT_BITS) - 1)
    found = np.bincount(codes, weights, minlength=2 << EXPONENT_BITS)  # exact: no count has 53 bits
    positive, negative = found.reshape(2, -1).astype(np.int64)
    used = np.flatnonzero(positive + negative).tolist()
    return WeightStatistics(
        count=total,
        zeros=finite - int(found.sum()),
        nonfinite=total - finite,
        minimum=float(values.min()),
        maximum=float(values.max()),
        mean=mean,
        squares=squares,
        bins={code - EXPONENT_BIAS: (int(negative[code]), int(positive[code])) for code in used},
    )


# -- differences ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DifferenceSums:
    """Sums over values x of a reference and y of another checkpoint.

    Attributes:
        count: the number of values.
        signal, noise: sums of x^2 and (x - y)^2.
        largest: the largest |x - y|; inf if only one of x and y is finite.
        scale: the largest |x| that is finite.
    """

    count: int = 0
    signal: float = 0.0
    noise: float = 0.0
    largest: float = 0.0
    scale: float = 0.0

    def __add__(self, other: "DifferenceSums") -> "DifferenceSums":
        """Returns the sums over the values of both."""
        return DifferenceSums(
            self.count + other.count,
            self.signal + other.signal,
            self.noise + other.noise,
            max(self.largest, other.largest),
            max(self.scale, other.scale),
        )


def difference_sums(x: np.ndarray, y: np.ndarray) -> DifferenceSums:
    """Returns the sums over two arrays of one shape. NaN and NaN do not differ, nor do infinities of one sign."""
    one, other = (np.ascontiguousarray(side).reshape(-1) for side in (x, y))
    out = DifferenceSums()
    for first in range(0, one.size, PART_ELEMENTS):
        part = slice(first, first + PART_ELEMENTS)
        a, b = one[part].astype(np.float64), other[part].astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            lost = np.abs(a - b)
            finite = np.isfinite(a)
            if not (finite.all() and np.isfinite(b).all()):
                lost[(a == b) | (np.isnan(a) & np.isnan(b))] = 0
                lost[np.isnan(lost)] = inf
                a = a[finite]
            sums = float(np.square(a).sum()), float(np.square(lost).sum())
        out += DifferenceSums(lost.size, *sums, float(lost.max(initial=0)), float(np.abs(a).max(initial=0)))
    return out


@dataclass(frozen=True)
class TensorDifference:
    """The difference of a parameter.

    Attributes:
        name: of the parameter.
        count: its values.
        snr_db: 10 log10(sum x^2 / sum (x - y)^2) of the values x of the reference and y of the other; inf for none.
        largest: the largest absolute difference.
        relative: the largest difference, divided by the largest absolute value of the reference.
    """

    name: str
    count: int
    snr_db: float
    largest: float
    relative: float

    @classmethod
    def of(cls, name: str, sums: DifferenceSums) -> "TensorDifference":
        """Returns the difference of the parameter whose values have these sums."""
        signal, noise = sums.signal, sums.noise
        ratio = inf if noise == 0 else 10 * log10(signal / noise) if 0 < signal < inf and noise < inf else -inf
        relative = 0.0 if not sums.largest else sums.largest / sums.scale if sums.scale else inf
        return cls(name, sums.count, ratio, sums.largest, relative)

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists; an infinite ratio is null."""
        finite = {key: getattr(self, key) for key in ("snr_db", "largest", "relative")}
        return vars(self) | {key: value if abs(value) < inf else None for key, value in finite.items()}
