"""The config.json of InternVL with code of its own (OpenGVLab/InternVL3_5-8B), in the keys of transformers."""

from collections.abc import Mapping
from typing import Any

from tpuconv.models.common.key_types import object_of

LLM_KEY = "llm_config"
"""The key of the text model."""
VISION_KEYS = {"qkv_bias": "attention_bias", "qk_normalization": "use_qk_norm"}
"""Keys of `vision_config`, and what transformers has in their place."""
VISION_DEFAULTS: Mapping[str, Any] = {
    **{"hidden_size": 3200, "intermediate_size": 12800, "num_hidden_layers": 48, "num_attention_heads": 25},
    **{"qkv_bias": False, "qk_normalization": True, "norm_type": "rms_norm", "image_size": 224, "patch_size": 14},
}
"""The defaults of `configuration_intern_vit.py` that transformers' differ from."""
UNUSED_IN_TEXT = ("use_bfloat16", "attn_implementation", "_attn_implementation")
"""Keys of the text model that say how a program computes."""


def in_keys_of_internvl(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a parsed config.json with `text_config` and `vision_config` in place of the release's keys, if it has
    these.

    Raises:
        ConfigError: a value that has to be an object is none.
    """
    if LLM_KEY not in raw:
        return raw
    vision = {**VISION_DEFAULTS, **object_of(raw, "vision_config")}
    text = {key: value for key, value in object_of(raw, LLM_KEY).items() if key not in UNUSED_IN_TEXT}
    around = {key: value for key, value in raw.items() if key not in (LLM_KEY, "vision_config", "select_layer")}
    return around | {
        "text_config": text,
        "vision_config": {VISION_KEYS.get(key, key): value for key, value in vision.items()},
        "vision_feature_layer": raw.get("select_layer", -1),
    }
