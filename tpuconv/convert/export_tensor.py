"""One tensor of an export, whatever makes its values."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np

from tpuconv.layout import Shape
from tpuconv.sources.headers import DTYPES


@dataclass(frozen=True)
class ExportTensor:
    """A tensor to write.

    Attributes:
        dtype: safetensors' name of its dtype.
        of: the name of the inverse row's result that it is made from.
        make: makes its values from that result.
    """

    name: str
    dtype: str
    shape: Shape
    of: str
    make: Callable[[np.ndarray], np.ndarray]

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize
