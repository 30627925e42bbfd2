"""The text models of Qwen3.5: linear attention in some layers, as in Qwen3-Next, with an MLP or experts."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.rows import FURTHER_TOKENS, MLP, PRE_NORMS, SHARED_AND_PROBABLE_EXPERTS, decoder_table
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.common.wrapper import SEES
from tpuconv.models.qwen3_next.family import FULL_ROWS, LINEAR_ROWS, HybridConfig, further_rows
from tpuconv.models.registry import Family
from tpuconv.notation.table import Map, under


@family_config
class Qwen35Config(MropeConfig, HybridConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "qwen3_5_text"
    interleaved: ClassVar[bool] = True
    default_sections: ClassVar[tuple[int, ...]] = (11, 11, 10)
    only: ClassVar = {"attn_output_gate": (True,), "mlp_only_layers": ([], None)}

    head_dim: int
    partial_rotary_factor: float = 0.25
    attention_bias: bool
    full_attention_interval: int = 4


@family_config
class Qwen35MoeConfig(ChosenExperts, Qwen35Config):
    """The keys of config.json. All layers have experts, whose weights are always normalized."""

    model_type: ClassVar[str] = "qwen3_5_moe_text"
    only: ClassVar = {**Qwen35Config.only, "norm_topk_prob": (True,)}

    intermediate_size: int = 512
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = True


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

SHARED_MOE_ROWS = under("mlp", "moe", *SHARED_AND_PROBABLE_EXPERTS)
"""A layer's router, its experts, and the shared one with its gate."""

OUTSIDE = {"visual": SEES, "mtp": FURTHER_TOKENS}
"""What is skipped of a model with a vision tower."""
OUTSIDE_TEXT = {"mtp.*": FURTHER_TOKENS, "visual.*": SEES, "model.visual.*": SEES}
"""What is skipped of the text model. Models that users make of those with a vision tower may keep this beside the text
model's config.json, and transformers reads them too."""


def _text(summary: str, config: type[Qwen35Config], rows: tuple[Map, ...], model: str, front: str) -> Family:
    others = (*ATTENTION_OF_BOTH, *further_rows(*rows))
    return Family(
        name=config.model_type,
        summary=f"{summary}, the text model on its own",
        config=config,
        table=decoder_table(*PRE_NORMS, *rows, others=others, ignore=OUTSIDE_TEXT),
        model=f"tpuconv.models.qwen3_next.modules:{model}",
        architectures={f"{front}{end}": config.model_type for end in ("ForCausalLM", "ForConditionalGeneration")},
    )


QWEN3_5_TEXT = _text("Qwen3.5, dense", Qwen35Config, under("mlp", "mlp", *MLP), "DenseModel", "Qwen3_5")
QWEN3_5_MOE_TEXT = _text("Qwen3.5 with experts", Qwen35MoeConfig, SHARED_MOE_ROWS, "Model", "Qwen3_5Moe")
