"""Youtu-LLM: config and mapping table."""

from typing import Any, ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.defaults import family_config
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


@family_config
class Config(deepseek_v3.Config):
    """The keys of config.json. All layers are dense. `embedding_initializer_range` is of training."""

    model_type: ClassVar[str] = "youtu"
    only: ClassVar = {}
    derived: ClassVar[frozenset[str]] = deepseek_v3.Config.derived | EXPERT_FIELDS

    embedding_initializer_range: float | None

    @property
    def axes(self) -> dict[str, Any]:
        return {**super().axes, "I": tuple(range(self.num_hidden_layers)), "J": ()}


TABLE = decoder_table(*deepseek_v3.ATTENTION_ROWS, *under("mlp", "mlp", *MLP))

FAMILY = family(Config, TABLE, "Youtu-LLM 2B", "YoutuForCausalLM")
