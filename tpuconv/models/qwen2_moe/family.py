"""Qwen1.5 and Qwen2, mixture of experts: config and mapping table."""

from collections.abc import Iterator
from typing import ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.kinds import faults_of_kinds
from tpuconv.models.common.rows import ATTENTION, PRE_NORMS, QKV_BIAS, SHARED, decoder_table, mlp_rows, when
from tpuconv.models.common.windows import WINDOW_KINDS
from tpuconv.models.qwen3_moe import family as qwen3_moe
from tpuconv.models.registry import family


@family_config
class Config(qwen3_moe.Config):
    """The keys of config.json. Without `layer_types` every other layer below `max_window_layers` has the window, other
    than in the dense Qwen2."""

    model_type: ClassVar[str] = "qwen2_moe"
    only: ClassVar = {"attention_bias": (False,)}
    least: ClassVar = {"max_window_layers": 0, "sliding_window": 0}

    shared_expert_intermediate_size: int
    layer_types: tuple[str, ...] | None
    qkv_bias: bool

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        yield from faults_of_kinds("layer_types", self.kinds, self.num_hidden_layers, WINDOW_KINDS)
        if "sliding_attention" in self.kinds and not (self.use_sliding_window and self.sliding_window):
            yield (
                f"layers have 'sliding_attention' with use_sliding_window={self.use_sliding_window} and "
                f"sliding_window={self.sliding_window}"
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The `layer_types` of all layers."""
        if self.layer_types is not None:
            return self.layer_types
        below = self.max_window_layers or 0 if self.use_sliding_window else 0
        layers = range(self.num_hidden_layers)
        return tuple("sliding_attention" if i % 2 == 0 and i < below else "full_attention" for i in layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in self.kinds)


TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION,
    *when("qkv_bias", *QKV_BIAS),
    others=mlp_rows(
        *qwen3_moe.MOE_ROWS,
        *under("shared_expert", "shared", *SHARED),
        Map("shared_expert_gate.weight", "router_shared.kernel", "1 D -> D"),
    ),
)

FAMILY = family(Config, TABLE, "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B", "Qwen2MoeForCausalLM")
