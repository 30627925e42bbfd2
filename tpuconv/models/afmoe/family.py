"""Trinity (AFMoE): config and mapping table."""

from collections.abc import Mapping
from typing import ClassVar

from tpuconv.mapping.table import Map
from tpuconv.models.common.defaults import family_config
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


@family_config
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

    attention_bias: bool
    mup_enabled: bool
    global_attn_every_n_layers: int

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
