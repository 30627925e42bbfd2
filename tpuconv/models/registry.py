"""The table of model families, and the choice of the family for a config.json. A family is imported when it is first
needed. Its config and table do not import jax.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from tpuconv.errors import ConfigError, UnsupportedConfig, UsageError
from tpuconv.jsonfile import short
from tpuconv.models.common.beside import Modality, PartConfig, modality_of
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.config_keys import given_keys, without_keys
from tpuconv.models.common.heads import AS_DRAFT, LOGITS, Head, class_of, headed, named_head, shown_head
from tpuconv.models.common.ignored import ConfigReport, report_ignored
from tpuconv.models.common.rows import ALL_FORMS
from tpuconv.models.common.saved import saved_names, saved_outside, saved_places
from tpuconv.models.families import DRAFT_ARCHITECTURES, DRAFT_FAMILIES, FAMILIES, SHARED_TYPES
from tpuconv.models.left_out import MODELS_LEFT_OUT
from tpuconv.names import REPAIR
from tpuconv.notation.forms import Forms, ReleaseReader
from tpuconv.notation.release import Release
from tpuconv.notation.segments import all_undressed
from tpuconv.notation.spelling import template
from tpuconv.notation.table import MappingTable
from tpuconv.plugins import by_name, check_alone, loaded, plugin

WRAPPED = "tpuconv.models.wrappers:wrapped_family"
"""Finds the family of a text model inside one of many multimodal models."""

BUILD = "tpuconv.models.build:model_class"
"""Makes the model of a family of its parts."""

GROUP = "tpuconv.families"
"""The group of entry points for families."""

MODALITIES = "tpuconv.modalities"
"""The group of entry points for encoders of images and sounds. The name of one is the family that gets it."""

CORRECT = (
    "correct config.json, as the model was trained: a program that cuts layers or adds tokens has to change all keys "
    "that count them"
)
"""The hint of errors about values of config.json."""

NO_PARTS: Mapping[str, PartConfig] = MappingProxyType({})
"""The parts of a text model alone."""


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        name: its name.
        summary: the models that it supports, for `tpuconv families`.
        config: the class that reads config.json.
        table: the mapping of the tensors.
        model: the class of the Flax NNX model, as "module:Class"; or the family that is made of its parts
            (`tpuconv.models.parts`).
        architectures: the model_type of each architecture in config.json that returns logits. The same models without
            a head for logits are read too (`tpuconv.models.common.heads`).
        aliases: names that modules have in some releases, and those of the table, with `{L}` or as templates
            (`tpuconv.notation.spelling`).
        forms: rows that releases of this family alone may have in another form.
        text_types: of a multimodal model the model_types of its text model, where families differ by it.
        text: of a multimodal model the family of its text model, if that has the same names of parameters and stands
            for it in the tables of targets.
        modalities: of a multimodal model how it sees and hears. Where several are of one part, the config of its tower
            says which one a model has.
        output: what all models of the family return (`tpuconv.models.common.heads`), if that is not logits.
    """

    name: str
    summary: str
    config: type[DecoderConfig]
    table: MappingTable
    model: str
    architectures: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    forms: tuple[Forms, ...] = ()
    text_types: tuple[str, ...] = ()
    text: str = ""
    modalities: tuple[Modality, ...] = ()
    output: str = LOGITS

    def returns(self, raw: Mapping[str, Any], tensors: Collection[str] = ()) -> str:
        """Returns what a model of this family returns (`tpuconv.models.common.heads`), by its parsed config.json and
        the names of its tensors."""
        if self.output:
            return self.output
        names = [named_head(name, self.architectures) for name in raw.get("architectures") or ()]
        embedding = next((row.hf_names[0] for row in self.table if row.jax_names[0].startswith("embed.")), "")
        return shown_head(next(filter(None, names), LOGITS), all_undressed(tensors), embedding)

    @property
    def whole_table(self) -> MappingTable:
        """The table with all parts beside the text model, with the names of most releases; of several towers for one
        part it has the first."""
        table = headed(self.table, LOGITS)
        for each in {each.part: each for each in reversed(self.modalities)}.values():
            table = each.joined(table)
        return table

    def parts_among(self, tensors: Collection[str]) -> tuple[str, ...]:
        """Returns the parts beside the text model of which there are tensors. With names of transformers' modules that
        are not known for a part, these are all parts, so that it is refused and not left out."""
        tensors, outside = all_undressed(tensors), tuple(each.removesuffix("*") for each in saved_outside(self.name))
        found = {each.part for each in self.modalities if each.has_some(tensors)}
        if modules := {template(name) for name in tensors if name.startswith(outside)}:
            table = self.whole_table
            reader = ReleaseReader(table, ALL_FORMS, saved_names(self.name), saved_places(self.name, table))
            parts = {template(name): row.part for row in reader.rows for name in row.hf_names}
            known = [parts.get(reader.speller.canonical(name) or "", "") for name in modules]
            found |= set(known) if all(known) else {each.part for each in self.modalities}
        return tuple(dict.fromkeys(each.part for each in self.modalities if each.part in found))

    def table_without_release(self, returns: str = LOGITS, parts: Mapping[str, PartConfig] = NO_PARTS) -> MappingTable:
        """Returns the table of models that return this, with the names of most releases; with these `parts` beside the
        text model."""
        return _joined(headed(self.table, returns), parts)

    def release_reader(
        self, returns: str = LOGITS, parts: Mapping[str, PartConfig] = NO_PARTS, wrapping: Collection[str] = ()
    ) -> ReleaseReader:
        """Returns what reads releases of models that return this; with these `parts` beside the text model, and with
        these leading segments of names that only wrap."""
        table = headed(self.table, returns)
        table = _joined(replace(table, ignore={**table.ignore, **saved_outside(self.name)}), parts)
        names = {**saved_names(self.name), **self.aliases}
        for each in parts.values():
            names |= each.modality.aliases
        return ReleaseReader(table, (*self.forms, *ALL_FORMS), names, saved_places(self.name, table), wrapping)

    def table_for(self, names: Collection[str], config: DecoderConfig, returns: str = LOGITS) -> MappingTable:
        """Returns the table of the release that has tensors with these names."""
        return self.release_reader(returns, config.parts).read(names, config)

    def table_of(self, release: Release, config: DecoderConfig, returns: str = LOGITS) -> MappingTable:
        """Returns the table of a release that a manifest describes, with its tensors as a whole."""
        return self.release_reader(returns, config.parts).release_table(release.whole(), config)

    def in_targets(self, model_type: str) -> tuple[str, str]:
        """Returns the family and the model type by which tables of targets have the models of a model type."""
        return (self.text, self.text_types[0]) if self.text else (self.name, model_type)

    @property
    def model_class(self) -> Any:
        """The class of the Flax NNX model; its arguments are those of `Decoder`. Imports jax."""
        return _resolve(self.model) if ":" in self.model else _resolve(BUILD)(self.model)

    def read_config(
        self,
        raw: Mapping[str, Any],
        allow: Collection[str] = (),
        tensors: Collection[str] = (),
        returns: str = LOGITS,
        parts: Collection[str] = (),
    ) -> DecoderConfig:
        """Returns the config that a parsed config.json describes without its keys `allow`. `tensors` are the names of
        the checkpoint's tensors or parameters, which may tell what config.json does not say; `returns` is what the
        model returns; `parts` are those beside the text model that it has.

        Raises:
            UnsupportedConfig, ConfigError: see `DecoderConfig.from_hf` and `Head.from_hf`.
        """
        raw = without_keys(raw, allow)
        try:
            config = self.config.from_hf(self.config.settled(raw, tensors) if tensors else raw)
            outer: Any = self.config.around_text(raw) if parts else raw
            towers = tuple(modality_of(self.modalities, part, outer).read(outer, config, tensors) for part in parts)
            return replace(config, head=Head.from_hf(returns, raw, tensors), towers=towers)
        except ConfigError as error:
            if error.hint is None:
                error.hint = CORRECT
            raise

    def check_config(
        self,
        raw: Mapping[str, Any],
        allow: Collection[str] = (),
        tensors: Collection[str] = (),
        returns: str = LOGITS,
        parts: Collection[str] = (),
    ) -> ConfigReport:
        """Returns the config that a parsed config.json describes, and its keys that are not read.

        Args:
            raw: the parsed config.json.
            allow: keys that the user lets through; they are treated as absent.
            tensors: names of the checkpoint's tensors, which may show the value of an ignored or absent key.
            returns: what the model returns.
            parts: those beside the text model that it has.

        Raises:
            UsageError: a key of `allow` is not in config.json, or the conversion reads it.
            UnsupportedConfig, ConfigError: see `read_config`.
        """
        given_keys(raw, allow)
        return report_ignored(self.read_config(raw, allow, tensors, returns, parts), raw, allow, tensors)


