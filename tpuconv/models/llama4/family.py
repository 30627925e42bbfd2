"""Llama 4, Scout and Maverick with their vision tower: the text model's config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.wrapper import BRINGS, SEES, WrapperConfig, inside
from tpuconv.models.llama4_text import family as llama4_text
from tpuconv.models.registry import family


@family_config
class Config(WrapperConfig, llama4_text.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "llama4"


TABLE = inside(llama4_text.TABLE, "language_model.model.", {"vision_model": SEES, "multi_modal_projector": BRINGS})

FAMILY = family(
    Config,
    TABLE,
    "Llama 4 Scout and Maverick, text",
    "Llama4ForConditionalGeneration",
    model="llama4_text",
)
