"""Qwen2.5-Omni: config and mapping table of the text model of its thinker."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.thinker import ThinkerConfig, thinker_table
from tpuconv.models.qwen2 import family as qwen2
from tpuconv.models.registry import family


@family_config
class Config(ThinkerConfig, MropeConfig, qwen2.Config):
    """The keys of `text_config` in `thinker_config`."""

    model_type: ClassVar[str] = "qwen2_5_omni"

    tie_word_embeddings: bool = False


TABLE = thinker_table(qwen2.TABLE, "talker", "token2wav")

FAMILY = family(
    Config,
    TABLE,
    "Qwen2.5-Omni, text of the thinker",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniModel",
    model="qwen2",
)