def _joined(table: MappingTable, parts: Mapping[str, PartConfig]) -> MappingTable:
    for each in parts.values():
        table = each.modality.joined(table)
    return table


def family(
    config: type[DecoderConfig],
    table: MappingTable,
    summary: str,
    *architectures: str,
    types: Mapping[str, str] | None = None,
    model: str = "",
    **facts: Any,
) -> Family:
    """Returns the family of a folder of `tpuconv/models`, which has the name of the folder.

    Args:
        config, table, summary: as of `Family`.
        architectures: those whose model_type is that of `config`.
        types: the model_type of other architectures.
        model: the folder whose modules have the class `Model`, if that of another family computes the same.
        facts: further attributes of `Family`.
    """
    name = config.__module__.split(".")[-2]
    return Family(
        name=name,
        summary=summary,
        config=config,
        table=table,
        model=f"tpuconv.models.{model or name}.modules:Model",
        architectures={**dict.fromkeys(architectures, config.model_type), **(types or {})},
        **facts,
    )


def draft_family(
    config: type[DecoderConfig], table: MappingTable, summary: str, types: Mapping[str, str] | None = None
) -> Family:
    """Returns the family of drafts of a folder of `tpuconv/models`, which return no logits by themselves; arguments
    are as of `family`."""
    name = config.model_type
    architectures = {each: name for each, family in DRAFT_ARCHITECTURES.items() if family == name}
    model = f"tpuconv.models.{name}.modules:Model"
    return Family(name, summary, config, table, model, {**architectures, **(types or {})}, output=AS_DRAFT)


