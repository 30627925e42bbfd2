"""The rows of a weight map as data: one for each kind of step, with names by pattern."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tpuconv.names import collapse
from tpuconv.weight_map.steps import MapStep, NamedStep, RowSide


@dataclass(frozen=True)
class MapSide:
    """One tree's side of a row.

    Attributes:
        names: of the arrays, by pattern.
        layouts: from the released tensors to the arrays.
        changes: how values differ from the release: `* H^-0.5`, `+ 1`; empty if none does.
    """

    names: tuple[str, ...]
    layouts: tuple[str, ...]
    changes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        return {"names": list(self.names), "layouts": list(self.layouts), "changes": list(self.changes)}


@dataclass(frozen=True)
class MapRow:
    """The steps of a map that are alike.

    Attributes:
        source: the side of the source tree, whose layouts are applied backwards and whose changes are undone.
        released: the tensors of the release between the trees, by pattern.
        target: the side of the target tree.
        exact: whether the inverse gives the same values again. If not, a change of values rounds.
        count: the number of steps.
    """

    source: MapSide
    released: tuple[str, ...]
    target: MapSide
    exact: bool
    count: int

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        return {
            "source": self.source.to_json(),
            "released": list(self.released),
            "target": self.target.to_json(),
            "exact": self.exact,
            "count": self.count,
        }


def rows_of(steps: Sequence[NamedStep]) -> Iterator[MapRow]:
    """Yields the rows of the steps of a map."""
    kinds: dict[MapStep, list[NamedStep]] = {}
    for named in steps:
        kinds.setdefault(named.step, []).append(named)
    for step, alike in kinds.items():
        for group in _by_pattern(alike):
            yield MapRow(
                _side(step.src, [name for each in group for name in each.src], keeps_values=step.keeps_values),
                tuple(collapse(name for each in group for name in each.released)),
                _side(step.dst, [name for each in group for name in each.dst], keeps_values=step.keeps_values),
                not step.rounds,
                len(group),
            )


def _by_pattern(alike: Sequence[NamedStep]) -> Iterator[list[NamedStep]]:
    """Yields steps that differ in indices alone: the norms of a layer are alike, and have rows of their own."""
    groups: dict[tuple[str, ...], list[NamedStep]] = {}
    for named in alike:
        key = tuple("".join(c for c in name if not c.isdigit()) for name in (named.src[0], named.dst[0]))
        groups.setdefault(key, []).append(named)
    yield from groups.values()


def _side(sides: Sequence[RowSide], names: Sequence[str], *, keeps_values: bool) -> MapSide:
    layouts = dict.fromkeys(str(side.layout) for side in sides)
    changes = dict.fromkeys(str(change) for side in sides for change in side.changes if change is not None)
    return MapSide(tuple(collapse(names)), tuple(layouts), () if keeps_values else tuple(changes))
