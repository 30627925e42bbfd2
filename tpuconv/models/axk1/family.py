"""A.X K1: config and mapping table."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import EXPERT_MLPS, MLP, MTP_IGNORE, SHARED_EXPERT_ROWS, decoder_table
from tpuconv.models.deepseek_v3 import family as deepseek_v3
from tpuconv.models.registry import family

CORRECTED = "is_corrected"
"""The field that says whether routers have corrections, which the names of the tensors tell."""


@family_config
class Config(deepseek_v3.Config):
    """The keys of config.json. Without `mlp_layer_types` the first `first_k_dense_replace` layers are dense. The
    release has no corrections of routers; what transformers saves has them."""

    model_type: ClassVar[str] = "axk1"
    derived: ClassVar[frozenset[str]] = deepseek_v3.Config.derived | {CORRECTED}

    num_nextn_predict_layers: int = 0
    n_shared_experts: int
    q_lora_rank: int
    first_k_dense_replace: int = 1
    mlp_layer_types: tuple[str, ...] | None
    is_corrected: bool = True

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        return replace(super().from_hf(raw), is_corrected=bool(raw.get(CORRECTED, True)))

    @classmethod
    def settled(cls, raw: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
        """Returns a parsed config.json that says whether routers have corrections."""
        return {**raw, CORRECTED: any(name.endswith(("_correction_bias", "router.correction")) for name in tensors)}


TABLE = decoder_table(
    *deepseek_v3.ATTENTION_ROWS,
    others=(
        *under("model.layers.{I}.mlp", "layers.{I}.mlp", *MLP),
        *under(
            "model.layers.{J}.mlp",
            "layers.{J}.moe",
            Map("gate.weight", "router.kernel", "E D -> D E"),
            Map("gate.e_score_correction_bias", "router.correction", "E", when=CORRECTED, buffer=True),
            *EXPERT_MLPS,
            *SHARED_EXPERT_ROWS,
        ),
        Map("model.layers.{J}.post_mlp_layernorm.weight", "layers.{J}.post_mlp_norm.scale", "D"),
    ),
    ignore={"model.layers.{I}.post_mlp_layernorm.weight": "dense layers do not use it", **MTP_IGNORE},
)

FAMILY = family(Config, TABLE, "A.X K1", "AXK1ForCausalLM")
