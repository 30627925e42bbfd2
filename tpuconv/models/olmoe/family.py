"""OLMoE: config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.clipped import ClippedConfig
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import (
    ATTENTION,
    NORMS_OF_ALL_HEADS,
    O_BIAS,
    PRE_NORMS,
    QKV_BIAS,
    decoder_table,
    when,
)
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.qwen3_moe.family import MOE_ROWS
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(ClippedConfig, ChosenExperts, DecoderConfig):
    """The keys of config.json. `intermediate_size` is the width of one expert."""

    model_type: ClassVar[str] = "olmoe"

    vocab_size: int = 50304
    hidden_size: int = 2048
    intermediate_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    attention_bias: bool = False
    clip_qkv: float | None = None


TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *NORMS_OF_ALL_HEADS,
    *under("mlp", "moe", *MOE_ROWS),
)

FAMILY = family(Config, TABLE, "OLMoE-1B-7B", "OlmoeForCausalLM")
