"""Composes a family's table and a target's tree to the table from released tensors to the target's parameters."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tpuconv.errors import LayoutError, UnsupportedConfig
from tpuconv.names import OWN_TARGET
from tpuconv.notation.layout import Axes, Axis, Layout, format_axes
from tpuconv.notation.sizes import HasSizes, WithSizes, configs_by_part, holds
from tpuconv.notation.table import (
    LAYERS,
    PERIODS,
    PLACES,
    REST_LAYERS,
    Binding,
    Map,
    MappingTable,
    is_of_mtp,
    row_indices,
)
from tpuconv.targets.target import HALF_HEAD, LayerPlaces, Place, Places, Target, Tree
from tpuconv.targets.trees import check_stacked, find_tree

_LAYER = re.compile(r"layers\.\{(\w+)\}\.")


def target_table(
    target: Target,
    family: str,
    model_type: str,
    table: MappingTable,
    config: HasSizes,
    *,
    scan_layers: bool = False,
    include_mtp: bool = False,
) -> tuple[MappingTable, HasSizes]:
    """Returns the table of a target, and the config with the letters that this table needs besides its own.

    Args:
        target: what the output is for.
        family: name of the family.
        model_type: of config.json.
        table: of the family.
        config: the family's reading of config.json.
        scan_layers: stack the layers.
        include_mtp: with the layers that predict further tokens.

    Raises:
        UnsupportedConfig: the target does not have the family, a parameter of this model, or stacked layers.
    """
    if scan_layers and target.layer_axis is None:
        raise UnsupportedConfig(f"{target.name} has no stacked layers", hint="leave out `scan_layers=`")
    if target.trees is None:
        if scan_layers and target.name != OWN_TARGET and (why := getattr(config, "unscannable", "")):
            raise UnsupportedConfig(
                f"`scan_layers=True` cannot stack the layers of this model: {why}", hint="leave it out"
            )
        stacks = scan_layers and not getattr(config, "unscannable", "")
        table = table.stack_layers(config) if stacks else table
        return (table, config) if target.name == OWN_TARGET else (_renamed(table, target), config)
    if table.returns:
        raise UnsupportedConfig(
            f"the target {target.name} has language models only, and this model returns {table.returns}",
            hint="convert without `target=`",
        )
    tree = find_tree(target, family, model_type, config)
    configs = configs_by_part(config)
    if scan_layers:
        check_stacked(target, tree, family, config)
        table.check_layers_alike()
        for part in configs.keys() & tree.parts.keys():
            if not tree.parts[part].is_scannable(configs[part]):
                raise UnsupportedConfig(
                    f"{target.name} has no stacked layers beside the {part} of this model",
                    hint="leave out `scan_layers=`, or convert the text model alone: `text_only=True`",
                )
    config = _of_tree(config, table, tree, scan_layers)
    composer = _Composer(target, tree, config, scan_layers)
    rows: list[Map] = []
    own = [row for row in table if _is_looped(row, configs_by_part(config), include_mtp)]
    for row in _merged(own, tree):
        placed = list(composer.rows(row))
        if not placed:
            what = "layers for multi-token prediction" if is_of_mtp(row) else ", ".join(row.jax_names)
            raise UnsupportedConfig(
                f"{target.name} has no place for {what} of {family}",
                hint="convert without `target=`" + (" or without `include_mtp=`" if include_mtp else ""),
            )
        rows += placed
    return table.with_rows(rows), config


def same_parameters(
    own: MappingTable, default_config: HasSizes, theirs: MappingTable, config: HasSizes, include_mtp: bool = False
) -> dict[str, str]:
    """Returns the target's names of the parameters that are ours but for the name: not joined, not changed."""
    ours = {_sources(binding): binding for binding in own.bind(default_config, include_mtp)}
    out: dict[str, str] = {}
    for binding in theirs.bind(config, include_mtp):
        other = ours.get(_sources(binding))
        if other is not None and other.layout.dst == binding.layout.dst and not binding.arithmetic:
            out |= {a.names[0]: b.names[0] for a, b in zip(other.dst, binding.dst, strict=True)}
    return out


def _sources(binding: Binding) -> tuple[str, ...]:
    return tuple(name for stack in binding.src for name in stack.names)


