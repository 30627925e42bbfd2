"""Forms: rows that stand in place of each other, and the table of one release.

A family has one table. A release may have other tensors for the same parameters (experts one by one, or stacked), and
other names for them. `ReleaseReader` finds from the names what a release has (a `Release`, which the manifest keeps),
and makes the family's table into that of the release, with the names on disk.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tpuconv.notation.release import AS_TABLED, Release
from tpuconv.notation.segments import FRONTS, without_front
from tpuconv.notation.sizes import HasSizes, configs_by_part, holds
from tpuconv.notation.spelling import (
    Speller,
    by_template,
    filled,
    fronts_of,
    module_of,
    numbers,
    respelled,
    rules_of,
    template,
    with_indices_of,
)
from tpuconv.notation.table import APART, INDEX, Map, MappingTable, row_indices, under

Forms = Mapping[str, tuple[Map, ...]]
"""Rows that make the same parameters of other tensors, by the name of the form. Any form may be in a family's table."""


@dataclass(frozen=True)
class FormPlace:
    """Where a table has the rows of a form.

    Attributes:
        hf: what stands before the names of the tensors: `model.layers.{L}.mlp.`.
        when: the property of the config that must hold, if there is one.
        home: the form that the table has.
        forms: the rows of each form there.
    """

    hf: str
    when: str | None
    home: str
    forms: Forms

    @property
    def name(self) -> str:
        """Tells the places of a table apart."""
        return self.hf + (f" {self.when}" if self.when else "")

    @property
    def part(self) -> str:
        """The part of a multimodal model that has the rows, as in `Map`."""
        return self.forms[self.home][0].part


_Key = tuple[tuple[str, ...], tuple[str, ...], str, str | None]


def _key(row: Map) -> _Key:
    return row.hf_names, row.jax_names, " ".join(row.layout.split()), row.when


def places(table: MappingTable, groups: Sequence[Forms]) -> list[FormPlace]:
    """Returns the places at which a table has all rows of a form, with every other form of its group there."""
    known = {_key(row) for row in table.rows}
    out: dict[tuple[str, str, str | None], FormPlace] = {}
    for group in groups:
        for home, rows in group.items():
            for row in table.rows:
                hf = row.hf_names[0].removesuffix(rows[0].hf_names[0])
                jax = row.jax_names[0].removesuffix(rows[0].jax_names[0])
                if not hf.endswith(".") or (jax and not jax.endswith(".")):
                    continue
                here = {
                    name: tuple(replace(each, when=row.when, part=row.part) for each in under(hf[:-1], jax[:-1], *form))
                    for name, form in group.items()
                }
                if all(_key(each) in known for each in here[home]):
                    out.setdefault((hf, jax, row.when), FormPlace(hf, row.when, home, here))
    return list(out.values())


