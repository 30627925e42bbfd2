"""MiniMax-M3: the text model's config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.common.rows import CORRECTION_BESIDE, MLP, NUMBERED_EXPERT_MLPS, SHARED_EXPERT_ROWS
from tpuconv.models.common.wrapper import BRINGS, SEES, WrapperConfig, tables
from tpuconv.models.minimax_m3_vl_text import family as minimax_m3_vl_text
from tpuconv.models.registry import Family


@dataclass(frozen=True)
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

TABLE, *VARIANTS = tables(
    RELEASED,
    "language_model.model.",
    {"vision_tower": SEES, "multi_modal_projector": BRINGS, "patch_merge_mlp": BRINGS},
)

FAMILY = Family(
    name="minimax_m3_vl",
    summary="MiniMax-M3, text",
    config=Config,
    table=TABLE,
    variants=tuple(VARIANTS),
    model="tpuconv.models.minimax_m3_vl.modules:Model",
    architectures={"MiniMaxM3SparseForConditionalGeneration": "minimax_m3_vl"},
)
