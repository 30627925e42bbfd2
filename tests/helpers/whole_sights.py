"""The cases of `helpers.sights`, made once, and what tests compare of them."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from helpers.sights import OF_OTHER_TYPES, SIGHTS, Sight

FAST = ("gemma3", "qwen3_vl")
_MARKED = {name: pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in SIGHTS}
EACH = pytest.mark.parametrize("name", _MARKED.values())
EACH_OF_ITS_TYPE = pytest.mark.parametrize("name", [x for name, x in _MARKED.items() if name not in OF_OTHER_TYPES])
"""Without the cases whose model in transformers is of another type."""


@cache
def made(name: str) -> Sight:
    """The case of this name."""
    return SIGHTS[name]()


def difference(have: Any, want: np.ndarray) -> float:
    """The largest difference, by the largest value."""
    return float(np.abs(np.asarray(have) - want).max() / max(1, np.abs(want).max()))


def logits(case: Sight, model: Any) -> np.ndarray:
    """The logits of the tokens of a case."""
    seen = model.see(case.ids_BT, case.mask_BT, **case.features)
    return np.asarray(model(case.ids_BT, case.mask_BT, seen=seen))[case.mask_BT]
