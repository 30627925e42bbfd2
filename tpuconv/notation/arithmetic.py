"""Changes of values on the way from a tensor to a parameter of another program, each with its inverse.

They are computed in float32 and rounded once, to the dtype of the values. A factor that is a power of two changes no
digit; the inverse of any other change is exact to one rounding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import frexp
from typing import Any, Protocol

import numpy as np

from tpuconv.notation.arrays import NUMPY, ArrayModule


class Arithmetic(Protocol):
    """A change of the values of a parameter. `arrays` is the module of the values."""

    def apply(self, values: Any, sizes: Mapping[str, int], arrays: ArrayModule = NUMPY) -> Any:
        """Returns the changed values in their dtype. `sizes` are the sizes of the letters."""

    def undo(self, values: Any, sizes: Mapping[str, int], arrays: ArrayModule = NUMPY) -> Any:
        """Returns the inverse of `apply`."""

    def rounds(self, sizes: Mapping[str, int]) -> bool:
        """Returns True if `undo` after `apply` may give other values than there were."""


@dataclass(frozen=True)
class Times:
    """A factor: the size of `letter`, to the power `power`, in float32 or rounded to the dtype of the values."""

    letter: str
    power: float
    in_their_dtype: bool = False

    def apply(self, values: Any, sizes: Mapping[str, int], arrays: ArrayModule = NUMPY) -> Any:
        """Multiplies."""
        return arrays.rounded(values.astype(np.float32) * self._factor(values, sizes), values.dtype)

    def undo(self, values: Any, sizes: Mapping[str, int], arrays: ArrayModule = NUMPY) -> Any:
        """Divides."""
        quotient = arrays.divided(values.astype(np.float32), self._factor(values, sizes))
        return arrays.rounded(quotient, values.dtype)

    def rounds(self, sizes: Mapping[str, int]) -> bool:
        """Returns True unless the factor is a power of two."""
        mantissa, _ = frexp(sizes[self.letter] ** self.power)
        return mantissa != 0.5

    def _factor(self, values: Any, sizes: Mapping[str, int]) -> np.float32:
        factor = sizes[self.letter] ** self.power
        return np.float32(values.dtype.type(factor) if self.in_their_dtype else factor)

    def __str__(self) -> str:
        return f"* {self.letter}^{self.power:g}"


@dataclass(frozen=True)
class Plus:
    """A term."""

    term: float

    def apply(self, values: Any, sizes: Mapping[str, int], arrays: ArrayModule = NUMPY) -> Any:
        """Adds."""
        return arrays.rounded(values.astype(np.float32) + np.float32(self.term), values.dtype)

    def undo(self, values: Any, sizes: Mapping[str, int], arrays: ArrayModule = NUMPY) -> Any:
        """Subtracts."""
        return arrays.rounded(values.astype(np.float32) - np.float32(self.term), values.dtype)

    def rounds(self, sizes: Mapping[str, int]) -> bool:
        """Returns True: small values lose digits."""
        return True

    def __str__(self) -> str:
        return f"+ {self.term:g}"


@dataclass(frozen=True)
class Ones:
    """Ones in place of the values: of an array that a program has and a release does not. The values give its shape and
    dtype. A program that trains it multiplies other arrays by it (`FactorsBeside`)."""

    def apply(self, values: Any, sizes: Mapping[str, int], arrays: ArrayModule = NUMPY) -> Any:
        """Returns ones."""
        return arrays.rounded(values.astype(np.float32) ** 0, values.dtype)  # also where it is NaN

    def undo(self, values: Any, sizes: Mapping[str, int], arrays: ArrayModule = NUMPY) -> Any:
        """Raises TypeError: rows of ones have no inverse (`Map.is_of_ones`)."""
        raise TypeError("a release has no such values")

    def rounds(self, sizes: Mapping[str, int]) -> bool:
        """Returns False."""
        return False

    def __str__(self) -> str:
        return "1"


@dataclass(frozen=True)
class FactorsBeside:
    """Factors that a program keeps in an array of its own, `Ones` at first. It multiplies the values by them along all
    axes but the last one. The way back multiplies them in.

    Attributes:
        name: of the array of factors, in the place of the last part of the name.
    """

    name: str

    def of(self, parameter: str) -> str:
        """Returns the name of the array with the factors of a parameter."""
        return f"{parameter.rpartition('.')[0]}.{self.name}"

    def multiplied(self, values: Any, factors: Any, arrays: ArrayModule = NUMPY) -> Any:
        """Returns the values [..., x] times the factors [...], in the dtype of the values."""
        return arrays.rounded(values.astype(np.float32) * factors.astype(np.float32)[..., None], values.dtype)

    def apply(self, values: Any, sizes: Mapping[str, int], arrays: ArrayModule = NUMPY) -> Any:
        """Returns the values: their factors are ones."""
        return values

    def undo(self, values: Any, sizes: Mapping[str, int], arrays: ArrayModule = NUMPY) -> Any:
        """Raises TypeError: see `multiplied`."""
        raise TypeError(f"the values need the factors in {self.name}")

    def rounds(self, sizes: Mapping[str, int]) -> bool:
        """Returns False: a factor of 1 changes no digit."""
        return False

    def __str__(self) -> str:
        return f"* {self.name}"


@dataclass(frozen=True)
class WholeNumbers:
    """No change: whole numbers that a program holds as float32. The way back from its run makes them int64 again."""

    def apply(self, values: Any, sizes: Mapping[str, int], arrays: ArrayModule = NUMPY) -> Any:
        """Returns the values."""
        return values

    def undo(self, values: Any, sizes: Mapping[str, int], arrays: ArrayModule = NUMPY) -> Any:
        """Returns the values: an export changes the dtype when it writes them."""
        return values

    def rounds(self, sizes: Mapping[str, int]) -> bool:
        """Returns False: float32 holds every number below 2^24."""
        return False

    def __str__(self) -> str:
        return "as float32"
