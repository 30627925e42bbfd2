"""Llama 4, Scout and Maverick with their vision tower: the text model's config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.common.wrapper import BRINGS, SEES, WrapperConfig, tables
from tpuconv.models.llama4_text import family as llama4_text
from tpuconv.models.registry import Family


@dataclass(frozen=True)
class Config(WrapperConfig, llama4_text.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "llama4"


TABLE, *VARIANTS = tables(
    llama4_text.TABLE, "language_model.model.", {"vision_model": SEES, "multi_modal_projector": BRINGS}
)

FAMILY = Family(
    name="llama4",
    summary="Llama 4 Scout and Maverick, text",
    config=Config,
    table=TABLE,
    variants=tuple(VARIANTS),
    model="tpuconv.models.llama4.modules:Model",
    architectures={"Llama4ForConditionalGeneration": "llama4"},
)
