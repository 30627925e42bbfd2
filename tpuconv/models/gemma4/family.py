"""Gemma 4 with vision and audio towers: the text model's config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.wrapper import BRINGS, HEARS, SEES, WrapperConfig, inside
from tpuconv.models.gemma4_text import family as gemma4_text
from tpuconv.models.registry import family


@family_config
class Config(WrapperConfig, gemma4_text.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "gemma4"
    tied: ClassVar[bool] = True


GEMMA4_PREFIX = "model.language_model."
TOWERS = {"vision_tower": SEES, "embed_vision": BRINGS, "audio_tower": HEARS, "embed_audio": HEARS}

TABLE = inside(gemma4_text.TABLE, GEMMA4_PREFIX, TOWERS)

FAMILY = family(Config, TABLE, "Gemma 4, text", "Gemma4ForConditionalGeneration", model="gemma4_text")
