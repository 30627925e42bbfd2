"""Qwen3.5, dense: the text model's config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.common.wrapper import WrapperConfig, tables
from tpuconv.models.qwen3_5_text import family as text
from tpuconv.models.registry import Family


@dataclass(frozen=True)
class Config(WrapperConfig, text.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "qwen3_5"


TABLE, *VARIANTS = tables(text.TABLE, "model.language_model.", text.OUTSIDE)

FAMILY = Family(
    name="qwen3_5",
    summary="Qwen3.5, dense, text",
    config=Config,
    table=TABLE,
    variants=tuple(VARIANTS),
    model="tpuconv.models.qwen3_5.modules:Model",
    architectures={"Qwen3_5ForConditionalGeneration": "qwen3_5"},
)
