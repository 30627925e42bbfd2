"""Gemma 3n with vision and audio towers: the text model's config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.wrapper import WrapperConfig, inside
from tpuconv.models.gemma3n_text import family as gemma3n_text
from tpuconv.models.gemma4.family import GEMMA4_PREFIX, TOWERS
from tpuconv.models.registry import family


@family_config
class Config(WrapperConfig, gemma3n_text.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "gemma3n"
    tied: ClassVar[bool] = True


TABLE = inside(gemma3n_text.TABLE, GEMMA4_PREFIX, TOWERS)

FAMILY = family(
    Config,
    TABLE,
    "Gemma 3n, text",
    "Gemma3nForConditionalGeneration",
    model="gemma3n_text",
)
