"""Qwen3.5 with experts: the text model's config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.common.wrapper import WrapperConfig, tables
from tpuconv.models.qwen3_5_moe_text import family as text
from tpuconv.models.qwen3_5_text.family import OUTSIDE
from tpuconv.models.qwen3_vl_moe.family import PREFIX
from tpuconv.models.registry import Family


@dataclass(frozen=True)
class Config(WrapperConfig, text.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "qwen3_5_moe"


TABLE, *VARIANTS = (
    *tables(text.TABLE, PREFIX, OUTSIDE),
    *tables(text.STACKED_TABLE, PREFIX, OUTSIDE, name="stacked "),
)

FAMILY = Family(
    name="qwen3_5_moe",
    summary="Qwen3.5 with experts, text",
    config=Config,
    table=TABLE,
    variants=tuple(VARIANTS),
    model="tpuconv.models.qwen3_5_moe.modules:Model",
    architectures={"Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe"},
)
