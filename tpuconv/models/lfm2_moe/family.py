"""LFM2, mixture of experts: config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import NUMBERED_EXPERT_MLPS
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.lfm2.family import LFM2_MLP, ShortConvConfig, lfm2_table
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(ChosenExperts, ShortConvConfig):
    """The keys of config.json. The first `num_dense_layers` layers have an MLP instead of experts."""

    model_type: ClassVar[str] = "lfm2_moe"
    least: ClassVar[Mapping[str, int]] = {"num_dense_layers": 0}

    vocab_size: int = 65536
    hidden_size: int = 2048
    intermediate_size: int = 7168
    moe_intermediate_size: int = 1792
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = None
    max_position_embeddings: int = 128000
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    rope: Rope = PLAIN_ROPE
    layer_types: tuple[str, ...] | None = None
    conv_bias: bool = False
    conv_L_cache: int = 3
    num_dense_layers: int = 2
    num_experts: int = 32
    num_experts_per_tok: int = 4
    use_expert_bias: bool = True
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

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
