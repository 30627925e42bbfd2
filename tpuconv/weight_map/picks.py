"""Picks: where the released tensors that a row of one tree stacks are among the stacks of the other tree.

A row stacks released tensors on leading axes, outermost first: layers, experts. The names of a stack stay axes. If they
were one axis, a sharded letter among them would be mixed with one that is not, and moved between devices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from tpuconv.notation.arrays import ArrayModule
from tpuconv.notation.layout import Shape


@dataclass(frozen=True)
class Box:
    """A box of one stack.

    Attributes:
        stack: the number of the stack.
        ranges: of each of its leading axes the range [start, stop), or None for all of it.
        kept: the leading axes that stay; each of the others has one element.
    """

    stack: int
    ranges: tuple[tuple[int, int] | None, ...] = ()
    kept: tuple[int, ...] = ()

    @property
    def boxes(self) -> Iterator["Box"]:
        """The box itself."""
        yield self

    def __call__(self, stacks: Sequence[Any], arrays: ArrayModule) -> Any:
        """Returns the box of the stacks."""
        whole = stacks[self.stack]
        part = whole
        if any(self.ranges):
            part = whole[tuple(slice(*(each or (None,))) for each in self.ranges)]
        if len(self.kept) == len(self.ranges):
            return part
        return part.reshape(*(part.shape[i] for i in self.kept), *part.shape[len(self.ranges) :])


@dataclass(frozen=True)
class Pile:
    """Picks stacked on a new first axis."""

    picks: "tuple[Pick, ...]"

    @property
    def boxes(self) -> Iterator[Box]:
        """All boxes in the pile, in order."""
        for pick in self.picks:
            yield from pick.boxes

    def __call__(self, stacks: Sequence[Any], arrays: ArrayModule) -> Any:
        """Returns the stacked picks."""
        return arrays.concatenate([arrays.expand_dims(pick(stacks, arrays), (0,)) for pick in self.picks], 0)


Pick = Box | Pile

StackPlace = tuple[int, tuple[int, ...]]
"""The number of a stack, and the index of a tensor in its leading axes."""


def pick_of(places: Sequence[StackPlace], dims: Sequence[int], shapes: Sequence[Shape]) -> Pick:
    """Returns the pick of the tensors at these places.

    Args:
        places: of the tensors of a stack, in order.
        dims: the sizes of the leading axes of that stack.
        shapes: the sizes of the leading axes of the stacks that the places are in.
    """
    stack = places[0][0]
    if all(number == stack for number, _ in places):
        indices = [index for _, index in places]
        columns = list(zip(*indices, strict=True))
        box = [(min(column), max(column) + 1) for column in columns]
        kept = _kept(box, dims)
        if kept is not None and indices == list(product(*(range(*each) for each in box))):
            ranges = tuple(None if each == (0, size) else each for each, size in zip(box, shapes[stack], strict=True))
            return Box(stack, ranges, kept)
    count = len(places) // dims[0]
    parts = (places[i * count : (i + 1) * count] for i in range(dims[0]))
    return Pile(tuple(pick_of(part, dims[1:], shapes) for part in parts))


def _kept(box: Sequence[tuple[int, int]], dims: Sequence[int]) -> tuple[int, ...] | None:
    """Returns the axes of a box that have the sizes `dims`, in order; None if the others have not one element each."""
    kept: list[int] = []
    left = list(dims)
    for i in reversed(range(len(box))):
        if left and box[i][1] - box[i][0] == left[-1]:
            kept.insert(0, i)
            left.pop()
    sizes = [stop - start for start, stop in box]
    return None if left or prod(sizes) != prod(dims) else tuple(kept)
