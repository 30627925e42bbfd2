"""Qwen3.5 with experts, the text model: config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import EXPERT_MLPS, PRE_NORMS, SHARED, decoder_table
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.qwen3_5_text.family import ATTENTION_OF_BOTH, OUTSIDE_TEXT
from tpuconv.models.qwen3_next.family import HybridConfig, further_rows
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(MropeConfig, ChosenExperts, HybridConfig):
    """The keys of config.json. All layers have experts, whose weights are always normalized."""

    model_type: ClassVar[str] = "qwen3_5_moe_text"
    only: ClassVar = {"attn_output_gate": (True,), "mlp_only_layers": ([], None), "norm_topk_prob": (True,)}

    vocab_size: int = 248320
    hidden_size: int = 2048
    intermediate_size: int = 512
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_hidden_layers: int = 40
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 2
    head_dim: int = 256
    num_experts: int = 256
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = True
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    partial_rotary_factor: float = 0.25
    attention_bias: bool = False
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    layer_types: tuple[str, ...] | None = None
    full_attention_interval: int = 4


SHARED_MOE_ROWS = under(
    "mlp",
    "moe",
    Map("gate.weight", "router.kernel", "E D -> D E"),
    *EXPERT_MLPS,
    *under("shared_expert", "shared", *SHARED),
    Map("shared_expert_gate.weight", "router_shared.kernel", "1 D -> D"),
)
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
