"""Every key of config.json that transformers has for encoders and projectors is read, refused, or has no effect."""

import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.random_configs import UNTOUCHED
from helpers.random_sights import OF_NO_USE, Keys, config_of, objects
from helpers.sights_sam import without_window
from helpers.whole_sights import EACH_OF_ITS_TYPE
from tpuconv.errors import ConfigError, TpuconvError, UnsupportedConfig
from tpuconv.models.common.beside import VISION, PartConfig
from tpuconv.models.registry import Family, find_family, get_family

WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "sizes that tensors show": (
        *("out_hidden_size", "output_dim", "output_proj_dims", "projection_dim", "text_hidden_size"),
        *("projection_hidden_size", "Ovis2Config.hidden_size", "FunAsrNanoAdaptorConfig.hidden_size"),
        *("Qwen2VLVisionConfig.hidden_size", "Ovis2Config.vocab_size", "VoxtralEncoderConfig.vocab_size"),
    ),
    "pooling of the encoder, which the model does not read": ("TimmWrapperConfig.do_pooling",),
    "biases that tensors show": ("Glm4vVisionConfig.attention_bias", "Glm4vMoeVisionConfig.attention_bias"),
    "new weights": ("layer_scale_init_value", "layerscale_value"),
    "training": ("drop_path_rate", "density_router_loss_weight"),
    "processors": (
        *("image_seq_length", "video_seq_length", "audio_chunk_size", "density_router_threshold", "num_image_tokens"),
        *(
            "FuyuConfig.image_size",
            "MiniCPMV4_6Config.image_size",
            "MiniCPMV4_7Config.image_size",
            "PixtralVisionConfig.image_size",
        ),
        *("MiniMaxM3VLVisionConfig.image_size", "GlmOcrVisionConfig.image_size", "Glm5NextVisionConfig.image_size"),
        *("force_image_size", "RadioConfig.image_size", "norm_mean", "norm_std"),
        *("img_max_token_num", "max_vit_seq_len", "min_image_size", "im_start_id", "im_end_id", "im_newline_id"),
    ),
    "videos": ("video_pruning_rate", "pos_emb_time", "spatial_pool_mode", "spatial_pool_stride", "tokens_per_second"),
    "videos with sound": ("position_id_per_seconds", "seconds_per_chunk"),
    "memory": ("conv_chunksize",),
    "other heads": ("enable_audio_output", "token_classification_bias", "image_text_hidden_size"),
    "transformers does not use it": (
        *("drop_vision_last_layer", "num_pos_feats", "scale_embedding", "HYV4VLVisionConfig.num_key_value_heads"),
        "HunYuanVLVisionConfig.num_key_value_heads",
        *("Llama4VisionConfig.hidden_act", "Llama4VisionConfig.norm_eps", "InklingAudioConfig.rms_norm_eps"),
        *("InklingVisionConfig.hidden_size", "InklingVisionConfig.num_attention_heads"),
        "Granite4VisionConfig.vision_feature_layer",
        *(f"DeepseekOcr2VisionEncoderConfig.{x}" for x in ("layer_types", "max_window_layers", "sliding_window")),
        *("InklingVisionConfig.rms_norm_eps", "Phi4MultimodalAudioConfig.feature_layer"),
        "ParakeetEncoderConfig.max_position_embeddings",
        *("Llama4VisionConfig.multi_modal_projector_bias", "Llama4VisionConfig.vision_feature_select_strategy"),
    ),
    "other keys tell it": ("patch_dim", "video_patch_dim"),
    "the key of the config around it wins": ("insert_layer_id",),
    "the text model": (
        "tie_word_embeddings",
        *("Phi4MultimodalConfig.vocab_size", "Phi4MultimodalConfig.intermediate_size", "resid_pdrop", "embd_pdrop"),
        *("Phi4MultimodalConfig.num_hidden_layers", "Phi4MultimodalConfig.rms_norm_eps"),
        *("Phi4MultimodalConfig.rope_parameters", "original_max_position_embeddings"),
        "Phi4MultimodalConfig.sliding_window",
    ),
    "adapters, which are merged": ("has_lora_adapter",),
    "random numbers": ("vae_std",),
    "texts beside learned queries": (*("Blip2QFormerConfig.vocab_size", "DeepseekOcr2VisionEncoderConfig.vocab_size"),),
    "the encoder has the width of learned queries (Granite Vision 4)": (
        *("Blip2QFormerConfig.hidden_size", "Blip2QFormerConfig.num_attention_heads"),
        "Blip2QFormerConfig.encoder_hidden_size",
    ),
}
"""By the reason, keys that encoders do not read: of every class of transformers' configs, or of one."""

