"""Phi-3 and Phi-4: config and mapping table."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tpuconv.errors import UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.mapping.table import Map, under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.partial_rope import PartialRopeConfig
from tpuconv.models.common.rope import check_rope_keys
from tpuconv.models.common.rows import FUSED_MLP, PRE_NORMS, decoder_table
from tpuconv.models.common.windows import OneWindow
from tpuconv.models.registry import family

LONGROPE = ("longrope", "su", "yarn")
"""The names that files of this family have for LongRoPE."""


@family_config
class Config(OneWindow, PartialRopeConfig):
    """The keys of config.json. The sliding window, if any, applies to all layers."""

    model_type: ClassVar[str] = "phi3"

    head_dim: int | None = None
    original_max_position_embeddings: int = 4096
    partial_rotary_factor: float = 1.0
    sliding_window: int | None

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """As `DecoderConfig.read_ropes`, with this family's names for LongRoPE. The original context is beside the
        rotary parameters; one inside has no effect."""
        check_rope_keys(raw)
        raw = dict(raw)
        for key in ("rope_scaling", "rope_parameters"):
            values = dict(raw.get(key) or {})
            kind = values.pop("rope_type", None) or values.pop("type", None) or "default"
            if kind in LONGROPE:
                original = raw.get("original_max_position_embeddings", cls.original_max_position_embeddings)
                values |= {"rope_type": "longrope", "original_max_position_embeddings": original}
                raw[key] = {name: value for name, value in values.items() if name != "type"}
            elif kind != "default":
                raise UnsupportedConfig(f"{key}={short(raw[key], 300)} is not implemented for phi3, only longrope")
        return super().read_ropes(raw, context)


QKV = ("attn.q.kernel", "attn.k.kernel", "attn.v.kernel")

TABLE = decoder_table(
    *PRE_NORMS,
    Map("self_attn.qkv_proj.weight", QKV, "((N + K + K) H) D -> D N H, D K H, D K H"),
    Map("self_attn.o_proj.weight", "attn.o.kernel", "D (N H) -> N H D"),
    *under("mlp", "mlp", *FUSED_MLP),
)

FAMILY = family(Config, TABLE, "Phi-3, Phi-3.5, Phi-4, Phi-4-mini", "Phi3ForCausalLM")