class ReleaseReader:
    """Reads releases of a family.

    Args:
        table: the family's.
        groups: rows that a release may have in another form.
        aliases: other names, and those of the table, with `{L}` or as templates.
        more: places of rows besides those of the groups.
        wrapping: leading segments that only wrap, besides the usual and the family's segments.

    Attributes:
        rows: of all forms.
        speller: leads names to those of these rows.
    """

    def __init__(
        self,
        table: MappingTable,
        groups: Sequence[Forms],
        aliases: Mapping[str, str] | None = None,
        more: Sequence[FormPlace] = (),
        wrapping: Collection[str] = (),
    ):
        self.table = table
        self.places = places(table, groups)
        taken = {_key(row) for place in self.places for row in place.forms[place.home]}
        self.places += [place for place in more if not any(_key(row) in taken for row in place.forms[place.home])]
        self._at = {_key(row): place for place in self.places for row in place.forms[place.home]}
        self.rows = [*table.rows, *(row for place in self.places for form in place.forms.values() for row in form)]
        copies = (name for pair in table.copies.items() for name in pair)
        known = dict.fromkeys(template(name) for name in (*(n for row in self.rows for n in row.hf_names), *copies))
        fronts = FRONTS | fronts_of([template(name) for row in table if not row.part for name in row.hf_names])
        fronts = fronts.union(wrapping)
        plain = Speller(known, fronts)
        led = {template(alias): plain.canonical(template(name)) for alias, name in (aliases or {}).items()}
        homes = {alias: home for alias, home in led.items() if home}
        self.speller = Speller(known, fronts, homes)
        self._known, self._modules = known, {module_of(name) for name in known}

    def read(self, names: Collection[str], config: HasSizes) -> MappingTable:
        """Returns the table of the release whose tensors have these names."""
        disk = by_template(names)
        found: dict[str, list[str]] = defaultdict(list)
        for old in disk:
            if (new := self.speller.canonical(old)) is not None:
                found[new].append(old)
        names_of = {new: [name for old in each for name in disk[old]] for new, each in found.items()}
        forms = {}
        for place in self.places:
            own = configs_by_part(config)[place.part]
            values = _values(self.table, own, place.hf)
            if holds(place.when, own) and (form := _form_at(place, names_of, values)) != place.home:
                forms[place.name] = form
        spelling, apart = self._spellings(found, disk)
        return self.release_table(Release(spelling, apart, forms), config)

    def _spellings(
        self, found: Mapping[str, Sequence[str]], disk: Mapping[str, Sequence[str]]
    ) -> tuple[dict[str, str], dict[str, dict[str, list[int]]]]:
        """`Release.spelling` and `Release.apart`."""
        spelled: dict[str, dict[str, list[str]]] = {}
        for new, each in found.items():
            for old in each:
                if new in self._known:
                    spelled.setdefault(new, {}).setdefault(old, []).append(old)
                elif module_of(new) in self._modules:  # encoded, as `.weight_packed`
                    spelled.setdefault(module_of(new), {}).setdefault(module_of(old), []).append(old)
        usual = {
            ours: max(theirs, key=lambda name: sum(len(disk[x]) for x in theirs[name]))
            for ours, theirs in spelled.items()
        }
        apart = {
            ours: {
                name: sorted({int(numbers(x)[0]) for old in olds for x in disk[old] if numbers(x)})
                for name, olds in theirs.items()
                if name != usual[ours]
            }
            for ours, theirs in spelled.items()
            if len(theirs) > 1
        }
        return rules_of(usual), apart

    def release_table(self, release: Release, config: HasSizes) -> MappingTable:
        """Returns the table of a release."""
        if release == AS_TABLED:
            return self.table
        words: dict[tuple[int, ...], str] = {}
        release = replace(release, forms={self._place(name): form for name, form in release.forms.items()})
        rows = []
        for row in self.table.rows:
            for formed, layers in self._in_forms(row, release):
                for spelled, own in self._spelled(formed, layers, release, config):
                    rows.append(spelled if own is None else _of_layers(spelled, tuple(own), words))

        def on_disk(name: str) -> str:
            return with_indices_of(name, respelled(template(name), release.spelling))

        skipped: dict[str, str] = {}
        for pattern, why in self.table.ignore.items():
            bare = without_front(pattern, self.speller.fronts)
            front = on_disk(pattern).removesuffix(bare)
            parts = front.split(".")
            skipped |= {".".join([*parts[:count], bare]): why for count in range(len(parts))}
            skipped |= {pattern: why, on_disk(pattern): why}
        return replace(
            self.table,
            rows=tuple(rows),
            ignore=skipped,
            copies={on_disk(copy): on_disk(original) for copy, original in self.table.copies.items()},
            recut=tuple(tuple(map(on_disk, group)) for group in self.table.recut),
            layer_sets={**self.table.layer_sets, **{word: layers for layers, word in words.items()}},
            release=release,
        )

    def _place(self, name: str) -> str:
        """The name of a place that a manifest names; a former tpuconv had other letters of layers in it."""
        names = [place.name for place in self.places]
        alike = [known for known in names if template(known) == template(name)]
        return alike[0] if name not in names and len(alike) == 1 else name

    def on_disk(self, name: str, release: Release) -> str | None:
        """Returns the name on disk of a tensor that is named in any spelling; None if the table does not have it."""
        if (found := self.speller.spelled(name)) is None:
            return None
        values = numbers(found)
        return filled(_on_disk(template(found), release, int(values[0]) if values else None), values)

    def _in_forms(self, row: Map, release: Release) -> Iterator[tuple[Map, Sequence[int] | None]]:
        """The rows in place of a row of the table, each with its layers if it is not of all."""
        place = self._at.get(_key(row))
        form = release.forms.get(place.name) if place else None
        if place is None or form is None:
            yield row, None
        elif _key(row) == _key(place.forms[place.home][0]):
            for name, layers in {form: None}.items() if isinstance(form, str) else form.items():
                for each in place.forms[name]:
                    yield each, layers

    def _spelled(
        self, row: Map, layers: Sequence[int] | None, release: Release, config: HasSizes
    ) -> Iterator[tuple[Map, Sequence[int] | None]]:
        """A row with the names on disk, for each of the ways in which its layers are spelled."""
        templates = [template(name) for name in row.hf_names]
        pieces: dict[tuple[str, ...], Sequence[int] | None] = {}
        if release.apart.keys() & {*templates, *map(module_of, templates)}:
            numbered: dict[tuple[str, ...], list[int]] = {}
            for number in (
                _values(self.table, configs_by_part(config)[row.part], row.hf_names[0]) if layers is None else layers
            ):
                here = tuple(_on_disk(name, release, number) for name in templates)
                numbered.setdefault(here, []).append(number)
            pieces |= numbered
        if len(pieces) < 2:
            pieces = {next(iter(pieces), tuple(respelled(name, release.spelling) for name in templates)): layers}
        for names, own in pieces.items():
            hf = tuple(with_indices_of(old, new) for old, new in zip(row.hf_names, names, strict=True))
            yield (row if hf == row.hf_names else replace(row, hf=hf)), own


