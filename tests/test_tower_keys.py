"""Every key of config.json that transformers has for encoders and projectors is read, refused, or has no effect."""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from helpers.random_configs import UNTOUCHED
from helpers.random_sights import OF_NO_USE, Keys, config_of, objects
from helpers.whole_sights import EACH
from tpuconv.errors import TpuconvError
from tpuconv.models.common.beside import VISION, PartConfig
from tpuconv.models.registry import Family, find_family

WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "sizes that tensors show": (
        *("out_hidden_size", "output_dim", "output_proj_dims", "projection_dim", "text_hidden_size"),
        *("projection_hidden_size", "Ovis2Config.hidden_size", "FunAsrNanoAdaptorConfig.hidden_size"),
        *("Qwen2VLVisionConfig.hidden_size", "Ovis2Config.vocab_size", "VoxtralEncoderConfig.vocab_size"),
    ),
    "biases that tensors show": ("Glm4vVisionConfig.attention_bias", "Glm4vMoeVisionConfig.attention_bias"),
    "new weights": ("layer_scale_init_value",),
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
        *("img_max_token_num", "max_vit_seq_len", "min_image_size", "im_start_id", "im_end_id", "im_newline_id"),
    ),
    "videos": ("pos_emb_time", "spatial_pool_mode", "spatial_pool_stride", "tokens_per_second"),
    "videos with sound": ("position_id_per_seconds", "seconds_per_chunk"),
    "memory": ("conv_chunksize",),
    "other heads": ("enable_audio_output", "token_classification_bias"),
    "transformers does not use it": (
        *("drop_vision_last_layer", "num_pos_feats", "scale_embedding", "HYV4VLVisionConfig.num_key_value_heads"),
        "HunYuanVLVisionConfig.num_key_value_heads",
        *("Llama4VisionConfig.hidden_act", "Llama4VisionConfig.norm_eps", "InklingAudioConfig.rms_norm_eps"),
        *("InklingVisionConfig.hidden_size", "InklingVisionConfig.num_attention_heads"),
        "Granite4VisionConfig.vision_feature_layer",
        *("InklingVisionConfig.rms_norm_eps", "Phi4MultimodalAudioConfig.feature_layer"),
        *("Llama4VisionConfig.multi_modal_projector_bias", "Llama4VisionConfig.vision_feature_select_strategy"),
    ),
    "the key of the config around it wins": ("insert_layer_id",),
    "the text model": (
        "tie_word_embeddings",
        *("Phi4MultimodalConfig.vocab_size", "Phi4MultimodalConfig.intermediate_size", "resid_pdrop", "embd_pdrop"),
        *("Phi4MultimodalConfig.num_hidden_layers", "Phi4MultimodalConfig.rms_norm_eps"),
        *("Phi4MultimodalConfig.rope_parameters", "original_max_position_embeddings"),
        "Phi4MultimodalConfig.sliding_window",
    ),
    "adapters, which are merged": ("has_lora_adapter",),
    "texts beside learned queries": ("Blip2QFormerConfig.vocab_size",),
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
    return found


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


@EACH
def test_keys_of_encoders_are_read_or_known_to_have_no_effect(name: str) -> None:
    found = [(kind, key) for kind, key in unread(config_of(name)) if not KNOWN & {key, f"{kind}.{key}"}]
    assert found == []


@EACH
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
