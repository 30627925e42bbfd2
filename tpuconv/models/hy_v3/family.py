"""Hy3: config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.rope import Rope
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

HY3_ROPE = Rope(theta=11_158_840.0)
"""The rotary positions of a config.json without any."""


@dataclass(frozen=True)
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
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": HY3_ROPE.theta}

    vocab_size: int = 120832
    hidden_size: int = 4096
    intermediate_size: int = 13312
    moe_intermediate_size: int = 1536
    num_hidden_layers: int = 80
    num_nextn_predict_layers: int = 1
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    n_routed_experts: int = 192
    n_shared_experts: int = 1
    routed_scaling_factor: float = 2.826
    num_experts_per_tok: int = 8
    first_k_dense_replace: int = 1
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    rope: Rope = HY3_ROPE
    attention_bias: bool = False

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
