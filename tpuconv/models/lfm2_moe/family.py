"""LFM2, mixture of experts: config and mapping table."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import NUMBERED_EXPERT_MLPS
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.lfm2.family import LFM2_MLP, ShortConvConfig, lfm2_table
from tpuconv.models.registry import family


@family_config
class Config(ChosenExperts, ShortConvConfig):
    """The keys of config.json. The first `num_dense_layers` layers have an MLP instead of experts."""

    model_type: ClassVar[str] = "lfm2_moe"
    least: ClassVar[Mapping[str, int]] = {"num_dense_layers": 0}

    moe_intermediate_size: int
    head_dim: int | None = None
    num_dense_layers: int
    num_experts: int
    num_experts_per_tok: int
    use_expert_bias: bool
    norm_topk_prob: bool
    routed_scaling_factor: float

    @property
    def axes(self) -> dict[str, Any]:
        dense, layers = min(self.num_dense_layers, self.num_hidden_layers), self.num_hidden_layers
        return {
            **super().axes,
            "I": tuple(range(dense)),
            "J": tuple(range(dense, layers)),
        }


TABLE = lfm2_table(
    *under("model.layers.{I}.feed_forward", "layers.{I}.mlp", *LFM2_MLP),
    *under(
        "model.layers.{J}.feed_forward",
        "layers.{J}.moe",
        Map("gate.weight", "router.kernel", "E D -> D E"),
        Map("expert_bias", "router.correction", "E", when="use_expert_bias", buffer=True),
        *NUMBERED_EXPERT_MLPS,
    ),
)

FAMILY = family(Config, TABLE, "LFM2, mixture of experts", "Lfm2MoeForCausalLM")
