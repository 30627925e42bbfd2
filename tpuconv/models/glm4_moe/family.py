"""GLM-4.5, GLM-4.6 and GLM-4.7: config and mapping table."""

from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.partial_rope import PartialRopeConfig
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import (
    ATTENTION,
    HEAD_NORMS,
    MLP,
    MTP_COPIES,
    MTP_HEAD,
    MTP_IGNORE,
    PRE_NORMS,
    QKV_BIAS,
    decoder_table,
    when,
)
from tpuconv.models.common.sparse import SparseConfig
from tpuconv.models.deepseek_v3.family import EXPERT_ROWS
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(SparseConfig, PartialRopeConfig):
    """The keys of config.json. All files have `head_dim`, which does not follow from the width."""

    model_type: ClassVar[str] = "glm4_moe"
    least: ClassVar = {"first_k_dense_replace": 0, "num_nextn_predict_layers": 0, "n_shared_experts": 0}
    derived: ClassVar[frozenset[str]] = SparseConfig.derived | {"mlp_layer_types"}

    vocab_size: int = 151552
    hidden_size: int = 4096
    intermediate_size: int = 10944
    moe_intermediate_size: int = 1408
    num_hidden_layers: int = 46
    num_nextn_predict_layers: int = 1
    num_attention_heads: int = 96
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    n_routed_experts: int = 128
    n_shared_experts: int = 1
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    num_experts_per_tok: int = 8
    first_k_dense_replace: int = 1
    norm_topk_prob: bool = True
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    partial_rotary_factor: float = 0.5
    attention_bias: bool = False
    use_qk_norm: bool = False

    @property
    def axes(self) -> dict[str, Any]:
        layers = self.num_hidden_layers
        return {
            **super().axes,
            "A": self.hidden_size,
            "U": tuple(range(layers, layers + self.num_nextn_predict_layers)),
        }


LAYER_ROWS = (
    *PRE_NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS),
    *when("use_qk_norm", *HEAD_NORMS),
)

TABLE = decoder_table(
    *LAYER_ROWS,
    others=(
        *under("model.layers.{I}.mlp", "layers.{I}.mlp", *MLP),
        *under("model.layers.{J}.mlp", "layers.{J}.moe", *EXPERT_ROWS),
        *under("model.layers.{U}", "mtp.{U}", *LAYER_ROWS, *under("mlp", "moe", *EXPERT_ROWS), *MTP_HEAD),
    ),
    ignore=MTP_IGNORE,
    copies=MTP_COPIES,
)

FAMILY = family(Config, TABLE, "GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7", "Glm4MoeForCausalLM")