KNOWN = {key for keys in WITHOUT_EFFECT.values() for key in keys}
Towers = tuple[PartConfig, ...]


def other(value: Any) -> Any:
    """Another value of the same type."""
    match value:
        case bool():
            return not value
        case int() | float():
            return 2 * value + 3
        case str():
            return f"{value}_of_another_kind"
        case [*_, last]:
            return [*value, other(last)]
        case {"rope_theta": theta}:
            return {**value, "rope_theta": 2 * theta}
        case dict() if value:
            return {key: other(each) for key, each in value.items()}
    return 7


def towers(family: Family, raw: Mapping[str, Any]) -> Towers | None:
    """The encoders of all parts that a config.json has; None where it is refused."""
    outer = family.config.around_text(raw)
    parts = [each.part for each in family.modalities if each.part == VISION or each.config_key in outer]
    try:
        return family.read_config(raw, parts=dict.fromkeys(parts)).towers
    except TpuconvError:
        return None


def object_at(raw: dict[str, Any], at: Keys) -> dict[str, Any]:
    """The object of a config.json at these keys, which is made where there is none."""
    for key in at:
        raw = raw.setdefault(key, {})
    return raw


def with_key(raw: Mapping[str, Any], keys: Keys, value: Any) -> dict[str, Any]:
    """A config.json with another value of a key."""
    out: dict[str, Any] = deepcopy(dict(raw))
    object_at(out, keys[:-1])[keys[-1]] = value
    return out


def saved(config: Any) -> dict[str, Any]:
    """What is written to config.json."""
    found: dict[str, Any] = json.loads(config.to_json_string())
    return without_window(found) if config.model_type == "unlimited_ocr" else found


def unread(config: Any) -> Iterator[tuple[str, str]]:
    """The classes of transformers' configs and their keys whose values change nothing."""
    raw = saved(config)
    family = find_family(raw)
    want = towers(family, raw)
    assert want
    for at, inner in objects(config):
        for key, value in inner.to_dict().items():
            known = getattr(type(inner), "__dataclass_fields__", {})
            if key not in known or key in UNTOUCHED or OF_NO_USE.search(key) or hasattr(vars(inner)[key], "to_dict"):
                continue
            if towers(family, with_key(raw, (*at, key), other(value))) == want:
                yield type(inner).__name__, key


@EACH_OF_ITS_TYPE
def test_keys_of_encoders_are_read_or_known_to_have_no_effect(name: str) -> None:
    found = [(kind, key) for kind, key in unread(config_of(name)) if not KNOWN & {key, f"{kind}.{key}"}]
    assert found == []


@EACH_OF_ITS_TYPE
def test_other_names_of_keys_are_read(name: str) -> None:
    """transformers' classes of encoders know further names of some keys."""
    config = config_of(name)
    raw = saved(config)
    family = find_family(raw)
    for at, inner in objects(config):
        for alias, key in type(inner).attribute_map.items() if at else ():
            if not OF_NO_USE.search(key) and not KNOWN & {key, f"{type(inner).__name__}.{key}"}:
                value = other(inner.to_dict()[key])
                want = with_key(raw, (*at, key), value)
                have = with_key(raw, (*at, alias), value)
                assert towers(family, have) is None or key not in object_at(raw, at)
                object_at(have, at).pop(key, None)
                assert towers(family, have) == towers(family, want), (at, alias)


