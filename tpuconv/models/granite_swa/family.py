"""Granite with sliding windows: config and mapping table."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from tpuconv.mapping.table import Map
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.windows import PatternConfig
from tpuconv.models.granite import family as granite
from tpuconv.models.registry import family


@family_config
class GraniteWindows(granite.Config, PatternConfig):
    """Granite's keys and the keys of its windows. Without `layer_types` the first layer of every four sees all tokens.
    `layer_rope_theta` has the base of each layer's rotary positions, 0 for a layer without."""

    sliding_window: int | None = 128
    layer_types: tuple[str, ...] | None = None
    layer_rope_theta: tuple[float, ...] | None = None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        thetas = self.layer_rope_theta
        if thetas is not None and len(thetas) != self.num_hidden_layers:
            yield f"layer_rope_theta has {len(thetas)} entries for num_hidden_layers={self.num_hidden_layers}"
        if wrong := [theta for theta in thetas or () if theta and theta <= 1]:
            yield f"layer_rope_theta has {wrong[0]}, of which rotary positions cannot be made"

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        return tuple("sliding_attention" if i % 4 else "full_attention" for i in range(self.num_hidden_layers))

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        if self.layer_rope_theta is None:
            return super().ropes
        return tuple(replace(self.rope, theta=float(theta)) if theta else None for theta in self.layer_rope_theta)


@family_config
class Config(GraniteWindows):
    """The keys of config.json."""

    model_type: ClassVar[str] = "granite_swa"


SINKS = Map("model.layers.{L}.self_attn.sinks", "layers.{L}.attn.sinks", "N")

TABLE = granite.TABLE.with_rows((*granite.TABLE.rows, SINKS))

FAMILY = family(Config, TABLE, "Granite with sliding windows, dense", "GraniteSWAForCausalLM")
