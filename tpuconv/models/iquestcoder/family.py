"""IQuest-Coder: config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.llama import family as llama
from tpuconv.models.registry import family


@family_config
class Config(llama.Config):
    """The keys of config.json."""

    model_type: ClassVar[str] = "iquestcoder"
    only: ClassVar = {"clip_qkv": (None,), "use_sliding_window": (False,)}


TABLE = llama.TABLE

FAMILY = family(
    Config,
    TABLE,
    "IQuest-Coder V1",
    "IQuestCoderForCausalLM",
    "LlamaForCausalLM",
    model="llama",
)
