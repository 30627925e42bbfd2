"""Kimi K2.5: the text model's config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.common.wrapper import BRINGS, SEES, WrapperConfig, tables
from tpuconv.models.kimi_k2 import family as kimi_k2
from tpuconv.models.registry import Family


@dataclass(frozen=True)
class Config(WrapperConfig, kimi_k2.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "kimi_k25"
    tied: ClassVar[bool] = True


TABLE, *VARIANTS = tables(kimi_k2.FAMILY.table, "language_model.model.", {"vision_tower": SEES, "mm_projector": BRINGS})

SAVED_TABLE = TABLE.renamed(lambda name: name.replace(".model.layers.", ".model.blocks."), variant="saved")
"""The names that transformers 5.23 gives the layers when it saves a model: as those of the vision tower."""

FAMILY = Family(
    name="kimi_k25",
    summary="Kimi K2.5, text",
    config=Config,
    table=TABLE,
    variants=(*VARIANTS, SAVED_TABLE),
    text_types=("kimi_k2", "deepseek_v3"),
    model="tpuconv.models.kimi_k25.modules:Model",
    architectures={"KimiK25ForConditionalGeneration": "kimi_k25", "Kimi_K25ForConditionalGeneration": "kimi_k25"},
)
