"""The work of a plan: slabs, which are read, transformed and written at once, in units that are done or not."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from tpuconv.convert.plan import sizes
from tpuconv.encodings.decode import Tensor
from tpuconv.notation.layout import Ranges, cut_sizes, lead, runs
from tpuconv.notation.table import Binding
from tpuconv.sources.source import Source

WIDE_SPAN = 2
"""A slab is wide if it spans more shards: a stack of norms, of which every shard has a few."""


@dataclass(frozen=True, slots=True)  # a large model has 100,000
class Slab:
    """The data that is read, transformed and written at once: a box of every target of a binding, in complete chunks.

    Attributes:
        ranges: its ranges of letters.
        dtype: of the values, before a target is encoded.
        names: the source tensors that are read.
        elements: the number of values.
    """

    binding: Binding
    ranges: Ranges
    dtype: np.dtype[Any]
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    elements: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", self._names())
        object.__setattr__(self, "elements", sum(map(prod, self.binding.layout.src_shapes(self.sizes))))

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every letter within the slab."""
        return cut_sizes(self.binding.sizes, self.ranges)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the values."""
        return self.elements * self.dtype.itemsize

    def reads(self) -> Iterator[list[tuple[str, int, int]]]:
        """Yields, for every source tensor of the layout, the runs to read: name, first element, number of elements."""
        layout, sizes = self.binding.layout, self.binding.sizes
        for stack, axes, shape in zip(self.binding.src, layout.src, layout.src_shapes(sizes), strict=True):
            tensor_size = prod(shape[stack.depth :])
            parts = []
            for start, stop in runs(axes, sizes, self.ranges):
                position = start
                while position < stop:
                    index, first = divmod(position, tensor_size)
                    count = min(stop - position, tensor_size - first)
                    parts.append((stack.names[index], first, count))
                    position += count
            yield parts

    def _names(self) -> tuple[str, ...]:
        names: list[str] = []
        for stack, axes in zip(self.binding.src, self.binding.layout.src, strict=True):
            every = runs(axes[: stack.depth], self.binding.sizes, self.ranges) if stack.depth else [(0, 1)]
            for start, stop in every:
                names += stack.names[start:stop]
        return tuple(names)

    def begins(self) -> tuple[str, int]:
        """Returns the source tensor that is read first, and the number of its first element: the first run of
        `reads`."""
        sizes, axes = self.binding.sizes, self.binding.layout.src[0][self.binding.src[0].depth :]
        if not any(letter in self.ranges for axis in axes for letter in axis.letters()):
            return self.names[0], 0
        corner = {letter: (start, start + 1) for letter in sizes for start, _ in [self.ranges.get(letter, (0, 0))]}
        return self.names[0], runs(axes, sizes, corner)[0][0]

    def boxes(self) -> list[tuple[slice, ...]]:
        """Returns the box of the slab in each target of the layout."""
        layout, sizes = self.binding.layout, self.binding.sizes
        return [
            tuple(self._range(lead(axis), n) for axis, n in zip(axes, shape, strict=True))
            for axes, shape in zip(layout.dst, layout.dst_shapes(sizes), strict=True)
        ]

    def _range(self, letter: str, size: int) -> slice:
        if letter not in self.ranges:
            return slice(0, size)
        start, stop = self.ranges[letter]
        inner = size // self.binding.sizes[letter]
        return slice(start * inner, stop * inner)


@dataclass(frozen=True)
class WorkUnit:
    """A part of the work that is done or not. Any process that sees the output folder could do it. A wide one is made
    from many shards of the source, and comes last."""

    uid: str
    slabs: tuple[Slab, ...]
    nbytes: int
    is_wide: bool = False


@dataclass(frozen=True)
class Buffers:
    """Bytes that one job holds at most.

    Attributes:
        values: values in the dtype that is wanted.
        raw: values as they are stored, if that is another dtype.
        read: what is read from a disk at once to be copied.
        changed: what the changes of an adapter are computed in.
        shard: one shard. While one is built, another is written.
        encoded: what encoders make, or what values are changed in.
    """

    values: int
    raw: int
    read: int
    changed: int
    shard: int
    encoded: int

    @property
    def nbytes(self) -> int:
        """Their sum."""
        return self.values + self.raw + self.read + self.changed + 2 * self.shard + self.encoded


def stored_bytes(tensors: Mapping[str, Tensor], slab: Slab) -> int:
    """Returns the bytes in which the values of a slab are stored at most, without scales."""
    elements = slab.elements
    return max(tensors[name].stored_bytes(elements) for name in slab.names)


def gather(source: Source, tensors: Mapping[str, Tensor], slabs: Sequence[Slab]) -> tuple[WorkUnit, ...]:
    """Gathers slabs into units of about UNIT_BYTES, in the order of the source on disk: by the last shard that they
    need, so that a source is read from start to end. Wide slabs get units of their own, after all others: else one
    norm would keep a unit waiting for the whole source."""
    order = {shard.name: i for i, shard in enumerate(source.shards)}

    def place(slab: Slab) -> tuple[bool, int, int, int]:
        name, start = slab.begins()
        tensor = tensors[name]
        needed = {order[info.shard] for each in slab.names for info in tensors[each].stored}
        is_wide = max(needed) - min(needed) >= WIDE_SPAN
        return is_wide, max(needed), order[tensor.values.shard], tensor.values.offset + tensor.stored_bytes(start)

    units: list[WorkUnit] = []
    unit_slabs: list[Slab] = []
    size, was_wide = 0, False

    def close() -> None:
        nonlocal unit_slabs, size
        if unit_slabs:
            units.append(WorkUnit(f"unit-{len(units):05d}", tuple(unit_slabs), size, was_wide))
        unit_slabs, size = [], 0

    for (is_wide, *_), slab in sorted(((place(slab), slab) for slab in slabs), key=lambda pair: pair[0]):
        if is_wide != was_wide:
            close()
            was_wide = is_wide
        unit_slabs.append(slab)
        size += stored_bytes(tensors, slab)
        if size >= sizes.UNIT_BYTES:
            close()
    close()
    return tuple(units)
