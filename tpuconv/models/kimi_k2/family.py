"""Kimi K2: DeepSeek V3 with other sizes, without multi-token prediction."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.deepseek_v3 import family as deepseek_v3
from tpuconv.models.registry import family


@family_config
class Config(deepseek_v3.Config):
    """The keys of config.json, with the defaults of DeepSeek V3."""

    model_type: ClassVar[str] = "kimi_k2"
    only: ClassVar = {**deepseek_v3.Config.only, "num_nextn_predict_layers": (0,)}

    num_nextn_predict_layers: int = 0


FAMILY = family(Config, deepseek_v3.TABLE, "Kimi K2", "DeepseekV3ForCausalLM", model="deepseek_v3")
