"""Configs of models in which some layers have sliding windows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import ROPE_KEYS, Rope, rope_of_layers


@dataclass(frozen=True)
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
        if len(self.layer_types) != self.num_hidden_layers:
            yield f"layer_types has {len(self.layer_types)} entries for num_hidden_layers={self.num_hidden_layers}"
        if unknown := set(self.layer_types) - {"full_attention", "sliding_attention"}:
            yield f"layer_types has the unknown {', '.join(map(repr, sorted(unknown)))}"
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
            return tuple(self._window if kind == "sliding_attention" else None for kind in self.layer_types)
        return tuple(self._window if i >= self.max_window_layers else None for i in range(self.num_hidden_layers))


@dataclass(frozen=True)
class PatternConfig(DecoderConfig):
    """A decoder with sliding windows in the layers with "sliding_attention" in `layer_types` or, if that is absent, in
    all but every `full_every`-th layer."""

    full_every: ClassVar[int]

    sliding_window: int | None
    layer_types: tuple[str, ...] | None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if len(self.kinds) != self.num_hidden_layers:
            yield f"layer_types has {len(self.kinds)} entries for num_hidden_layers={self.num_hidden_layers}"
        if unknown := set(self.kinds) - {"full_attention", "sliding_attention"}:
            yield f"layer_types has the unknown {', '.join(map(repr, sorted(unknown)))}"
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
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in self.kinds)


@dataclass(frozen=True)
class TwoRopesConfig(PatternConfig):
    """A decoder whose layers with a sliding window have rotary positions of their own, `local_rope`. config.json has
    `rope_parameters` for each of the `layer_types`, and the defaults of the fields are those of a file without."""

    derived: ClassVar[frozenset[str]] = PatternConfig.derived | {"local_rope"}

    local_rope: Rope

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        for key in ROPE_KEYS[:2]:
            if raw.get(key) is not None:
                raise UnsupportedConfig(
                    f"{key}={short(raw[key], 300)} is not implemented for {cls.model_type}",
                    hint="rope_parameters has an object for each of the layer_types",
                )
        return {
            field: Rope.from_hf(rope_of_layers(raw, kind, getattr(cls, field).theta), cls.model_type, context)
            for kind, field in ROPE_FIELDS.items()
        }

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return tuple(self.local_rope if kind == "sliding_attention" else self.rope for kind in self.kinds)


ROPE_FIELDS = {"full_attention": "rope", "sliding_attention": "local_rope"}
PART_FIELDS = {"full_attention": "full_rotary", "sliding_attention": "local_rotary"}
"""Fields by type of layer."""


@dataclass(frozen=True)
class TwoPartialRopesConfig(TwoRopesConfig):
    """A decoder whose layers with the window have rotary positions of their own, in another part of each head.

    Attributes:
        rotary_part: the part of a head with rotary positions, where config.json does not say it.
        local_rope: the rotary positions of layers with the window; `rope` has those of the others.
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
            own = rope_of_layers(raw, kind, getattr(cls, ROPE_FIELDS[kind]).theta)["rope_parameters"]
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
        """As `DecoderConfig.rope_dims`. An odd number is that of the frequencies' exponents, and one more dimension
        has rotary positions."""
        H = self.head_dim or self.hidden_size // self.num_attention_heads
        return tuple(int(H * getattr(self, PART_FIELDS[kind])) for kind in self.kinds)