def _of_tree(config: Any, table: MappingTable, tree: Tree, scan: bool) -> HasSizes:
    """Returns the config with what the table of a tree needs besides: half of the head dimension; the first layers of
    all periods, the places of a period that share an array, and the layers after the last period.

    Raises:
        UnsupportedConfig: the layers of the model do not repeat with the tree's period.
    """
    period = tree.period
    half = {HALF_HEAD: config.sizes["H"] // 2} if "H" in config.sizes else {}
    sizes = {**config.sizes, **half, **tree.sizes(config)}
    sets = {**config.layer_sets, **table.layer_sets, **tree.layer_sets(config)}
    if period == 1:
        return WithSizes(config, sizes, sets)
    numbers = sets[LAYERS]
    whole = len(numbers) // period * period
    firsts, rest = list(numbers[:whole:period]), list(numbers[whole:])
    in_one = [place for places in _stacks(tree).values() if len(places) > 1 for place in places]
    has_rest = any(layers.rest for layers in tree.layers)
    if rest and (scan or _by_place(tree)) and not has_rest:
        raise UnsupportedConfig(
            f"{len(numbers)} layers are not a complete number of periods of {period}",
            hint="leave out `scan_layers=`" if scan else "convert without `target=`",
        )
    if scan:
        kinds = [config.layer_kinds[i] for i in numbers[:whole]]
        if any(kind != kinds[i % period] for i, kind in enumerate(kinds)):
            raise UnsupportedConfig(
                f"the layers of this model do not repeat with a period of {period}", hint="leave out `scan_layers=`"
            )
    return WithSizes(config, sizes, {**sets, PERIODS: firsts, PLACES: in_one, REST_LAYERS: rest})


def _stacks(tree: Tree) -> dict[str, list[int]]:
    """Returns the places of a period, by the names of the arrays that hold their layers if they are scanned."""
    stacks: dict[str, list[int]] = {}
    for place in range(tree.period):
        for name in {layers.stack(place) for layers in tree.layers if layers.stacked is not None}:
            stacks.setdefault(name, []).append(place)
    return stacks


def _by_place(tree: Tree) -> bool:
    """True if layers have names by their place in a period even if they are not scanned."""
    return any(layers.letter.startswith(PERIODS) for layers in tree.layers)


def _is_looped(row: Map, configs: Mapping[str, HasSizes], include_mtp: bool) -> bool:
    """True if a model has some parameters of a row."""
    config = configs.get(row.part)
    if config is None or (is_of_mtp(row) and not include_mtp):
        return False
    if not holds(row.when, config):
        return False
    return all(config.layer_sets.get(letter) or config.sizes.get(letter) for letter in row_indices(row)[0])


def _renamed(table: MappingTable, target: Target) -> MappingTable:
    """Returns the table with our own names between the target's root and leaf."""
    rows = [replace(row, jax=tuple(f"{target.root}{name}{target.leaf}" for name in row.jax_names)) for row in table]
    return table.with_rows(rows)


def _merged(rows: Sequence[Map], tree: Tree) -> list[Map]:
    """Returns the rows, those merged into one whose parameters a place joins."""
    out = list(rows)
    for letter, places in (("", _outside_layers(tree)), *((layers.letter, layers.places) for layers in tree.layers)):
        for joined in places:
            if isinstance(joined, str):
                continue
            parts = [
                row for name in joined for row in out if any(_is_named(own, name, letter) for own in row.jax_names)
            ]
            by_layers: dict[str, list[Map]] = {}
            for row in dict.fromkeys(parts):
                layer = _LAYER.match(row.jax_names[0])
                by_layers.setdefault(layer[1] if layer else "", []).append(row)
            for first, *others in by_layers.values():
                if _is_repeated(joined):
                    ones = _merge([first] * len(joined))
                    out += [ones] if ones not in out else []
                    continue
                merged = _merge([first, *others])
                out = [merged if row is first else row for row in out if row not in others]
    return out


def _is_repeated(names: tuple[str, ...]) -> bool:
    """Returns True for one name several times: the place is an array of ones (`Places`)."""
    return len(names) > len(set(names))


def _merge(rows: Sequence[Map]) -> Map:
    """Returns one row of the names and axes of all."""
    return replace(
        rows[0],
        hf=tuple(name for row in rows for name in row.hf_names),
        jax=tuple(name for row in rows for name in row.jax_names),
        layout=" -> ".join(", ".join(side) for side in zip(*(_sides(row.layout) for row in rows), strict=True)),
    )


def _outside_layers(tree: Tree) -> Places:
    """Returns the places outside of the layers of the text model, of all parts."""
    beside: Places = {
        tuple(f"{part}.{name}" for name in ((ours,) if isinstance(ours, str) else ours)): place
        for part, own in tree.parts.items()
        for ours, place in own.places.items()
    }
    return {**tree.places, **beside}


def _is_named(parameter: str, name: str, letter: str) -> bool:
    """Returns True if a parameter has this name in the layers of a letter, or outside of layers for the letter ""."""
    layer = _LAYER.match(parameter)
    if layer is None:
        return parameter == name
    return parameter.removeprefix(layer[0]) == name and (letter == LAYERS or layer[1] in (LAYERS, letter))


def _sides(layout: str) -> tuple[str, str]:
    src, arrow, dst = (part.strip() for part in layout.partition("->"))
    return src, dst if arrow else src


class _Composer:
    """Places the rows of a family's table in a tree."""

    def __init__(self, target: Target, tree: Tree, config: HasSizes, scan: bool):
        self.target, self.tree, self.scan = target, tree, scan
        self.layer_sets = config.layer_sets
        self.places, self.stacks = _outside_layers(tree), _stacks(tree)

    def rows(self, row: Map) -> Iterator[Map]:
        """Yields the rows that a row of the family's table becomes; none if the tree has no place for it."""
        layer = _LAYER.match(row.jax_names[0])
        if layer is None:
            if (placed := _find(self.places, row.jax_names)) is not None:
                yield self._row(row, placed)
            return
        own = layer[1]
        names = tuple(name.removeprefix(layer[0]) for name in row.jax_names)
        for layers in self.tree.layers:
            index = self._index(own, layers)
            placed = _find(layers.places, names) if self.layer_sets.get(index.partition("+")[0]) else None
            if placed is None:
                continue
            if not self.scan or layers.stacked is None:
                front = layers.apart.replace(f"{{{layers.letter}}}", f"{{{index}}}")
                yield self._row(_with_index(row, own, index), placed, f"{front}.")
            elif self.tree.period == 1 or index.startswith(PERIODS):
                letter = index.partition("+")[0]
                yield self._row(_with_index(row, own, index), placed, f"{layers.stack(0)}.", (letter,))
            else:
                yield from self._periodic(row, placed, layers, own, index)

    def _index(self, own: str, layers: LayerPlaces) -> str:
        """Returns the layers of both a row and a part of the tree, as an index in names; empty if there are none."""
        if layers.letter in (LAYERS, own):
            return own
        if own == LAYERS or set(self.layer_sets.get(layers.letter, (None,))) <= set(self.layer_sets[own]):
            return layers.letter
        return ""

    def _periodic(self, row: Map, placed: "_Placed", layers: LayerPlaces, own: str, index: str) -> Iterator[Map]:
        """Returns the rows of scanned layers: one for each array that holds some places of a period, and the rows of
        the layers after the last period."""
        has = self.layer_sets[index]
        for first in self.layer_sets[PERIODS][:1]:
            for name, places in self.stacks.items():
                mine = [place for place in places if first + place in has]
                if not mine or layers.stack(mine[0]) != name:
                    continue
                if mine != places:
                    raise UnsupportedConfig(
                        f"{self.target.name} has {', '.join(row.jax_names)} of all layers of a period in one array",
                        hint="leave out `scan_layers=`",
                    )
                at, letters = (f"{PERIODS}+{places[0]}", (PERIODS,)) if len(places) == 1 else _SHARED_PLACES
                yield self._row(_with_index(row, own, at), placed, f"{name}.", letters)
        for place, number in enumerate(self.layer_sets[REST_LAYERS]):
            if number in has and layers.rest:
                yield self._row(_with_index(row, own, number), placed, f"{layers.rest.replace('{#L}', str(place))}.")

    def _row(self, row: Map, placed: "_Placed", front: str = "", stack: Sequence[str] = ()) -> Map:
        sources, targets = _joined(row, placed)
        of_arrays = [(name, place) for _, place in placed for name in place.names]
        if stack:
            targets = [
                _stacked(axes, stack, self._axis(place)) for axes, (_, place) in zip(targets, of_arrays, strict=True)
            ]
        arithmetic = tuple(place.arithmetic for _, place in of_arrays)
        layout = " -> ".join(", ".join(map(format_axes, side)) for side in (sources, targets))
        return replace(
            row,
            jax=tuple(f"{self.target.root}{front}{name}{self.target.leaf}" for name, _ in of_arrays),
            layout=layout,
            arithmetic=arithmetic if any(arithmetic) else (),
        )

    def _axis(self, place: Place) -> int:
        axis = self.target.layer_axis if place.layer_axis is None else place.layer_axis
        assert axis is not None
        return axis


_SHARED_PLACES = (f"{PERIODS}+{PLACES}", (PERIODS, PLACES))
"""The layers at several places of all periods: as an index, and the letters of its axes."""


def _with_index(row: Map, letter: str, index: str | int) -> Map:
    """Returns the row for other layers: the layers of an index, or a single one."""
    new = f"{{{index}}}" if isinstance(index, str) else str(index)
    names = [tuple(name.replace(f"{{{letter}}}", new) for name in x) for x in (row.hf_names, row.jax_names)]
    return replace(row, hf=names[0], jax=names[1])


_Placed = list[tuple[tuple[int, ...], Place]]
"""Each place, with the numbers of the row's parameters that it takes."""


def _find(places: Places, names: tuple[str, ...]) -> _Placed | None:
    """Returns the places of a row's parameters; None unless all have one."""
    if _is_repeated(names):
        place = places.get(names)
        return [(tuple(range(len(names))), place)] if isinstance(place, Place) else None
    number = {name: i for i, name in enumerate(names)}
    found: _Placed = []
    for ours, theirs in places.items():
        parts = (ours,) if isinstance(ours, str) else ours
        if all(part in number for part in parts) and not _is_repeated(parts):
            place = Place(theirs) if isinstance(theirs, str) else theirs
            found.append((tuple(number[part] for part in parts), place))
    taken = sorted(i for numbers, _ in found for i in numbers)
    return sorted(found, key=lambda each: each[0]) if taken == list(range(len(number))) else None


def _joined(row: Map, placed: _Placed) -> tuple[list[Axes], list[Axes]]:
    """Returns the axes of a row's sources and of the target's parameters. A letter that a place takes apart, such as H
    as (half_head + half_head), is taken apart in the sources too. An index in a place's name is no axis there."""
    stack = tuple(row_indices(row)[1])
    layout = Layout.parse(row.layout, stack)
    apart: dict[str, Axis] = {}
    targets: list[Axes] = []
    for numbers, place in placed:
        own = [_without_indices(layout.dst[i], place.name) for i in numbers]
        if not place.layout:
            (axes,) = own
            targets.append(axes)
            continue
        wanted = Layout.parse(place.layout)
        for axes, given in zip(own, wanted.src, strict=True):
            for axis, part in zip(axes, given, strict=True):
                if axis != part:
                    if axis.op or not part.op:
                        raise LayoutError(f"'{place.layout}' of {place.name} does not begin with {format_axes(axes)}")
                    apart[axis.letter] = part
        targets += wanted.dst
    sources = [axes[len(stack) :] for axes in layout.src]
    return [_taken_apart(axes, apart) for axes in sources], [_taken_apart(axes, apart) for axes in targets]


def _without_indices(axes: Axes, name: str) -> Axes:
    return tuple(axis for axis in axes if axis.op or f"{{{axis.letter}}}" not in name)


def _taken_apart(axes: Axes, apart: Mapping[str, Axis]) -> Axes:
    def change(axis: Axis) -> Axis:
        if axis.op:
            return replace(axis, parts=tuple(map(change, axis.parts)))
        return apart.get(axis.letter, axis)

    return tuple(map(change, axes))


def _stacked(axes: Axes, letters: Sequence[str], at: int) -> Axes:
    at = min(at, len(axes))
    return (*axes[:at], *map(Axis, letters), *axes[at:])
