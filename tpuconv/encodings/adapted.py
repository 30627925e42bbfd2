"""Tensors that an adapter changes: each is read, decoded, and changed before a row of the table is applied to it."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import ml_dtypes
import numpy as np

from tpuconv.encodings.decode import Tensor
from tpuconv.errors import shorten
from tpuconv.names import collapse
from tpuconv.sources.adapter_changes import Change, LowRank, Product, ReplacedRows, Replacement
from tpuconv.sources.reader import Reader

BY_ADAPTER = ", which an adapter changes"
"""A phrase of the reason why a changed tensor is not converted."""

ONE_MATRIX = "shares its matrix with"
"""A phrase of the fault of a head that is tied to the embedding, where an adapter changes the two apart."""


@dataclass(frozen=True)
class Adapted(Tensor):
    """A tensor with the changes of adapters, in their order."""

    base: Tensor = field(kw_only=True)
    changes: tuple[Change, ...] = field(kw_only=True)

    def is_stored_as(self, dtype: np.dtype[np.generic]) -> bool:
        """Never: the stored bytes are changed."""
        return False

    def stored_bytes(self, count: int) -> int:
        """See `Tensor.stored_bytes`."""
        return self.base.stored_bytes(count)

    def work_bytes(self, count: int) -> int:
        """See `Tensor.work_bytes`. Complete rows are multiplied, in float32: with a magnitude beside the rows in two
        forms, else beside two copies in the dtype of the weight if they are rounded."""
        return 12 * (count + 2 * self.shape[-1])

    def read(self, reader: Reader, start: int, raw: np.ndarray, out: np.ndarray) -> None:
        """Reads the tensor's values and changes them; see `Tensor.read`. Each product is added in float32, and the sum
        is rounded to the dtype of `out`."""
        change, *others = self.changes
        if isinstance(change, Product) and change.scales_rows:
            self._read_scaled(reader, change, start, out)
        else:
            if not isinstance(change, Replacement):
                self.base.read(reader, start, raw, out)
            self._change(change, start, out)
        for other in others:
            self._change(other, start, out)

    def _read_scaled(self, reader: Reader, change: Product, start: int, out: np.ndarray) -> None:
        """Reads values with a change that scales rows: a norm belongs to a complete row."""
        columns = self.shape[-1]
        first, last = start // columns, -(-(start + out.size) // columns)
        rows = np.empty((last - first) * columns, out.dtype)
        stored = np.empty(self.base.stored_bytes(rows.size) + 8, np.uint8)
        self.base.read(reader, first * columns, stored, rows)
        begin = start - first * columns
        scaled = _scaled(change, rows.reshape(-1, columns), first)[begin : begin + out.size]
        np.copyto(out, scaled, casting="unsafe")

    def _change(self, change: Change, start: int, out: np.ndarray) -> None:
        columns = self.shape[-1]
        if isinstance(change, Product):
            self._add(change, start, out)
        elif isinstance(change, Replacement):
            self._replace(change, start, out)
        else:
            for row, values in zip(change.rows, change.values, strict=True):
                begin, end = max(row * columns, start), min((row + 1) * columns, start + out.size)
                if begin < end:
                    part = values[begin - row * columns : end - row * columns]
                    self._set(change, part, out[begin - start : end - start])

    def _add(self, change: Product, start: int, out: np.ndarray) -> None:
        if out.dtype == ml_dtypes.bfloat16 and not change.rounded:
            _add_product(change, start, out)
            return
        columns = self.shape[-1]
        first, last = start // columns, -(-(start + out.size) // columns)
        part = _product(change, first, last)
        if change.rounded:
            part = part.astype(self.dtype).astype(np.float32)
        begin = start - first * columns
        part = part.reshape(-1)[begin : begin + out.size]
        part += out
        np.copyto(out, part, casting="unsafe")

    def _replace(self, change: Replacement, start: int, out: np.ndarray) -> None:
        self._set(change, change.values.reshape(-1)[start : start + out.size], out)

    def _set(self, change: Replacement | ReplacedRows, part: np.ndarray, out: np.ndarray) -> None:
        # peft keeps them in the dtype of the model
        np.copyto(out, change.file.values(part).astype(self.dtype), casting="unsafe")


def _matrices(change: Product, first: int, last: int) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """The matrices that rows `first` to `last` are in, the rows of stacked matrices being counted through: of each its
    rows, left for these and right, both in float32."""
    rows = change.shape[-2]
    for i in range(first // rows, -(-last // rows)):
        begin, end = max(first, i * rows), min(last, (i + 1) * rows)
        yield begin, end, *change.factors(i, slice(begin - i * rows, end - i * rows))


def _product(change: Product, first: int, last: int) -> np.ndarray:
    """Rows of left times right, times the factor: float32 [last - first, columns]."""
    from tpuconv.encodings.low_rank import multiply

    out = np.empty((last - first, change.shape[-1]), np.float32)
    for begin, end, left, right in _matrices(change, first, last):
        multiply(left, right, out[begin - first : end - first])
    out *= np.float32(change.scaling)
    return out


def _add_product(change: Product, start: int, out: np.ndarray) -> None:
    """Adds the product to a part of a tensor in bfloat16, flat from `start`, without holding it."""
    from tpuconv.encodings.low_rank import add_product_to_bfloat16

    columns, bits, factor = change.shape[-1], out.view(np.uint16), np.float32(change.scaling)
    for begin, end, left, right in _matrices(change, start // columns, -(-(start + out.size) // columns)):
        own = slice(max(0, begin * columns - start), min(out.size, end * columns - start))
        add_product_to_bfloat16(left, right, factor, start + own.start - begin * columns, bits[own])


def _scaled(change: Product, rows: np.ndarray, first: int) -> np.ndarray:
    """Flat: complete rows plus their product, each scaled to its magnitude (DoRA, arXiv:2402.09353), in float32."""
    from tpuconv.encodings.low_rank import row_norms

    moved = _product(change, first, first + len(rows))
    moved += rows
    norms = np.empty(len(rows), np.float32)
    row_norms(moved, norms)
    moved *= change.row_factors(slice(first, first + len(rows)), norms)[:, None]
    return moved.reshape(-1)


@dataclass(frozen=True)
class Placed:
    """The changes of an adapter by the names of the tensors on disk, and what it changes that is not there."""

    adapter: str
    changes: Mapping[str, Change]
    missing: tuple[str, ...] = ()


def adapt(
    tensors: Mapping[str, Tensor], adapters: Sequence[Placed], input_first: Collection[str] = ()
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors with the changes of all adapters, in their order, and what does not fit. Those that are named in
    `input_first` are matrices [in, out], and those that a scheme packs so, as GPTQ and AWQ do."""
    out, faults = dict(tensors), []
    for placed in adapters:
        missing = [*placed.missing, *(name for name in placed.changes if name not in out)]
        faults += [f"{p}  is changed by the adapter {placed.adapter}, and not in the model" for p in collapse(missing)]
        for name, given in placed.changes.items():
            if (tensor := out.get(name)) is None:
                continue
            is_transposed = name in input_first or (tensor.scheme is not None and tensor.scheme.input_first)
            change = given.transposed if isinstance(given, LowRank) and is_transposed else given
            if fault := _fault(tensor, change, placed.adapter):
                faults.append(f"{name}  {fault}")
            elif isinstance(tensor, Adapted):
                out[name] = replace(tensor, changes=(*tensor.changes, change))
            else:
                stored = {each.name: getattr(tensor, each.name) for each in fields(Tensor)}
                out[name] = Adapted(**stored, base=tensor, changes=(change,))
    return out, list(shorten(faults))


def _fault(tensor: Tensor, change: Change, adapter: str) -> str | None:
    if isinstance(change, LowRank) and change.scales_columns:
        return f"is a matrix [in, out], whose columns the adapter {adapter} would scale (DoRA)"
    if isinstance(change, ReplacedRows):
        size = (max(change.rows, default=-1) + 1, change.values.shape[1])
        if len(tensor.shape) != 2 or tensor.shape[0] < size[0] or tensor.shape[1] != size[1]:
            return f"has the shape {list(tensor.shape)}, and rows of it in the adapter {adapter} {list(size)}"
        return None
    if tensor.shape != change.shape:
        return f"has the shape {list(tensor.shape)}, its change in the adapter {adapter} {list(change.shape)}"
    if isinstance(change, Product) and change.scales_rows and isinstance(tensor, Adapted):
        return f"is changed by another adapter before the DoRA adapter {adapter}, which must be the first"
    return None
