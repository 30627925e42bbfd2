"""The places of single layers in arrays of stacked layers, for every target that stacks them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tpuconv.notation.layout import Shape
from tpuconv.notation.table import Binding


@dataclass(frozen=True)
class LayerPlace:
    """The place of the array of a layer in an array of stacked layers.

    Attributes:
        stack: name of the stacked array.
        at: its index along each stacked axis, by axis.
    """

    stack: str
    at: Mapping[int, int]

    def box(self, box: tuple[slice, ...]) -> tuple[slice, ...]:
        """Returns the box in the stacked array of a box in the layer's array."""
        inner = iter(box)
        axes = range(len(box) + len(self.at))
        return tuple(slice(self.at[i], self.at[i] + 1) if i in self.at else next(inner) for i in axes)

    def without_stack(self, sizes: Shape) -> Shape:
        """Returns the sizes of the axes that the layer's array has too."""
        return tuple(size for axis, size in enumerate(sizes) if axis not in self.at)


@dataclass(frozen=True)
class LayerStack:
    """The arrays of single layers that an array of stacked layers is made of.

    Attributes:
        axes: the stacked axes.
        layers: the name of each layer's array, by its index along these axes.
    """

    axes: tuple[int, ...]
    layers: Mapping[Shape, str]

    def parts(self, box: tuple[slice, ...]) -> Iterator[tuple[str, tuple[slice | int, ...], tuple[slice, ...]]]:
        """Yields the layers in a box: the name of the array, its place in the box, and the box in the array."""
        for index, name in self.layers.items():
            at = dict(zip(self.axes, index, strict=True))
            if all(box[axis].start <= i < box[axis].stop for axis, i in at.items()):
                place = tuple(at[i] - part.start if i in at else slice(None) for i, part in enumerate(box))
                yield name, place, tuple(part for i, part in enumerate(box) if i not in at)


def layer_places(apart: Iterable[Binding], stacked: Iterable[Binding]) -> dict[str, LayerPlace]:
    """Returns the place of each array of `apart` in `stacked`, by name. Arrays that are the same in both have none; one
    that is not stacked and has another name there has a place without stacked axes.

    Args:
        apart, stacked: the bindings of a target from the same tensors, without stacked layers and with them.
    """
    found: dict[tuple[str, bool], tuple[Binding, dict[str, int]]] = {}
    for binding in stacked:
        stack, axes = binding.src[0], binding.layout.src[0]
        letters = [axis.letter for axis in axes[: stack.depth]]
        sizes = [binding.sizes[letter] for letter in letters]
        for number, name in enumerate(stack.names):
            index = np.unravel_index(number, sizes) if sizes else ()
            letter_places = {letter: int(i) for letter, i in zip(letters, index, strict=True)}
            found[name, binding.row.is_of_ones] = binding, letter_places
    places: dict[str, LayerPlace] = {}
    for binding in apart:
        other, index_of = found[binding.src[0].names[0], binding.row.is_of_ones]
        for ours, axes, theirs, their_axes in zip(
            binding.dst, binding.layout.dst, other.dst, other.layout.dst, strict=True
        ):
            has = set(map(str, axes))
            at = {i: index_of[str(axis)] for i, axis in enumerate(their_axes) if str(axis) not in has}
            if at or ours.names != theirs.names:
                places[ours.names[0]] = LayerPlace(theirs.names[0], at)
    return places


def layer_stacks(places: Mapping[str, LayerPlace]) -> dict[str, LayerStack]:
    """Returns the arrays of stacked layers that have these places, by name."""
    layers: dict[str, dict[Shape, str]] = {}
    for name, place in places.items():
        layers.setdefault(place.stack, {})[tuple(place.at.values())] = name
    axes = {place.stack: tuple(place.at) for place in places.values()}
    return {stack: LayerStack(axes[stack], found) for stack, found in layers.items()}
