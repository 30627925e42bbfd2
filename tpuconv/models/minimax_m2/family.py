"""MiniMax-M2: config and mapping table."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.partial_rope import PartialRopeConfig
from tpuconv.models.common.rows import (
    ATTENTION,
    CORRECTION_BESIDE,
    NORMS_OF_ALL_HEADS,
    NUMBERED_EXPERT_MLPS,
    PRE_NORMS,
    decoder_table,
)
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.registry import family


@family_config
class Config(ChosenExperts, PartialRopeConfig):
    """The keys of config.json. `intermediate_size` is the width of one expert. `rotary_dim`, the number of dimensions
    of a head with rotary positions, is the older form of `partial_rotary_factor`."""

    model_type: ClassVar[str] = "minimax_m2"
    experts_key: ClassVar[str] = "num_local_experts"
    only: ClassVar = {"use_qk_norm": (True,), "qk_norm_type": ("per_layer",), "scoring_func": ("sigmoid",)}

    head_dim: int
    num_local_experts: int
    num_experts_per_tok: int
    partial_rotary_factor: float = 1.0
    rotary_dim: int | None = None

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        out, rotary, head = super().in_our_keys(raw), raw.get("rotary_dim"), raw.get("head_dim", cls.head_dim)
        if type(rotary) is int and type(head) is int and head > 0:
            out.setdefault("partial_rotary_factor", rotary / head)
        return out


TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION,
    *NORMS_OF_ALL_HEADS,
    *under(
        "block_sparse_moe",
        "moe",
        *CORRECTION_BESIDE,
        *NUMBERED_EXPERT_MLPS,
    ),
)

FAMILY = family(Config, TABLE, "MiniMax-M2", "MiniMaxM2ForCausalLM")
