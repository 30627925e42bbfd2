"""Gemma 3n with vision and audio towers: the text model's config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.common.wrapper import WrapperConfig, tables
from tpuconv.models.gemma3n_text import family as gemma3n_text
from tpuconv.models.gemma4.family import GEMMA4_PREFIX, TOWERS
from tpuconv.models.registry import Family


@dataclass(frozen=True)
class Config(WrapperConfig, gemma3n_text.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "gemma3n"
    tied: ClassVar[bool] = True


TABLE, *VARIANTS = tables(gemma3n_text.TABLE, GEMMA4_PREFIX, TOWERS)

FAMILY = Family(
    name="gemma3n",
    summary="Gemma 3n, text",
    config=Config,
    table=TABLE,
    variants=tuple(VARIANTS),
    model="tpuconv.models.gemma3n.modules:Model",
    architectures={"Gemma3nForConditionalGeneration": "gemma3n"},
)