GRANITE4 = {"downsample_rate": "4/8", "deepstack_layer_map": [[-1, 0]], "qformer_config": {}}
TOWER = {"hidden_size": 128, "image_size": 384, "patch_size": 16, "num_hidden_layers": 2}
TEXT = SimpleNamespace(hidden_size=8, num_hidden_layers=4)


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"downsample_rate": None}, "downsample_rate=None is no fraction"),
        ({"downsample_rate": "4/0"}, "downsample_rate='4/0' is no fraction"),
        ({"downsample_rate": "4/7"}, "downsample_rate=4/7, and an image has 24 x 24 patches"),
        ({"downsample_rate": "2/8"}, "downsample_rate=2/8, and an image has 24 x 24 patches"),
        ({"deepstack_layer_map": [[1]]}, "deepstack_layer_map=.* is no list of pairs"),
        ({"deepstack_layer_map": [[-4, 0]]}, r"no hidden states \[-4\]"),
        ({"spatial_target_layers": [0, 1, 2, 3, 0]}, "has more than 4 layers"),
        ({"qformer_config": [1]}, "qformer_config=.* is not an object"),
        ({"qformer_config": {"model_type": "bert"}}, "a projector of the type 'bert'"),
        ({"qformer_config": {"intermediate_size": 0}}, "query_mlp=0"),
        ({"vision_config": {**TOWER, "hidden_size": 32}}, "query_heads=0"),
    ],
)
def test_projectors_of_granite_4_that_make_no_sense_are_refused(keys: dict[str, Any], fault: str) -> None:
    vision = get_family("granite4_vision").modalities[0]
    assert vision.read({**GRANITE4, "vision_config": TOWER}, TEXT).queries == 16
    with pytest.raises((ConfigError, UnsupportedConfig)) as caught:
        vision.read({**GRANITE4, "vision_config": TOWER, **keys}, TEXT)
    assert re.search(fault, "\n".join([caught.value.message, *caught.value.details]))


@pytest.mark.parametrize(
    ("part", "keys", "fault"),
    [
        ("sam_config", {"downsample_channels": [512]}, "has not the channels of two convolutions"),
        ("sam_config", {"downsample_channels": [512, 64]}, "do not end with hidden_size=896"),
        ("encoder_config", {"num_key_value_heads": 5}, "is no multiple of num_key_value_heads=5"),
        ("encoder_config", {"num_attention_heads": 9, "num_key_value_heads": 3}, "is no multiple of num_attention"),
        ("encoder_config", {"use_sliding_window": True}, "use_sliding_window=True of an encoder is not implemented"),
        ("encoder_config", 3, "encoder_config=3 is not an object"),
    ],
)
def test_encoders_of_deepseek_ocr_that_make_no_sense_are_refused(part: str, keys: Any, fault: str) -> None:
    vision, encoder = get_family("deepseek_ocr2").modalities[0], {"hidden_size": 896, "num_attention_heads": 14}
    whole = {"sam_config": {}, "encoder_config": {**encoder, "num_key_value_heads": 2}}
    assert vision.read({"vision_config": whole}, TEXT).sizes["H"] == 64
    changed = {**whole, part: {**whole[part], **keys} if isinstance(keys, dict) else keys}
    with pytest.raises((ConfigError, UnsupportedConfig)) as caught:
        vision.read({"vision_config": changed}, TEXT)
    assert fault in "\n".join([caught.value.message, *caught.value.details])


@pytest.mark.parametrize(
    ("part", "keys", "fault"),
    [
        ("sam_config", {"downsample_channels": [512, 896]}, "do not end with hidden_size=1024"),
        ("encoder_config", {"num_attention_heads": 3}, "hidden_size=1024 is no multiple of num_attention_heads=3"),
        ("encoder_config", {"hidden_act": "relu6"}, "hidden_act='relu6' of an encoder is not implemented"),
    ],
)
def test_encoders_of_the_first_deepseek_ocr_that_make_no_sense_are_refused(part: str, keys: Any, fault: str) -> None:
    vision = get_family("deepseek_ocr2").modalities[1]
    assert vision.read({"vision_config": {}}, TEXT).sizes["J"] == 2048
    with pytest.raises((ConfigError, UnsupportedConfig)) as caught:
        vision.read({"vision_config": {part: keys}}, TEXT)
    assert fault in "\n".join([caught.value.message, *caught.value.details])
