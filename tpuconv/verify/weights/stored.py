"""Weights as they are stored, read box by box: numbers, and the values that quantized numbers stand for."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import lcm, prod
from typing import Any

import numpy as np

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.checkpoint.reader import read_box
from tpuconv.encodings.decode import Tensor
from tpuconv.encodings.words import spans_of
from tpuconv.notation.layout import Shape
from tpuconv.sources.headers import TensorInfo
from tpuconv.sources.reader import Reader
from tpuconv.verify.weights.statistics import WeightStatistics, coded_statistics, merged_statistics, statistics_of

MOST_GROWTH = 4
"""How many times larger a box may be, so that complete chunks are read."""

WeightBox = tuple[slice, ...]
"""A slice for each axis of a weight."""


def boxes_of(shape: Shape, groups: Shape, chunks: Shape, most: int) -> Iterator[WeightBox]:
    """Yields boxes that divide a shape, in row-major order.

    Args:
        shape: of the weight.
        groups: by axis, the number of values that share a scale: a box begins and ends at multiples.
        chunks: by axis, the number of values that are stored together: boxes of complete chunks read each once.
        most: the most values of a box, unless groups or chunks have more; chunks have `MOST_GROWTH` times as many.
    """
    if 0 in shape:
        return
    units = [min(lcm(*sizes), n) for *sizes, n in zip(groups, chunks, shape, strict=True)]
    if prod(units) > MOST_GROWTH * most:
        units = [min(group, n) for group, n in zip(groups, shape, strict=True)]
    steps = list(units)
    for axis in reversed(range(len(shape))):  # a box is as long as possible along the last axes, which are contiguous
        steps[axis] = min(shape[axis], steps[axis] * max(1, most // prod(steps)))
        if steps[axis] < shape[axis]:
            break
    starts = (range(0, n, step) for n, step in zip(shape, steps, strict=True))
    for first in product(*starts):
        yield tuple(slice(i, min(i + step, n)) for i, step, n in zip(first, steps, shape, strict=True))


@dataclass(frozen=True)
class WeightPart:
    """The contents of a box: the values, and the statistics of the quantized numbers that are stored for them; None if
    the values themselves are stored, or the numbers are not known."""

    values: np.ndarray
    numbers: WeightStatistics | None


@dataclass(frozen=True, kw_only=True)
class Weight(ABC):
    """A stored array or tensor.

    Attributes:
        name: as it is stored.
        parameter: the name of the parameter whose values it holds; empty for scales and the like.
        dtype: of what is stored, or the type of its quantized numbers.
        stored_shape: as it is stored.
        nbytes: its size.
        shape: of its values.
        groups, chunks: see `boxes_of`.
    """

    name: str
    parameter: str
    dtype: str
    stored_shape: Shape
    nbytes: int
    shape: Shape
    groups: Shape
    chunks: Shape

    @property
    @abstractmethod
    def files(self) -> set[str]:
        """The files of the source that it is read from."""

    @property
    @abstractmethod
    def is_quantized(self) -> bool:
        """True if its values are made of stored numbers and scales."""

    @abstractmethod
    def read(self, box: WeightBox) -> WeightPart:
        """Returns the contents of a box.

        Raises:
            CorruptOutput, SourceError: they cannot be read.
        """


@dataclass(frozen=True, kw_only=True)
class ArrayWeight(Weight):
    """An array of a checkpoint of ours, or one layer of it.

    Attributes:
        layer: the number of the layer within a stacked array; None for all of it.
        qtype: of the quantized values; None if it is not quantized, or cannot be decoded.
        beside: the names of the arrays with its scales and, if there are any, its zero points.
    """

    manifest: Manifest
    layer: int | None = None
    qtype: str | None = None
    beside: tuple[str, ...] = ()

    @property
    def files(self) -> set[str]:
        """See `Weight`: each array is checked by itself."""
        return set()

    @property
    def is_quantized(self) -> bool:
        """See `Weight`."""
        return self.qtype is not None

    def read(self, box: WeightBox) -> WeightPart:
        """See `Weight`."""
        stored = self._part(self.name, box)
        if self.qtype is None:
            return WeightPart(stored, None)
        from tpuconv.quantize.values import decoded_values

        few = tuple(slice(s.start // group, -(-s.stop // group)) for s, group in zip(box, self.groups, strict=True))
        scales, *zeros = (self._part(name, few) for name in self.beside)
        parts = [stored.view(np.uint8), scales, *(zero.view(np.uint8) for zero in zeros)]
        return WeightPart(decoded_values(self.qtype, parts), statistics_of(stored))

    def of_layer(self, name: str, layer: int) -> "ArrayWeight":
        """Returns one layer of a stacked array, as a weight of this name."""
        return replace(
            self,
            parameter=name,
            layer=layer,
            shape=self.shape[1:],
            stored_shape=self.stored_shape[1:],
            nbytes=self.nbytes // self.shape[0],
            groups=self.groups[1:],
            chunks=self.chunks[1:],
        )

    def _part(self, name: str, box: WeightBox) -> np.ndarray:
        out = np.empty([s.stop - s.start for s in box], self.manifest.arrays[name].dtype)
        read_box(self.manifest, name, box if self.layer is None else (self.layer, *box), out)
        return out


@dataclass(frozen=True, kw_only=True)
class PlainWeight(Weight):
    """A parameter that is not quantized, of arrays that are read as a whole.

    Attributes:
        read_box: returns a box of an array, by its name.
    """

    read_box: Callable[[str, WeightBox], np.ndarray]

    @property
    def files(self) -> set[str]:
        """See `Weight`: the source is opened as a whole."""
        return set()

    @property
    def is_quantized(self) -> bool:
        """See `Weight`."""
        return False

    def read(self, box: WeightBox) -> WeightPart:
        """See `Weight`."""
        return WeightPart(self.read_box(self.name, box), None)


def plain_weight(
    name: str, dtype: np.dtype[Any], shape: Shape, chunks: Shape, read_box: Callable[[str, WeightBox], np.ndarray]
) -> PlainWeight:
    """Returns a parameter that is not quantized; for the arguments see `Weight` and `PlainWeight`."""
    return PlainWeight(
        name=name,
        parameter=name,
        dtype=dtype.name,
        stored_shape=shape,
        nbytes=prod(shape) * dtype.itemsize,
        shape=shape,
        groups=ones(shape),
        chunks=chunks,
        read_box=read_box,
    )


@dataclass(frozen=True, kw_only=True)
class TensorWeight(Weight):
    """A tensor of safetensors, decoded if it has scales.

    Attributes:
        tensor: as tables see it.
        reader: of the source.
    """

    tensor: Tensor
    reader: Reader

    @property
    def files(self) -> set[str]:
        """See `Weight`."""
        return {info.shard for info in self.tensor.stored}

    @property
    def is_quantized(self) -> bool:
        """See `Weight`."""
        return self.tensor.scheme is not None

    def read(self, box: WeightBox) -> WeightPart:
        """See `Weight`. The box is contiguous."""
        shape = tuple(s.stop - s.start for s in box)
        if not self.is_quantized:
            out = np.empty(prod(shape), self.tensor.dtype)
            self.tensor.read(self.reader, self._start(box), np.empty(0, np.uint8), out)
            return WeightPart(out.reshape(shape), None)
        values = np.empty(shape, np.float32)
        if not self._has_scales_by_matrix:
            return WeightPart(values, self._decode(self.tensor, self._start(box), values.reshape(-1)))
        # Scales of a tensor are read together: the scales of all experts would be read again for each box.
        found = [
            self._decode(self._matrix(box[0].start + number), self._start((slice(0, 1), *box[1:])), part.reshape(-1))
            for number, part in enumerate(values)
        ]
        return WeightPart(values, merged_statistics(filter(None, found)))

    def _start(self, box: WeightBox) -> int:
        start = 0
        for s, n in zip(box, self.shape, strict=True):
            start = start * n + s.start
        return start

    @cached_property
    def _has_scales_by_matrix(self) -> bool:
        parts, scales = self.tensor.stored[1:], self.tensor.scales
        alone = len(parts) == 1 or (len(parts) == 2 and self.tensor.tensor_scale is not None)
        return len(self.shape) > 2 and alone and scales is not None and scales.shape[:1] == self.shape[:1]

    def _matrix(self, number: int) -> Tensor:
        """Returns the tensor at an index of the first axis."""
        scales = self.tensor.scales
        assert scales is not None
        values = _at(self.tensor.values, number)
        return replace(self.tensor, shape=self.shape[1:], values=values, scales=_at(scales, number))

    def _decode(self, tensor: Tensor, start: int, out: np.ndarray) -> WeightStatistics | None:
        """Fills `out` with values from number `start` on. Returns the statistics of their quantized numbers."""
        scheme = tensor.scheme
        assert scheme is not None
        if scheme.flat is not None:  # only the text beside the values says their shape
            tensor = replace(tensor, shape=tuple(tensor.flat_parts.text(self.reader)["shape"]))
        raw = np.empty(tensor.stored_bytes(out.size), np.uint8)
        tensor.read(self.reader, start, raw, out)
        if scheme.affine is not None:
            affine = scheme.affine
            read = (
                affine.words.read(self.reader, tensor.values, rows, columns)
                for rows, columns in spans_of(start, out.size, tensor.shape[-1])
            )
            return merged_statistics(statistics_of(affine.numbers(numbers)) for part in read for _, numbers in part)
        if scheme.quarters is not None:  # numbers are the signs of values
            return statistics_of(np.sign(out))
        if scheme.flat is not None or tensor.column_scales is not None:  # `raw` then has other bytes
            self.reader.read(tensor.values, tensor.stored_bytes(start), raw.data)
        if len(scheme.table) > 16:  # a value in a byte, else two
            return coded_statistics(raw, scheme.table)
        halves = (raw & np.uint8(15), raw >> np.uint8(4))
        return merged_statistics(coded_statistics(half, scheme.table) for half in halves)


def _at(info: TensorInfo, number: int) -> TensorInfo:
    """Returns the part of a stored tensor at an index of its first axis."""
    nbytes = info.nbytes // info.shape[0]
    return replace(info, shape=info.shape[1:], offset=info.offset + number * nbytes, nbytes=nbytes)


def ones(shape: Sequence[Any]) -> Shape:
    """Returns a 1 for each axis of a shape."""
    return (1,) * len(shape)


def tensor_weight(info: TensorInfo, tensor: Tensor | None, reader: Reader, *, is_part: bool) -> TensorWeight:
    """Returns a stored tensor as a weight.

    Args:
        info: the stored tensor.
        tensor: what its values stand for, if it is encoded.
        reader: of the source.
        is_part: whether it belongs to another tensor, as scales do.
    """
    seen = tensor or Tensor(info.name, info.shape, info, any_scales=True)
    return TensorWeight(
        name=info.name,
        parameter="" if is_part else seen.name,
        dtype=info.dtype if seen.scheme is None else f"{seen.scheme.qtype} in {info.dtype}",
        stored_shape=info.shape,
        nbytes=info.nbytes,
        shape=seen.shape,
        groups=ones(seen.shape),
        chunks=ones(seen.shape),
        tensor=seen,
        reader=reader,
    )
