"""Beam: config and mapping table."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tpuconv.errors import UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import Rope, check_rope_keys, rope_of_layers
from tpuconv.models.common.rows import (
    ATTENTION,
    CORRECTED_ROUTER,
    EXPERT_MLPS,
    HEAD_NORMS,
    O_BIAS,
    QKV_BIAS,
    SANDWICH_NORMS,
    decoder_table,
    mlp_rows,
    when,
)
from tpuconv.models.common.sparse import SparseConfig
from tpuconv.models.common.windows import ROPES_OF_WINDOWS, PatternConfig, refuse_flat_ropes
from tpuconv.models.registry import family
from tpuconv.notation.table import Map


@family_config
class Config(SparseConfig, PatternConfig):
    """The keys of config.json. Without `layer_types` every sixth layer and the last one see all tokens; only layers
    with the window have rotary positions. Without `mlp_layer_types` the first three layers are dense."""

    model_type: ClassVar[str] = "beam"
    least: ClassVar = {"n_shared_experts": 0}
    hf_names: ClassVar[Mapping[str, str]] = {"n_routed_experts": "num_experts"}
    derived: ClassVar[frozenset[str]] = SparseConfig.derived | {"n_shared_experts", "first_k_dense_replace"}
    full_every: ClassVar[int] = 6
    rope_fields: ClassVar[Mapping[str, str]] = ROPES_OF_WINDOWS

    n_shared_experts: int = 0
    first_k_dense_replace: int = 3
    attention_bias: bool
    final_logit_softcapping: float | None

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """As `DecoderConfig.read_ropes`: the positions of layers with the window. Other layers have none."""
        check_rope_keys(raw)
        refuse_flat_ropes(cls, raw)
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
    *SANDWICH_NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *HEAD_NORMS,
    Map("self_attn.gate_proj.weight", "attn.gate.kernel", "(N H) D -> D N H"),
    Map("self_attn.gate_bias", "attn.gate_bias", "N"),
    others=mlp_rows(*CORRECTED_ROUTER, *EXPERT_MLPS),
)

FAMILY = family(Config, TABLE, "Beam 1.0", "BeamForCausalLM")
