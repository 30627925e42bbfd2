"""Qwen3.5 with experts, the text model: config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.rows import PRE_NORMS, SHARED_AND_PROBABLE_EXPERTS, decoder_table
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.qwen3_5_text.family import ATTENTION_OF_BOTH, OUTSIDE_TEXT
from tpuconv.models.qwen3_next.family import HybridConfig, further_rows
from tpuconv.models.registry import family
from tpuconv.notation.table import under


@family_config
class Config(MropeConfig, ChosenExperts, HybridConfig):
    """The keys of config.json. All layers have experts, whose weights are always normalized."""

    model_type: ClassVar[str] = "qwen3_5_moe_text"
    interleaved: ClassVar[bool] = True
    default_sections: ClassVar[tuple[int, ...]] = (11, 11, 10)
    only: ClassVar = {"attn_output_gate": (True,), "mlp_only_layers": ([], None), "norm_topk_prob": (True,)}

    intermediate_size: int = 512
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = True
    partial_rotary_factor: float = 0.25
    attention_bias: bool
    full_attention_interval: int = 4


SHARED_MOE_ROWS = under("mlp", "moe", *SHARED_AND_PROBABLE_EXPERTS)
"""A layer's router, its experts, and the shared one with its gate."""

TABLE = decoder_table(
    *PRE_NORMS, *SHARED_MOE_ROWS, others=(*ATTENTION_OF_BOTH, *further_rows(*SHARED_MOE_ROWS)), ignore=OUTSIDE_TEXT
)

FAMILY = family(
    Config,
    TABLE,
    "Qwen3.5 with experts, the text model on its own",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    model="qwen3_next",
)
