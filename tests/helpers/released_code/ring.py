"""Ring Linear 2 (Bailing) after `bailing_moe_linear.py` of sgl-project/sglang: the layers of `ling.py`, with attention
as in Ling 2."""

from helpers.released_code import ling


class Config(ling.CommonConfig):
    model_type = "bailing_moe_linear"


class BailingMoeLinearV2ForCausalLM(ling.BailingMoeV2_5ForCausalLM):
    config_class = Config
