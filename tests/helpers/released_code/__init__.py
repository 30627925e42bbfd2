"""Models that transformers does not have, in torch after the code of their releases or of servers: references that
share nothing with tpuconv."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

MODELS: Mapping[str, str] = {
    "bailing_moe_v2_5": "ling:BailingMoeV2_5ForCausalLM",
    "bailing_moe_linear": "ring:BailingMoeLinearV2ForCausalLM",
    "kimi_k3": "kimi:KimiK3ForConditionalGeneration",
    "deepseek_v41": "deepseek:DeepseekV41ForCausalLM",
    "deepseek": "deepseek_moe:DeepseekForCausalLM",
    "bailing_moe_v1": "deepseek_moe:BailingMoeForCausalLM",
    "orion": "like_llama:OrionForCausalLM",
    "minicpm": "like_llama:MiniCPMForCausalLM",
    "rnj1": "rnj1:Rnj1ForCausalLM",
    "plamo3": "plamo:Plamo3ForCausalLM",
    "domynedge": "domyn:DomynEdgeForCausalLM",
    "iquestloopcoder": "loop_coder:IQuestLoopCoderForCausalLM",
    "step1": "step:Step1ForCausalLM",
    "TeleFLM": "like_llama:TeleFLMForCausalLM",
    "longcat_flash_ngram": "longcat:LongcatFlashNgramForCausalLM",
    "telechat": "telechat:TeleChat2ForCausalLM",
    "step3_text": "step:Step3TextForCausalLM",
    "solar": "like_llama:SolarForCausalLM",
    "naive_n05_flash": "naive:NaiveN05FlashForCausalLM",
    "nanbeige": "loop_coder:NanbeigeForCausalLM",
    "ouro": "loop_coder:OuroForCausalLM",
    "alice_ai": "alice:AliceAIForCausalLM",
    "k2_horizon": "k2_horizon:K2HorizonForCausalLM",
    "pangu_ultra_moe": "pangu:PanguUltraMoEForCausalLM",
    "nemotron_h_puzzle": "nemotron_puzzle:NemotronHPuzzleForCausalLM",
    "step4": "step_preview:Step4ForCausalLM",
    "xing4_0": "xing:Xing4_0ForCausalLM",
    "grok": "grok:GrokForCausalLM",
    "qwen": "qwen1:QWenLMHeadModel",
    "Keye": "keye:KeyeForConditionalGeneration",
    "KeyeVL1_5": "keye:KeyeVL1_5ForConditionalGeneration",
    "nemotron-nas": "nemotron_nas:DeciLMForCausalLM",
}
"""The model types, which are the names of families too, and the module and class of each model with logits."""


def config_of(model_type: str, **keys: Any) -> Any:
    """Returns the config object of a model type, which transformers has or this package."""
    from transformers import AutoConfig

    if (kind := class_of(model_type)) is None:
        return AutoConfig.for_model(model_type, **keys)
    return kind.config_class(**keys)


def class_of(model_type: str) -> Any:
    """Returns the class with logits of a model type; None where transformers has it."""
    if model_type not in MODELS:
        return None
    module, _, name = MODELS[model_type].partition(":")
    return getattr(import_module(f"{__name__}.{module}"), name)
