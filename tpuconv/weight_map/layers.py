"""Layers: a step with stacked layers as the same smaller step for each layer.

A row of 48 stacked layers with 128 experts has 6,144 tensors in a release. As one program it compiles for more than a
minute; a program of one layer, whose number is an operand, compiles in less than a second and serves all layers. The
memory of a call is then a layer's too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

from tpuconv.notation.layout import Axes
from tpuconv.weight_map.picks import Box, Pick, Pile
from tpuconv.weight_map.steps import MapStep, RowSide


@dataclass(frozen=True)
class LayerStep:
    """The step of one layer.

    Attributes:
        step: with an axis of size 1 where layers are stacked.
        src_axes: the axis of layers of each array of the source; empty if each layer has its own arrays.
        dst_axes: the same of the target.
    """

    step: MapStep
    src_axes: tuple[int, ...]
    dst_axes: tuple[int, ...]


@dataclass(frozen=True)
class StepLayers:
    """The layers of a step.

    Attributes:
        one: the step of each of them.
        src, dst: for each layer the numbers of its arrays among the arrays of the complete step.
    """

    one: LayerStep
    src: tuple[tuple[int, ...], ...]
    dst: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        """The number of layers."""
        return len(self.src)


def _taken(step: MapStep) -> list[Sequence[Axes]]:
    """Returns the axes of the arrays of the source, row by row."""
    return [side.undone for side in step.src]


def _made(step: MapStep) -> list[Sequence[Axes]]:
    """Returns the axes of the arrays of the target, row by row."""
    return [side.layout.dst for side in step.dst]


@cache
def layers_of(step: MapStep) -> StepLayers | None:
    """Returns the layers of a step whose layers are stacked in one tree or both, and alike; else None."""
    if all(isinstance(pick, Box) and pick.ranges for pick in step.picks):
        return _of_stacked(step)
    if all(isinstance(pick, Pile) for pick in step.picks):
        return _into_stacked(step)
    return None


def _of_stacked(step: MapStep) -> StepLayers | None:
    """The layers of a source that has them stacked."""
    picks = [pick for pick in step.picks if isinstance(pick, Box)]
    letters = {step.stacks[pick.stack][0].letter for pick in picks}
    letter = letters.pop()
    src_axes = _axes_of(_taken(step), letter)
    if letters or not letter or src_axes is None:
        return None
    count = dict(step.src[0].sizes)[letter]
    arrays = tuple(range(len(src_axes)))
    if all(pick.ranges[0] is None and pick.kept[:1] == (0,) for pick in picks):
        firsts = {axes[0].letter for side in step.dst for axes in side.layout.src}
        dst_axes = _axes_of(_made(step), letter)
        if firsts != {letter} or dst_axes is None or count < 2:
            return None
        one = MapStep(_one(step.src, letter), _one(step.dst, letter), step.picks)
        return StepLayers(LayerStep(one, src_axes, dst_axes), (arrays,) * count, (tuple(range(len(dst_axes))),) * count)
    rows = _rows_of_picks(step.dst)
    found = None
    mine: list[tuple[int, ...]] = []
    for layer in range(count):
        here = [i for i, pick in enumerate(picks) if pick.ranges[0] == (layer, layer + 1)]
        sides = list(dict.fromkeys(rows[i] for i in here))
        small = tuple(replace(picks[i], ranges=(None, *picks[i].ranges[1:])) for i in here)
        one = MapStep(_one(step.src, letter), tuple(step.dst[i] for i in sides), small)
        if (found is not None and one != found) or not here or len(small) != sum(rows.count(i) for i in sides):
            return None
        found = one
        mine.append(_arrays_of(_made(step), sides))
    if found is None or count < 2 or sum(map(len, mine)) != len(_arrays_of(_made(step), range(len(step.dst)))):
        return None
    return StepLayers(LayerStep(found, src_axes, ()), (arrays,) * count, tuple(mine))


def _into_stacked(step: MapStep) -> StepLayers | None:
    """The layers of a target that has them stacked, of a source that has them apart."""
    picks = [pick for pick in step.picks if isinstance(pick, Pile)]
    letters = {axes[0].letter for side in step.dst for axes in side.layout.src}
    letter, count = letters.pop(), len(picks[0].picks)
    dst_axes = _axes_of(_made(step), letter)
    if letters or not letter or dst_axes is None or count < 2 or {len(pick.picks) for pick in picks} != {count}:
        return None
    owner = [i for i, side in enumerate(step.src) for _ in side.layout.src]
    found = None
    mine: list[tuple[int, ...]] = []
    for layer in range(count):
        parts = [pick.picks[layer] for pick in picks]
        sides = sorted({owner[box.stack] for part in parts for box in part.boxes})
        stacks = [i for i, side in enumerate(owner) if side in sides]
        number = {stack: i for i, stack in enumerate(stacks)}
        small = tuple(Pile((_renumbered(part, number),)) for part in parts)
        one = MapStep(tuple(step.src[i] for i in sides), _one(step.dst, letter), small)
        if found is not None and one != found:
            return None
        found = one
        mine.append(_arrays_of(_taken(step), sides))
    flat = [i for arrays in mine for i in arrays]
    if found is None or sorted(flat) != list(_arrays_of(_taken(step), range(len(step.src)))):
        return None
    return StepLayers(LayerStep(found, (), dst_axes), tuple(mine), (tuple(range(len(dst_axes))),) * count)


def _renumbered(pick: Pick, number: dict[int, int]) -> Pick:
    if isinstance(pick, Box):
        return replace(pick, stack=number[pick.stack])
    return Pile(tuple(_renumbered(part, number) for part in pick.picks))


def _axes_of(rows: Sequence[Sequence[Axes]], letter: str) -> tuple[int, ...] | None:
    """Returns the axis of a letter in each array of the rows; None unless it is an axis by itself in all of them."""
    found = []
    for axes in chain.from_iterable(rows):
        at = [i for i, axis in enumerate(axes) if axis.letter == letter]
        if len(at) != 1 or _count(axes, letter) != 1:
            return None
        found.append(at[0])
    return tuple(found)


def _count(axes: Axes, letter: str) -> int:
    return [name for axis in axes for name in axis.letters()].count(letter)


def _one(sides: Sequence[RowSide], letter: str) -> tuple[RowSide, ...]:
    """Returns the rows with one of a letter."""
    return tuple(
        replace(side, sizes=tuple((x, 1 if x == letter else size) for x, size in side.sizes)) for side in sides
    )


def _rows_of_picks(sides: Sequence[RowSide]) -> list[int]:
    return [i for i, side in enumerate(sides) for _ in side.layout.src]


def _arrays_of(rows: Sequence[Sequence[Axes]], numbers: Sequence[int]) -> tuple[int, ...]:
    """Returns the numbers of the arrays of some rows among the arrays of all rows."""
    starts = [0]
    for axes in rows:
        starts.append(starts[-1] + len(axes))
    return tuple(i for number in numbers for i in range(starts[number], starts[number + 1]))
