"""Trinity (AFMoE): config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import Map
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import (
    ATTENTION,
    EXPERT_MLPS,
    HEAD_NORMS,
    O_BIAS,
    QKV_BIAS,
    SHARED_EXPERT_ROWS,
    decoder_table,
    mlp_rows,
    when,
)
from tpuconv.models.common.sparse import SparseConfig
from tpuconv.models.common.windows import ROPES_OF_WINDOWS, PatternConfig
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(SparseConfig, PatternConfig):
    """The keys of config.json. Without `layer_types` every `global_attn_every_n_layers`-th layer sees all tokens. Only
    layers with the window have rotary positions. Experts are chosen among all, and their weights are normalized."""

    model_type: ClassVar[str] = "afmoe"
    rope_fields: ClassVar[Mapping[str, str]] = ROPES_OF_WINDOWS
    least: ClassVar = {"first_k_dense_replace": 0}
    hf_names: ClassVar[Mapping[str, str]] = {
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "routed_scaling_factor": "route_scale",
        "first_k_dense_replace": "num_dense_layers",
    }
    derived: ClassVar[frozenset[str]] = SparseConfig.derived | {
        *("n_group", "topk_group", "norm_topk_prob", "mlp_layer_types")
    }

    vocab_size: int = 200192
    hidden_size: int = 2048
    intermediate_size: int = 6144
    moe_intermediate_size: int = 1408
    num_hidden_layers: int = 32
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = 128
    n_routed_experts: int = 64
    n_shared_experts: int = 2
    routed_scaling_factor: float = 1.0
    num_experts_per_tok: int = 6
    first_k_dense_replace: int = 1
    max_position_embeddings: int = 16384
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    attention_bias: bool = False
    mup_enabled: bool = False
    sliding_window: int | None = 1024
    global_attn_every_n_layers: int = 4
    layer_types: tuple[str, ...] | None = None

    @property
    def full_every(self) -> int:  # type: ignore[override]
        """The last of as many layers sees all tokens."""
        return self.global_attn_every_n_layers


TABLE = decoder_table(
    Map("input_layernorm.weight", "attn_norm.scale", "D"),
    Map("post_attention_layernorm.weight", "post_attn_norm.scale", "D"),
    Map("pre_mlp_layernorm.weight", "mlp_norm.scale", "D"),
    Map("post_mlp_layernorm.weight", "post_mlp_norm.scale", "D"),
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *HEAD_NORMS,
    Map("self_attn.gate_proj.weight", "attn.gate.kernel", "(N H) D -> D N H"),
    others=mlp_rows(
        Map("router.gate.weight", "router.kernel", "E D -> D E"),
        Map("expert_bias", "router.correction", "E", buffer=True),
        *EXPERT_MLPS,
        *SHARED_EXPERT_ROWS,
    ),
)

FAMILY = family(Config, TABLE, "Trinity Nano, Mini, Large", "AfmoeForCausalLM")
