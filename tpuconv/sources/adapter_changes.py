"""The changes of an adapter to one tensor."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.lib.array_utils import byte_bounds

from tpuconv.errors import SourceError
from tpuconv.notation.layout import Shape
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

    @cached_property
    def bytes(self) -> np.ndarray:
        """The mapped bytes; there are some, once the header was read."""
        return np.memmap(self.path, np.uint8, "r")

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


class Product(ABC):
    """The change of a weight: a product of two matrices, times `scaling`. PEFT computes changes in float32; it rounds
    the changes of embeddings and of experts to the dtype of the weight before it adds them (`rounded`). The weights of
    stacked experts have one more axis before the others."""

    scaling: float
    rounded: bool

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """The shape of the weight."""

    @abstractmethod
    def factors(self, matrix: int, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """Returns the factors, in float32, of some rows of a matrix, of which stacked weights have several: [rows, R]
        and [R, columns]."""

    @property
    def scales_rows(self) -> bool:
        """True if changed rows are scaled to a magnitude (DoRA)."""
        return False

    def row_factors(self, rows: slice, norms: np.ndarray) -> np.ndarray:
        """Returns what some changed rows are scaled by, in float32; `norms` are theirs."""
        raise NotImplementedError


@dataclass(frozen=True)
class LowRank(Product):
    """`left` [rows, R] times `right` [R, columns], perhaps stacked. Both are parts of `file`, perhaps with their axes
    swapped, and are read when they are needed. With a `magnitude` [rows] the changed rows are scaled to it (DoRA), or
    the columns of a weight [in, out], which is not implemented (`scales_columns`)."""

    left: np.ndarray
    right: np.ndarray
    scaling: float
    file: AdapterFile
    rounded: bool = False
    magnitude: np.ndarray | None = None
    scales_columns: bool = False

    @property
    def shape(self) -> Shape:
        """See `Product`."""
        return *self.left.shape[:-1], self.right.shape[-1]

    @property
    def transposed(self) -> "LowRank":
        """The change of a weight [in, out]."""
        left, right = self.right.swapaxes(-1, -2), self.left.swapaxes(-1, -2)
        return replace(self, left=left, right=right, scales_columns=self.magnitude is not None)

    def factors(self, matrix: int, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """See `Product`."""
        left, right = (x[matrix] if x.ndim == 3 else x for x in (self.left, self.right))
        return self._float32(left[rows]), self._float32(right)

    @property
    def scales_rows(self) -> bool:
        """See `Product`."""
        return self.magnitude is not None

    def row_factors(self, rows: slice, norms: np.ndarray) -> np.ndarray:
        """See `Product`."""
        assert self.magnitude is not None
        factors: np.ndarray = self._float32(self.magnitude[rows]) / norms
        return factors

    def _float32(self, part: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(self.file.values(part), np.float32)


@dataclass(frozen=True)
class JoinedExperts(Product):
    """The changes of single experts, where a tensor holds all: [count, parts * rows, columns], or with the last two
    axes swapped (`input_first`).

    Attributes:
        changes: the change of each matrix [rows, columns], by expert and part; some have none.
        count: of experts.
        parts: the number of matrices of an expert that lie one behind the other, such as gate and up.
    """

    changes: Mapping[tuple[int, int], LowRank]
    count: int
    parts: int
    input_first: bool
    scaling: float = 1.0
    rounded: bool = False

    @property
    def shape(self) -> Shape:
        """See `Product`."""
        rows, columns = self._matrix
        whole = (self.parts * rows, columns)
        return (self.count, *(whole[::-1] if self.input_first else whole))

    @property
    def _matrix(self) -> Shape:
        return next(iter(self.changes.values())).shape

    def factors(self, matrix: int, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """See `Product`: the parts' rows, one behind the other."""
        size, columns = self._matrix
        own = {part: self.changes[matrix, part] for part in range(self.parts) if (matrix, part) in self.changes}
        left, right = np.zeros((self.parts * size, 1), np.float32), np.zeros((1, columns), np.float32)
        if own:
            source = np.full(self.parts * size, -1)
            for place, part in enumerate(own):
                source[part * size : (part + 1) * size] = np.arange(place * size, (place + 1) * size)
            gathered = GatheredRows(tuple(own.values()), source)
            left, right = gathered.factors(0, slice(None))
            left *= np.float32(gathered.scaling)
        if self.input_first:
            left, right = right.T, left.T
        return np.ascontiguousarray(left[rows]), np.ascontiguousarray(right)


@dataclass(frozen=True)
class GatheredRows(Product):
    """The changes of matrices whose rows are in one tensor, in another order.

    Attributes:
        changes: the changes of the matrices, with the same columns.
        source: for each row of the tensor the number of the row that it is, counted through all matrices; -1 for a row
            that no change has.
    """

    changes: tuple[LowRank, ...]
    source: np.ndarray

    @property
    def scaling(self) -> float:  # type: ignore[override]
        """See `Product`: one that all changes share, so that a row is what it is in its own matrix; else 1."""
        shared = {change.scaling for change in self.changes}
        return shared.pop() if len(shared) == 1 else 1.0

    @property
    def rounded(self) -> bool:  # type: ignore[override]
        """See `Product`."""
        return False

    @property
    def shape(self) -> Shape:
        """See `Product`."""
        return len(self.source), self.changes[0].shape[1]

    def factors(self, matrix: int, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """See `Product`: the ranks of the changes side by side, so that each changes its rows alone."""
        source = self.source[rows]
        left = np.zeros((len(source), sum(change.left.shape[-1] for change in self.changes)), np.float32)
        right = np.empty((left.shape[1], self.shape[1]), np.float32)
        start = 0
        for change, own, numbers in self._of_rows(source):
            ranks = slice(start, start + change.left.shape[-1])
            whole, right[ranks] = change.factors(0, slice(None))
            left[own, ranks] = whole[numbers] * np.float32(change.scaling / self.scaling)
            start = ranks.stop
        return left, right

    @property
    def scales_rows(self) -> bool:
        """See `Product`."""
        return any(change.scales_rows for change in self.changes)

    def row_factors(self, rows: slice, norms: np.ndarray) -> np.ndarray:
        """See `Product`; 1 for the rows of other changes."""
        factors = np.ones(norms.shape, np.float32)
        for change, own, numbers in self._of_rows(self.source[rows]):
            if change.scales_rows:
                whole = np.ones(len(change.left), np.float32)
                whole[numbers] = norms[own]
                factors[own] = change.row_factors(slice(None), whole)[numbers]
        return factors

    def _of_rows(self, source: np.ndarray) -> Iterator[tuple[LowRank, np.ndarray, np.ndarray]]:
        """Each change, which of some rows it has, and their numbers in its matrix."""
        first = 0
        for change in self.changes:
            own = (source >= first) & (source < first + len(change.left))
            yield change, own, source[own] - first
            first += len(change.left)


@dataclass(frozen=True)
class Replacement:
    """A tensor that was trained as a whole: other `values`, a part of `file`, instead of the model's."""

    values: np.ndarray
    file: AdapterFile

    @property
    def shape(self) -> Shape:
        """The shape of the tensor."""
        return self.values.shape


@dataclass(frozen=True)
class ReplacedRows:
    """Rows of a matrix that were trained as a whole, such as the embeddings of single tokens: `values` [n, columns], a
    part of `file`, instead of the model's `rows`."""

    values: np.ndarray
    rows: tuple[int, ...]
    file: AdapterFile


Change = Product | Replacement | ReplacedRows
