"""Qwen2-VL: the text model's config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.qwen2_5_vl import family as qwen2_5_vl
from tpuconv.models.registry import family


@family_config
class Config(qwen2_5_vl.Config):
    """The keys of `text_config`, which releases have at the root."""

    model_type: ClassVar[str] = "qwen2_vl"


TABLE = qwen2_5_vl.TABLE

FAMILY = family(Config, TABLE, "Qwen2-VL, QVQ, text", "Qwen2VLForConditionalGeneration", model="qwen2")
