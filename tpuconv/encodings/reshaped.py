"""Tensors as the shapes that a table wants say, where the stored ones have others: flat values, and rows that are cut
elsewhere. transformers may load several tensors as one, and divide that in equal parts when it saves the model."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from tpuconv.encodings.decode import Tensor
from tpuconv.encodings.scheme import STATED_SHAPE, Scheme
from tpuconv.notation.layout import Shape
from tpuconv.sources.headers import DTYPES, TensorInfo
from tpuconv.sources.reader import Reader


def shaped(tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Returns the tensors, where those have the shape that a table wants that may have it: flat values, and rows whose
    last word is filled up. Only what is read with the values says their shape."""
    out = dict(tensors)
    for name, shape in shapes.items():
        tensor = out.get(name)
        if tensor and tensor.scheme and tensor.shape != shape and _may_be(tensor, tensor.scheme, shape):
            out[name] = replace(tensor, shape=shape, scheme=tensor.scheme.for_shape(shape))
    return out


def stated_shapes(tensors: Mapping[str, Tensor], reader: Reader) -> dict[str, Shape]:
    """Returns the shapes that a release says beside packed values, by the names of the tensors.

    Raises:
        SourceError: the source cannot be read.
    """
    out = {}
    for name, tensor in tensors.items():
        for info in tensor.extra:
            if info.name.endswith(STATED_SHAPE) and info.dtype in ("I32", "I64") and info.shape == (len(tensor.shape),):
                stored = np.empty(info.shape, DTYPES[info.dtype])
                reader.read(info, 0, stored.view(np.uint8).data)
                out[name] = tuple(stored.tolist())
    return out


def _may_be(tensor: Tensor, scheme: Scheme, shape: Shape) -> bool:
    if scheme.flat:
        return scheme.stored_shape(shape) == tensor.values.shape
    scales = tensor.scales.shape if tensor.scales else ()
    return shape in scheme.shapes(tensor.values.shape) and scheme.scale_shape(shape, scales) == scales


@dataclass(frozen=True)
class Recut(Tensor):
    """Rows of several plain tensors, which follow each other in `stored`. `first_byte` is where they begin in these."""

    first_byte: int = field(kw_only=True)

    def stored_bytes(self, count: int) -> int:
        """See `Tensor.stored_bytes`. Stored tensors have other numbers of elements."""
        return count * self.dtype.itemsize

    def is_stored_as(self, dtype: np.dtype[Any]) -> bool:
        """False: the values may come from more than one stored tensor."""
        return False

    def ranges(self, start: int, stop: int) -> Iterator[tuple[TensorInfo, int, int]]:
        """See `Tensor.ranges`."""
        first, last = (self.first_byte + self.stored_bytes(number) for number in (start, stop))
        for info in self.stored:
            if max(first, 0) < min(last, info.nbytes):
                yield info, max(first, 0), min(last, info.nbytes)
            first, last = first - info.nbytes, last - info.nbytes

    def read(self, reader: Reader, start: int, raw: np.ndarray, out: np.ndarray) -> None:
        """See `Tensor.read`."""
        values = out if out.dtype == self.dtype else raw[: self.stored_bytes(out.size)].view(self.dtype)
        memory = values.view(np.uint8).data
        for info, first, last in self.ranges(start, start + out.size):
            reader.read(info, first, memory[: last - first])
            memory = memory[last - first :]
        if values is not out:
            np.copyto(out, values, casting="unsafe")


def recut(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape], groups: Iterable[Sequence[str]]
) -> dict[str, Tensor]:
    """Cuts the tensors as a table wants them, if the tensors of a group are equal parts of as many rows.

    Args:
        tensors: of the source.
        shapes: what the table wants.
        groups: names of tensors whose rows follow each other (`MappingTable.recut`).
    """
    out = dict(tensors)
    for names in groups:
        if not all(name in tensors and name in shapes for name in names):
            continue
        parts, wanted = [tensors[name] for name in names], [shapes[name] for name in names]
        stored = [part.shape for part in parts]
        is_one = len({shape[1:] for shape in stored + wanted}) == len({part.dtype for part in parts}) == 1
        rows = sum(shape[0] for shape in wanted)
        step = -(-rows // len(parts))
        is_equal = [shape[:1] for shape in stored] == [(min(step, rows - step * i),) for i in range(len(parts))]
        if stored == wanted or not is_one or not is_equal or any(part.scheme for part in parts):
            continue
        values, *others = (part.values for part in parts)
        begin = 0
        for name, shape in zip(names, wanted, strict=True):
            out[name] = Recut(name, shape, values, extra=tuple(others), first_byte=begin)
            begin += out[name].stored_bytes(prod(shape))
    return out
