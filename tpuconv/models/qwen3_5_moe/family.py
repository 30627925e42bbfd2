"""Qwen3.5 with experts: the text model's config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.wrapper import WrapperConfig, inside
from tpuconv.models.qwen3_5_moe_text import family as text
from tpuconv.models.qwen3_5_text.family import OUTSIDE
from tpuconv.models.qwen3_vl_moe.family import PREFIX
from tpuconv.models.registry import family


@family_config
class Config(WrapperConfig, text.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "qwen3_5_moe"


TABLE = inside(text.TABLE, PREFIX, OUTSIDE)

FAMILY = family(
    Config,
    TABLE,
    "Qwen3.5 with experts, text",
    "Qwen3_5MoeForConditionalGeneration",
    model="qwen3_next",
)
