"""Strict reading of config.json. A key is a field of the family's Config, or has no effect on logits, or is not read by
the reference (transformers) and is reported as ignored. Every other key is an error.

If unknown keys were skipped, a conversion might succeed and its model be wrong.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from typing import Any, ClassVar, Self, get_args

from tpuconv.errors import ConfigError, UsageError
from tpuconv.jsonfile import short
from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.config_keys import SUPPORTED_VALUES, aliases_of_reference, ignored_keys
from tpuconv.models.common.heads import LANGUAGE_MODEL, Head
from tpuconv.models.common.key_types import checked_values, hints_of
from tpuconv.models.common.mrope import SECTIONS, Mrope
from tpuconv.models.common.periods import LayerStacks, find_period
from tpuconv.models.common.rope import PLAIN_ROPE, Rope, check_rope_keys, with_default_rope
from tpuconv.models.common.rope_keys import without_older_rope_keys
from tpuconv.notation.sizes import WithSizes, sets_of_layers

LARGEST_VALUES: Mapping[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "num_nextn_predict_layers", "first_k_dense_replace"), 4096),
    **dict.fromkeys(("loop_num", "loop_num_passes", "num_loops", "total_ut_steps"), 4096),
    **dict.fromkeys(("n_routed_experts", "n_shared_experts", "n_group"), 1 << 16),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "qk_head_dim"), 1 << 16),
}
"""The largest values of integers. Checked before anything of that size is enumerated or allocated."""

MOST_OF_A_NUMBER, MOST_OF_A_SIZE = 1 << 16, (1 << 31) - 1
"""The largest values of keys that are not in `LARGEST_VALUES`: of `num_*`, and of others."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The keys of config.json that all decoders have. Their defaults come from transformers
    (`tpuconv.models.common.defaults`).

    Class attributes: `only` adds to `SUPPORTED_VALUES`, `most` to `LARGEST_VALUES`; `least` has the smallest values of
    integers that may be less than 1.

    Raises:
        ConfigError: a value is too small or too large, or contradicts another.
    """

    model_type: ClassVar[str] = ""
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    least: ClassVar[Mapping[str, int]] = {}
    most: ClassVar[Mapping[str, int]] = {}
    derived: ClassVar[frozenset[str]] = frozenset({"rope", "head", "mrope", "towers"})
    """Fields that are computed from keys of config.json with other names."""
    settled_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys that no config.json has: `settled` and `in_our_keys` add them."""
    hf_names: ClassVar[Mapping[str, str]] = {}
    """The keys of config.json of fields that have another name."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Further keys of config.json, beside the keys of `aliases_of_reference`, and the keys that they stand for, over
    which they win as in transformers."""
    synonyms: ClassVar[Mapping[str, str]] = {}
    """Further keys of config.json and those that they stand for, which must agree where a file has both."""
    left_out: ClassVar[frozenset[str]] = frozenset()
    """Keys of config.json that have no effect in this family, or that `in_our_keys` and `disagreements` read."""
    nullable: ClassVar[frozenset[str]] = frozenset()
    """Keys of config.json whose null is as good as absent."""
    variants: ClassVar[Mapping[str, Any]] = {}
    """The classes of further model types of a family, which have other defaults or keys."""
    sees_behind: ClassVar[bool] = False
    """True where tokens see the tokens behind them too: an embedding model, which has no cache."""
    default_rope: ClassVar[Mapping[str, Any]] = {}
    """The default of `rope_parameters`. Its `rope_theta` is also the default of that key alone."""
    default_sections: ClassVar[tuple[int, ...]] = ()
    """Sections of rotary positions where config.json has none. They need not fit a head of default size."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: Rope = PLAIN_ROPE
    head: Head = LANGUAGE_MODEL
    mrope: Mrope | None = None
    towers: tuple[PartConfig, ...] = ()

    @property
    def canvas_length(self) -> int:
        """The number of tokens of a canvas, which a model writes at once; 0 of models that write token by token."""
        return 0

    @classmethod
    def of_type(cls, model_type: str | None) -> "type[DecoderConfig]":
        """Returns the class for a model type of the family, of which some have other defaults."""
        variants: Mapping[str, type[DecoderConfig]] = vars(cls).get("variants", {})
        return variants.get(model_type, cls) if isinstance(model_type, str) else cls

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """Returns the config that a parsed config.json describes.

        Raises:
            UnsupportedConfig: a key or a value is not implemented.
            ConfigError: a key is missing, or a value has a wrong type, is too small or too large, or contradicts
                another.
        """
        kind = cls.of_type(raw.get("model_type"))
        if kind is not cls:
            return kind.from_hf(raw)  # type: ignore[return-value]  # a subclass
        read = cls.in_our_keys(without_older_rope_keys(raw))
        hints = {cls._key(name): hint for name, hint in hints_of(cls).items() if name not in cls.derived}
        cls._unread(read)
        fields_of = {key: name for name, key in cls.hf_names.items()}
        values: Any = {fields_of.get(key, key): value for key, value in checked_values(read, hints).items()}
        if missing := [cls._key(each.name) for each in fields(cls) if _is_needed(each) and each.name not in values]:
            raise ConfigError(
                f"config.json does not have {', '.join(missing)}, for which no default is known",
                hint="add them to config.json, as the model was trained",
            )
        config = cls(**values)
        config = replace(config, **cls.read_ropes(read, config.max_position_embeddings))
        _refuse(list(config.disagreements(raw)))
        return config

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a parsed config.json with the keys that this class reads in place of other spellings: by its tables
        of keys, and in families where these do not suffice, by code.

        Raises:
            ConfigError: a key and one of its `synonyms` differ, or the rotary parameters are not an object.
        """
        check_rope_keys(raw)
        out = {key: value for key, value in raw.items() if key not in cls.left_out}
        for other, key in cls.synonyms.items():
            value = out.pop(other, None)
            if value is not None and out.setdefault(key, value) != value:
                both = (f"{name}={short(raw[name])}" for name in raw if name in (other, key))
                raise ConfigError(f"config.json: {', '.join(both)}")
        aliases = cls.known_aliases()
        given = {key: out[alias] for alias, key in aliases.items() if out.get(alias) is not None}
        out = {key: value for key, value in out.items() if key not in aliases} | given
        return {key: value for key, value in out.items() if key not in cls.nullable or value is not None}

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """Returns the fields for rotary positions that a parsed config.json `in_our_keys` describes. `context` is the
        value of `max_position_embeddings`."""
        return {"rope": Rope.from_hf(with_default_rope(raw, cls.default_rope), cls.model_type, context)}

    @classmethod
    def ignored_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keys of a parsed config.json, with their values, that neither this family nor the reference
        reads.

        Raises:
            UnsupportedConfig: the reference reads a key that this family does not, or a value is not implemented.
        """
        return cls._unread(cls.in_our_keys(raw))

    @classmethod
    def around_text(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the object of a parsed config.json that has the configs of the text model and of the parts beside it,
        in the keys of transformers."""
        return raw

    @classmethod
    def settled(cls, raw: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
        """Returns a parsed config.json with what the names of the tensors (or of the parameters) tell and it does
        not say."""
        return raw

    def with_files(self, read: Callable[[str], bytes | None]) -> Self:
        """Returns this config with what other files of a checkpoint say, of which `read` returns the contents, or None
        if there is none."""
        return self

    @classmethod
    def _unread(cls, read: Mapping[str, Any]) -> dict[str, Any]:
        """`ignored_keys` of a config.json `in_our_keys`."""
        return ignored_keys(read, cls.known_keys(), cls.implemented_values(), cls.model_type)

    @classmethod
    def implemented_values(cls) -> dict[str, tuple[Any, ...]]:
        """Returns the values of keys whose other values are refused."""
        known = cls.known_keys()
        supported = {key: values for key, values in SUPPORTED_VALUES.items() if key not in known}
        return {**supported, **cls.only}

    @classmethod
    def known_aliases(cls) -> dict[str, str]:
        """Returns the aliases of keys that this family reads."""
        known = cls.known_keys()
        others = aliases_of_reference(cls.model_type).items()
        return {alias: key for alias, key in others if key in known and alias not in known} | dict(cls.aliases)

    @classmethod
    def known_keys(cls) -> list[str]:
        """Returns the keys that this family reads."""
        return [cls._key(field.name) for field in fields(cls) if field.name not in cls.derived]

    @classmethod
    def _key(cls, field: str) -> str:
        return cls.hf_names.get(field, field)

    def __post_init__(self) -> None:
        faults = []
        for name, hint in hints_of(type(self)).items():
            value, least = getattr(self, name), self.least.get(name, 1)
            if int not in (hint, *get_args(hint)) or not isinstance(value, int):
                continue
            if value < least:
                faults.append(f"{self._key(name)}={value} is less than {least}")
            elif value > (most := self._most(name)):
                faults.append(f"{self._key(name)}={value} is more than {most}")
        if faults:
            raise ConfigError("config.json has values out of range", details=faults, hint="correct these values")
        _refuse(list(self.contradictions()))  # which divides by values checked above

    @classmethod
    def _most(cls, key: str) -> int:
        default = MOST_OF_A_NUMBER if key.startswith("num_") else MOST_OF_A_SIZE
        return cls.most.get(key, LARGEST_VALUES.get(key, default))

    def contradictions(self) -> Iterator[str]:
        """Yields a sentence for each contradiction between values."""
        yield from self.contradictions_of_heads()
        if self.rope.type == "dynamic" and self.rope_dim <= 2:
            yield f"rotary positions of the type 'dynamic' need more than {self.rope_dim} dimensions"
        for name in ("short_factor", "long_factor"):
            if (count := len(getattr(self.rope, name))) not in (0, self.rope_dim // 2):
                yield f"{name} of the rotary positions has {count} numbers for {self.rope_dim // 2} pairs of dimensions"
        sections = self.mrope.sections if self.mrope else self.default_sections
        if self.mrope and sections != self.default_sections and (fault := self.mrope.fault(self.rope_dim // 2)):
            yield f"{SECTIONS}={short(list(sections))} {fault}"
        if self.rms_norm_eps < 0:
            yield f"{self._key('rms_norm_eps')}={self.rms_norm_eps} is negative"

    def contradictions_of_heads(self) -> Iterator[str]:
        """Yields a sentence for each contradiction between the number of heads and their sizes."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads or self.num_attention_heads
        if heads % kv_heads:
            yield f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
        if self.head_dim is None and self.hidden_size % heads:
            yield f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={heads}, without a head_dim"
        elif self.rope_dim % 2:
            yield f"head_dim={self.rope_dim} is odd: rotary positions need pairs"
        elif self.rope_dim > self._most("head_dim"):
            yield f"hidden_size={self.hidden_size} gives a head dimension of more than {self._most('head_dim')}"

    def disagreements(self, raw: Mapping[str, Any]) -> Iterator[str]:
        """Yields a sentence for each key of the parsed config.json that is `left_out` and contradicts this config."""
        yield from ()

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each letter and word (`tpuconv.notation.letters`) that does not stand for layers."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads or self.num_attention_heads
        return {
            "D": self.hidden_size,
            "N": heads,
            "K": kv_heads,
            "G": heads // kv_heads,
            "H": self.head_dim or self.hidden_size // heads,
            "F": self.intermediate_size,
            "V": self.vocab_size,
            **self.head.sizes,
            **({"hidden_score": self.hidden_size} if self.head.is_mlp else {}),
        }

    @property
    def outer_sizes(self) -> dict[str, int]:
        """The sizes of the embeddings, and of what the last norm hands to the head."""
        return self.sizes

    @property
    def parts(self) -> Mapping[str, PartConfig]:
        """The configs of the parts of a multimodal model beside its text model; empty for the text model alone."""
        return {each.part: each for each in self.towers}

    @property
    def sees_images(self) -> str:
        """The layers in which tokens of an image see each other, within the window of the layer: "all", or those with a
        "sliding" one; "beyond" where they do in all layers and beyond windows, as all tokens of a prompt with images in
        some models; or none."""
        return "beyond" if any(each.sees_prompt for each in self.towers) else ""

    @property
    def routes_images(self) -> bool:
        """True if layers have experts for images beside the ones for text (`Step.of_images_BT`)."""
        return False

    @property
    def attends_to_images(self) -> bool:
        """True if some layers attend to images (`tpuconv.models.common.across`)."""
        return False

    @property
    def feature_factor(self) -> float:
        """The factor of features that stand in place of embeddings. Some models multiply both."""
        return 1.0

    @property
    def placeholder_as(self) -> int | None:
        """The token whose embeddings stand for placeholders until their features do; None for themselves."""
        return 0

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        """The numbers of the layers of each letter and word that stands for layers."""
        return {"L": range(self.num_hidden_layers)}

    @property
    def executed_layers(self) -> Sequence[int]:
        """The layers in the order in which they run. A looped one stands there once for each time that it runs."""
        return range(self.num_hidden_layers)

    @property
    def weight_sharing_layers(self) -> frozenset[int]:
        """The layers that use the weights of another one, or whose weights another one uses."""
        return frozenset()

    @property
    def layer_sizes(self) -> Mapping[int, Mapping[str, int]]:
        """For layers in which letters have other sizes than in `sizes`, these sizes."""
        return {}

    @property
    def module_sizes(self) -> Mapping[str, Mapping[str, int]]:
        """For modules outside of layers in which letters have other sizes than in `sizes`, by their names, these
        sizes."""
        return {}

    def of_layer(self, layer: int) -> Any:
        """Returns this config with the sizes of a layer."""
        return WithSizes(self, {**self.sizes, **self.layer_sizes.get(layer, {})}, self.layer_sets)

    @property
    def rope_dim(self) -> int:
        """The number of dimensions of a head that have rotary positions."""
        return self.sizes["H"]

    @property
    def rope_dims(self) -> tuple[int, ...]:
        """For each layer the number of dimensions of a head that have rotary positions."""
        return (self.rope_dim,) * self.num_hidden_layers

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """The rotary positions of each layer; None for a layer without."""
        return (self.rope,) * self.num_hidden_layers

    @property
    def layer_kinds(self) -> tuple[Any, ...]:
        """A kind for each layer: layers of one kind differ in windows and rotary positions alone."""
        sets = sets_of_layers(self).values()
        return tuple(tuple(layer in layers for layers in sets) for layer in range(self.num_hidden_layers))

    @property
    def period(self) -> int:
        """The number of layers after which kinds of layers repeat; see `find_period`."""
        return find_period(self.layer_kinds)

    @property
    def stacks(self) -> LayerStacks:
        """The arrays of layers that are scanned."""
        return LayerStacks(self.num_hidden_layers, self.period)

    @property
    def unscannable(self) -> str:
        """Why `scan_layers` is impossible; empty if it is possible."""
        if self.layer_sizes:
            return "its layers differ in their sizes"
        return "" if self.period else "its layers are of several kinds, which do not repeat with a period"

    @property
    def inseparable(self) -> str:
        """Why no layer can run by itself on hidden states; empty if each can."""
        return ""

    @property
    def unrounded_cache(self) -> str:
        """Why the cache of keys and values is always in the model's dtype; empty if it may be int8 or FP8."""
        return ""

    def check_rounded_cache(self) -> None:
        """Checks that the cache may be int8 or FP8.

        Raises:
            UsageError: it may not.
        """
        if self.unrounded_cache:
            raise UsageError(
                f"the cache of {self.model_type} is always in the model's dtype: {self.unrounded_cache}",
                hint="leave out `cache_dtype=`",
            )

    @property
    def has_lm_head(self) -> bool:
        """True if there is a matrix for the logits. If not, the embedding is used (tied embeddings)."""
        return not self.tie_word_embeddings and not self.head.kind

    @property
    def has_head_bias(self) -> bool:
        """True if the logits have a bias."""
        return False

    @property
    def position_limit(self) -> int | None:
        """The number of positions that the model can tell apart; None where there is no limit."""
        return None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer: the number of tokens that a token sees, itself included; None for all."""
        return (None,) * self.num_hidden_layers

    @property
    def horizons(self) -> frozenset[int]:
        """The numbers of tokens up to which a text does not show a part of the computation, such as a sliding window.
        Families with chunks, with selected tokens or with other factors at later positions add theirs."""
        windows = {window for window in self.windows if window is not None}
        ropes = {rope for rope in self.ropes if rope is not None and rope.depends_on_length}
        return frozenset(windows | {rope.original_max_position_embeddings for rope in ropes})


def _is_needed(field: "Field[Any]") -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _refuse(faults: list[str]) -> None:
    if faults:
        raise ConfigError("config.json contradicts itself", details=faults)


def context_of(config: DecoderConfig) -> int:
    """Returns the context of a model in tokens: `max_position_embeddings` of config.json, or the context that YaRN
    (arXiv:2309.00071) extends it to, if that is larger."""
    rope = config.rope
    extended = int(rope.factor * rope.original_max_position_embeddings) if rope.type == "yarn" else 0
    return max(config.max_position_embeddings, extended)
