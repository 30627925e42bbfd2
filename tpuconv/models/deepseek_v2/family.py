"""DeepSeek V2 and V2-Lite: config and mapping table."""

from typing import ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import MLP, decoder_table
from tpuconv.models.deepseek_v3 import family as deepseek_v3
from tpuconv.models.registry import family


@family_config
class Config(deepseek_v3.Config):
    """The keys of config.json. The weights of experts are never normalized, whatever `norm_topk_prob`."""

    model_type: ClassVar[str] = "deepseek_v2"
    only: ClassVar = {
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "moe_layer_freq": (1,),
        "norm_topk_prob": (False,),
        "num_nextn_predict_layers": (0,),
        "rope_interleave": (True,),
        "mlp_bias": (False,),
    }
    nullable: ClassVar[frozenset[str]] = frozenset({"n_group", "topk_group", "topk_method", "norm_topk_prob"})

    num_nextn_predict_layers: int = 0
    topk_method: str
    n_group: int = 1
    topk_group: int = 1
    num_experts_per_tok: int = 6

    @property
    def groups(self) -> tuple[int, int]:
        return (self.n_group, self.topk_group) if self.topk_method == "group_limited_greedy" else (1, 1)


UNCORRECTED_EXPERTS = tuple(row for row in deepseek_v3.EXPERT_ROWS if not row.buffer)

TABLE = decoder_table(
    *deepseek_v3.ATTENTION_ROWS,
    others=(
        *under("model.layers.{I}.mlp", "layers.{I}.mlp", *MLP),
        *under("model.layers.{J}.mlp", "layers.{J}.moe", *UNCORRECTED_EXPERTS),
    ),
)

FAMILY = family(Config, TABLE, "DeepSeek V2, V2-Lite, V2.5, Coder V2", "DeepseekV2ForCausalLM")
