"""Local steps: where both trees are sharded by the same letters, each device rearranges its own part.

The layouts of a step then run on the parts with smaller sizes of the letters. No device needs values of another one,
whatever the compiler would find out about reshapes.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from tpuconv.notation.layout import Axes, Axis, lead
from tpuconv.notation.sharding import AxisSharding
from tpuconv.weight_map.picks import Box
from tpuconv.weight_map.steps import MapStep, RowSide

Spec = tuple[tuple[str, ...], ...]
"""The mesh axes of more than one device that each axis of an array is sharded over; axes at the end may be left out."""


def spec_of(given: Sequence[AxisSharding], mesh: Mapping[str, int]) -> Spec:
    """Returns the entries of a `PartitionSpec` on a mesh of these sizes, without mesh axes of one device."""
    entries = ((entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in given)
    return tuple(tuple(name for name in names if mesh[name] > 1) for names in entries)


def letters_divided(step: MapStep, specs: Sequence[Spec], mesh: Mapping[str, int]) -> dict[str, int] | None:
    """Returns into how many parts each letter is divided, if each device can do a step on its own part; else None.

    That is so if all arrays with a letter are sharded alike over whole elements of the letter, which is the outermost
    one of its axis; if a box takes all of each sharded axis; and if the released tensors are sharded alike on both
    sides. A tree may have other letters for the same axis there: (shards n_of_shard) is N.

    Args:
        step: the step.
        specs: of each array of the source, then of the target.
        mesh: the size of each mesh axis.
    """
    found = _shardings_of_letters(step, specs, mesh)
    if found is None:
        return None
    stacks = [[_division(axis, found) for axis in axes] for axes in step.stacks]
    wanted = [axes for side in step.dst for axes in side.layout.src]
    for pick, axes in zip(step.picks, wanted, strict=True):
        theirs = [_division(axis, found) for axis in axes]
        for box in pick.boxes:
            ours = stacks[box.stack]
            if any(each is not None and name for each, name in zip(box.ranges, ours, strict=False)):
                return None
            mine = [ours[i] for i in box.kept] + ours[len(box.ranges) :]
            piled = len(theirs) - len(mine)
            if theirs[piled:] != mine or any(theirs[:piled]) or (piled and isinstance(pick, Box)):
                return None
    return {letter: _count(names, mesh) for letter, names in found.items() if names}


def _division(axis: Axis, found: Mapping[str, tuple[str, ...]]) -> tuple[Any, ...]:
    """Returns how an axis of released tensors is divided: the mesh axes of its outermost letter; of a concatenation the
    divisions of its parts; empty if it is whole."""
    if axis.op == "*":
        return _division(axis.parts[0], found)
    if axis.op == "+":
        parts = tuple(_division(part, found) for part in axis.parts)
        return parts if any(parts) else ()
    return found.get(axis.letter, ())


def _shardings_of_letters(
    step: MapStep, specs: Sequence[Spec], mesh: Mapping[str, int]
) -> dict[str, tuple[str, ...]] | None:
    """Returns the mesh axes that each letter is sharded over; None if two arrays differ in one."""
    found: dict[str, tuple[str, ...]] = {}
    arrays: list[tuple[RowSide, Axes]] = [(side, axes) for side in step.src for axes in side.undone]
    arrays += [(side, axes) for side in step.dst for axes in side.layout.dst]
    for (side, axes), spec in zip(arrays, specs, strict=True):
        sizes = dict(side.sizes)
        for i, axis in enumerate(axes):
            names, letter = spec[i] if i < len(spec) else (), lead(axis)
            if names and (letter not in sizes or sizes[letter] % _count(names, mesh)):
                return None
            for inner in axis.letters():
                mine = names if inner == letter else ()
                if found.setdefault(inner, mine) != mine:
                    return None
    return found


def _count(names: Sequence[str], mesh: Mapping[str, int]) -> int:
    return prod(mesh[name] for name in names)
