"""Cohere 2, mixture of experts: config and mapping table."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import (
    ATTENTION,
    EXPERT_MLPS,
    MLP,
    O_BIAS,
    QKV_BIAS,
    SHARED_EXPERT_ROWS,
    decoder_table,
    when,
)
from tpuconv.models.common.sparse import ChosenExperts, MixedMLPs
from tpuconv.models.common.windows import PatternConfig
from tpuconv.models.registry import family
from tpuconv.notation.table import Map, under


@family_config
class Config(ChosenExperts, MixedMLPs, PatternConfig):
    """The keys of config.json. The first `first_k_dense_replace` layers are dense, with their own pattern of windows.
    `intermediate_size` is the width of one expert. If there is an `rms_norm_eps`, norms are RMS norms."""

    model_type: ClassVar[str] = "cohere2_moe"
    only: ClassVar = {
        "expert_selection_fn": ("softmax", "sigmoid"),
        "shared_expert_combination_strategy": ("average", "sum"),
    }
    least: ClassVar = {"num_shared_experts": 0, "first_k_dense_replace": 0}
    derived: ClassVar[frozenset[str]] = PatternConfig.derived | {"has_rms_norms"}
    nullable: ClassVar[frozenset[str]] = frozenset({"rms_norm_eps"})

    prefix_dense_intermediate_size: int | None
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    shared_expert_combination_strategy: str
    expert_selection_fn: str
    norm_topk_prob: bool
    first_k_dense_replace: int = 0
    mlp_layer_types: tuple[str, ...] | None
    layer_norm_eps: float
    rms_norm_eps: float = 1e-5
    has_rms_norms: bool = False
    attention_bias: bool
    logit_scale: float
    sliding_window_pattern: int
    prefix_dense_sliding_window_pattern: int

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        config = super().from_hf(raw)
        if raw.get("rms_norm_eps") is not None:
            return replace(config, has_rms_norms=True)
        return replace(config, rms_norm_eps=config.layer_norm_eps)

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        first = min(self.first_k_dense_replace, self.num_hidden_layers)
        parts = (
            (first, self.prefix_dense_sliding_window_pattern),
            (self.num_hidden_layers - first, self.sliding_window_pattern),
        )
        ends = (i % pattern == 0 for count, pattern in parts for i in range(1, count + 1))
        return tuple("full_attention" if is_end else "sliding_attention" for is_end in ends)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """Layers with the window have rotary positions, and dense layers if all of them see all tokens."""
        forced = self.prefix_dense_sliding_window_pattern == 1
        return tuple(
            self.rope if kind == "sliding_attention" or (forced and mlp == "dense") else None
            for kind, mlp in zip(self.kinds, self.mlp_kinds, strict=True)
        )

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "F": self.prefix_dense_intermediate_size or self.intermediate_size,
            "W": self.intermediate_size * self.num_shared_experts,
        }

    @property
    def has_shared_experts(self) -> bool:
        """True if there are experts that every token uses, which are stored as one MLP."""
        return bool(self.num_shared_experts)


CHOSEN_EXPERTS = (Map("gate.weight", "router.kernel", "E D -> D E"), *EXPERT_MLPS)

TABLE = decoder_table(
    Map("input_layernorm.weight", "norm.scale", "D"),
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    others=(
        *when("all_experts", *under("model.layers.{L}.mlp", "layers.{L}.moe", *CHOSEN_EXPERTS)),
        *when(
            "all_experts and has_shared_experts", *under("model.layers.{L}.mlp", "layers.{L}.moe", *SHARED_EXPERT_ROWS)
        ),
        *when("some_dense", *under("model.layers.{J}.mlp", "layers.{J}.moe", *CHOSEN_EXPERTS)),
        *when(
            "some_dense and has_shared_experts", *under("model.layers.{J}.mlp", "layers.{J}.moe", *SHARED_EXPERT_ROWS)
        ),
        *under("model.layers.{I}.mlp", "layers.{I}.mlp", *MLP),
    ),
)

FAMILY = family(Config, TABLE, "Command A+", "Cohere2MoeForCausalLM")
