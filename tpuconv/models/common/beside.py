"""Parts of a multimodal model beside its text model: an encoder of images or sounds (a tower), a projector to the width
of the text model, and how the features enter the text.

A part has letters of its own, which its config explains: D, N, H, F and L are the sizes of its tower, O is the width of
the text model, X colours, p and q rows and columns of a patch. Names of its parameters begin with the name of the part:
`vision.layers.0.attn.q.kernel`, `vision.projector.up.kernel`.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar, Self

from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.encoder_keys import TEXT_ALONE, check_acts, in_our_keys, rope_keys
from tpuconv.models.common.key_types import checked_values, hints_of, object_of
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.segments import without_front
from tpuconv.notation.spelling import template
from tpuconv.notation.table import Map, MappingTable

declare(
    pairs=Word("pairs of dimensions that rotary positions turn (H / 2)"),
    two=Word("the two dimensions of a pair"),
)

VISION, VIDEO, AUDIO = "vision", "video", "audio"
"""The parts. Most models see videos with the part for images."""
UNKNOWN_TOKEN = -1
"""The id of a placeholder that config.json does not say: `DecoderConfig.with_files` finds it."""


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """The keys of `vision_config` or `audio_config` that a tower reads. Transformers has the same defaults.

    Attributes:
        only: keys that have one of these values, where the file has them.
        aliases: further names of keys, and those that they stand for.
        told: keys that no config.json has: whether a release has tensors with such names, or a checkpoint arrays.
    """

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    aliases: ClassVar[Mapping[str, str]] = {}
    told: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """Returns the config that an object of config.json describes.

        Raises:
            UnsupportedConfig: a value is not implemented.
            ConfigError: a value has a wrong type, or is not positive, or two names of a key have different values.
        """
        raw = in_our_keys(raw, cls.aliases)
        if "rope_theta" in hints_of(cls):
            raw |= rope_keys(raw)
        for key, values in cls.only.items():
            if key in raw and raw[key] not in values:
                raise UnsupportedConfig(f"{key}={short(raw[key])} of an encoder is not implemented", hint=TEXT_ALONE)
        config = cls(**checked_values(raw, hints_of(cls)))
        check_acts(config)
        return config

    def __post_init__(self) -> None:
        sizes = {name: value for name, value in vars(self).items() if type(value) is int}
        wrong = [f"{name}={value} is negative" for name, value in sizes.items() if value < 0]
        if not wrong:
            try:
                wrong = list(self.contradictions())
                _ = wrong or self.sizes  # which divides by sizes
            except ZeroDivisionError:
                wrong = [f"{name}=0" for name, value in vars(self).items() if type(value) in (int, float) and not value]
        if wrong:
            raise ConfigError("config.json contradicts itself about an encoder", details=wrong)

    def contradictions(self) -> Iterable[str]:
        """Returns what is wrong with the values together."""
        return ()

    @property
    def words(self) -> range:
        """The ids of the vocabulary that the projector embeds, where it does."""
        return range(0)

    @property
    def sizes(self) -> dict[str, Any]:
        """The size of each letter."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ProjectorConfig:
    """The sizes of a projector, read from the config.json around the text model."""

    out: int

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        """Returns the config of a projector from a tower to a text model; `outer` has `vision_config`.

        Raises:
            UnsupportedConfig: a value is not implemented.
            ConfigError: a value has a wrong type, or does not fit the tower.
        """
        config = cls(**{**checked_values(outer, hints_of(cls)), **cls.of_text(text)})
        check_acts(config)
        config.check(tower)
        return config

    @classmethod
    def of_text(cls, text: Any) -> dict[str, Any]:
        """Returns the fields that the config of the text model says."""
        return {"out": text.hidden_size}

    def check(self, tower: Any) -> None:
        """Raises ConfigError or UnsupportedConfig if the tower has not what the projector reads."""
        states = tower.sizes.get("L", 0) + 1
        if wrong := [number for number in self.feature_layers if not -states <= number < states]:
            raise ConfigError(f"config.json: the encoder has no hidden states {short(wrong)}, it has {states}")

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The numbers of the hidden states of the tower that it reads, side by side: 0 is the input of the first layer,
        -1 the output of the last. Empty for that output behind the tower's last norm."""
        return ()

    @property
    def drops_first(self) -> bool:
        """True if it does not read the first of the tower's patches, which is a class token."""
        return False

    @property
    def is_attended(self) -> bool:
        """True if layers of the text model attend to the features, which have no places among its tokens."""
        return False

    @property
    def adds_features(self) -> bool:
        """True if features are added to the embeddings of placeholders, which they replace in most models."""
        return False

    @property
    def block_tokens(self) -> tuple[int, ...]:
        """The ids of further tokens that count as an image: they see each other, whichever image of a text they belong
        to, or are routed as images are; none where the placeholders of each image are a block of their own."""
        return ()

    @property
    def sees_prompt(self) -> bool:
        """True if all tokens of a call with images see each other: the prompt, before new tokens follow."""
        return False

    @property
    def merge(self) -> int:
        """The number of patches that it joins along each side."""
        return 1

    def sizes(self, tower: Any) -> dict[str, Any]:
        """The size of each letter that the tower does not have."""
        return {"O": self.out}


