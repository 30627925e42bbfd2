"""What an adapter does to one tensor."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tpuconv.errors import SourceError
from tpuconv.layout import Shape
from tpuconv.storage.hashes import stamp


@dataclass(frozen=True)
class AdapterFile:
    """The file of an adapter's matrices, with the stamp that it had when it was read."""

    path: Path
    stamp: tuple[int, ...]

    def check_unchanged(self) -> None:
        """Raises SourceError if the file was changed or replaced."""
        try:
            same = stamp(self.path.stat()) == self.stamp
        except OSError:
            same = False
        if not same:
            raise SourceError(f"{self.path} was changed while it was read", hint="run the command again")


@dataclass(frozen=True)
class LowRank:
    """The change of a weight: `left` [rows, R] times `right` [R, columns], times `scaling`. Both are stored, perhaps
    with their axes swapped, and are read when they are needed. PEFT computes changes in float32; those of embeddings
    and of experts it rounds to the dtype of the weight before it adds them (`rounded`). Those of stacked experts have
    one more axis before the others. With a `magnitude` [rows] the changed rows are scaled to it (DoRA)."""

    left: np.ndarray
    right: np.ndarray
    scaling: float
    file: AdapterFile
    rounded: bool = False
    magnitude: np.ndarray | None = None

    @property
    def shape(self) -> Shape:
        """The shape of the weight."""
        return *self.left.shape[:-1], self.right.shape[-1]


@dataclass(frozen=True)
class Replacement:
    """A tensor that was trained as a whole: other values instead of the model's."""

    values: np.ndarray
    file: AdapterFile

    @property
    def shape(self) -> Shape:
        """The shape of the tensor."""
        return self.values.shape


Change = LowRank | Replacement
