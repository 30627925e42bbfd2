"""Qwen3-VL, dense: the text model's config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.wrapper import SEES, WrapperConfig, inside
from tpuconv.models.qwen3 import family as qwen3
from tpuconv.models.registry import family


@family_config
class Config(WrapperConfig, MropeConfig, qwen3.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "qwen3_vl"
    only: ClassVar = {"use_sliding_window": (False, None)}


TABLE = inside(qwen3.TABLE, "model.language_model.", {"visual": SEES})

FAMILY = family(
    Config,
    TABLE,
    "Qwen3-VL, dense, text",
    "Qwen3VLForConditionalGeneration",
    model="qwen3",
)
