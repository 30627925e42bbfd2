"""The config.json of ERNIE 4.5 VL as released with code of its own, in the keys of transformers."""

from collections.abc import Mapping
from typing import Any

from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.config import LARGEST_VALUES
from tpuconv.models.common.encoder_keys import TEXT_ALONE
from tpuconv.models.common.key_types import object_of
from tpuconv.models.common.wrapper import KEYS_AROUND

TYPE_OF_CODE = "ernie4_5_moe_vl"
"""The model_type of releases."""

COMPUTED_WITH: Mapping[str, Any] = {
    **{"moe_gate": "topk", "moe_gate_act": "softmax", "moe_norm_gate_logits": True, "moe_use_aux_free": True},
    **{"moe_use_hard_gate": True, "moe_use_token_type_bias": False, "moe_num_attn_experts": False},
    **{"rope_3d": True, "freq_allocation": 20, "compression_ratio": 1.0, "use_temporal_conv": True},
    "temporal_conv_size": 2,
}
"""Keys without a counterpart in transformers, and the values that it computes with."""

ROPE_OF_CODE = "ernie_3d"
"""The type of rotary positions that this code writes. Their sections are `freq_allocation`."""
OF_VISION = ("depth", "num_heads", "hidden_act", "in_channels", "patch_size", "spatial_merge_size")


def in_two_objects(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a parsed config.json with `text_config` and `vision_config` as transformers has them; another one than of
    `TYPE_OF_CODE` as it is.

    Raises:
        UnsupportedConfig: a value is not the one that transformers computes with, or experts for text and for images
            differ in more than their widths.
        ConfigError: a value that has to be an object or a number is none.
    """
    if raw.get("model_type") != TYPE_OF_CODE:
        return raw
    around = {k: v for k, v in raw.items() if k in KEYS_AROUND or k.startswith(("image_", "video_"))}
    text = {k: v for k, v in raw.items() if k not in around}
    if "im_patch_id" in text:
        around["image_token_id"] = text.pop("im_patch_id")
    vision, scaling = object_of(raw, "vision_config"), object_of(raw, "rope_scaling")
    text.pop("vision_config", None)
    for key, value in COMPUTED_WITH.items():
        if (found := text.pop(key, value)) != value:
            raise UnsupportedConfig(f"config.json: {key}={short(found)} is not implemented")
    if scaling.get("rope_type") == ROPE_OF_CODE:
        del text["rope_scaling"]
    first, last, step = (text.pop(f"moe_layer_{key}", default) for key, default in _LAYERS.items())
    text["moe_num_experts"] = _for_both("moe_num_experts", text.get("moe_num_experts", 64))
    text["mlp_layer_types"] = _kinds(text.get("num_hidden_layers", 28), first, last, step)
    merge = text.pop("spatial_conv_size", 2)
    return {**around, "text_config": text, "vision_config": _of_tower(vision, merge)}


_LAYERS = {"start_index": 1, "end_index": -1, "interval": 1}


def _for_both(key: str, value: Any) -> Any:
    """Returns a value that is the same for text and for images, which may be listed for each."""
    if not isinstance(value, list):
        return value
    if not value or any(other != value[0] for other in value):
        raise UnsupportedConfig(f"config.json: {key}={short(value)} differs between text and images")
    return value[0]


def _kinds(layers: Any, first: Any, last: Any, step: Any) -> Any:
    """Returns the `mlp_layer_types`. The first and last layers with experts may be listed for text and for images."""
    firsts, lasts = (value if isinstance(value, list) else [value] * 2 for value in (first, last))
    if not all(type(x) is int for x in (layers, step, *firsts, *lasts)) or len(firsts) != len(lasts) or step < 1:
        raise ConfigError(
            f"config.json: moe_layer_start_index={short(first)}, moe_layer_end_index={short(last)} and "
            f"moe_layer_interval={short(step)} are no numbers of layers for text and for images"
        )
    numbers = range(min(layers, LARGEST_VALUES["num_hidden_layers"]))
    of_each = [
        ["sparse" if a <= i <= (layers if b == -1 else b) and (i + 1) % step == 0 else "dense" for i in numbers]
        for a, b in zip(firsts, lasts, strict=True)
    ]
    return _for_both("the layers with experts", of_each)


def _of_tower(vision: Mapping[str, Any], merge: Any) -> dict[str, Any]:
    """Returns `vision_config`. Other keys of the release are about training."""
    out = {key: vision[key] for key in OF_VISION if key in vision}
    width, ratio = vision.get("embed_dim", 1280), vision.get("mlp_ratio", 4)
    if type(width) is not int or type(ratio) not in (int, float):
        raise ConfigError(f"config.json: embed_dim={short(width)} or mlp_ratio={short(ratio)} is not a number")
    if out.setdefault("spatial_merge_size", merge) != merge:
        raise UnsupportedConfig(
            f"config.json: spatial_conv_size={short(merge)} is not spatial_merge_size", hint=TEXT_ALONE
        )
    return {**out, "hidden_size": width, "intermediate_size": int(width * ratio)}
