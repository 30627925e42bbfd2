"""Solar Open: config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import (
    ATTENTION,
    CORRECTED_ROUTER,
    EXPERT_MLPS,
    PRE_NORMS,
    QKV_BIAS,
    SHARED_EXPERT_ROWS,
    decoder_table,
    mlp_rows,
    when,
)
from tpuconv.models.common.sparse import SparseConfig
from tpuconv.models.registry import family

SOLAR_ROPE = Rope(theta=1_000_000.0)
"""The rotary positions of a config.json without any."""


@dataclass(frozen=True)
class Config(SparseConfig):
    """The keys of config.json. All layers have experts; `intermediate_size` is not used."""

    model_type: ClassVar[str] = "solar_open"
    only: ClassVar = {"first_k_dense_replace": (0,), "mlp_layer_types": (None,), "use_qk_norm": (False,)}
    least: ClassVar = {"first_k_dense_replace": 0}
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": SOLAR_ROPE.theta}

    vocab_size: int = 196608
    hidden_size: int = 4096
    intermediate_size: int = 10240
    moe_intermediate_size: int = 1280
    num_hidden_layers: int = 48
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    n_routed_experts: int = 128
    n_shared_experts: int = 1
    routed_scaling_factor: float = 1.0
    num_experts_per_tok: int = 8
    first_k_dense_replace: int = 0
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    rope: Rope = SOLAR_ROPE
    attention_bias: bool = False


TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS),
    others=mlp_rows(*CORRECTED_ROUTER, *EXPERT_MLPS, *SHARED_EXPERT_ROWS),
)

FAMILY = family(Config, TABLE, "Solar Open 100B", "SolarOpenForCausalLM")
