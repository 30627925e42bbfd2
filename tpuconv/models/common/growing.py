"""Queries that grow with their position."""

from collections.abc import Mapping
from typing import Any

from tpuconv.errors import ConfigError
from tpuconv.jsonfile import short
from tpuconv.models.common.rope import LARGEST_ROPE_VALUE, PARAMETER_KEYS, Rope

BETA = "llama_4_scaling_beta"


class GrowingQueries:
    """Reads `llama_4_scaling_beta`, which is one of `rope_parameters`: how much queries grow with their position. A
    Config derives from this class and from `DecoderConfig`, in this order."""

    rope: Rope
    llama_4_scaling_beta: float

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        raw = dict(raw)
        given = [key for key in PARAMETER_KEYS if raw.get(key)]
        beta: Any = None if given else cls.llama_4_scaling_beta
        for key in given:
            inside = dict(raw[key])
            beta = inside.pop(BETA, beta)
            inside.pop("max_position_embeddings", None)  # without effect
            raw[key] = inside
        if type(beta) not in (int, float) or not 0 <= beta < LARGEST_ROPE_VALUE:
            raise ConfigError(f"config.json: {BETA}={short(beta)} of the rotary positions is not a number from 0")
        ropes: dict[str, Any] = super().read_ropes(raw, context)  # type: ignore[misc]
        if ropes["rope"].type != "yarn":
            raise ConfigError(f"config.json: {BETA} needs an original context, which only rotary positions 'yarn' have")
        return {**ropes, BETA: float(beta)}

    @property
    def horizons(self) -> frozenset[int]:
        """As `DecoderConfig.horizons`: queries grow after the original context."""
        original = {self.rope.original_max_position_embeddings} if self.llama_4_scaling_beta else set()
        found: frozenset[int] = super().horizons | original  # type: ignore[misc]
        return found
