"""PaddleOCR-VL: the text model's config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.wrapper import BRINGS, SEES, WrapperConfig, inside
from tpuconv.models.ernie4_5 import family as ernie4_5
from tpuconv.models.registry import family


@family_config
class Config(WrapperConfig, MropeConfig, ernie4_5.Config):
    """The keys of `text_config`, which releases have at the root."""

    model_type: ClassVar[str] = "paddleocr_vl"
    flat: ClassVar[bool] = True
    tied: ClassVar[bool] = True
    only: ClassVar = {"sliding_window": (None,)}


TABLE = inside(ernie4_5.TABLE, "model.", {"visual": SEES, "mlp_AR": BRINGS, "projector": BRINGS})

FAMILY = family(Config, TABLE, "PaddleOCR-VL, text", "PaddleOCRVLForConditionalGeneration")
