"""The config.json of DeepSeek-OCR and DeepSeek-OCR 2 as released, in the keys of transformers.

Both releases have the model_type of DeepSeek-VL2 and code of their own, in which most sizes of the encoder behind SAM
are constants. transformers has the encoder of DeepSeek-OCR in Unlimited-OCR alone, whose text model has a window.
"""

from collections.abc import Mapping
from typing import Any

from tpuconv.errors import UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.key_types import object_of
from tpuconv.models.common.wrapper import KEYS_AROUND

RELEASED_TYPE = "deepseek_vl_v2"
"""The model_type of the releases."""
FIRST_TYPE = "deepseek_ocr"
"""The type that DeepSeek-OCR has here."""
CLIP_TYPE, DECODER_TYPE = "unlimited_ocr_vision", "deepseek_ocr2_vision"
"""The types of `vision_config` in transformers: CLIP behind SAM, and the decoder behind SAM."""
ENCODERS = {"deeplip_b_l": CLIP_TYPE, "deepencoderv2": DECODER_TYPE}
"""These by `model_name` of the releases."""
TEXT_KEY, VISION_KEY = "language_config", "vision_config"
"""The keys of the text model in the releases, whose keys stand around it once more, and of the encoder."""

PROJECTOR_KEY = "projector_config"
"""The key of the projector in the releases."""

OF_TEXT: Mapping[str, Any] = {
    **{"use_mla": False, "kv_lora_rank": None, "q_lora_rank": None, "qk_nope_head_dim": 0},
    **{"qk_rope_head_dim": 0, "v_head_dim": 0, "lm_head": True, "rm_head": False, "moe_layer_freq": 1},
    **{"norm_topk_prob": False, "scoring_func": "softmax"},
}
"""Keys of the text model without a counterpart in transformers, and the values that it computes with."""
OF_PROJECTOR: Mapping[str, Mapping[str, Any]] = {
    PROJECTOR_KEY: {"projector_type": "linear", "model_type": "mlp_projector"}
}
"""The same of the projector."""

DECODER = {
    **{"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864},
    **{"rms_norm_eps": 1e-6, "rope_theta": 1e6},
}
"""The decoder of the queries, Qwen2 0.5B."""
CHANNELS = 512
"""The channels between the two convolutions behind SAM."""
SHORT_KEYS = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
KEYS_OF_SAM = SHORT_KEYS | {name: name for name in ("global_attn_indexes", "image_size", "downsample_channels")}
KEYS_OF_CLIP = SHORT_KEYS | {name: name for name in ("image_size", "patch_size")}
"""The keys of SAM and of CLIP in the releases, and in transformers."""


def with_text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a parsed config.json with `text_config` and `vision_config` in place of the release's keys, if it has
    these. An encoder that is not known keeps its name, and what reads encoders refuses it: the text model does not
    depend on it.

    Raises:
        UnsupportedConfig: a value of the text model is not the one that transformers computes with.
        ConfigError: a value that has to be an object is none.
    """
    if TEXT_KEY not in raw:
        return raw
    text, vision = _object(raw, TEXT_KEY), _object(raw, VISION_KEY)
    for name, value in OF_TEXT.items():
        if (found := text.pop(name, value)) != value:
            raise UnsupportedConfig(
                f"config.json: {TEXT_KEY}.{name}={short(found)} is not implemented, only {value!r}",
                hint=f"if you know that it does not change the model, convert without it: `allow_config={[name]}`",
            )
    layers, dense = text.get("num_hidden_layers", 0), text.pop("first_k_dense_replace", 0)
    if type(layers) is int and type(dense) is int:
        text["mlp_layer_types"] = ["dense" if i < dense else "sparse" for i in range(min(layers, 1 << 16))]
    around = {k: raw[k] for k in (*KEYS_AROUND, PROJECTOR_KEY) if k in raw}
    return {**around, "text_config": text, VISION_KEY: _vision_config(vision)}


def _vision_config(vision: Mapping[str, Any]) -> dict[str, Any]:
    name, widths = vision.get("model_name", "deepencoderv2"), _object(vision, "width")
    if not isinstance(name, str) or name not in ENCODERS:
        return {"model_type": name}
    sam = _renamed({**vision, **_object(widths, "sam_vit_b")}, KEYS_OF_SAM)
    if (kind := ENCODERS[name]) == CLIP_TYPE:
        encoder = _renamed(_object(widths, "clip-l-14-224"), KEYS_OF_CLIP)
    else:
        width = _object(widths, "qwen2-0-5b").get("dim", 896)
        sam["downsample_channels"], encoder = [CHANNELS, width], {**DECODER, "hidden_size": width}
    return {"model_type": kind, "sam_config": sam, "encoder_config": encoder}


def _renamed(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names[key]: value for key, value in given.items() if key in names}


def _object(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in object_of(raw, key).items() if name not in ("auto_map", "architectures")}
