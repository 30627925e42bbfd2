"""Makes the tensors of a piece of an export from its arrays."""

from dataclasses import replace
from typing import Any

import numpy as np

from tpuconv.convert.export.array_source import ArraySource
from tpuconv.convert.export.rows import ExportPiece
from tpuconv.convert.export.tensor import ExportRow
from tpuconv.convert.run.strided import copy_strided
from tpuconv.encodings.casts import check_cast
from tpuconv.errors import OutputError
from tpuconv.notation.arithmetic import FactorsBeside
from tpuconv.notation.layout import Ranges, cut_sizes
from tpuconv.sources.headers import DTYPES


def make_piece(arrays: ArraySource, piece: ExportPiece, ranges: Ranges) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Returns the values of all tensors of a piece, or of a slab of them; and the statistics of its parameters."""
    made: dict[str, np.ndarray] = {}
    figures: dict[str, Any] = {}
    values = []
    own = {letter: each for letter, each in ranges.items() if letter == piece.letter}
    for row in piece.rows:
        inverse = replace(row.inverse, sizes=cut_sizes(row.inverse.sizes, own))
        results = inverse(lambda name, row=row: _array(arrays, row, name, ranges, made, figures))  # type: ignore[misc]
        for tensor in row.tensors:
            value = tensor.make(_contiguous(arrays, results[tensor.of], row))
            shape = tensor.shape
            if own and not tensor.fixed:
                start, stop = own[piece.letter]
                inner = shape[0] // row.inverse.sizes[piece.letter]  # of rows that the letter leads
                shape = ((stop - start) * inner, *shape[1:])
            if value.shape != shape or value.dtype.itemsize != DTYPES[tensor.dtype].itemsize:
                raise OutputError(f"{tensor.name} would be {value.shape}, not {shape}: a bug of tpuconv")
            values.append(value)
    return values, figures


def _array(
    arrays: ArraySource,
    row: ExportRow,
    name: str,
    ranges: Ranges,
    made: dict[str, np.ndarray],
    figures: dict[str, Any],
) -> np.ndarray:
    """Returns an array without the changes that its row makes, as unsigned integers: these are faster to move than
    floats and keep every bit."""
    values = arrays.read(name, row.axes[name], ranges, made, figures)
    if (change := row.inverse.inverse.arithmetic.get(name)) is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            if isinstance(change, FactorsBeside):
                factors = arrays.read(change.of(name), row.axes[name][:-1], ranges, made, figures)
                undone = change.multiplied(values, factors)
            else:
                undone = change.undo(values, row.inverse.sizes)
        check_cast(name, values, undone)
        values = undone
    for axis, count in enumerate(row.repeats.get(name, ())):
        values = values if count == 1 else np.repeat(values, count, axis)
    return values.view(f"u{values.itemsize}")


def _contiguous(arrays: ArraySource, array: np.ndarray, row: ExportRow) -> np.ndarray:
    """Returns the values in the dtype of the row's arrays; a contiguous copy if they are not contiguous."""
    out = array
    if not array.flags.c_contiguous:  # what comes back as it was read is
        out = np.empty(array.shape, array.dtype)
        copy_strided([(out, array)])
    return out.view(np.dtype(arrays.manifest.arrays[row.inverse.src[0].names[0]].dtype))
