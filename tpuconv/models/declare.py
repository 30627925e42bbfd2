"""Declares families: decoders that are made of parts, and text models inside multimodal ones."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from inspect import get_annotations
from typing import Any, ClassVar, TypeVar, get_origin

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import MTP_COPIES, MTP_IGNORE, NORM_BIAS, decoder_table
from tpuconv.models.common.wrapper import WrapperConfig, inside, outside_of
from tpuconv.models.parts import KEY_TYPES, WITH_BIAS, WITHOUT_SCALE, Experts, Factors, Mlp, Mtp, Norms, Part
from tpuconv.models.registry import Family
from tpuconv.notation.spelling import respelled
from tpuconv.notation.table import Map, MappingTable, under

Bases = type[DecoderConfig] | tuple[type, ...]
AnyPart = TypeVar("AnyPart", bound=Part)
OF_FAMILIES = ("text_types", "forms", "text", "modalities", "output")
"""Facts of a `Family`; the other facts that a family is declared with are class variables of its Config."""


@dataclass(frozen=True)
class DecoderFamily(Family):
    """A family that is made of parts.

    Attributes:
        parts: its parts.
        base: the class that its model derives from, if that is not `Decoder`: "modules.gpt:PositionedDecoder".
        said: the arguments of `decoder` that other families like it have too.
    """

    parts: tuple[Part, ...] = ()
    base: str = ""
    said: Mapping[str, Any] = field(default_factory=dict)

    def part(self, kind: type[AnyPart]) -> AnyPart | None:
        """Returns its part of a kind; None without one."""
        return _part(self.parts, kind)

    def but(self, name: str, summary: str, *said: str | Part, **others: Any) -> "DecoderFamily":
        """Returns a family like this one, with some parts replaced by others of their kinds, and other facts. Its
        Config derives from this family's unless `config` is given.

        Raises:
            ValueError: the Config would read a key that no part uses.
        """
        parts = _replaced(self.parts, [part for part in said if isinstance(part, Part)])
        unused = set(_named_keys(self.parts)) - set(_named_keys(parts))
        if unused and "config" not in others:
            raise ValueError(f"{name} does not use {', '.join(sorted(unused))} of {self.name}: give it a config")
        architectures = (each for each in said if isinstance(each, str))
        return decoder(name, summary, *architectures, *parts, **{**self.said, "config": self.config, **others})


def _part(parts: Iterable[Part], kind: type[AnyPart]) -> AnyPart | None:
    return next((part for part in parts if isinstance(part, kind)), None)


def _replaced(parts: Iterable[Part], others: Iterable[Part]) -> tuple[Part, ...]:
    """Returns the parts, some of them replaced by others of their kinds."""
    return tuple({_slot(part): part for part in (*parts, *others)}.values())


def _slot(part: Part) -> type:
    """The kind of a part, of which a layer has one: experts stand in place of the MLP."""
    return Mlp if isinstance(part, Experts) and part.layers == "all" else type(part)


def decoder(
    name: str,
    summary: str,
    *said: str | Part,
    config: Bases = DecoderConfig,
    keys: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    variants: Mapping[str, type[DecoderConfig]] | None = None,
    types: Mapping[str, str] | None = None,
    base: str = "",
    modules: Mapping[str, str] | None = None,
    table: MappingTable | None = None,
    names: Mapping[str, str] | None = None,
    others: tuple[Map, ...] = (),
    ignore: Mapping[str, str] | None = None,
    copies: Mapping[str, str] | None = None,
    **facts: Any,
) -> DecoderFamily:
    """Returns a family that is made of parts.

    Args:
        name: of the family, which is its model_type too.
        summary: the models that it supports.
        said: the architectures of config.json, then the parts, in the order of their rows in the table.
        config: the classes that its Config derives from.
        keys: keys of config.json that no part names, or that have another type here.
        defaults: defaults that differ from transformers'.
        variants: the Configs of further model types.
        types: the model_type of other architectures.
        base: as of `DecoderFamily`.
        modules: names of modules in other releases, and the names in the table (`Family.aliases`).
        table: the table, where tensors have neither the names nor the layouts of Llama.
        names: names of modules of Llama, and this family's names: `{"model.layers.{L}.mlp": "blocks.{L}.ffn"}`. The
            longest one that begins a tensor's name is replaced.
        others, ignore, copies: as `decoder_table` has them.
        facts: class variables of the Config, and `OF_FAMILIES`.

    Raises:
        ValueError: no class of `config` has a class variable of this name, or the type of a key is not known.
    """
    parts = tuple(part for part in said if isinstance(part, Part))
    bases = config if isinstance(config, tuple) else (config,)
    known = {*(keys or {}), *(name for base in bases for name in _names(base))}
    named = [key for key in _named_keys(parts) if key not in known]
    if untyped := [key for key in named if key not in KEY_TYPES]:
        raise ValueError(f"{name}: say the types of {', '.join(untyped)} in keys")
    read = {key: KEY_TYPES[key] for key in named}
    of_config = {key: value for key, value in facts.items() if key not in OF_FAMILIES}
    if variants:
        of_config["variants"] = variants
    differing = {"base": base, "table": table, "names": names, "others": others, "ignore": ignore, "copies": copies}
    if table is None:
        table = table_of_parts(parts, others, ignore, copies).renamed(partial(respelled, rules=names or {}))
    return DecoderFamily(
        name=name,
        summary=summary,
        config=config_class(bases, {**read, **(keys or {})}, defaults or {}, model_type=name, **of_config),
        table=table,
        model=name,
        architectures=dict.fromkeys((each for each in said if isinstance(each, str)), name) | dict(types or {}),
        aliases=modules or {},
        **{key: facts[key] for key in OF_FAMILIES if key in facts},
        parts=parts,
        base=base,
        said={key: value for key, value in differing.items() if value},
    )


def _named_keys(parts: Iterable[Part]) -> list[str]:
    return list(dict.fromkeys(key for part in parts for key in part.named_keys()))


def _names(base: type) -> Iterator[str]:
    """Yields what a class has: its fields, class variables and properties. A plain attribute is the default of a key
    that the classes that derive from it may have."""
    for cls in base.__mro__:
        yield from getattr(cls, "__dataclass_fields__", ())
        kinds: dict[str, Any] = get_annotations(cls)
        yield from (name for name, kind in kinds.items() if ClassVar in (kind, get_origin(kind)))
        yield from (name for name, value in vars(cls).items() if isinstance(value, property))


def config_class(
    bases: tuple[type, ...], keys: Mapping[str, Any], defaults: Mapping[str, Any], **facts: Any
) -> type[DecoderConfig]:
    """Returns the Config with these keys besides the keys of the bases, and these class variables.

    Raises:
        ValueError: no base has a class variable of this name.
    """
    if unknown := [fact for fact in facts if not any(hasattr(base, fact) or fact in _names(base) for base in bases)]:
        raise ValueError(f"{', '.join(unknown)} is no class variable of {', '.join(base.__name__ for base in bases)}")
    known = {key: kind for base in bases for key, kind in _types(base).items()}
    annotated = {**{key: known.get(key, KEY_TYPES.get(key)) for key in defaults}, **keys}
    body = {"__annotations__": annotated, "__doc__": "The keys of config.json.", **defaults, **facts}
    return family_config(type("Config", bases, body))


def _types(base: type) -> dict[str, Any]:
    return {each.name: each.type for each in fields(base)} if hasattr(base, "__dataclass_fields__") else {}


def table_of_parts(
    parts: Collection[Part],
    others: tuple[Map, ...] = (),
    ignore: Mapping[str, str] | None = None,
    copies: Mapping[str, str] | None = None,
) -> MappingTable:
    """Returns the table of a decoder that is made of parts, with the names of Llama."""
    norms, experts, mtp = _part(parts, Norms) or Norms(), _part(parts, Experts), _part(parts, Mtp)
    in_layers = [part for part in parts if not isinstance(part, Factors | Mtp)]
    if experts is not None and experts.layers != "all":  # whose rows include the MLP's
        in_layers = [part for part in in_layers if not isinstance(part, Mlp)]
    if norms.between:
        rows = []
        others_than_norms = (part for part in in_layers if part is not norms)
        for part, is_attention in zip(others_than_norms, (True, False), strict=True):
            near = [row for row in norms.table_rows if ("attn_norm" in row.jax_names[0]) == is_attention]
            behind = [row for row in near if row.jax_names[0].startswith("post_")]
            rows += [*(row for row in near if row not in behind), *part.table_rows, *behind]
    else:
        rows = [row for part in in_layers for row in part.table_rows]
    sparse = () if experts is None else experts.rows_of_layers
    further: tuple[Map, ...] = ()
    if mtp is not None and mtp.rows is not None and experts is not None:
        further = under("model.layers.{U}", "mtp.{U}", *rows, *experts.placed_rows, *mtp.table_rows)
    found = decoder_table(
        *rows,
        others=(*sparse, *further, *((NORM_BIAS,) if norms.kind in WITH_BIAS else ()), *others),
        ignore={**(MTP_IGNORE if further else {}), **(ignore or {})},
        copies={**(MTP_COPIES if further else {}), **(copies or {})},
    )
    if norms.kind in WITHOUT_SCALE:
        return found.with_rows([row for row in found.rows if row.jax_names != ("norm.scale",)])
    return found


def wrapper(
    name: str,
    summary: str,
    *said: str | Part,
    text: Family,
    outside: Mapping[str, str] | None = None,
    prefix: str = "model.language_model.",
    head: str | None = None,
    tensors: Mapping[str, str] | None = None,
    mixins: tuple[type, ...] = (),
    reads: type = WrapperConfig,
    table: MappingTable | None = None,
    keys: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    types: Mapping[str, str] | None = None,
    modules: Mapping[str, str] | None = None,
    **facts: Any,
) -> Family:
    """Returns the family of a text model inside a multimodal one.

    Args:
        name, summary: as of `decoder`.
        said: the architectures, and parts that replace parts of the text model.
        text: the family of the text model.
        outside, prefix, head, tensors: as `inside` has them, and as `Wrapper` describes them. By default the modules
            outside are the modules of the modalities.
        mixins: classes that the Config derives from before the text model's Config.
        reads: the class that finds the config of the text model.
        table: the table, where it is not the text model's with a prefix.
        keys, defaults, types, modules, facts: as of `decoder`.
    """
    of_config = {key: value for key, value in facts.items() if key not in OF_FAMILIES}
    if table is None:
        outside = outside or outside_of(facts.get("modalities", ()))
        table = inside(text.table, prefix, outside, tensors=tensors or {}, head=head)
    made: dict[str, Any] = {
        "name": name,
        "summary": summary,
        "config": config_class((reads, *mixins, text.config), keys or {}, defaults or {}, model_type=name, **of_config),
        "table": table,
        "architectures": dict.fromkeys((each for each in said if isinstance(each, str)), name) | dict(types or {}),
        "aliases": modules or {},
        **{key: facts[key] for key in OF_FAMILIES if key in facts},
    }
    parts = tuple(part for part in said if isinstance(part, Part))
    if not parts:
        return Family(**made, model=text.model)
    assert isinstance(text, DecoderFamily)
    return DecoderFamily(**made, model=name, parts=_replaced(text.parts, parts), base=text.base)


def like(
    other: Family,
    name: str,
    summary: str,
    *architectures: str,
    mixins: tuple[type, ...] = (),
    table: MappingTable | None = None,
    keys: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    **facts: Any,
) -> Family:
    """Returns a family that runs the modules of another one, with other keys of config.json; for the arguments see
    `wrapper`."""
    return Family(
        name=name,
        summary=summary,
        config=config_class((*mixins, other.config), keys or {}, defaults or {}, model_type=name, **facts),
        table=other.table if table is None else table,
        model=other.model,
        architectures=dict.fromkeys(architectures, name),
    )
