"""Beam: config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.errors import UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.mapping.table import Map
from tpuconv.models.common.rope import PLAIN_ROPE, Rope, check_rope_keys, rope_of_layers
from tpuconv.models.common.rows import (
    ATTENTION,
    CORRECTED_ROUTER,
    EXPERT_MLPS,
    HEAD_NORMS,
    O_BIAS,
    QKV_BIAS,
    decoder_table,
    mlp_rows,
    when,
)
from tpuconv.models.common.sparse import SparseConfig
from tpuconv.models.common.windows import ROPES_OF_WINDOWS, PatternConfig
from tpuconv.models.gemma2.family import NORMS
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(SparseConfig, PatternConfig):
    """The keys of config.json. Without `layer_types` every sixth layer and the last one see all tokens; only layers
    with the window have rotary positions. Without `mlp_layer_types` the first three layers are dense."""

    model_type: ClassVar[str] = "beam"
    least: ClassVar = {"n_shared_experts": 0}
    hf_names: ClassVar[Mapping[str, str]] = {"n_routed_experts": "num_experts"}
    derived: ClassVar[frozenset[str]] = SparseConfig.derived | {"n_shared_experts", "first_k_dense_replace"}
    full_every: ClassVar[int] = 6
    rope_fields: ClassVar[Mapping[str, str]] = ROPES_OF_WINDOWS

    vocab_size: int = 151936
    hidden_size: int = 5120
    intermediate_size: int = 20480
    moe_intermediate_size: int = 2560
    num_hidden_layers: int = 52
    num_attention_heads: int = 48
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    n_routed_experts: int = 256
    n_shared_experts: int = 0
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    num_experts_per_tok: int = 8
    first_k_dense_replace: int = 3
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    attention_bias: bool = False
    sliding_window: int | None = 512
    layer_types: tuple[str, ...] | None = None
    final_logit_softcapping: float | None = 30.0

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """As `DecoderConfig.read_ropes`: the positions of layers with the window. Other layers have none."""
        check_rope_keys(raw)
        given = raw.get("rope_parameters")
        if given and (given.get("full_attention") is not None or given.get("sliding_attention") is None):
            raise UnsupportedConfig(
                f"rope_parameters={short(given, 300)} is not implemented for {cls.model_type}",
                hint="only layers with 'sliding_attention' have rotary positions",
            )
        return {"rope": Rope.from_hf(rope_of_layers(raw, "sliding_attention", cls.rope.theta), "beam", context)}

    @property
    def kinds(self) -> tuple[str, ...]:
        return super().kinds if self.layer_types is not None else (*super().kinds[:-1], "full_attention")

    @property
    def unscannable(self) -> str:
        return "each of its layers has a factor of residuals of its own"


TABLE = decoder_table(
    *NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *HEAD_NORMS,
    Map("self_attn.gate_proj.weight", "attn.gate.kernel", "(N H) D -> D N H"),
    Map("self_attn.gate_bias", "attn.gate_bias", "N"),
    others=mlp_rows(*CORRECTED_ROUTER, *EXPERT_MLPS),
)

FAMILY = family(Config, TABLE, "Beam 1.0", "BeamForCausalLM")
