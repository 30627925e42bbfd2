"""Lara 4 Mini: config and mapping table."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import (
    ATTENTION,
    HEAD_NORMS,
    O_BIAS,
    PRE_NORMS,
    QKV_BIAS,
    SHARED,
    STACKED_EXPERTS,
    decoder_table,
    when,
)
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.common.windows import windows_by_kind
from tpuconv.models.qwen3_next.family import LINEAR_ROWS, HybridConfig
from tpuconv.models.qwen3_next.qwen3_5 import FLAT_INPUTS
from tpuconv.models.registry import family
from tpuconv.notation.table import Map, under

PERIOD = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")
"""The `layer_types` of a config.json without."""


@family_config
class Config(ChosenExperts, HybridConfig):
    """The keys of config.json. All layers have experts. Layers that see all tokens have no rotary positions.
    `intermediate_size` has no effect, since no layer is dense."""

    model_type: ClassVar[str] = "lara_mini"
    other_kinds: ClassVar[tuple[str, ...]] = ("full_attention", "sliding_attention")
    derived: ClassVar[frozenset[str]] = HybridConfig.derived | {"full_attention_interval"}

    intermediate_size: int = 1
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    partial_rotary_factor: float = 1.0
    attention_bias: bool
    sliding_window: int
    full_attention_interval: int = 1

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.layer_types or tuple(PERIOD[i % len(PERIOD)] for i in range(self.num_hidden_layers))

    @property
    def has_shared_experts(self) -> bool:
        """True: there is an expert that every token uses."""
        return True

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        states = self.layers_of(self.state_kind)
        others = tuple(layer for layer in range(self.num_hidden_layers) if layer not in states)
        return {"L": range(self.num_hidden_layers), "attention_layers": others, "state_layers": states}

    @property
    def windows(self) -> tuple[int | None, ...]:
        return windows_by_kind(self.kinds, self.sliding_window)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return tuple(self.rope if kind == "sliding_attention" else None for kind in self.kinds)


KEY_AXES, VALUE_AXES, GATE_AXES = "(groups key_dim)", "(groups per_group value_dim)", "(groups per_group)"

JOINED_INPUTS = (
    Map(
        "in_proj.weight",
        tuple(f"{name}.kernel" for name in ("q", "k", "v", "z", "b", "a")),
        f"({KEY_AXES} + {KEY_AXES} + {VALUE_AXES} + {VALUE_AXES} + {GATE_AXES} + {GATE_AXES}) D "
        "-> D groups key_dim, D groups key_dim, D groups per_group value_dim, D groups per_group value_dim, "
        "D groups per_group, D groups per_group",
    ),
)
"""The matrices that make the inputs of linear attention, in one tensor."""

TABLE = decoder_table(
    *PRE_NORMS,
    *under(
        "mlp",
        "moe",
        Map("gate.weight", "router.kernel", "E D -> D E"),
        *STACKED_EXPERTS,
        *under("shared_expert", "shared", *SHARED),
    ),
    others=(
        *under(
            "model.layers.{attention_layers}",
            "layers.{attention_layers}",
            *ATTENTION,
            *when("attention_bias", *QKV_BIAS, O_BIAS),
            *HEAD_NORMS,
        ),
        *under(
            "model.layers.{state_layers}.linear_attn",
            "layers.{state_layers}.attn",
            *JOINED_INPUTS,
            *(replace(row, hf="out_norm.weight") if row.hf == "norm.weight" else row for row in LINEAR_ROWS),
        ),
    ),
)

FAMILY = family(
    Config,
    TABLE,
    "Lara 4 Mini",
    "LaraMiniForCausalLM",
    forms=({"joined": JOINED_INPUTS, "apart": FLAT_INPUTS},),
)
