"""The functions on arrays that layouts and changes of values need. Layouts run on arrays of numpy, and on arrays of jax
(`tpuconv.weight_map.on_devices`): one implementation of the notation serves both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import truediv
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ArrayModule:
    """The functions of an array module that are no methods of its arrays.

    Attributes:
        concatenate: joins arrays along an axis.
        expand_dims: inserts axes of size 1.
        divided: divides float32 values by a constant, rounded as IEEE 754 says.
        rounded: rounds values once to a dtype.
    """

    concatenate: Callable[[Sequence[Any], int], Any]
    expand_dims: Callable[[Any, tuple[int, ...]], Any]
    divided: Callable[[Any, np.float32], Any]
    rounded: Callable[[Any, Any], Any]


def _rounded(values: np.ndarray, dtype: Any) -> np.ndarray:
    return values.astype(dtype)


NUMPY = ArrayModule(np.concatenate, np.expand_dims, truediv, _rounded)
"""The functions of numpy."""