@dataclass(frozen=True, eq=False)
class Tower:
    """An encoder of images or sounds.

    Attributes:
        name: its name.
        summary: the models that have it.
        config: the class that reads its object of config.json.
        rows: its table, with names on disk below the tower's prefix.
        encoder: the class of its Flax NNX model, as "module:Class".
    """

    name: str
    summary: str
    config: type[TowerConfig]
    rows: tuple[Map, ...]
    encoder: str


@dataclass(frozen=True, eq=False)
class Projector:
    """A module that brings features to the width of the text model.

    Attributes:
        config: the class that reads its sizes.
        rows: its table, with names on disk below the projector's prefix.
        module: its class, as "module:Class".
    """

    config: type[ProjectorConfig]
    rows: tuple[Map, ...]
    module: str


@dataclass(frozen=True, eq=False)
class Modality:
    """A way in which a multimodal family sees or hears.

    Attributes:
        part: `VISION`, `VIDEO` or `AUDIO`.
        tower, projector: what encodes, and what brings the features to the text.
        prefix, projector_prefix: what stands before their names on disk in releases.
        replaces: the modules beside the text model that the two are, as the family's table skips them; by default those
            that the prefixes begin with.
        placeholder: the keys of config.json, or else of the tower's config, that may have the id of the token in whose
            place features stand.
        placeholder_id: that id, where config.json has none.
        placeholder_token: the token, where its id is in the tokenizer's files alone.
        opening_token: the token before each run of placeholders, by which they are told from another part's, where
            both parts have the same placeholder.
        config_key: the key of config.json that has the tower's config.
        other_prefixes: what other releases have in place of `prefix`.
        other_parts: parts of names, and what transformers or other releases write for them.
        defaults: keys of the tower's config that have other defaults in this family.
        tower_types: the values of `model_type` in the tower's config that mean this tower, in a family that has a
            choice of towers.
        unused: patterns of tensors in releases below `prefix` that the reference does not read either.
    """

    part: str
    tower: Tower
    projector: Projector
    prefix: str
    projector_prefix: str = "multi_modal_projector."
    replaces: tuple[str, ...] = ()
    placeholder: tuple[str, ...] = ("image_token_id", "image_token_index")
    placeholder_id: int | None = None
    placeholder_token: str = ""
    opening_token: str = ""
    config_key: str = "vision_config"
    other_prefixes: tuple[str, ...] = ()
    other_parts: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tower_types: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules beside the text model that tower and projector are."""
        begins = (name.removeprefix("model.").partition(".")[0] for name in (self.prefix, self.projector_prefix))
        return self.replaces or tuple(dict.fromkeys(filter(None, begins)))

    def read(self, outer: Mapping[str, Any], text: Any, tensors: Collection[str] = ()) -> "PartConfig":
        """Returns the config of this part.

        Args:
            outer: the parsed object of config.json that has `vision_config`.
            text: the config of the text model.
            tensors: the names of the tensors of the release, or of the parameters of a checkpoint.

        Raises:
            UnsupportedConfig, ConfigError: see `TowerConfig.from_hf`.
        """
        own = object_of(outer, self.config_key)
        told = {key: any(map(re.compile(name).search, tensors)) for key, name in self.tower.config.told.items()}
        tower = self.tower.config.from_hf({**self.defaults, **own, **told})
        ids = [place[key] for place in (outer, own) for key in self.placeholder if place.get(key) is not None]
        placeholder = ids[0] if ids else UNKNOWN_TOKEN if self.placeholder_token else self.placeholder_id
        if type(placeholder) is not int:
            raise ConfigError(
                f"config.json: {' or '.join(self.placeholder)} is {short(placeholder)}, not the id of a token"
            )
        opening = UNKNOWN_TOKEN if self.opening_token else None
        return PartConfig(self, tower, self.projector.config.from_hf(outer, tower, text), placeholder, opening)

    @cached_property
    def rows(self) -> tuple[Map, ...]:
        """The rows of tower and projector in a table of the whole model."""
        return (
            *_placed(self.tower.rows, self.prefix, self.part, self.part),
            *_placed(self.projector.rows, self.projector_prefix, f"{self.part}.projector", self.part),
        )

    @property
    def aliases(self) -> dict[str, str]:
        """Templates of names in other releases, and of names in `rows`."""
        names = [name for row in self.rows for name in row.hf_names]
        below_others = {
            template(other + name.removeprefix(self.prefix)): template(name)
            for other in self.other_prefixes
            for name in names
            if name.startswith(self.prefix)
        }
        return below_others | {
            template(name.replace(part, other)): template(name)
            for part, other in self.other_parts.items()
            for name in names
            if part in name
        }

    def has_some(self, tensors: Collection[str]) -> bool:
        """Returns whether some of the tensors are of this part."""
        modules = tuple(f"{without_front(name)}." for name in self.modules)
        return any(without_front(name).startswith(modules) for name in tensors)

    def joined(self, table: MappingTable) -> MappingTable:
        """Returns the table of the text model with this part."""
        fronts = tuple(f"{front}{name}" for name in self.modules for front in ("", "model."))
        kept = {
            pattern: why
            for pattern, why in table.ignore.items()
            if not any(pattern == front or pattern.startswith(f"{front}.") for front in fronts)
        }
        unused = {f"{self.prefix}{pattern}": "the reference does not read it either" for pattern in self.unused}
        return replace(table, rows=(*table.rows, *self.rows), ignore={**kept, **unused})


def modality_of(modalities: Sequence[Modality], part: str, outer: Mapping[str, Any]) -> Modality:
    """Returns the modality of a part that a model has, among the ones of its family. `outer` is as in `Modality.read`.

    Raises:
        UnsupportedConfig: the model has another tower.
    """
    known = [each for each in modalities if each.part == part]
    own = outer.get(known[0].config_key)
    kind = own.get("model_type") if isinstance(own, Mapping) else None
    found = [each for each in known if kind is None or not each.tower_types or kind in each.tower_types]
    if found:
        return found[0]
    raise UnsupportedConfig(
        f"an encoder of the type {short(kind)} is not implemented in this family",
        details=[f"known are {', '.join(name for each in known for name in each.tower_types)}"],
        hint=TEXT_ALONE,
    )


@dataclass(frozen=True)
class PartConfig:
    """The config of a part of one model. What it does not have itself is a property of the projector or the tower.

    Attributes:
        placeholder: the id of the token in whose place features stand.
        opening: the id of the token before each run of them; None where no other part has the same placeholder.
    """

    modality: Modality
    tower: Any
    projector: Any
    placeholder: int
    opening: int | None = None

    @property
    def unknown_tokens(self) -> dict[str, str]:
        """The tokens whose ids are not known, by attribute."""
        named = {"placeholder": self.modality.placeholder_token, "opening": self.modality.opening_token}
        return {name: token for name, token in named.items() if getattr(self, name) == UNKNOWN_TOKEN}

    @property
    def part(self) -> str:
        """The name of the part."""
        return self.modality.part

    @property
    def sizes(self) -> dict[str, Any]:
        """The size of each letter."""
        return {name: size for name, size in self._named.items() if isinstance(size, int)}

    @property
    def layer_sets(self) -> Mapping[str, Sequence[int]]:
        """The numbers of the layers of each letter that stands for some of them."""
        return {name: layers for name, layers in self._named.items() if not isinstance(layers, int)}

    @property
    def _named(self) -> dict[str, Any]:
        own = {**self.tower.sizes, **self.projector.sizes(self.tower)}
        return {**own, "pairs": own["H"] // 2, "two": 2} if "H" in own else own

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("tower", "projector"):  # while a copy is made there are none
            raise AttributeError(name)
        return getattr(self.projector if hasattr(self.projector, name) else self.tower, name)

    @property
    def encoder_class(self) -> Any:
        """The class of the Flax NNX encoder; its arguments are (config, dtype=, keys=). Imports jax."""
        return _resolve(self.modality.tower.encoder)

    @property
    def projector_class(self) -> Any:
        """The class of the projector; it has the arguments of the encoder. Imports jax."""
        return _resolve(self.modality.projector.module)


def _resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _placed(rows: Sequence[Map], hf: str, jax: str, part: str) -> list[Map]:
    """Rows with what stands before their names on each side."""
    return [
        replace(
            row,
            hf=tuple(hf + name for name in row.hf_names),
            jax=tuple(f"{jax}.{name}" for name in row.jax_names),
            part=part,
        )
        for row in rows
    ]
