"""Configs of models in which a part of each head has rotary positions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import PARAMETER_KEYS


@dataclass(frozen=True, kw_only=True)
class PartialRopeConfig(DecoderConfig):
    """A decoder in which the first `partial_rotary_factor` of each head's dimensions have rotary positions."""

    nullable: ClassVar[frozenset[str]] = frozenset({"partial_rotary_factor"})

    partial_rotary_factor: float

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """As `DecoderConfig.in_our_keys`. The factor may be inside the rotary parameters too, where it wins as in
        transformers."""
        name, out = "partial_rotary_factor", super().in_our_keys(raw)
        for key in PARAMETER_KEYS:
            if isinstance(inside := out.get(key), Mapping) and inside.get(name) is not None:
                out[name] = inside[name]
                out[key] = {k: value for k, value in inside.items() if k != name}
        return out

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
