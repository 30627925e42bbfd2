"""Gemma 4 with vision and audio towers: the text model's config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.common.wrapper import BRINGS, HEARS, SEES, WrapperConfig, tables
from tpuconv.models.gemma4_text import family as gemma4_text
from tpuconv.models.registry import Family


@dataclass(frozen=True)
class Config(WrapperConfig, gemma4_text.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "gemma4"
    tied: ClassVar[bool] = True


GEMMA4_PREFIX = "model.language_model."
TOWERS = {"vision_tower": SEES, "embed_vision": BRINGS, "audio_tower": HEARS, "embed_audio": HEARS}

TABLE, *VARIANTS = (
    *tables(gemma4_text.TABLE, GEMMA4_PREFIX, TOWERS),
    *tables(gemma4_text.NUMBERED_TABLE, GEMMA4_PREFIX, TOWERS, name="numbered "),
)

FAMILY = Family(
    name="gemma4",
    summary="Gemma 4, text",
    config=Config,
    table=TABLE,
    variants=tuple(VARIANTS),
    model="tpuconv.models.gemma4.modules:Model",
    architectures={"Gemma4ForConditionalGeneration": "gemma4"},
)
