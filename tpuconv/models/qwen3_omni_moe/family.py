"""Qwen3-Omni: config and mapping table of the text model of its thinker."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.thinker import ThinkerConfig, thinker_table
from tpuconv.models.qwen3_moe import family as qwen3_moe
from tpuconv.models.registry import family


@family_config
class Config(ThinkerConfig, MropeConfig, qwen3_moe.Config):
    """The keys of `text_config` in `thinker_config`."""

    model_type: ClassVar[str] = "qwen3_omni_moe"
    only: ClassVar = {"use_sliding_window": (False, None)}

    num_attention_heads: int = 32
    sliding_window: int | None = 4096


TABLE = thinker_table(qwen3_moe.TABLE, "talker", "code2wav")

FAMILY = family(
    Config,
    TABLE,
    "Qwen3-Omni, text of the thinker",
    "Qwen3OmniMoeForConditionalGeneration",
    model="qwen3_moe",
)
