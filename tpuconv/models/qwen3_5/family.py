"""Qwen3.5, dense: the text model's config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.wrapper import WrapperConfig, inside
from tpuconv.models.qwen3_5_text import family as text
from tpuconv.models.registry import family


@family_config
class Config(WrapperConfig, text.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "qwen3_5"


TABLE = inside(text.TABLE, "model.language_model.", text.OUTSIDE)

FAMILY = family(
    Config,
    TABLE,
    "Qwen3.5, dense, text",
    "Qwen3_5ForConditionalGeneration",
    model="qwen3_5_text",
)
