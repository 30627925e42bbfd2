"""Configs of models in which some layers have sliding windows."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.errors import ConfigError
from tpuconv.jsonfile import short
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.kinds import faults_of_kinds
from tpuconv.models.common.rope import ROPE_KEYS, Rope, refuse_ropes, rope_of_layers

WINDOW_KINDS = ("full_attention", "sliding_attention")
"""The `layer_types` of layers that see all tokens, and of those with the window."""
ROPES_BY_KIND = {"full_attention": "rope", "sliding_attention": "local_rope"}
ROPES_OF_WINDOWS = {"sliding_attention": "rope"}
"""Fields with the rotary positions by type of layer: where both types have their own, and where layers that see all
tokens have none."""
PART_FIELDS = {"full_attention": "full_rotary", "sliding_attention": "local_rotary"}
"""Fields with the part of each head that has them."""


class OneWindow:
    """A decoder with one sliding window in all layers, or none. A family's Config derives from this class and from
    another, in this order."""

    num_hidden_layers: int
    sliding_window: int | None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """See `DecoderConfig.windows`."""
        return (self.sliding_window,) * self.num_hidden_layers


def windows_by_kind(kinds: Iterable[str], window: int | None) -> tuple[int | None, ...]:
    """Returns the window of each layer, which those with "sliding_attention" have."""
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(DecoderConfig):
    """A decoder with sliding windows in some layers: those with "sliding_attention" in `layer_types`, or if that is
    absent, the layers from `max_window_layers` on."""

    least: ClassVar[Mapping[str, int]] = {"max_window_layers": 0}

    use_sliding_window: bool
    sliding_window: int | None
    max_window_layers: int
    layer_types: tuple[str, ...] | None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.layer_types is None:
            return
        yield from faults_of_kinds("layer_types", self.layer_types, self.num_hidden_layers, WINDOW_KINDS)
        if "sliding_attention" in self.layer_types and self._window is None:
            yield (
                f"layer_types has 'sliding_attention' with use_sliding_window={self.use_sliding_window} and "
                f"sliding_window={self.sliding_window}"
            )

    @property
    def _window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    @property
    def windows(self) -> tuple[int | None, ...]:
        if self.layer_types is not None:
            return windows_by_kind(self.layer_types, self._window)
        return tuple(self._window if i >= self.max_window_layers else None for i in range(self.num_hidden_layers))


@dataclass(frozen=True, kw_only=True)
class PatternConfig(DecoderConfig):
    """A decoder with sliding windows in the layers with "sliding_attention" in `layer_types` or, if that is absent, in
    all but every `full_every`-th layer.

    Class attribute: `rope_fields` has the field with the rotary positions of each type of layer that has some.
    """

    full_every: ClassVar[int]
    rope_fields: ClassVar[Mapping[str, str]] = dict.fromkeys(WINDOW_KINDS, "rope")

    sliding_window: int | None
    layer_types: tuple[str, ...] | None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        yield from faults_of_kinds("layer_types", self.kinds, self.num_hidden_layers, WINDOW_KINDS)
        if "sliding_attention" in self.kinds and self.sliding_window is None:
            yield "layers have 'sliding_attention' with sliding_window=None"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The `layer_types` of all layers."""
        if self.layer_types is not None:
            return self.layer_types
        layers = range(1, self.num_hidden_layers + 1)
        return tuple("sliding_attention" if i % self.full_every else "full_attention" for i in layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return windows_by_kind(self.kinds, self.sliding_window)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        found = {kind: getattr(self, field) for kind, field in self.rope_fields.items()}
        return tuple(found.get(kind) for kind in self.kinds)


@dataclass(frozen=True, kw_only=True)
class TwoRopesConfig(PatternConfig):
    """A decoder whose layers with a sliding window have rotary positions of their own, `local_rope`. config.json has
    `rope_parameters` for each of the `layer_types`, and the defaults of the fields apply to a file without it."""

    derived: ClassVar[frozenset[str]] = PatternConfig.derived | {"local_rope"}
    rope_fields: ClassVar[Mapping[str, str]] = ROPES_BY_KIND

    local_rope: Rope

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        return read_two_ropes(cls, raw, context)


def refuse_flat_ropes(config: type[DecoderConfig], raw: Mapping[str, Any]) -> None:
    """Checks that `rope_parameters` alone say rotary positions, for each type of layer.

    Raises:
        UnsupportedConfig: there are others beside it.
    """
    refuse_ropes(config.model_type, raw, ROPE_KEYS[:2], "rope_parameters has an object for each of the layer_types")


def read_two_ropes(config: type[DecoderConfig], raw: Mapping[str, Any], context: int) -> dict[str, Any]:
    """Returns the fields of `ROPES_BY_KIND`: see `DecoderConfig.read_ropes`.

    Raises:
        UnsupportedConfig: there are rotary positions outside of `rope_parameters`.
    """
    refuse_flat_ropes(config, raw)
    return {
        field: Rope.from_hf(rope_of_layers(raw, kind, getattr(config, field).theta), config.model_type, context)
        for kind, field in ROPES_BY_KIND.items()
    }


def read_older_ropes(config: type[DecoderConfig], raw: Mapping[str, Any], context: int) -> dict[str, Any]:
    """Returns the fields of `ROPES_BY_KIND`, of older files too, in which `rope_theta` and `rope_scaling` apply to
    layers that see all tokens, and `rope_local_base_freq` to the other layers: see `DecoderConfig.read_ropes`."""
    older = {
        "full_attention": (raw.get("rope_theta"), raw.get("rope_scaling")),
        "sliding_attention": (raw.get("rope_local_base_freq"), None),
    }
    out = {}
    for kind, (theta, scaling) in older.items():
        field = ROPES_BY_KIND[kind]
        own = rope_of_layers(raw, kind, getattr(config, field).theta if theta is None else theta, scaling)
        out[field] = Rope.from_hf(own, config.model_type, context)
    return out


@dataclass(frozen=True, kw_only=True)
class TwoPartialRopesConfig(TwoRopesConfig):
    """A decoder whose layers with the window have rotary positions of their own, in another part of each head.

    Attributes:
        rotary_part: the part of a head with rotary positions, where config.json does not say it.
        local_rope: the rotary positions of layers with the window; `rope` has the positions of the other layers.
        full_rotary, local_rotary: the parts of a head of layers that see all tokens, and of those with the window.
    """

    derived: ClassVar[frozenset[str]] = TwoRopesConfig.derived | set(PART_FIELDS.values())
    rotary_part: ClassVar[float]

    full_rotary: float
    local_rotary: float

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """As `DecoderConfig.read_ropes`, for each type of layer."""
        nested, parts = {}, {}
        for kind, field in PART_FIELDS.items():
            own = rope_of_layers(raw, kind, getattr(cls, ROPES_BY_KIND[kind]).theta)["rope_parameters"]
            part = own.pop("partial_rotary_factor", cls.rotary_part)
            if type(part) not in (int, float) or not 0 < part <= 1:
                raise ConfigError(f"config.json: partial_rotary_factor={short(part)} is not a part of a head")
            nested[kind], parts[field] = own, float(part)
        return super().read_ropes({**raw, "rope_parameters": nested}, context) | parts

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if any(dim < 2 for dim in self.rope_dims):
            yield "partial_rotary_factor leaves no pair of dimensions"

    @property
    def rope_dims(self) -> tuple[int, ...]:
        """As `DecoderConfig.rope_dims`. An odd number counts the frequencies' exponents, and one more dimension has
        rotary positions."""
        H = self.head_dim or self.hidden_size // self.num_attention_heads
        parts = {kind: getattr(self, field) for kind, field in PART_FIELDS.items()}
        return tuple(int(H * parts.get(kind, 1.0)) for kind in self.kinds)  # unknown ones are contradictions
