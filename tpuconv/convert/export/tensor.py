"""One tensor of an export, and the row that makes it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from tpuconv.notation.layout import Axes, Shape
from tpuconv.notation.table import Binding
from tpuconv.sources.headers import DTYPES


@dataclass(frozen=True)
class ExportTensor:
    """A tensor to write.

    Attributes:
        dtype: safetensors' name of its dtype.
        of: the name of the inverse row's result that it is made from.
        make: makes its values from that result.
        sliced: whether `make` makes a slice along the first axis from the same slice of that result.
        fixed: whether it makes the same of every slice.
    """

    name: str
    dtype: str
    shape: Shape
    of: str
    make: Callable[[np.ndarray], np.ndarray]
    sliced: bool = False
    fixed: bool = False

    @classmethod
    def constant(cls, name: str, dtype: str, value: np.ndarray, of: str) -> "ExportTensor":
        """Returns a tensor of values that are known before the result is made."""
        return cls(name, dtype, value.shape, of, lambda _: value, fixed=True)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class ExportRow:
    """An inverse row with the tensors that it makes. `repeats` says how often the values of an array are repeated along
    every axis before."""

    inverse: Binding
    tensors: Sequence[ExportTensor]
    repeats: Mapping[str, Shape] = field(default_factory=dict)

    @property
    def axes(self) -> dict[str, Axes]:
        """The axes of each array that the row reads."""
        return {stack.names[0]: axes for axes, stack in zip(self.inverse.layout.src, self.inverse.src, strict=True)}