@cache
def _resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


@cache
def _plugins() -> dict[str, list[EntryPoint]]:
    return by_name(entry_points(group=GROUP))


@cache
def _modality_points() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=MODALITIES))


def _with_modalities(family: Family) -> Family:
    """Returns a family with the encoders that other packages register for it, after its own.

    Raises:
        UsageError: one cannot be imported, or is none.
    """
    points = [point for point in _modality_points() if point.name == family.name]
    if not points:
        return family
    found = [loaded("encoder for the family", point) for point in points]
    for point, each in zip(points, found, strict=True):
        if not isinstance(each, Modality):
            raise UsageError(
                f"the encoder for the family '{family.name}', {point.value}, is not a "
                "tpuconv.models.common.beside.Modality",
                hint=REPAIR,
            )
    return replace(family, modalities=(*family.modalities, *found))


def family_names() -> list[str]:
    """Returns the names of all families, those of this package first."""
    return list(dict.fromkeys((*FAMILIES, *_plugins())))


def get_family(name: str) -> Family:
    """Returns the family of this name.

    Raises:
        UsageError: there is no such family, or several packages have it, or its package cannot be imported.
    """
    place, points = FAMILIES.get(name) or DRAFT_FAMILIES.get(name), _plugins().get(name, [])
    check_alone("family", name, points, is_ours=place is not None)
    if place is not None:
        variable = "FAMILY" if place.endswith(".family") else name.upper().replace("-", "_")
        own: Family = _resolve(f"tpuconv.models.{place}:{variable}")
        return _with_modalities(own)
    wrapper, _, text_type = name.partition(".")
    if text_type and (found := _wrapped({"model_type": wrapper, "text_config": {"model_type": text_type}})) is not None:
        return found
    if not points:
        raise UsageError(f"there is no family '{name}'", hint=_suggestion(name, family_names()))
    return _with_modalities(plugin("family", Family, points[0]))


def named_family(name: str) -> Family:
    """Returns the family of this name, or the one that reads this model type.

    Raises:
        UsageError: there is none, or its package cannot be imported.
    """
    return get_family(name) if name in {**FAMILIES, **DRAFT_FAMILIES} else family_of_type(name) or get_family(name)


@cache
def family_of_type(model_type: str) -> Family | None:
    """Returns the family that reads a model type; None if there is none."""
    readers = (family for family in _imported([], model_type) if model_type in family.architectures.values())
    return next(readers, None)


def all_families() -> list[Family]:
    """Returns all families that can be imported. Imports them."""
    return list(_imported([]))


def _imported(faults: list[str], likely: str = "") -> Iterator[Family]:
    """Yields the families, the one of the name `likely` first, then ours, so that others are imported only if needed.
    One that cannot be imported is left out: `faults` takes the reason."""
    for name in sorted(family_names(), key=lambda name: name != likely):
        try:
            family = get_family(name)
        except UsageError as error:
            faults.append(error.message)
        else:
            yield family


def _wrapped(hf_config: Mapping[str, Any]) -> Family | None:
    """Returns the family of the text model in one of `tpuconv.models.wrappers`; None of another config.json."""
    family: Family | None = _resolve(WRAPPED)(hf_config)
    return None if family is None else _with_modalities(family)


