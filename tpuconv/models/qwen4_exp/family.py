"""Qwen4-Exp: the text model's config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.common.wrapper import WrapperConfig, tables
from tpuconv.models.qwen3_5_text.family import OUTSIDE
from tpuconv.models.qwen3_vl_moe.family import PREFIX
from tpuconv.models.qwen4_exp_text import family as text
from tpuconv.models.registry import Family


@dataclass(frozen=True)
class Config(WrapperConfig, text.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "qwen4_exp"


TABLE, *VARIANTS = (
    *tables(text.TABLE, PREFIX, OUTSIDE),
    *tables(text.STACKED_EXPERTS_TABLE, PREFIX, OUTSIDE, name="stacked "),
)

FAMILY = Family(
    name="qwen4_exp",
    summary="Qwen4-Exp, such as Qwen3.8-Flash-Next, text",
    config=Config,
    table=TABLE,
    variants=tuple(VARIANTS),
    model="tpuconv.models.qwen4_exp.modules:Model",
    architectures={"Qwen4ExpForConditionalGeneration": "qwen4_exp"},
)
