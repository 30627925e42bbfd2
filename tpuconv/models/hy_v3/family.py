"""Hy3: config and mapping table."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import (
    ATTENTION,
    EXPERT_MLPS,
    HEAD_NORMS,
    MTP_COPIES,
    MTP_FINAL,
    MTP_IGNORE,
    O_BIAS,
    PRE_NORMS,
    QKV_BIAS,
    SHARED,
    decoder_table,
    mlp_rows,
    when,
)
from tpuconv.models.common.sparse import SparseConfig
from tpuconv.models.registry import family


@family_config
class Config(SparseConfig):
    """The keys of config.json. Experts are chosen among all, and their weights are normalized."""

    model_type: ClassVar[str] = "hy_v3"
    only: ClassVar = {"mlp_bias": (False,), "enable_moe_fp32_combine": (True, False)}
    least: ClassVar = {"first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
    hf_names: ClassVar[Mapping[str, str]] = {
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "routed_scaling_factor": "router_scaling_factor",
    }
    derived: ClassVar[frozenset[str]] = SparseConfig.derived | {"n_group", "topk_group", "norm_topk_prob"}

    num_nextn_predict_layers: int = 1
    first_k_dense_replace: int = 1
    attention_bias: bool

    @property
    def axes(self) -> dict[str, Any]:
        layers = self.num_hidden_layers
        return {
            **super().axes,
            "A": self.hidden_size,
            "U": tuple(range(layers, layers + self.num_nextn_predict_layers)),
        }


LAYER_ROWS = (*PRE_NORMS, *ATTENTION, *when("attention_bias", *QKV_BIAS, O_BIAS), *HEAD_NORMS)

HY3_EXPERT_ROWS = (
    Map("router.gate.weight", "router.kernel", "E D -> D E"),
    Map("expert_bias", "router.correction", "E", buffer=True),
    *EXPERT_MLPS,
    *under("shared_mlp", "shared", *SHARED),
)

TABLE = decoder_table(
    *LAYER_ROWS,
    others=(
        *mlp_rows(*HY3_EXPERT_ROWS),
        *under("model.layers.{U}", "mtp.{U}", *LAYER_ROWS, *under("mlp", "moe", *HY3_EXPERT_ROWS), *MTP_FINAL),
    ),
    ignore=MTP_IGNORE,
    copies=MTP_COPIES,
)

FAMILY = family(Config, TABLE, "Hy3", "HYV3ForCausalLM")
