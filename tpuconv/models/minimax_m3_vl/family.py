"""MiniMax-M3: the text model's config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import CORRECTION_BESIDE, MLP, NUMBERED_EXPERT_MLPS, SHARED_EXPERT_ROWS
from tpuconv.models.common.wrapper import BRINGS, SEES, WrapperConfig, inside
from tpuconv.models.minimax_m3_vl_text import family as minimax_m3_vl_text
from tpuconv.models.registry import family


@family_config
class Config(WrapperConfig, minimax_m3_vl_text.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "minimax_m3_vl"


RELEASED = minimax_m3_vl_text.m3_table(
    "index_",
    MLP,
    "block_sparse_moe",
    (
        *CORRECTION_BESIDE,
        *NUMBERED_EXPERT_MLPS,
        *SHARED_EXPERT_ROWS,
    ),
)

TABLE = inside(
    RELEASED,
    "language_model.model.",
    {"vision_tower": SEES, "multi_modal_projector": BRINGS, "patch_merge_mlp": BRINGS},
)

FAMILY = family(
    Config,
    TABLE,
    "MiniMax-M3, text",
    "MiniMaxM3SparseForConditionalGeneration",
    model="minimax_m3_vl_text",
)