def _on_disk(name: str, release: Release, number: int | None) -> str:
    """The template on disk of one of the table, in a layer."""
    for own in (name, module_of(name)):
        for theirs, layers in release.apart.get(own, {}).items():
            if number in layers:
                return theirs + name[len(own) :]
    return respelled(name, release.spelling)


def _form_at(
    place: FormPlace, names_of: Mapping[str, Sequence[str]], layers: Sequence[int]
) -> str | dict[str, list[int]]:
    """The form of all layers of a place, or the layers of each form. Of layers without any tensor it is that of the
    others, or that of the table."""
    there = {
        name: [_found(template(tensor), names_of) for row in rows for tensor in row.hf_names]
        for name, rows in place.forms.items()
    }
    at_all = [name for name, tensors in there.items() if any(tensors)]
    for name in at_all:  # forms share some tensors: that which has all that are there is the form of all layers
        others = (each for other in at_all for tensor in there[other] for each in tensor)
        if {each for tensor in there[name] for each in tensor}.issuperset(others):
            return name
    if not at_all or not layers:
        return place.home
    numbered = {
        name: [{int(numbers(x)[0]) for each in tensor for x in names_of[each] if numbers(x)} for tensor in there[name]]
        for name in at_all
    }
    chosen: dict[str, list[int]] = {}
    for layer in layers:
        count = {name: sum(layer in tensor for tensor in numbered[name]) / len(numbered[name]) for name in at_all}
        chosen.setdefault(max(count, key=lambda name: count[name]), []).append(layer)
    return next(iter(chosen)) if len(chosen) == 1 else chosen


def _found(tensor: str, names_of: Mapping[str, Sequence[str]]) -> list[str]:
    """The templates of a tensor, perhaps encoded: `.weight_packed` for `.weight`, `down_proj_scale_inv` for
    `down_proj`."""
    if tensor in names_of:
        return [tensor]
    stem = tensor.removesuffix("weight")
    return [name for name in names_of if name.startswith(stem) and "." not in name[len(stem) :].lstrip(".")]


def _values(table: MappingTable, config: HasSizes, hf: str) -> Sequence[int]:
    """The numbers of the layers that a row, or a place, is in; empty if it is in one place."""
    index = INDEX.search(hf)
    if not index:
        return ()
    letter = index[1].partition("+")[0]
    sets = {**config.layer_sets, **table.layer_sets}
    return sets[letter] if letter in sets else range(config.sizes.get(letter, 0))  # a tower has a number of layers


def _of_layers(row: Map, layers: tuple[int, ...], words: dict[tuple[int, ...], str]) -> Map:
    """A row for some of its layers, whose word is added to `words`."""
    loop = row_indices(row)[0]
    if len(loop) != 1:
        return row
    word = words.setdefault(layers, f"{APART}{len(words)}")

    def moved(name: str) -> str:
        return INDEX.sub(lambda found: found[0].replace(loop[0], word), name)

    return replace(row, hf=tuple(map(moved, row.hf_names)), jax=tuple(map(moved, row.jax_names)))
