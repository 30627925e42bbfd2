"""The table of a family: which tensors of a Hugging Face checkpoint become which parameters, and how.

A row is data. From it follow the transform and its inverse, the shapes on both sides, the source bytes that feed a
slice of a parameter, what happens to block scales, the sharding of the parameter, and a line of `tpuconv families NAME
--table`.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import numpy as np

from tpuconv.errors import ConfigError, LayoutError, UnsupportedConfig
from tpuconv.notation.arithmetic import Arithmetic, Ones
from tpuconv.notation.layout import Layout, Shape, format_axes
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.release import AS_TABLED, Release
from tpuconv.notation.segments import reason_by
from tpuconv.notation.sizes import MTP, HasSizes, configs_by_part, holds, sets_of_layers, special_sizes_of

INDEX = re.compile(r"\{(#?\w+(?:\+\w+)*)\}")
LAYERS, EXPERTS = "L", "E"
PERIODS, PLACES = "Y", "Z"
"""The letters of the first layers of all periods of layers, and of the places of a period whose layers are in one
array."""
REST_LAYERS = "rest_layers"
declare(**{REST_LAYERS: Word("layers after the last complete period")})

LAYERS_APART = "rest"
"""Where the layers after the last complete period are in our own tree, if the others are stacked."""
APART = "apart_"
"""How the words begin for the layers that a release names or groups in another way than the rest."""
MTP_PARAMETERS = "mtp."
"""How the names of the parameters of layers for further tokens begin. Their rows exist only on request."""

MTP_PATTERNS = ("mtp", f"{{{MTP}}}")
"""Parts of the patterns of tensors that are ignored unless these rows are requested."""

MAX_MODEL_TENSORS = 500_000
"""The largest models have 100,000. Listing one takes half a kilobyte and some microseconds."""


@dataclass(frozen=True)
class Map:
    """One row.

    `{X}` in the names is an index. In the names of both sides it is a loop; in the HF names only, it is an axis X of
    the parameter, on which the named tensors are stacked, outermost on the HF side. `{#X}` in a JAX name is the place
    of the index among the values of X, from 0. `{X+3}` is the index plus 3, `{X+Y}` the sum of two.

    Attributes:
        hf, jax: names of the source tensors and of the parameters.
        layout: how the axes of the sources become the axes of the parameters.
        when: what must hold for the row to exist: properties of the config joined by "and", some of them after "not".
        buffer: whether it is not trained: never cast, and not counted as parameters.
        arithmetic: for each parameter, how its values differ from the sources; empty if none differ.
        input_first: whether the source is a matrix [in, out], as transformers' Conv1D has it. What adapters change and
            servers read is [out, in].
        otherwise: the letter of the one layer whose tensors are taken where the row's are missing; empty if none are.
        part: the part of a multimodal model beside its text model, whose config has the sizes; empty in the text model.
    """

    hf: str | tuple[str, ...]
    jax: str | tuple[str, ...]
    layout: str
    when: str | None = None
    buffer: bool = False
    arithmetic: tuple[Arithmetic | None, ...] = ()
    input_first: bool = False
    otherwise: str = ""
    part: str = ""

    @property
    def hf_names(self) -> tuple[str, ...]:
        """The names of the source tensors, as a tuple."""
        return (self.hf,) if isinstance(self.hf, str) else self.hf

    @property
    def jax_names(self) -> tuple[str, ...]:
        """The names of the parameters, as a tuple."""
        return (self.jax,) if isinstance(self.jax, str) else self.jax

    @property
    def is_of_ones(self) -> bool:
        """True if the sources give only the shape of the parameter: the way back has no such row."""
        return any(isinstance(change, Ones) for change in self.arithmetic)


def under(hf: str, jax: str, *rows: Map) -> tuple[Map, ...]:
    """The rows with a prefix before the names on each side; an empty one adds nothing."""

    def below(prefix: str, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{prefix}.{name}" for name in names) if prefix else names

    return tuple(replace(row, hf=below(hf, row.hf_names), jax=below(jax, row.jax_names)) for row in rows)


@dataclass(frozen=True)
class Stack:
    """A tensor of a layout's side: named ones that are stacked on its `depth` leading axes, or one with depth 0."""

    names: tuple[str, ...]
    depth: int


