"""The LoRA in a trainer's tree, to be added to the arrays beside it."""

import json
from collections.abc import Sequence

import numpy as np

from tpuconv.convert.export.lora.tree import ReadRow
from tpuconv.storage.hashes import hash_bytes


class MergedPairs:
    """Pairs that are added to the parameters that they change. Changes are computed in float32, and the sum is rounded
    once, to the dtype of the parameter.

    Args:
        rows: the pairs of the tree.
        alpha: of the training.
    """

    def __init__(self, rows: Sequence[ReadRow], alpha: float):
        self._pairs = {name: (row, pair) for row, pairs in rows for name, pair in pairs.items()}
        self._alpha = alpha

    def identity(self, tree: str) -> str:
        """Returns the identity of the sums, from the identity of the tree."""
        return str(hash_bytes(json.dumps([tree, "merged", self._alpha]).encode())["xxh3_128"])

    def added(self, name: str, box: Sequence[slice], values: np.ndarray) -> np.ndarray:
        """Returns a box of a parameter, of which these are the values, with its change."""
        if name not in self._pairs:
            return values
        row, pair = self._pairs[name]
        merged: np.ndarray = (values.astype(np.float32) + row.change(name, pair, box)).astype(values.dtype)
        return merged