def find_family(hf_config: Mapping[str, Any]) -> Family:
    """Returns the family that supports the model_type and all architectures of a parsed config.json.

    Raises:
        ConfigError: the model_type or the architectures are malformed.
        UnsupportedConfig: no family supports them.
    """
    if (draft := _draft_family(hf_config)) is not None:
        return draft
    model_type, architectures = hf_config.get("model_type"), hf_config.get("architectures") or []
    names = [model_type, *architectures] if isinstance(architectures, list) else [None]
    if not isinstance(model_type, str) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"config.json: model_type={short(model_type)} and architectures={short(architectures)} name no model",
            hint="write the model_type of the release into config.json, a text, and its architectures, a list of "
            "texts: `tpuconv families` lists known ones",
        )
    model_type = type_of_family(hf_config)
    known: set[str] = set()
    faults: list[str] = []
    inside = None if model_type in FAMILIES else _wrapped(hf_config)
    for family in _imported(faults, model_type) if inside is None else [inside]:
        known.update(family.architectures.values())
        if model_type in family.architectures.values() and _reads_text(family, hf_config):
            causal = [name for name, kind in family.architectures.items() if kind == model_type]
            other = [name for name in architectures if named_head(name, causal) is None]
            if not other:
                return family
            raise UnsupportedConfig(
                f"{family.name} reads model_type '{model_type}', but not its architecture "
                + ", ".join(name[:100] for name in other[:10]),
                hint=f"of this model_type it reads {', '.join(causal)}, and the same without a head or with scores; if "
                "the weights are of one of these, write it into architectures",
            )
    text, compare = hf_config.get("text_config"), "`tpuconv families --new SRC` compares the model with each"
    around = f" with a text model {short(text.get('model_type'))}" if isinstance(text, Mapping) else ""
    reason = MODELS_LEFT_OUT.get(model_type)
    raise UnsupportedConfig(
        f"no family reads model_type {short(model_type)}{around} (architectures {short(architectures)})"
        + (f": {reason}" if reason else ""),
        details=faults,
        hint=compare if reason else f"{_suggestion(model_type, known)}; {compare}",
    )


def type_of_family(hf_config: Mapping[str, Any]) -> str:
    """Returns the model_type of a parsed config.json, or the type that the family of its first architecture has here,
    where releases of several families write the same one."""
    model_type: str = hf_config["model_type"]
    first = class_of(next(iter(hf_config.get("architectures") or ()), ""))
    kinds = SHARED_TYPES.get(model_type, {}).items()
    return next((kind for stem, kind in kinds if first.startswith(stem)), model_type)


SPECULATORS_TYPE = "speculators_model_type"
"""The key of config.json that names a draft in the format of speculators."""


def _draft_family(hf_config: Mapping[str, Any]) -> Family | None:
    """Returns the family of a draft; None of another config.json."""
    said, architectures = hf_config.get(SPECULATORS_TYPE), hf_config.get("architectures")
    if isinstance(said, str):
        if said not in DRAFT_FAMILIES:
            raise UnsupportedConfig(
                f"no family reads drafts of the type '{said[:100]}'", hint=f"supported are {', '.join(DRAFT_FAMILIES)}"
            )
        return get_family(said)
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    named = DRAFT_ARCHITECTURES.get(first) if isinstance(first, str) else hf_config.get("model_type")
    return get_family(named) if isinstance(named, str) and named in DRAFT_FAMILIES else None


def _reads_text(family: Family, hf_config: Mapping[str, Any]) -> bool:
    """Whether a family reads the text model of a multimodal one."""
    text = hf_config.get("text_config")
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    return not family.text_types or kind is None or kind in family.text_types


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """Returns up to three known names that resemble one without endings such as `ForCausalLM`, which most share."""
    stems: dict[str, list[str]] = {}
    for each in sorted(known):
        stems.setdefault(_stem(each), []).append(each)
    near = [each for stem in get_close_matches(_stem(name), stems, n=3) for each in stems[stem]]
    return sorted(near, key=lambda each: -SequenceMatcher(None, name.lower(), each.lower()).ratio())[:3]


def _stem(name: str) -> str:
    return re.sub(r"(?i)(for[a-z]+|lmheadmodel|model)$", "", name[:100]).lower()


def _suggestion(name: str, known: Collection[str]) -> str:
    near = near_names(name, known)
    return (f"did you mean {' or '.join(near)}? " if near else "") + "`tpuconv families` lists all"
