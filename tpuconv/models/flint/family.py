"""Flint: config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import (
    ATTENTION,
    HEAD_NORMS,
    O_BIAS,
    PRE_NORMS,
    QKV_BIAS,
    SHARED,
    decoder_table,
    mlp_rows,
    when,
)
from tpuconv.models.common.sparse import ChosenExperts, MixedMLPs, stepped_mlp_kinds
from tpuconv.models.common.windows import ROPES_OF_WINDOWS, PatternConfig
from tpuconv.models.qwen3_moe.family import MOE_ROWS
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(ChosenExperts, MixedMLPs, PatternConfig):
    """The keys of config.json. Without `layer_types` the first two layers, the last one and every fourth see all
    tokens; only layers with the window have rotary positions. Without `mlp_only_layers` the first two are dense."""

    model_type: ClassVar[str] = "flint"
    rope_fields: ClassVar[Mapping[str, str]] = ROPES_OF_WINDOWS

    vocab_size: int = 150144
    hidden_size: int = 2048
    intermediate_size: int = 6144
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 1024
    num_hidden_layers: int = 49
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 4
    head_dim: int | None = 128
    num_experts: int = 256
    num_experts_per_tok: int = 6
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = None
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    attention_bias: bool = False
    sliding_window: int | None = 513
    layer_types: tuple[str, ...] | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        last = self.num_hidden_layers - 1
        full = {i for i in range(last + 1) if i < 2 or i % 4 == 1 or i == last}
        return tuple("full_attention" if i in full else "sliding_attention" for i in range(last + 1))

    @property
    def mlp_kinds(self) -> tuple[str, ...]:
        dense = (0, 1) if self.mlp_only_layers is None else self.mlp_only_layers
        return stepped_mlp_kinds(dense, self.decoder_sparse_step, self.num_hidden_layers)

    @property
    def has_shared_experts(self) -> bool:
        """True if there is an expert that every token uses."""
        return True


TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *HEAD_NORMS,
    Map("self_attn.softmax_offset", "attn.sinks", "N"),
    others=mlp_rows(*MOE_ROWS, *under("shared_expert", "shared", *SHARED)),
)

FAMILY = family(Config, TABLE, "Flint", "FlintForCausalLM")
