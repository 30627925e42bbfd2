"""Models that transformers does not have, in torch after the code of their releases or of servers: references that
share nothing with tpuconv."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

MODELS: Mapping[str, str] = {
    "bailing_moe_v2_5": "ling",
    "bailing_moe_linear": "ring",
    "kimi_k3": "kimi",
    "deepseek_v41": "deepseek",
}
"""The model types, which are the names of families too, and the module of each, which has its `Config` and its `Model`
with logits."""


def config_of(model_type: str, **keys: Any) -> Any:
    """Returns the config object of a model type, which transformers has or this package."""
    from transformers import AutoConfig

    if model_type not in MODELS:
        return AutoConfig.for_model(model_type, **keys)
    return _module(model_type).Config(**keys)


def class_of(model_type: str) -> Any:
    """Returns the class with logits of a model type; None where transformers has it."""
    return _module(model_type).Model if model_type in MODELS else None


def _module(model_type: str) -> Any:
    return import_module(f"{__name__}.{MODELS[model_type]}")
