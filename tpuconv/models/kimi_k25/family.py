"""Kimi K2.5: the text model's config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.wrapper import BRINGS, SEES, WrapperConfig, inside
from tpuconv.models.kimi_k2 import family as kimi_k2
from tpuconv.models.registry import family


@family_config
class Config(WrapperConfig, kimi_k2.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "kimi_k25"
    tied: ClassVar[bool] = True


TABLE = inside(kimi_k2.FAMILY.table, "language_model.model.", {"vision_tower": SEES, "mm_projector": BRINGS})

FAMILY = family(
    Config,
    TABLE,
    "Kimi K2.5, text",
    "KimiK25ForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",
    model="deepseek_v3",
    text_types=("kimi_k2", "deepseek_v3"),
)
