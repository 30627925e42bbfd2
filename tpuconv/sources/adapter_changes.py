"""The changes of an adapter to one tensor."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib.array_utils import byte_bounds

from tpuconv.errors import SourceError
from tpuconv.layout import Shape
from tpuconv.sources.headers import DTYPES, TensorInfo
from tpuconv.storage.hashes import stamp


class AdapterFile:
    """The file of an adapter's matrices, which must stay as it is.

    Its `bytes` are mapped, and say where a part of a matrix is. They are never looked at: a file that shrinks under a
    map kills the process.
    """

    def __init__(self, path: Path):
        self.path = path
        self._stamp = stamp(path.stat())
        self.bytes = np.memmap(path, np.uint8, "r")

    def matrix(self, info: TensorInfo) -> np.ndarray:
        """Returns a tensor of the file, of which `values` reads parts."""
        return np.ndarray(info.shape, DTYPES[info.dtype], self.bytes, info.offset)

    def values(self, part: np.ndarray) -> np.ndarray:
        """Reads a part of a matrix, in whichever order it has its axes. The result has its shape and strides.

        Raises:
            SourceError: the file cannot be read, or was changed or replaced.
        """
        low, high = byte_bounds(part)
        data = np.empty(high - low, np.uint8)
        try:
            with self.path.open("rb") as file:
                file.seek(low - self.bytes.ctypes.data)
                count = file.readinto(data.data)
        except OSError as e:
            raise SourceError(f"{self.path} cannot be read: {e.strerror}", hint="check the disk") from None
        self.check_unchanged()
        if count != data.size:
            raise SourceError(f"{self.path} cannot be read to its end", hint="check the disk")
        return np.ndarray(part.shape, part.dtype, data, strides=part.strides)

    def check_unchanged(self) -> None:
        """Raises SourceError if the file was changed or replaced."""
        try:
            same = stamp(self.path.stat()) == self._stamp
        except OSError:
            same = False
        if not same:
            raise SourceError(f"{self.path} was changed while it was read", hint="run the command again")


@dataclass(frozen=True)
class LowRank:
    """The change of a weight: `left` [rows, R] times `right` [R, columns], times `scaling`. Both are parts of `file`,
    perhaps with their axes swapped, and are read when they are needed. PEFT computes changes in float32; it rounds the
    changes of embeddings and of experts to the dtype of the weight before it adds them (`rounded`). The changes of
    stacked experts have one more axis before the others. With a `magnitude` [rows] the changed rows are scaled to it
    (DoRA)."""

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
    """A tensor that was trained as a whole: other `values`, a part of `file`, instead of the model's."""

    values: np.ndarray
    file: AdapterFile

    @property
    def shape(self) -> Shape:
        """The shape of the tensor."""
        return self.values.shape


Change = LowRank | Replacement
