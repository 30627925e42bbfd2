"""The arrays of a trainer's tree with the LoRA in it added to them."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from tpuconv.checkpoint.orbax_tree import TrainedTree
from tpuconv.convert.export.array_source import array_box
from tpuconv.convert.export.lora.tree import ReadRow
from tpuconv.convert.export.orbax_arrays import OrbaxArrays
from tpuconv.convert.export.way_back import Explained, Parameter
from tpuconv.notation.layout import Axes, Ranges
from tpuconv.sources.source import Source
from tpuconv.storage.hashes import hash_bytes


class MergedArrays(OrbaxArrays):
    """See `OrbaxArrays`. Changes are computed in float32, and the sum is rounded once, to the dtype of the array.

    Args:
        rows: the pairs of the tree.
        alpha: of the training.
    """

    def __init__(
        self,
        tree: TrainedTree,
        explained: Explained,
        parameters: Sequence[Parameter],
        source: Source,
        family: str,
        rows: Sequence[ReadRow],
        alpha: float,
    ):
        identity = str(hash_bytes(json.dumps([tree.identity, "merged", alpha]).encode())["xxh3_128"])
        super().__init__(tree, explained, parameters, source, family, identity)
        self._pairs = {name: (row, pair) for row, pairs in rows for name, pair in pairs.items()}

    def read(
        self, name: str, axes: Axes, ranges: Ranges, made: dict[str, np.ndarray], figures: dict[str, Any]
    ) -> np.ndarray:
        """See `ArraySource`. Raises SourceError if it cannot be read."""
        values = super().read(name, axes, ranges, made, figures)
        if name not in self._pairs:
            return values
        row, pair = self._pairs[name]
        change = row.change(name, pair, array_box(axes, self.manifest.arrays[name].shape, ranges))
        merged: np.ndarray = (values.astype(np.float32) + change).astype(values.dtype)
        return merged
