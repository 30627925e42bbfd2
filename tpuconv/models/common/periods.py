"""Stacked layers that are not alike: layers that repeat with a period are stacked for each place of a period, and run
by a loop over periods. Layers after the last complete period stay apart."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from tpuconv.notation.table import LAYERS_APART


def find_period(kinds: Sequence[Hashable]) -> int:
    """Returns the smallest number of layers after which the kinds of layers repeat, for two complete periods or more: 1
    if all are alike, 0 if they do not repeat."""
    layers = len(kinds)
    repeats = (p for p in range(1, max(layers // 2, 1) + 1) if all(kinds[i] == kinds[i - p] for i in range(p, layers)))
    return next(repeats, 0)


@dataclass(frozen=True)
class LayerStacks:
    """Which arrays hold which of `layers` layers, stacked with a period."""

    layers: int
    period: int

    @property
    def count(self) -> int:
        """The number of complete periods."""
        return self.layers // self.period

    @property
    def rest(self) -> range:
        """The layers after the last complete period."""
        return range(self.count * self.period, self.layers)

    def at_place(self, place: int) -> range:
        """Returns the layers at a place of all periods, which are stacked."""
        return range(place, self.rest.start, self.period)

    def find(self, layer: int) -> tuple[str, int | None]:
        """Returns how the names of the arrays of a layer begin, and its index on their first axis; None if they hold
        this layer alone."""
        if layer in self.rest:
            return f"{LAYERS_APART}.{layer - self.rest.start}", None
        if self.period == 1:
            return "layers", layer
        return f"layers.{layer % self.period}", layer // self.period

    def names_in(self, array: str) -> list[tuple[str, int | None]]:
        """Returns the names that the parameters of an array have in a model of separate layers, each with the layer's
        index on the first axis; None if the array holds one alone. The inverse of `find`."""
        for layer in range(self.layers):
            prefix, index = self.find(layer)
            if array.startswith(f"{prefix}."):
                tail = array.removeprefix(prefix)
                mates = [layer] if index is None else self.at_place(layer)
                return [(f"layers.{mate}{tail}", self.find(mate)[1]) for mate in mates]
        return [(array, None)]
