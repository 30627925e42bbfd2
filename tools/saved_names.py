"""Writes tpuconv/models/common/saved_names.json: how transformers spells and groups the tensors of each family.

    python tools/saved_names.py [FAMILY]...

Run it after an update of transformers. A model of transformers has names of its own for modules (those that
`save_pretrained(save_original_format=False)` writes), and by default it saves others, which differ from those of
releases for some families. Both follow from transformers' conversion mapping: a renaming becomes another name of a
module, an operation on tensors becomes a row with another layout. What is the name of another tensor elsewhere becomes
a form of that one row. Only what the reader of releases does not find by itself is written. Of multimodal models these
are the text models, and the whole models.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    rename_source_key,
)

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from helpers.families import CASES, Case, hf_model
from helpers.sights import OF_OTHER_TYPES, SIGHTS
from tpuconv.errors import LayoutError
from tpuconv.models.common.rows import ALL_FORMS
from tpuconv.models.common.saved import forget_saved
from tpuconv.models.registry import Family, find_family
from tpuconv.notation.forms import ReleaseReader, places
from tpuconv.notation.layout import Axis, Layout, format_axes
from tpuconv.notation.release import AS_TABLED, Release
from tpuconv.notation.spelling import filled, module_of, numbers, template, with_indices_of
from tpuconv.notation.table import Map, MappingTable, row_indices

FILE = Path(__file__).parent.parent / "tpuconv" / "models" / "common" / "saved_names.json"


@cache
def whole_by_family() -> Mapping[str, Sequence[str]]:
    """The multimodal cases of `tests/helpers/sights.py` by family, whose models in transformers are of its type. Of
    Qwen-Omni these are the complete models."""
    out: dict[str, list[str]] = defaultdict(list)
    for name, make in SIGHTS.items():
        if name not in OF_OTHER_TYPES and not name.endswith("_thinker"):
            out[find_family(make().config_json()).name].append(name)
    return out


@dataclass
class Found:
    """What transformers has for a family.

    Attributes:
        names: templates of its names, and those of the table.
        forms: rows in place of rows of the table.
        outside: modules beside the text model.
        release: how the modules of transformers' model are named and grouped.
        lost: what cannot be said by rows.
    """

    names: dict[str, str] = field(default_factory=dict)
    forms: list[tuple[Sequence[Map], Sequence[Map]]] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    release: Release = AS_TABLED
    lost: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        forms = [
            {
                "home": [list(row.hf_names) for row in home],
                "when": home[0].when,
                "rows": [{"hf": row.hf, "jax": list(row.jax_names), "layout": row.layout} for row in rows],
            }
            for home, rows in self.forms
        ]
        facts = {
            "names": self.names,
            "forms": forms,
            "outside": self.outside,
            "release": self.release.to_json(),
        }
        return {name: value for name, value in facts.items() if value}


def axes_of(side: str) -> list[str]:
    """The axes of one tensor of a layout: `E (M + M) D` has three."""
    return re.findall(r"\((?:[^()]|\([^()]*\))*\)|\S+", side)


def joined(rows: Sequence[Map], hf: str, operations: Sequence[Any]) -> Map:
    """The row of the tensor that operations of transformers make of those of other rows.

    Raises:
        NotImplementedError: an operation has no layout.
    """
    sides = []
    for row in rows:
        src, _, dst = row.layout.partition("->")
        sides.append((axes_of(src), (dst or src).strip(), row_indices(row)[1]))
    for operation in operations:
        kind = type(operation).__name__
        if kind == "MergeModulelist":
            sides = [([*stack, *src], dst, []) for src, dst, stack in sides]
        elif kind == "Concatenate" and len(sides) == 1 and sides[0][2] and operation.dim == 0:
            first, dst, stack = sides[0]
            sides = [([f"({' '.join(stack)} {first[0]})", *first[1:]], dst, [])]
        elif kind == "Concatenate":
            first, axis = sides[0][0], operation.dim
            whole = "(" + " + ".join(src[axis] for src, _, _ in sides) + ")"
            sides = [([*first[:axis], whole, *first[axis + 1 :]], ", ".join(dst for _, dst, _ in sides), [])]
        elif kind == "Transpose":
            for src, _, _ in sides:
                src[operation.dim0], src[operation.dim1] = src[operation.dim1], src[operation.dim0]
        elif kind == "PermuteForRope":
            sides = [([in_halves(src[0]), *src[1:]], of_pairs(dst), stack) for src, dst, stack in sides]
        else:
            raise NotImplementedError(kind)
    if len(sides) != 1 or sides[0][2]:
        raise NotImplementedError("several tensors")
    src, dst, _ = sides[0]
    jax = tuple(name for row in rows for name in row.jax_names)
    return Map(hf, jax if len(jax) > 1 else jax[0], f"{' '.join(src)} -> {dst}", rows[0].when, rows[0].buffer)


def in_halves(heads: str) -> str:
    """An axis of heads whose dimensions are pairs to rotate, first all the first ones, then all the second ones."""
    return heads.replace("H", "two pairs")


def of_pairs(dst: str) -> str:
    """The axes of a parameter that has the two dimensions of each pair side by side."""
    return re.sub(r"\bH\b", "(pairs two)", dst)


def parts_of(axis: Axis) -> list[Axis]:
    """The parts of a concatenation, which may be outermost in a product; none of another axis."""
    if axis.op == "+":
        return list(axis.parts)
    return [Axis(op="*", parts=(part, *axis.parts[1:])) for part in (parts_of(axis.parts[0]) if axis.op else ())]


def split(row: Map, names: Sequence[str], operations: Sequence[Any]) -> Iterator[Map]:
    """The rows of the tensors into which transformers splits that of a row, at its joined axis.

    Raises:
        NotImplementedError: the row has not as many parameters.
    """
    layout = Layout.parse(row.layout)
    (axes,), dst = layout.src, list(map(format_axes, layout.dst))
    parts = parts_of(axes[0])
    if not len(parts) == len(names) == len(dst):
        raise NotImplementedError("several tensors")
    rotated = [each.permute_layer_names for each in operations if type(each).__name__ == "PermuteForRope"]
    for part, name, jax, side in zip(parts, names, row.jax_names, dst, strict=True):
        src = format_axes((part, *axes[1:]))
        if any(each in name for own in rotated for each in own):
            src, side = in_halves(src), of_pairs(side)
        yield Map(name, jax, f"{src} -> {side}", row.when, row.buffer)


class Finder:
    """Finds what transformers has for the tensors of a table, which has the parts of a config."""

    def __init__(self, family: Family, model: Any, config: Any):
        table = family.table_without_release(parts=config.parts)
        aliases = [family.aliases, *(each.modality.aliases for each in config.parts.values())]
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        self.renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self.converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self.back = [
            each.reverse_transform()
            for each in reversed(mapping)
            if isinstance(each, WeightRenaming) and not isinstance(each, PrefixChange)
        ]
        self.prefix, self.keys = model.base_model_prefix, dict.fromkeys(model.state_dict(), 1)
        self.table, self.config = table, config
        self.own = {template(name) for row in table for name in row.hf_names}
        self.known = {
            form.hf_names: rows
            for place in places(table, ALL_FORMS)
            for rows in [place.forms]
            for form in rows[place.home]
        }
        self.found = Found()
        reader = ReleaseReader(table, (*family.forms, *ALL_FORMS), {a: b for each in aliases for a, b in each.items()})
        self.plain = reader.speller
        self.said = {
            template(name)
            for place in places(table, family.forms)
            for form in place.forms.values()
            for row in form
            for name in row.hf_names
        } - self.own
        self.in_forms = {template(name) for row in reader.rows for name in row.hf_names} - self.own

    def run(self) -> Found:
        renamed: dict[str, list[tuple[str, Map, str, str]]] = defaultdict(list)
        merged: dict[tuple[str | None, str], dict[str, tuple[str, Map, Any]]] = defaultdict(dict)
        by_pattern = {pattern: each for each in self.converters for pattern in each.source_patterns}
        for binding in self.table.bind(self.config):
            for hf, stack in zip(binding.row.hf_names, binding.src, strict=True):
                name = stack.names[0]
                target, pattern = rename_source_key(name, self.renamings, self.converters, self.prefix, self.keys)
                if pattern is None:
                    others = {target, apply_renamings(target, self.back)} - {name}
                    renamed[template(hf)] += [(hf, binding.row, name, other) for other in sorted(others)]
                    continue
                if self.plain.canonical(template(target)) in self.said:  # by a form of the family
                    continue
                saved = apply_renamings(apply_renamings(name, self.renamings), self.back)
                self.add_name(template(saved), hf, None)
                parts = merged[binding.row.when, template(target)]
                parts.setdefault(pattern, (hf, binding.row, by_pattern[pattern]))
        groups: dict[tuple[str | None, str], list[tuple[list[Map], list[Map]]]] = defaultdict(list)
        for pairs in renamed.values():
            if not any(has_other_constants(*pair) for pair in pairs):
                for hf, row, _, other in pairs:
                    self.add_name(template(other), hf, row)
                continue
            for hf, row, _, other in pairs:  # templates do not tell `proj.0` from `proj.2`
                new = replace(row, hf=numbered_as(hf, row, other))
                place = groups[row.when, module_of(new.hf_names[0])]
                if ([row], [new]) not in place:
                    place.append(([row], [new]))
        for (when, target), parts in merged.items():
            for rows, new in self.merged_rows(target, parts):
                groups[when, module_of(target)].append((rows, new))
        for place in groups.values():
            self.found.forms.append(
                ([row for rows, _ in place for row in rows], [row for _, new in place for row in new])
            )
        found_already = {a: self.plain.canonical(a) for a in self.found.names}
        self.found.names = {
            a: b for a, b in self.found.names.items() if found_already[a] != b and found_already[a] not in self.in_forms
        }
        self.found.outside = sorted(set(self.beside()))
        return self.found

    def beside(self) -> Iterator[str]:
        """The modules of transformers' model beside the text model that the table does not skip by these names. A
        module that the text model is in too, such as the thinker of Qwen-Omni, is none."""
        found = {template(name) for _, rows in self.found.forms for row in rows for name in row.hf_names}
        found |= self.found.names.keys()
        skipped = self.table.ignored(self.config, include_mtp=True)
        of_text = {outermost(name) for name in self.own}
        for key in self.keys:
            is_found = self.plain.canonical(template(key)) is not None or template(key) in found
            if not is_found and outermost(key) not in of_text and not skipped(key):
                yield outermost(key)

    def targets_of(self, target: str, converter: Any) -> list[str]:
        """The names of all that a converter makes, of which one is `target`."""
        own = next(each for each in converter.target_patterns if each in target)
        return [target.replace(own, each) for each in converter.target_patterns]

    def add_name(self, other: str, hf: str, row: Map | None) -> None:
        if other == template(hf):
            return
        if other not in self.own and self.found.names.get(other, template(hf)) == template(hf):
            self.found.names[other] = template(hf)
        elif row is not None and len(row.hf_names) == 1 and other in self.own:
            new = replace(row, hf=with_indices_of(hf, other))
            if ([row], [new]) not in self.found.forms:
                self.found.forms.append(([row], [new]))

    def merged_rows(
        self, target: str, parts: Mapping[str, tuple[str, Map, Any]]
    ) -> Iterator[tuple[list[Map], list[Map]]]:
        """The rows that a converter joins or splits, and the rows of what it makes of them."""
        converter = next(iter(parts.values()))[2]
        try:
            if len(converter.source_patterns) == 1 and len(converter.target_patterns) > 1:
                ((hf, row, _),) = parts.values()
                names = [with_loop_of(hf, row, other) for other in self.targets_of(target, converter)]
                yield [row], list(split(row, names, converter.operations))
                return
            order = [parts[pattern] for pattern in converter.source_patterns]
            if any(len(row.hf_names) > 1 for _, row, _ in order) or len(converter.target_patterns) > 1:
                raise NotImplementedError("several to several")
            rows = [row for _, row, _ in order]
            new = joined(rows, with_loop_of(order[0][0], rows[0], target), converter.operations)
            MappingTable([new])
        except (NotImplementedError, KeyError, IndexError, ValueError, LayoutError) as error:
            self.found.lost.append(f"{target}: {type(error).__name__} {error}")
            return
        forms = self.known.get(rows[0].hf_names, {})
        alike = [
            row
            for form in forms.values()
            for row in form
            if row.jax_names == new.jax_names and row.layout.replace(" ", "") == new.layout.replace(" ", "")
        ]
        if not alike and new.hf != rows[0].hf:
            yield rows, [new]
        elif not alike:
            self.found.lost.append(f"{target}: the same name with another layout, which config.json must tell")
        elif template(alike[0].hf_names[0]) != target:
            self.found.names[target] = template(alike[0].hf_names[0])


def outermost(name: str) -> str:
    """The module of a name below the model."""
    return name.removeprefix("model.").partition(".")[0]


def with_loop_of(hf: str, row: Map, pattern: str) -> str:
    """A template with the indices over which a row loops."""
    loop = iter(row_indices(row)[0])
    return re.sub("#", lambda _: f"{{{next(loop)}}}", pattern)


def has_other_constants(hf: str, row: Map, name: str, other: str) -> bool:
    """Returns True if a name has other numbers besides its indices than the name in the table has."""
    loops, mine, theirs = len(row_indices(row)[0]), numbers(name), numbers(other)
    return "+" not in hf and mine[:loops] == theirs[:loops] and mine != theirs


def numbered_as(hf: str, row: Map, other: str) -> str:
    """A name of transformers with the indices over which a row loops; its further numbers stay."""
    loop, given = row_indices(row)[0], numbers(other)
    return filled(template(other), [*(f"{{{index}}}" for index in loop), *given[len(loop) :]])


@dataclass
class Models:
    """The models of transformers for some cases of one family, and their configs as tpuconv reads them.

    Attributes:
        cases: of the text model.
        whole: names of multimodal cases; by default the ones of the family.
    """

    cases: Sequence[Case]
    whole: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.models = list(map(hf_model, self.cases))
        raws = [json.loads(model.config.to_json_string()) for model in self.models]
        self.whole = self.whole or whole_by_family().get(find_family(raws[0]).name, ())
        sights = [SIGHTS[name]() for name in self.whole]
        self.models += [sight.model for sight in sights]
        raws += [sight.config_json() for sight in sights]
        self.family = find_family(raws[0])
        parts = [*(() for _ in self.cases), *(sight.parts for sight in sights)]
        self.configs = [
            self.family.read_config(raw, tensors=[*model.state_dict()] if own else (), parts=own)
            for raw, model, own in zip(raws, self.models, parts, strict=True)
        ]

    def found(self) -> Found:
        """What transformers has, besides the release. Of the cases of the text model the first one shows all."""
        out = Found()
        for number, (model, config) in enumerate(zip(self.models, self.configs, strict=True)):
            if 0 < number < len(self.cases):
                continue
            each = Finder(self.family, model, config).run()
            out.names |= each.names
            out.forms += [form for form in each.forms if form not in out.forms]
            out.lost += each.lost
            text = Finder(self.family, model, replace(config, towers=())).run() if config.parts else each
            out.outside = sorted({*out.outside, *text.outside})
        return out

    def release(self) -> Release:
        """How the modules are named and grouped, as it is read with the names of the file."""
        spelling, forms = {}, {}
        for model, config in zip(self.models, self.configs, strict=True):
            release = self.family.table_for(model.state_dict(), config).release
            if bool(config.parts) == bool(self.whole):  # rules for the text model alone may be wrong beside an encoder
                spelling |= release.spelling
            forms |= {name: form for name, form in release.forms.items() if isinstance(form, str)}
        return Release(spelling=spelling, forms=forms)


def models_by_family() -> dict[str, Callable[[], Models]]:
    """The models of the families whose names transformers' classes tell."""
    cases: dict[str, list[Case]] = defaultdict(list)
    for case in CASES:
        if not case.written_as and not case.traits.thinker_of:
            cases[case.family].append(case)
    of_texts = {name: partial(Models, own) for name, own in cases.items()}
    return of_texts | {
        name: partial(Models, (), whole) for name, whole in whole_by_family().items() if name not in cases
    }


def main() -> None:
    wanted = sys.argv[1:]
    out: dict[str, Any] = json.loads(FILE.read_text()) if wanted else {}
    for name, make in models_by_family().items():
        if wanted and name not in wanted:
            continue
        models = make()
        found = models.found()
        for text in found.lost:
            print(f"{name}: no row: {text}")
        out[models.family.name] = found.to_json()
        FILE.write_text(json.dumps(out, indent=1, sort_keys=True) + "\n")
        forget_saved()
        out[models.family.name] = replace(found, release=models.release()).to_json()
    FILE.write_text(json.dumps(out, indent=1, sort_keys=True) + "\n")
    print(f"{FILE.name}: {len(out)} families")


if __name__ == "__main__":
    main()
