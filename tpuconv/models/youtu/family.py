"""Youtu-LLM: config and mapping table."""

from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.rows import MLP, decoder_table
from tpuconv.models.deepseek_v3 import family as deepseek_v3
from tpuconv.models.registry import family

EXPERT_FIELDS = {
    *(
        "moe_intermediate_size",
        "n_routed_experts",
        "n_shared_experts",
        "routed_scaling_factor",
        "n_group",
        "topk_group",
    ),
    *("num_experts_per_tok", "first_k_dense_replace", "norm_topk_prob", "num_nextn_predict_layers"),
}
"""The fields of DeepSeek V3's experts, which there are none of."""


@dataclass(frozen=True)
class Config(deepseek_v3.Config):
    """The keys of config.json. All layers are dense. `embedding_initializer_range` is of training."""

    model_type: ClassVar[str] = "youtu"
    only: ClassVar = {}
    derived: ClassVar[frozenset[str]] = deepseek_v3.Config.derived | EXPERT_FIELDS

    vocab_size: int = 128256
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 32
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    max_position_embeddings: int = 131072
    tie_word_embeddings: bool = True
    embedding_initializer_range: float | None = None

    @property
    def axes(self) -> dict[str, Any]:
        return {**super().axes, "I": tuple(range(self.num_hidden_layers)), "J": ()}


TABLE = decoder_table(*deepseek_v3.ATTENTION_ROWS, *under("mlp", "mlp", *MLP))

FAMILY = family(Config, TABLE, "Youtu-LLM 2B", "YoutuForCausalLM")
