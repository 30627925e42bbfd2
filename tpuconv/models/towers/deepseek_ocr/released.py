"""The config.json of DeepSeek-OCR 2 as released, in the keys of transformers.

The release has the model_type of DeepSeek-VL2 and code of its own, in which the sizes of the decoder behind SAM and of
the convolutions before it are constants.
"""

from collections.abc import Mapping
from typing import Any

from tpuconv.errors import UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.beside import TEXT_ALONE
from tpuconv.models.common.key_types import object_of

RELEASED_TYPE = "deepseek_vl_v2"
"""The model_type of the release."""
TEXT_KEY = "language_config"
"""The key of the text model in the release, whose keys stand around it once more."""

WITHOUT_CHOICE: Mapping[str, Mapping[str, Any]] = {
    TEXT_KEY: {
        **{"use_mla": False, "kv_lora_rank": None, "q_lora_rank": None, "qk_nope_head_dim": 0},
        **{"qk_rope_head_dim": 0, "v_head_dim": 0, "lm_head": True, "rm_head": False, "moe_layer_freq": 1},
        **{"norm_topk_prob": False, "scoring_func": "softmax"},
    },
    "projector_config": {"projector_type": "linear", "model_type": "mlp_projector"},
    "vision_config": {"model_name": "deepencoderv2"},
}
"""Keys without a counterpart in transformers, and the values that it computes with."""

DECODER = {
    **{"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864},
    **{"rms_norm_eps": 1e-6, "rope_theta": 1e6},
}
"""The decoder of the queries, Qwen2 0.5B."""
CHANNELS = 512
"""The channels between the two convolutions behind SAM."""
SAM_KEYS = {
    **{"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"},
    **{name: name for name in ("global_attn_indexes", "image_size")},
}
"""The keys of SAM in the release, and in transformers."""
SAID_AROUND = ("architectures", "model_type", "quantization_config", "tie_word_embeddings", "dtype", "torch_dtype")
"""The keys beside these objects that say something."""


def with_text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a parsed config.json with `text_config` and `vision_config` in place of the release's keys, if it has
    these.

    Raises:
        UnsupportedConfig: a value is not the one that transformers computes with.
        ConfigError: a value that has to be an object is none.
    """
    if TEXT_KEY not in raw:
        return raw
    objects = {key: _object(raw, key) for key in WITHOUT_CHOICE}
    for key, values in WITHOUT_CHOICE.items():
        for name, value in values.items():
            if (found := objects[key].pop(name, value)) != value:
                raise UnsupportedConfig(f"config.json: {key}.{name}={short(found)} is not implemented", hint=TEXT_ALONE)
    text, _, vision = objects.values()
    widths = _object(vision, "width")
    sam, decoder = _object(widths, "sam_vit_b"), _object(widths, "qwen2-0-5b")
    layers, dense = text.get("num_hidden_layers", 0), text.pop("first_k_dense_replace", 0)
    if type(layers) is int and type(dense) is int:
        text["mlp_layer_types"] = ["dense" if i < dense else "sparse" for i in range(min(layers, 1 << 16))]
    width = decoder.get("dim", 896)
    of_sam = {SAM_KEYS[key]: value for key, value in {**vision, **sam}.items() if key in SAM_KEYS}
    of_vision = {
        "sam_config": {**of_sam, "downsample_channels": [CHANNELS, width]},
        "encoder_config": {**DECODER, "hidden_size": width},
    }
    return {**{k: raw[k] for k in SAID_AROUND if k in raw}, "text_config": text, "vision_config": of_vision}


def _object(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in object_of(raw, key).items() if name not in ("auto_map", "architectures")}
