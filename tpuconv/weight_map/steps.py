"""Steps: the rows of two trees that share released tensors.

The released tensors are between the trees. A step undoes the changes of values of the source's rows, applies their
layouts backwards, picks tensors, and applies the layouts and changes of the target's rows. No released tensor is an
array of its own: the compiler fuses the chain.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tpuconv.errors import UnsupportedConfig, shorten
from tpuconv.names import collapse
from tpuconv.notation.arithmetic import Arithmetic, FactorsBeside
from tpuconv.notation.arrays import ArrayModule
from tpuconv.notation.layout import UNIT, Axes, Axis, Layout, Sizes
from tpuconv.notation.table import Binding
from tpuconv.weight_map.picks import Pick, pick_of

WHOLE: Mapping[str, int] = {}
"""The parts of letters of which none is divided."""


@dataclass(frozen=True)
class RowSide:
    """A row of one tree without names: rows of layers that are alike are equal, and share a compiled program.

    Attributes:
        layout: from released tensors to the arrays of the tree.
        sizes: of the letters of the layout and the changes, sorted.
        changes: how the values of each array differ from the release.
    """

    layout: Layout
    sizes: tuple[tuple[str, int], ...]
    changes: tuple[Arithmetic | None, ...]

    @classmethod
    def of(cls, row: Binding) -> "RowSide":
        """Returns the row without names."""
        changes = row.row.arithmetic or (None,) * len(row.dst)
        tensors = (*row.layout.src, *row.layout.dst)
        letters = {letter for axes in tensors for axis in axes for letter in axis.letters() if letter != UNIT}
        if any(changes):
            letters |= row.sizes.keys()  # a change may depend on any
        return cls(row.layout, tuple(sorted((x, row.sizes[x]) for x in letters)), changes)

    @property
    def undone(self) -> tuple[Axes, ...]:
        """The axes of the arrays that the way back takes: of the row, and of the factors beside them."""
        first = self.changes[0]
        return (*self.layout.dst, self.layout.dst[0][:-1]) if isinstance(first, FactorsBeside) else self.layout.dst

    def local(self, parts: Mapping[str, int]) -> dict[str, int]:
        """Returns the sizes in one device's part, if the letters are divided into `parts`."""
        return {letter: size // parts.get(letter, 1) for letter, size in self.sizes}


@dataclass(frozen=True)
class MapStep:
    """Rows of the source and rows of the target that share released tensors.

    Attributes:
        src: rows of the source tree, which are undone.
        dst: rows of the target tree, which are done.
        picks: for each stack of released tensors of each row of `dst`, where it is among the stacks of `src`.
    """

    src: tuple[RowSide, ...]
    dst: tuple[RowSide, ...]
    picks: tuple[Pick, ...]

    def __call__(self, tensors: Sequence[Any], arrays: ArrayModule, parts: Mapping[str, int] = WHOLE) -> list[Any]:
        """Returns the arrays of the target.

        Args:
            tensors: the arrays of the source.
            arrays: their module.
            parts: into how many parts each letter is divided, if the arrays are the part of one device.
        """
        given, stacks, keeps_values = iter(tensors), [], self.keeps_values
        for side in self.src:
            mine = [next(given) for _ in side.undone]
            if isinstance(change := side.changes[0], FactorsBeside):
                *mine, factors = mine
                mine = [change.multiplied(x, factors, arrays) for x in mine]
            elif not keeps_values:
                mine = [
                    x if change is None else change.undo(x, dict(side.sizes), arrays)
                    for x, change in zip(mine, side.changes, strict=True)
                ]
            stacks += side.layout.inverse(mine, side.local(parts), arrays)
        picks, out = iter(self.picks), []
        for side in self.dst:
            picked = [next(picks)(stacks, arrays) for _ in side.layout.src]
            made = side.layout(picked, side.local(parts), arrays)
            if not keeps_values:
                made = [
                    x if change is None else change.apply(x, dict(side.sizes), arrays)
                    for x, change in zip(made, side.changes, strict=True)
                ]
            out += made
        return out

    @property
    def keeps_values(self) -> bool:
        """True if no value changes: all arrays differ from the release in the same way, or not at all."""
        changes = {change for side in (*self.src, *self.dst) for change in side.changes}
        return len(changes) == 1 and not any(isinstance(change, FactorsBeside) for change in changes)

    @property
    def rounds(self) -> bool:
        """True if the values that come back by the inverse may differ: a change of values rounds."""
        changes = ((change, dict(side.sizes)) for side in (*self.src, *self.dst) for change in side.changes)
        return not self.keeps_values and any(change.rounds(sizes) for change, sizes in changes if change is not None)

    @property
    def stacks(self) -> list[Axes]:
        """The axes of the stacks of released tensors that the rows of the source give."""
        return [axes for side in self.src for axes in side.layout.src]


@dataclass(frozen=True)
class NamedStep:
    """A step with the names of its arrays, in the order in which the step takes and gives them."""

    step: MapStep
    src: tuple[str, ...]
    dst: tuple[str, ...]
    released: tuple[str, ...]


def compose_steps(source: Sequence[Binding], target: Sequence[Binding]) -> tuple[NamedStep, ...]:
    """Returns the steps from one tree to another one, given the rows from released tensors to each. Arrays of the
    source that no layer reads are left out.

    Raises:
        UnsupportedConfig: one tree has released tensors that the other one lacks.
    """
    source = [row for row in source if not (row.row.otherwise or row.row.is_of_ones)]
    _check_alike(source, target)
    owner = {name: i for i, row in enumerate(source) for stack in row.src for name in stack.names}
    parent = list(range(len(source) + len(target)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for i, row in enumerate(target, len(source)):
        for stack in row.src:
            for name in stack.names:
                parent[find(i)] = find(owner[name])
    groups: dict[int, tuple[list[Binding], list[Binding]]] = {}
    for i, row in enumerate((*source, *target)):
        groups.setdefault(find(i), ([], []))[i >= len(source)].append(row)
    return tuple(_step(*rows) for rows in groups.values())


def _step(source: Sequence[Binding], target: Sequence[Binding]) -> NamedStep:
    stacks = [
        (stack, _dims(axes[: stack.depth], row.sizes))
        for row in source
        for stack, axes in zip(row.src, row.layout.src, strict=True)
    ]
    places = {
        name: (number, index)
        for number, (stack, dims) in enumerate(stacks)
        for name, index in zip(stack.names, product(*map(range, dims)), strict=True)
    }
    shapes = [dims for _, dims in stacks]
    picks = tuple(
        pick_of([places[name] for name in stack.names], _dims(axes[: stack.depth], row.sizes), shapes)
        for row in target
        for stack, axes in zip(row.src, row.layout.src, strict=True)
    )
    step = MapStep(tuple(map(RowSide.of, source)), tuple(map(RowSide.of, target)), picks)
    taken = tuple(name for row, side in zip(source, step.src, strict=True) for name in _undone(row, side))
    return NamedStep(step, taken, _names(target), tuple(places))


def _dims(axes: Sequence[Axis], sizes: Sizes) -> tuple[int, ...]:
    return tuple(axis.size(sizes) for axis in axes)


def _undone(row: Binding, side: RowSide) -> tuple[str, ...]:
    """Returns the names of the arrays of `RowSide.undone`."""
    names, change = _names([row]), side.changes[0]
    return (*names, change.of(names[0])) if isinstance(change, FactorsBeside) else names


def _names(rows: Sequence[Binding]) -> tuple[str, ...]:
    return tuple(name for row in rows for stack in row.dst for name in stack.names)


def _check_alike(source: Sequence[Binding], target: Sequence[Binding]) -> None:
    ours, theirs = (_released(rows) for rows in (source, target))
    if ours != theirs:
        raise UnsupportedConfig(
            "the trees do not hold the same tensors of the release",
            details=shorten(
                [f"only in the source: {name}" for name in collapse(sorted(ours - theirs))]
                + [f"only in the target: {name}" for name in collapse(sorted(theirs - ours))]
            ),
            hint="map the text model alone: `text_only=True`",
        )


def _released(rows: Collection[Binding]) -> set[str]:
    return {name for row in rows for stack in row.src for name in stack.names}
