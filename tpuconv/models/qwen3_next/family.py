"""Qwen3-Next: config and mapping table."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.hybrid import StateConfig
from tpuconv.models.common.partial_rope import PartialRopeConfig
from tpuconv.models.common.rows import (
    ATTENTION,
    FURTHER_TOKENS,
    HEAD_NORMS,
    MTP_AROUND,
    O_BIAS,
    PRE_NORMS,
    QKV_BIAS,
    SHARED_AND_PROBABLE_EXPERTS,
    decoder_table,
    mlp_rows,
    when,
)
from tpuconv.models.common.sparse import ChosenExperts, MixedMLPs, stepped_mlp_kinds
from tpuconv.models.registry import family
from tpuconv.notation.table import Map, under


@family_config
class HybridConfig(StateConfig, PartialRopeConfig):
    """A decoder with linear attention in some layers: those with "linear_attention" in `layer_types` or, if that is
    absent, all but every `full_attention_interval`-th layer."""

    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    full_attention_interval: int

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if values % keys:
            yield f"linear_num_value_heads={values} is not a multiple of linear_num_key_heads={keys}"

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        layers, every = range(1, self.num_hidden_layers + 1), self.full_attention_interval
        return tuple("linear_attention" if i % every else "full_attention" for i in layers)

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "groups": self.linear_num_key_heads,
            "per_group": self.linear_num_value_heads // self.linear_num_key_heads,
            "key_dim": self.linear_key_head_dim,
            "value_dim": self.linear_value_head_dim,
            "taps": self.linear_conv_kernel_dim,
            "A": self.hidden_size,
        }

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        return {**super().layer_sets, "U": (0,)}


@family_config
class Config(ChosenExperts, MixedMLPs, HybridConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "qwen3_next"
    only: ClassVar = {"use_sliding_window": (False, None)}

    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...] | None
    partial_rotary_factor: float = 0.25
    attention_bias: bool
    full_attention_interval: int = 4

    @property
    def mlp_kinds(self) -> tuple[str, ...]:
        return stepped_mlp_kinds(self.mlp_only_layers or (), self.decoder_sparse_step, self.num_hidden_layers)


QUERIES_GATES = {
    "kernel": Map("self_attn.q_proj.weight", ("attn.q.kernel", "attn.gate.kernel"), "(N (H + H)) D -> D N H, D N H"),
    "bias": Map("self_attn.q_proj.bias", ("attn.q.bias", "attn.gate.bias"), "(N (H + H)) -> N H, N H"),
}

FULL_ROWS = (
    QUERIES_GATES["kernel"],
    *ATTENTION[1:],
    *when("attention_bias", QUERIES_GATES["bias"], *QKV_BIAS[1:], O_BIAS),
    *HEAD_NORMS,
)
"""Full attention: each head's queries are stored with its gates."""


def further_rows(*mlp: Map) -> tuple[Map, ...]:
    """Returns the rows of the layer with full attention that predicts further tokens, and of what is around it. `mlp`
    are those of its MLP or experts."""
    return (
        *under("mtp", "mtp", *MTP_AROUND),
        *under("mtp.layers.{U}", "mtp.{U}", *PRE_NORMS, *FULL_ROWS, *mlp),
    )


CONVOLUTIONS = ("q_conv.kernel", "k_conv.kernel", "v_conv.kernel")

LINEAR_ROWS = (
    Map(
        "conv1d.weight",
        CONVOLUTIONS,
        "((groups key_dim) + (groups key_dim) + (groups per_group value_dim)) 1 taps "
        "-> groups key_dim taps, groups key_dim taps, groups per_group value_dim taps",
    ),
    Map("A_log", "a_log", "(groups per_group) -> groups per_group"),
    Map("dt_bias", "dt_bias", "(groups per_group) -> groups per_group"),
    Map("norm.weight", "norm.scale", "value_dim"),
    Map("out_proj.weight", "o.kernel", "D (groups per_group value_dim) -> groups per_group value_dim D"),
)
"""Linear attention, besides the matrices that make its inputs."""

GROUPED_INPUTS = (
    Map(
        "in_proj_qkvz.weight",
        ("q.kernel", "k.kernel", "v.kernel", "z.kernel"),
        "(groups (key_dim + key_dim + (per_group value_dim) + (per_group value_dim))) D "
        "-> D groups key_dim, D groups key_dim, D groups per_group value_dim, D groups per_group value_dim",
    ),
    Map(
        "in_proj_ba.weight",
        ("b.kernel", "a.kernel"),
        "(groups (per_group + per_group)) D -> D groups per_group, D groups per_group",
    ),
)

TABLE = decoder_table(
    *PRE_NORMS,
    others=(
        *under("model.layers.{attention_layers}", "layers.{attention_layers}", *FULL_ROWS),
        *under("model.layers.{state_layers}.linear_attn", "layers.{state_layers}.attn", *GROUPED_INPUTS, *LINEAR_ROWS),
        *mlp_rows(*SHARED_AND_PROBABLE_EXPERTS),
        *further_rows(*under("mlp", "moe", *SHARED_AND_PROBABLE_EXPERTS)),
    ),
    ignore={"mtp.*": FURTHER_TOKENS},
)

FAMILY = family(Config, TABLE, "Qwen3-Next-80B-A3B", "Qwen3NextForCausalLM")
