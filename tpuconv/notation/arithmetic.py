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
