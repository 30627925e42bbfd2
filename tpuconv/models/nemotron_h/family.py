"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: config and mapping table."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.hybrid import NO_LIMIT, OLDER_KINDS, MambaConfig
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import (
    ATTENTION,
    FURTHER_TOKENS,
    MAMBA_ROWS,
    MTP_INPUTS,
    PLAIN_MLP,
    PLAIN_MLP_BIAS,
    when,
)
from tpuconv.models.common.sparse import GroupedExperts
from tpuconv.models.registry import family
from tpuconv.notation.table import Map, MappingTable, under

PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""The letters of `hybrid_override_pattern`."""

PATTERN_KEYS = {
    "hybrid_override_pattern": "layers_block_type",
    "mtp_hybrid_override_pattern": "mtp_layers_block_type",
}
"""Keys of releases with such letters, and those with the kinds of layers that transformers has for them."""

MTP_KINDS = ("full_attention", "moe")
"""The layers for multi-token prediction, in all releases that have some."""

UNREAD_KEYS = {
    *("rms_norm_eps", "attention_bias", "mamba_proj_bias", "residual_in_fp32", "sliding_window"),
}
"""Keys of releases that the model of the reference does not read, though its config has them."""


@family_config
class Config(GroupedExperts, MambaConfig):
    """The keys of config.json. Each layer is one part: Mamba-2, attention, an MLP or experts. `num_hidden_layers` and
    `n_shared_experts` have no effect."""

    model_type: ClassVar[str] = "nemotron_h"
    other_kinds: ClassVar[tuple[str, ...]] = ("full_attention", "mlp", "moe")
    only: ClassVar = {
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu",),
    }
    least: ClassVar[Mapping[str, int]] = {"n_shared_experts": 0, "num_nextn_predict_layers": 0}
    hf_names: ClassVar[Mapping[str, str]] = {
        "rms_norm_eps": "layer_norm_epsilon",
        "layer_types": "layers_block_type",
        "mamba_n_heads": "mamba_num_heads",
        "mamba_n_groups": "n_groups",
        "mamba_d_state": "ssm_state_size",
        "mamba_d_head": "mamba_head_dim",
        "mamba_d_conv": "conv_kernel",
        "mamba_expand": "expand",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_proj_bias": "use_bias",
    }
    aliases: ClassVar = {
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_expand": "expand",
        "mamba_dt_min": "time_step_min",
        "mamba_dt_limit": "time_step_limit",
        "mamba_conv_bias": "use_conv_bias",
    }
    left_out: ClassVar[frozenset[str]] = frozenset({*PATTERN_KEYS, *UNREAD_KEYS})

    num_hidden_layers: int = 4
    head_dim: int
    mlp_bias: bool
    time_step_limit: tuple[float, ...] = (0.0, NO_LIMIT)
    time_step_min: float
    n_routed_experts: int
    n_shared_experts: int
    moe_intermediate_size: int
    moe_shared_expert_intermediate_size: int
    moe_latent_size: int | None
    num_experts_per_tok: int
    routed_scaling_factor: float
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    num_nextn_predict_layers: int
    mtp_layers_block_type: tuple[str, ...] | None = None

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """As `MambaConfig.in_our_keys`. The kinds of layers come from `layers_block_type`, or else of
        `hybrid_override_pattern`."""
        out = super().in_our_keys(raw)
        for key, kinds_key in PATTERN_KEYS.items():
            pattern = raw.get(key)
            if out.get(kinds_key) is None and isinstance(pattern, str):
                out[kinds_key] = [PATTERN.get(letter, letter) for letter in pattern]
        if isinstance(kinds := out.get("layers_block_type"), list):
            out["num_hidden_layers"] = len(kinds)
        return out

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.layer_types or ("linear_attention", "moe", "full_attention", "mlp")

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return (None,) * self.num_hidden_layers

    @property
    def mamba_width(self) -> int:
        return self.mamba_n_heads * self.mamba_head

    @property
    def mamba_head(self) -> int:
        return self.mamba_d_head or 64

    @property
    def step_limits(self) -> tuple[float, float]:
        return self.time_step_min, NO_LIMIT

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "E": self.n_routed_experts,
            "M": self.moe_intermediate_size,
            "W": self.moe_shared_expert_intermediate_size,
            "expert_dim": self.moe_latent_size or self.hidden_size,
            "A": self.hidden_size,
        }

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        return {
            **super().layer_sets,
            "I": self.layers_of("mlp"),
            "J": self.layers_of("moe"),
            "U": tuple(range(len(MTP_KINDS))) if self.has_mtp else (),
        }

    @property
    def has_lm_head(self) -> bool:
        """The reference has a matrix of its own also where tie_word_embeddings is true."""
        return not self.head.kind

    @property
    def has_latent(self) -> bool:
        """True if experts read a vector that is narrower than the model."""
        return self.moe_latent_size is not None

    @property
    def has_mtp(self) -> bool:
        """True if there are layers for multi-token prediction, of the known kinds."""
        kinds = [OLDER_KINDS.get(kind, kind) for kind in self.mtp_layers_block_type or MTP_KINDS]
        return self.num_nextn_predict_layers == 1 and tuple(kinds) == MTP_KINDS

    @property
    def is_full_width(self) -> bool:
        """True if experts read hidden states."""
        return not self.has_latent


def plain_experts(D: str) -> tuple[Map, ...]:
    """Returns the rows of experts without gates that read vectors of the width `D`."""
    return (
        Map("experts.{E}.up_proj.weight", "up.kernel", f"M {D} -> E {D} M"),
        Map("experts.{E}.down_proj.weight", "down.kernel", f"{D} M -> E M {D}"),
    )


NEMOTRON_ATTENTION_ROWS = tuple(replace(row, hf=str(row.hf).removeprefix("self_attn.")) for row in ATTENTION)

NEMOTRON_EXPERT_ROWS = (
    Map("gate.weight", "router.kernel", "E D -> D E"),
    Map("gate.e_score_correction_bias", "router.correction", "E", buffer=True),
    *when("is_full_width", *plain_experts("D")),
    *when(
        "has_latent",
        *plain_experts("expert_dim"),
        Map("fc1_latent_proj.weight", "to_latent.kernel", "expert_dim D -> D expert_dim"),
        Map("fc2_latent_proj.weight", "from_latent.kernel", "D expert_dim -> expert_dim D"),
    ),
    *when(
        "has_latent and mlp_bias",
        Map("fc1_latent_proj.bias", "to_latent.bias", "expert_dim"),
        Map("fc2_latent_proj.bias", "from_latent.bias", "D"),
    ),
    Map("shared_experts.up_proj.weight", "shared.up.kernel", "W D -> D W"),
    Map("shared_experts.down_proj.weight", "shared.down.kernel", "D W -> W D"),
    *when(
        "mlp_bias",
        Map("shared_experts.up_proj.bias", "shared.up.bias", "W"),
        Map("shared_experts.down_proj.bias", "shared.down.bias", "D"),
    ),
)

TABLE = MappingTable(
    (
        Map("backbone.embeddings.weight", "embed.embedding", "V D"),
        Map("backbone.layers.{L}.norm.weight", "layers.{L}.norm.scale", "D"),
        *under("backbone.layers.{state_layers}.mixer", "layers.{state_layers}.attn", *MAMBA_ROWS),
        *under("backbone.layers.{attention_layers}.mixer", "layers.{attention_layers}", *NEMOTRON_ATTENTION_ROWS),
        *under("backbone.layers.{I}.mixer", "layers.{I}.mlp", *PLAIN_MLP, *when("mlp_bias", *PLAIN_MLP_BIAS)),
        *under("backbone.layers.{J}.mixer", "layers.{J}.moe", *NEMOTRON_EXPERT_ROWS),
        *under("mtp.layers.0", "mtp", *MTP_INPUTS),
        Map("mtp.layers.{U}.norm.weight", "mtp.{U}.norm.scale", "D"),
        *under("mtp.layers.0.mixer", "mtp.0", *NEMOTRON_ATTENTION_ROWS),
        *under("mtp.layers.1.mixer", "mtp.1.moe", *NEMOTRON_EXPERT_ROWS),
        Map("mtp.layers.1.final_layernorm.weight", "mtp.norm.scale", "D"),
        Map("backbone.norm_f.weight", "norm.scale", "D"),
        Map("lm_head.weight", "lm_head.kernel", "V D -> D V"),
    ),
    ignore={"mtp.*": FURTHER_TOKENS},
)

FAMILY = family(Config, TABLE, "Nemotron-H, Nemotron Nano 2, Nemotron 3", "NemotronHForCausalLM")
