"""SmolLM3: config and mapping table."""

from collections.abc import Iterator
from typing import ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import ATTENTION, MLP, MLP_BIAS, O_BIAS, PRE_NORMS, QKV_BIAS, decoder_table, when
from tpuconv.models.common.windows import PatternConfig
from tpuconv.models.registry import family


@family_config
class Config(PatternConfig):
    """The keys of config.json. `no_rope_layers` has 1 for a layer WITH rotary positions; without it every
    `no_rope_layer_interval`-th layer has none. Without `layer_types` those have the window, if it is used."""

    model_type: ClassVar[str] = "smollm3"

    head_dim: int | None = None
    attention_bias: bool
    mlp_bias: bool
    use_sliding_window: bool
    no_rope_layers: tuple[int, ...] | None
    no_rope_layer_interval: int

    def contradictions(self) -> Iterator[str]:
        if len(self.with_rope) != self.num_hidden_layers:
            yield f"no_rope_layers has {len(self.with_rope)} entries for num_hidden_layers={self.num_hidden_layers}"
            return
        yield from super().contradictions()
        if "sliding_attention" in self.kinds and not self.use_sliding_window:
            yield "layers have 'sliding_attention' with use_sliding_window=False"

    @property
    def with_rope(self) -> tuple[bool, ...]:
        """For each layer, True if it has rotary positions."""
        if self.no_rope_layers is not None:
            return tuple(map(bool, self.no_rope_layers))
        return tuple(i % self.no_rope_layer_interval != 0 for i in range(1, self.num_hidden_layers + 1))

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        has_window = self.use_sliding_window and self.sliding_window is not None
        return tuple("sliding_attention" if has_window and not rope else "full_attention" for rope in self.with_rope)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return tuple(self.rope if rope else None for rope in self.with_rope)


TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *under("mlp", "mlp", *MLP),
    *under("mlp", "mlp", *when("mlp_bias", *MLP_BIAS)),
)

FAMILY = family(Config, TABLE, "SmolLM3", "SmolLM3ForCausalLM")
