"""Configs of models in which a part of each head has rotary positions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from tpuconv.models.common.config import DecoderConfig


@dataclass(frozen=True)
class PartialRopeConfig(DecoderConfig):
    """A decoder in which the first `partial_rotary_factor` of each head's dimensions have rotary positions."""

    partial_rotary_factor: float

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """As `DecoderConfig.from_hf`. The factor may be inside the rotary parameters too, where it wins as in
        transformers; null is as good as absent."""
        name, raw = "partial_rotary_factor", dict(raw)
        for key in ("rope_scaling", "rope_parameters"):
            if isinstance(inside := raw.get(key), Mapping) and inside.get(name) is not None:
                raw[name] = inside[name]
                raw[key] = {k: value for k, value in inside.items() if k != name}
        if raw.get(name) is None:
            raw.pop(name, None)
        return super().from_hf(raw)

    def contradictions(self) -> Iterator[str]:
        if not 0 < self.partial_rotary_factor <= 1:
            yield f"partial_rotary_factor={self.partial_rotary_factor} is not a part of a head"
        elif self.rope_dim < 2:
            yield f"partial_rotary_factor={self.partial_rotary_factor} leaves no pair of dimensions"
        else:
            yield from super().contradictions()

    @property
    def rope_dim(self) -> int:
        return int(super().rope_dim * self.partial_rotary_factor)
