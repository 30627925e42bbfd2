"""K-EXAONE: config and mapping table."""

from typing import Any, ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import (
    ATTENTION,
    CORRECTION_BESIDE,
    EXPERT_MLPS,
    FURTHER_TOKENS,
    HEAD_NORMS,
    MLP,
    MTP_AROUND,
    PRE_NORMS,
    SHARED_EXPERT_ROWS,
    decoder_table,
    mlp_rows,
)
from tpuconv.models.common.sparse import SparseConfig
from tpuconv.models.exaone4 import family as exaone4
from tpuconv.models.registry import family


@family_config
class Config(SparseConfig, exaone4.Config):
    """The keys of config.json. Windows and rotary positions are the same as in EXAONE 4."""

    model_type: ClassVar[str] = "exaone_moe"
    least: ClassVar = {"first_k_dense_replace": 0, "sliding_window_pattern": 0}
    hf_names: ClassVar = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}

    head_dim: int | None = None

    @property
    def axes(self) -> dict[str, Any]:
        return {**super().axes, "A": self.hidden_size, "U": (0,)}


LAYER_ROWS = (*PRE_NORMS, *ATTENTION, *HEAD_NORMS)

TABLE = decoder_table(
    *LAYER_ROWS,
    others=(
        *mlp_rows(
            *CORRECTION_BESIDE,
            *EXPERT_MLPS,
            *SHARED_EXPERT_ROWS,
        ),
        *under("mtp", "mtp", *MTP_AROUND),
        *under("mtp.layers.{U}", "mtp.{U}", *LAYER_ROWS, *under("mlp", "mlp", *MLP)),
    ),
    ignore={"mtp.*": FURTHER_TOKENS},
)

FAMILY = family(Config, TABLE, "K-EXAONE", "ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM")
