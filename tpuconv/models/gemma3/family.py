"""Gemma 3 with its vision tower: the text model's config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.wrapper import LLAVA, WrapperConfig, inside
from tpuconv.models.gemma3_text import family as gemma3_text
from tpuconv.models.registry import family


@family_config
class Config(WrapperConfig, gemma3_text.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "gemma3"
    tied: ClassVar[bool] = True


TABLE = inside(gemma3_text.TABLE, "language_model.model.", LLAVA)

FAMILY = family(
    Config,
    TABLE,
    "Gemma 3 with its vision tower, text",
    "Gemma3ForConditionalGeneration",
    model="gemma3_text",
)
