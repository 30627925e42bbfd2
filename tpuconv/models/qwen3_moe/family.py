"""Qwen3, mixture of experts: config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import Map
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import (
    ATTENTION,
    EXPERT_MLPS,
    HEAD_NORMS,
    O_BIAS,
    PRE_NORMS,
    QKV_BIAS,
    decoder_table,
    mlp_rows,
    when,
)
from tpuconv.models.common.sparse import ChosenExperts, MixedMLPs, stepped_mlp_kinds
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(ChosenExperts, MixedMLPs, DecoderConfig):
    """The keys of config.json. `max_window_layers` has no effect, other than in the dense Qwen3: the window applies to
    all layers."""

    model_type: ClassVar[str] = "qwen3_moe"
    synonyms: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    least: ClassVar[Mapping[str, int]] = {"max_window_layers": 0}

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    moe_intermediate_size: int = 768
    num_hidden_layers: int = 24
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 4
    head_dim: int | None = None
    num_experts: int = 128
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = None
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int | None = None
    attention_bias: bool = False

    @property
    def mlp_kinds(self) -> tuple[str, ...]:
        return stepped_mlp_kinds(self.mlp_only_layers or (), self.decoder_sparse_step, self.num_hidden_layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return (self.sliding_window if self.use_sliding_window else None,) * self.num_hidden_layers


MOE_ROWS = (Map("gate.weight", "router.kernel", "E D -> D E"), *EXPERT_MLPS)


TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *HEAD_NORMS,
    others=mlp_rows(*MOE_ROWS),
)

FAMILY = family(Config, TABLE, "Qwen3, mixture of experts", "Qwen3MoeForCausalLM")
