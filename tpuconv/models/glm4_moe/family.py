"""GLM-4.5, GLM-4.6 and GLM-4.7: config and mapping table."""

from typing import Any, ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.partial_rope import PartialRopeConfig
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


@family_config
class Config(SparseConfig, PartialRopeConfig):
    """The keys of config.json. All files have `head_dim`, which does not follow from the width."""

    model_type: ClassVar[str] = "glm4_moe"
    least: ClassVar = {"first_k_dense_replace": 0, "num_nextn_predict_layers": 0, "n_shared_experts": 0}
    derived: ClassVar[frozenset[str]] = SparseConfig.derived | {"mlp_layer_types"}

    num_nextn_predict_layers: int = 1
    head_dim: int | None = 128
    partial_rotary_factor: float = 0.5
    attention_bias: bool
    use_qk_norm: bool

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
