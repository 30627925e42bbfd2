"""Mixtral: config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import ATTENTION, ATTN_NORM, NUMBERED_EXPERT_MLPS, decoder_table
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.common.windows import OneWindow
from tpuconv.models.registry import family

MIXTRAL_ROPE = Rope(theta=1e6)
"""The rotary positions of a config.json without any."""


@dataclass(frozen=True)
class Config(OneWindow, ChosenExperts, DecoderConfig):
    """The keys of config.json. `intermediate_size` is the width of one expert."""

    model_type: ClassVar[str] = "mixtral"
    experts_key: ClassVar[str] = "num_local_experts"
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": MIXTRAL_ROPE.theta}

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    rope: Rope = MIXTRAL_ROPE
    sliding_window: int | None = None


TABLE = decoder_table(
    ATTN_NORM,
    *ATTENTION,
    Map("post_attention_layernorm.weight", "moe_norm.scale", "D"),
    Map("block_sparse_moe.gate.weight", "moe.router.kernel", "E D -> D E"),
    *under("block_sparse_moe", "moe", *NUMBERED_EXPERT_MLPS),
)

FAMILY = family(Config, TABLE, "Mixtral", "MixtralForCausalLM")
