"""Mellum 2: config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import (
    ATTENTION,
    FURTHER_TOKENS,
    HEAD_NORMS,
    O_BIAS,
    PRE_NORMS,
    QKV_BIAS,
    decoder_table,
    mlp_rows,
    when,
)
from tpuconv.models.common.sparse import ChosenExperts, MixedMLPs
from tpuconv.models.common.windows import TwoRopesConfig
from tpuconv.models.qwen3_moe.family import MOE_ROWS
from tpuconv.models.registry import family

MELLUM_ROPE = Rope(theta=500_000.0)
"""The rotary positions of layers that see all tokens, of a config.json without any."""


@dataclass(frozen=True)
class Config(ChosenExperts, MixedMLPs, TwoRopesConfig):
    """The keys of config.json. Without `layer_types` all layers see all tokens, without `mlp_layer_types` all have
    experts."""

    model_type: ClassVar[str] = "mellum"
    least: ClassVar[Mapping[str, int]] = {"num_mtp_layers": 0}
    synonyms: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    aliases: ClassVar[Mapping[str, str]] = {"num_nextn_predict_layers": "num_mtp_layers"}
    full_every: ClassVar[int] = 1

    vocab_size: int = 98304
    hidden_size: int = 2304
    intermediate_size: int = 7168
    moe_intermediate_size: int = 896
    num_hidden_layers: int = 28
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 4
    head_dim: int | None = 128
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = True
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope: Rope = MELLUM_ROPE
    local_rope: Rope = PLAIN_ROPE
    attention_bias: bool = False
    sliding_window: int | None = 1024
    layer_types: tuple[str, ...] | None = None
    mlp_layer_types: tuple[str, ...] | None = None
    num_mtp_layers: int | None = None
    mtp_layer_types: tuple[str, ...] | None = None
    mtp_mlp_layer_types: tuple[str, ...] | None = None


TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *HEAD_NORMS,
    others=mlp_rows(*MOE_ROWS),
    ignore={"mtp.*": FURTHER_TOKENS},
)

FAMILY = family(Config, TABLE, "Mellum 2", "MellumForCausalLM")
