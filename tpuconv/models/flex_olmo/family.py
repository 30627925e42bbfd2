"""FlexOlmo: config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import (
    ATTENTION,
    NORMS_OF_ALL_HEADS,
    O_BIAS,
    POST_NORMS,
    QKV_BIAS,
    decoder_table,
    when,
)
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.qwen3_moe.family import MOE_ROWS
from tpuconv.models.registry import family

FLEX_ROPE = Rope(theta=500_000.0)
"""The rotary positions of a config.json without any."""


@dataclass(frozen=True)
class Config(ChosenExperts, DecoderConfig):
    """The keys of config.json. `intermediate_size` is the width of one expert."""

    model_type: ClassVar[str] = "flex_olmo"
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": FLEX_ROPE.theta}

    vocab_size: int = 100352
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    num_experts: int = 7
    num_experts_per_tok: int = 5
    norm_topk_prob: bool = False
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope: Rope = FLEX_ROPE
    attention_bias: bool = False


TABLE = decoder_table(
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *NORMS_OF_ALL_HEADS,
    *POST_NORMS,
    *under("mlp", "moe", *MOE_ROWS),
)

FAMILY = family(Config, TABLE, "FlexOlmo 7x7B", "FlexOlmoForCausalLM")