@dataclass(frozen=True)
class Binding:
    """A row for one config and one value of its loop indices."""

    row: Map
    layout: Layout
    sizes: Mapping[str, int]
    src: tuple[Stack, ...]
    dst: tuple[Stack, ...]

    @property
    def arithmetic(self) -> dict[str, Arithmetic]:
        """The changes of values, by the names of the parameters."""
        names = (stack.names[0] for stack in self.dst)
        return {n: change for n, change in zip(names, self.row.arithmetic, strict=False) if change is not None}

    @property
    def inverse(self) -> "Binding":
        """The binding from parameters back to the tensors of the checkpoint."""
        return replace(self, layout=self.layout.inverse, src=self.dst, dst=self.src)

    def swapped(self, is_swapped: Callable[[str], bool]) -> "Binding":
        """The binding for a source that stores some matrices, by name, with their axes swapped."""
        src = tuple(
            (*axes[:-2], axes[-1], axes[-2]) if is_swapped(stack.names[0]) else axes
            for axes, stack in zip(self.layout.src, self.src, strict=True)
        )
        return self if src == self.layout.src else replace(self, layout=Layout(src, self.layout.dst))

    def src_shapes(self) -> dict[str, Shape]:
        """The shape of every single source tensor, by name."""
        shapes = self.layout.src_shapes(self.sizes)
        return {name: s[stack.depth :] for s, stack in zip(shapes, self.src, strict=True) for name in stack.names}

    def dst_shapes(self) -> dict[str, Shape]:
        """The shape of every single target, by name."""
        return self.inverse.src_shapes()

    def dst_axes(self) -> dict[str, str]:
        """The axes of every target in letters, by name: `D N H`."""
        return {
            name: format_axes(axes[stack.depth :])
            for axes, stack in zip(self.layout.dst, self.dst, strict=True)
            for name in stack.names
        }

    def __call__(self, read: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
        """All targets by name. `read` returns a source tensor. The complete row is in memory."""
        sources = []
        for stack, shape in zip(self.src, self.layout.src_shapes(self.sizes), strict=True):
            arrays = [read(name) for name in stack.names]
            sources.append(np.stack(arrays).reshape(shape) if stack.depth else arrays[0])
        targets: dict[str, np.ndarray] = {}
        for stack, target in zip(self.dst, self.layout(sources, self.sizes), strict=True):
            parts = target.reshape(len(stack.names), *target.shape[stack.depth :]) if stack.depth else [target]
            targets |= zip(stack.names, parts, strict=True)
        return targets


@dataclass(frozen=True)
class MappingTable:
    """The rows of a family.

    Attributes:
        ignore: source tensors that are not converted, with the reasons. `{X}` stands for a number (one of those in the
            config, if it lists them), `{X..Y}` for one from size X to below size Y, and `*` for anything.
        copies: source tensors that may be on disk as copies of another one. They are skipped once the two are found
            equal.
        release: of the table of a release, how that differs from the family's.
        returns: what the model returns, if not logits (`tpuconv.models.common.heads`).
        layer_sets: layers of the rows that no config has.
        recut: groups of source tensors whose rows follow each other, and that may be cut elsewhere: transformers loads
            each group as one tensor, and saves equal parts of it.
    """

    rows: tuple[Map, ...]
    ignore: Mapping[str, str]
    copies: Mapping[str, str]
    release: Release
    returns: str
    layer_sets: Mapping[str, Sequence[int]]
    recut: tuple[tuple[str, ...], ...]

    def __init__(
        self,
        rows: Sequence[Map],
        *,
        ignore: Mapping[str, str] | None = None,
        copies: Mapping[str, str] | None = None,
        release: Release | None = None,
        returns: str = "",
        layer_sets: Mapping[str, Sequence[int]] | None = None,
        recut: Sequence[tuple[str, ...]] = (),
    ):
        object.__setattr__(self, "rows", tuple(rows))
        object.__setattr__(self, "ignore", dict(ignore or {}))
        object.__setattr__(self, "copies", dict(copies or {}))
        object.__setattr__(self, "release", release or AS_TABLED)
        object.__setattr__(self, "returns", returns)
        object.__setattr__(self, "layer_sets", dict(layer_sets or {}))
        object.__setattr__(self, "recut", tuple(recut))
        for row in self.rows:
            _row_layout(row)

    def renamed(self, rename: Callable[[str], str], *, ignore: Mapping[str, str] | None = None) -> "MappingTable":
        """The same rows with other names of source tensors, those that `rename` gives to each name, and to each pattern
        of what is not converted. `ignore` is not converted besides."""
        return replace(
            self,
            rows=tuple(replace(row, hf=tuple(map(rename, row.hf_names))) for row in self.rows),
            ignore={**{rename(name): why for name, why in self.ignore.items()}, **(ignore or {})},
            copies={rename(copy): rename(original) for copy, original in self.copies.items()},
            recut=tuple(tuple(map(rename, names)) for names in self.recut),
        )

    def count(self, config: HasSizes, include_mtp: bool = False) -> int:
        """The number of source tensors that `bind` names, without listing them."""
        sizes = {
            part: {x: len(value) for x, value in values.items()}
            for part, values in self._values_by_part(config, include_mtp).items()
        }
        return sum(
            prod(sizes[row.part][x] for letters in row_indices(row) for x in letters) * len(row.hf_names)
            for row in self._rows_of(config, include_mtp)
        )

    def _values(self, config: HasSizes, include_mtp: bool) -> dict[str, Sequence[int]]:
        """The values of every letter as an index."""
        sizes = {x: range(size) for x, size in config.sizes.items()}
        values: dict[str, Sequence[int]] = {**sizes, **config.layer_sets, **self.layer_sets}
        return values if include_mtp else {**values, MTP: ()}

    def _values_by_part(self, config: HasSizes, include_mtp: bool) -> dict[str, dict[str, Sequence[int]]]:
        """`_values` of the text model, under an empty name, and of each part beside it."""
        return {part: self._values(own, include_mtp) for part, own in configs_by_part(config).items()}

    def _rows_of(self, config: HasSizes, include_mtp: bool) -> list[Map]:
        configs = configs_by_part(config)
        rows = (row for row in self.rows if include_mtp or not is_of_mtp(row))
        return [row for row in rows if row.part in configs and holds(row.when, configs[row.part])]

    def bind(self, config: HasSizes, include_mtp: bool = False) -> list[Binding]:
        """Every row that the config has, once for each value of its loop indices.

        Raises:
            ConfigError: the config needs more than `MAX_MODEL_TENSORS` source tensors.
        """
        if (count := self.count(config, include_mtp)) > MAX_MODEL_TENSORS:
            layers, experts = (len(self._values(config, include_mtp).get(x, ())) for x in (LAYERS, EXPERTS))
            raise ConfigError(
                f"config.json asks for {count} tensors, with {layers} layers"
                + (f" of {experts} experts" if experts else "")
                + f": more than the {MAX_MODEL_TENSORS} that are listed"
            )
        by_part = self._values_by_part(config, include_mtp)
        sizes_by_part = {part: {x: len(value) for x, value in values.items()} for part, values in by_part.items()}
        special_sizes = {part: special_sizes_of(own) for part, own in configs_by_part(config).items()}
        bindings = []
        for row in self._rows_of(config, include_mtp):
            values, sizes = by_part[row.part], sizes_by_part[row.part]
            loop, stack = row_indices(row)
            layout = _row_layout(row)
            if unknown := [x for x in row_axes(row) if x not in sizes]:
                raise LayoutError(f"{row} has the axis {unknown[0]}, of which the config has neither size nor layers")
            for known in _steps(loop, values):
                steps = [known | step for step in _steps(stack, values)]
                src = tuple(
                    Stack(tuple(_with_indices(name, step) for step in steps), len(stack)) for name in row.hf_names
                )
                places = {f"#{x}": values[x].index(number) for x, number in known.items()}
                dst = tuple(Stack((_with_indices(name, known | places),), 0) for name in row.jax_names)
                own = special_sizes[row.part](dst[0].names[0])
                bindings.append(Binding(row, layout, {**sizes, **own} if own else sizes, src, dst))
        return bindings

    def modules(self, config: HasSizes) -> dict[str, None]:
        """Returns the modules of the parameters (`layers/0/attn/q` of `layers.0.attn.q.kernel`) and their parents, as
        the rules of a quantization name them, without building the model, which needs jax."""
        out: dict[str, None] = {}
        for binding in self.bind(config):
            for name in (name for stack in binding.dst for name in stack.names):
                parts = name.split(".")
                out |= dict.fromkeys("/".join(parts[:n]) for n in range(len(parts)))
        return out

    def stack_layers(self, config: HasSizes) -> "MappingTable":
        """The table of a model whose stacked layers are in one array, with a leading axis L; or, if the kinds of layers
        repeat with a period (`config.period`), in one for each place of a period, with a leading axis Y. Layers after
        the last period stay apart.

        Raises:
            UnsupportedConfig: layers differ in the names or groups of their tensors.
        """
        self.check_layers_alike()
        period, sets = getattr(config, "period", 1), sets_of_layers(config)
        numbers = sets[LAYERS]
        whole = len(numbers) // period * period
        rows: list[Map] = []
        for row in self.rows:
            letter = next((x for x in row_indices(row)[0] if x in sets), "")
            if row.part or not letter:
                rows.append(row)
            elif period == 1:
                if sets[letter]:  # all layers, or none
                    rows.append(_stacked_row(row, letter, f"{{{letter}}}", letter, ""))
            else:
                has = sets[letter]
                rows += [
                    _stacked_row(row, letter, f"{{{PERIODS}+{place}}}", PERIODS, f"layers.{place}.")
                    for place, number in enumerate(numbers[:period])
                    if number in has
                ]
                rows += [
                    _row_of_layer(row, letter, number, f"{LAYERS_APART}.{place}.")
                    for place, number in enumerate(numbers[whole:])
                    if number in has
                ]
        more = {} if period == 1 else {PERIODS: numbers[:whole:period]}
        return replace(self, rows=tuple(rows), layer_sets={**self.layer_sets, **more})

    def check_layers_alike(self) -> None:
        """Raises UnsupportedConfig if layers differ in the names or groups of their tensors: they cannot be stacked."""
        if apart := [r for r in self.rows if not r.part and any(x.startswith(APART) for x in row_indices(r)[0])]:
            raise UnsupportedConfig(
                f"some layers of this release name or group the tensors of {apart[0].jax_names[0]} in another way than "
                "the rest, and cannot be stacked with them",
                hint="leave out `scan_layers=`",
            )

    def with_rows(self, rows: Sequence[Map]) -> "MappingTable":
        """The table with other rows, of the same model."""
        return replace(self, rows=tuple(rows))

    def ignored(self, config: HasSizes, include_mtp: bool = False) -> Callable[[str], str | None]:
        """A function that returns why a source tensor is not converted, or None if the table does not ignore it."""
        further = MTP_PATTERNS if include_mtp else ()
        ignored = {text: why for text, why in self.ignore.items() if not any(x in text for x in further)}
        # Any number of a layer is ignored, beyond the model's too.
        sets = {x: layers for x, layers in config.layer_sets.items() if x != LAYERS}
        patterns = [(_compile_pattern(text, sets, config.sizes), why) for text, why in ignored.items()]
        return reason_by(patterns)

    def copies_of(self, config: HasSizes, include_mtp: bool = False) -> dict[str, str]:
        """`copies` for this config: names without indices."""
        return {copy: original for copy, original in self._each(self.copies.items(), config, include_mtp)}

    def recut_groups(self, config: HasSizes, include_mtp: bool = False) -> Iterator[tuple[str, ...]]:
        """`recut` for this config: names without indices."""
        return self._each(self.recut, config, include_mtp)

    def _each(
        self, groups: Iterable[tuple[str, ...]], config: HasSizes, include_mtp: bool
    ) -> Iterator[tuple[str, ...]]:
        for names in groups:
            letters = dict.fromkeys(x for name in names for x in INDEX.findall(name))
            for indices in _steps(list(letters), self._values(config, include_mtp)):
                yield tuple(_with_indices(name, indices) for name in names)

    @property
    def fingerprint(self) -> str:
        """Changes when a row does. A conversion is resumed only with the table that it began with."""
        text = "\n".join(
            f"{r.hf_names} {r.jax_names} {r.layout} {r.when} {r.buffer}"
            + "".join(f" {fact}" for fact in (r.arithmetic, r.part) if fact)
            for r in self.rows
        )
        return hashlib.sha256(f"{text}\n{self.ignore}\n{self.copies}".encode()).hexdigest()[:16]

    def __iter__(self) -> Iterator[Map]:
        return iter(self.rows)


def _stacked_row(row: Map, letter: str, index: str, stack: str, front: str) -> Map:
    """The row for the layers of an index, stacked on a leading axis `stack` of each parameter."""
    src, _, dst = row.layout.partition("->")
    stacked = ", ".join(f"{stack} {tensor.strip()}" for tensor in (dst or src).split(","))
    hf = tuple(name.replace(f"{{{letter}}}", index) for name in row.hf_names)
    jax = tuple(_in_front(name, letter, front or "layers.") for name in row.jax_names)
    return replace(row, hf=hf, jax=jax, layout=f"{src.strip()} -> {stacked}")


def _row_of_layer(row: Map, letter: str, number: int, front: str) -> Map:
    """The row for a single layer."""
    hf = tuple(name.replace(f"{{{letter}}}", str(number)) for name in row.hf_names)
    return replace(row, hf=hf, jax=tuple(_in_front(name, letter, front) for name in row.jax_names))


def _in_front(name: str, letter: str, front: str) -> str:
    return front + name.removeprefix(f"layers.{{{letter}}}.")


def is_of_mtp(row: Map) -> bool:
    """Returns True if a row belongs to layers that predict further tokens."""
    return row.jax_names[0].startswith(MTP_PARAMETERS)


def row_indices(row: Map) -> tuple[list[str], list[str]]:
    """The letters and words that a row loops over, and those on which it stacks."""
    hf, jax = ({tuple(dict.fromkeys(_letters(name))) for name in names} for names in (row.hf_names, row.jax_names))
    if len(hf) != 1 or len(jax) != 1:
        raise LayoutError(f"the names of one side of {row} differ in their indices")
    (in_hf,), (in_jax,) = hf, jax
    if not set(in_jax) <= set(in_hf):
        raise LayoutError(f"{row} has an index in its JAX names alone")
    return list(in_jax), [x for x in in_hf if x not in in_jax]


def row_axes(row: Map) -> list[str]:
    """The letters and words of a row, in its indices and its layout."""
    loop, stack = row_indices(row)
    return list(dict.fromkeys((*loop, *stack, *_row_layout(row).letters())))


def _letters(name: str) -> Iterator[str]:
    """The letters of the indices of a name, in reading order."""
    return (x for index in INDEX.findall(name) for x in index.lstrip("#").split("+") if not x.isdigit())


def _row_layout(row: Map) -> Layout:
    layout = Layout.parse(row.layout, tuple(row_indices(row)[1]))
    if (len(layout.src), len(layout.dst)) != (len(row.hf_names), len(row.jax_names)):
        raise LayoutError(f"'{row.layout}' has another number of tensors than {row} has names")
    return layout


def _with_indices(name: str, indices: Mapping[str, Any]) -> str:
    return INDEX.sub(lambda m: str(sum(int(x) if x.isdigit() else indices[x] for x in m[1].split("+"))), name)


def _steps(letters: Sequence[str], values: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    return (dict(zip(letters, index, strict=True)) for index in product(*(values[x] for x in letters)))


def _compile_pattern(text: str, sets: Mapping[str, Sequence[int]], sizes: Mapping[str, int]) -> re.Pattern[str]:
    def numbers(index: re.Match[str]) -> str:
        first, end = index.groups()
        listed = range(sizes[first], sizes[end]) if end else sets.get(first)
        return r"\d+" if listed is None else f"(?:{'|'.join(map(str, listed)) or '(?!)'})"

    return re.compile(re.sub(r"\\\{(\w+)(?:\\\.\\\.(\w+))?\\\}", numbers, re.escape(text)).replace(r"\*", ".*"))
