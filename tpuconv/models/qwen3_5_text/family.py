"""Qwen3.5, dense, the text model: config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.rows import FURTHER_TOKENS, MLP, PRE_NORMS, decoder_table
from tpuconv.models.common.wrapper import SEES
from tpuconv.models.qwen3_next.family import FULL_ROWS, LINEAR_ROWS, HybridConfig, further_rows
from tpuconv.models.registry import family
from tpuconv.notation.table import Map, under


@family_config
class Config(MropeConfig, HybridConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "qwen3_5_text"
    interleaved: ClassVar[bool] = True
    default_sections: ClassVar[tuple[int, ...]] = (11, 11, 10)
    only: ClassVar = {"attn_output_gate": (True,), "mlp_only_layers": ([], None)}

    head_dim: int
    partial_rotary_factor: float = 0.25
    attention_bias: bool
    full_attention_interval: int = 4


FLAT_INPUTS = (
    Map(
        "in_proj_qkv.weight",
        ("q.kernel", "k.kernel", "v.kernel"),
        "((groups key_dim) + (groups key_dim) + (groups per_group value_dim)) D "
        "-> D groups key_dim, D groups key_dim, D groups per_group value_dim",
    ),
    Map("in_proj_z.weight", "z.kernel", "(groups per_group value_dim) D -> D groups per_group value_dim"),
    Map("in_proj_b.weight", "b.kernel", "(groups per_group) D -> D groups per_group"),
    Map("in_proj_a.weight", "a.kernel", "(groups per_group) D -> D groups per_group"),
)

ATTENTION_OF_BOTH = (
    *under("model.layers.{attention_layers}", "layers.{attention_layers}", *FULL_ROWS),
    *under("model.layers.{state_layers}.linear_attn", "layers.{state_layers}.attn", *FLAT_INPUTS, *LINEAR_ROWS),
)
"""The rows of attention, full and linear."""

MLP_ROWS = under("mlp", "mlp", *MLP)

OUTSIDE = {"visual": SEES, "mtp": FURTHER_TOKENS}
"""What is skipped of a model with a vision tower."""
OUTSIDE_TEXT = {"mtp.*": FURTHER_TOKENS, "visual.*": SEES, "model.visual.*": SEES}
"""What is skipped of the text model. Models that users make of those with a vision tower may keep this beside the text
model's config.json, and transformers reads them too."""

TABLE = decoder_table(*PRE_NORMS, *MLP_ROWS, others=(*ATTENTION_OF_BOTH, *further_rows(*MLP_ROWS)), ignore=OUTSIDE_TEXT)

FAMILY = family(
    Config, TABLE, "Qwen3.5, dense, the text model on its own", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"
)
