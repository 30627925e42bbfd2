"""Changes of values on the way from a tensor to a parameter of another program, each with its inverse.

They are computed in float32 and rounded once, to the dtype of the values. A factor that is a power of two changes no
digit; the inverse of any other change is exact to one rounding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Arithmetic(Protocol):
    """A change of the values of a parameter."""

    def apply(self, values: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Returns the changed values in their dtype. `sizes` are the sizes of the letters."""

    def undo(self, values: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Returns the inverse of `apply`."""


@dataclass(frozen=True)
class Times:
    """A factor: the size of `letter`, to the power `power`, in float32 or rounded to the dtype of the values."""

    letter: str
    power: float
    in_their_dtype: bool = False

    def apply(self, values: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Multiplies."""
        return (values.astype(np.float32) * self._factor(values, sizes)).astype(values.dtype)

    def undo(self, values: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Divides."""
        return (values.astype(np.float32) / self._factor(values, sizes)).astype(values.dtype)

    def _factor(self, values: np.ndarray, sizes: Mapping[str, int]) -> np.float32:
        factor = sizes[self.letter] ** self.power
        return np.float32(values.dtype.type(factor) if self.in_their_dtype else factor)


@dataclass(frozen=True)
class Plus:
    """A term."""

    term: float

    def apply(self, values: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Adds."""
        return (values.astype(np.float32) + np.float32(self.term)).astype(values.dtype)

    def undo(self, values: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Subtracts."""
        return (values.astype(np.float32) - np.float32(self.term)).astype(values.dtype)
