"""Qwen4-Exp: the text model's config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.wrapper import WrapperConfig, inside
from tpuconv.models.qwen3_5_text.family import OUTSIDE
from tpuconv.models.qwen3_vl_moe.family import PREFIX
from tpuconv.models.qwen4_exp_text import family as text
from tpuconv.models.registry import family


@family_config
class Config(WrapperConfig, text.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "qwen4_exp"
    indexer_n_heads: int = 4
    indexer_head_dim: int = 256
    indexer_budget: int = 2048
    indexer_compress_ratio: int = 4


TABLE = inside(text.TABLE, PREFIX, OUTSIDE)

FAMILY = family(
    Config,
    TABLE,
    "Qwen4-Exp, such as Qwen3.8-Flash-Next, text",
    "Qwen4ExpForConditionalGeneration",
    model="qwen4_exp_text",
)
