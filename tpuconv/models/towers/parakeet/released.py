"""How Nemotron Omni sees and hears, and its config.json with the keys of releases."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tpuconv.models.common.beside import AUDIO, VISION, Modality
from tpuconv.models.common.key_types import object_of
from tpuconv.models.towers.parakeet.family import PARAKEET, SOUND_SQUARED
from tpuconv.models.towers.radio.family import LLAMA_SQUARES, RADIO, SQUARES
from tpuconv.models.towers.radio.released import in_keys_of_radio

NEMOTRON_VISION = Modality(
    VISION,
    RADIO,
    SQUARES,
    prefix="vision_model.radio_model.",
    projector_prefix="",
    replaces=("vision_model", "mlp1", "vision_projector"),
    placeholder=("image_token_id",),
    placeholder_id=18,
)

LLAMA_NEMOTRON_VISION = replace(
    NEMOTRON_VISION, projector=LLAMA_SQUARES, placeholder_id=None, placeholder_token="<image>"
)
"""Llama Nemotron Nano VL."""

NEMOTRON_AUDIO = Modality(
    AUDIO,
    PARAKEET,
    SOUND_SQUARED,
    prefix="sound_encoder.encoder.",
    projector_prefix="sound_projection.",
    placeholder=("audio_token_id",),
    placeholder_id=27,
    config_key="audio_config",
    defaults={"attention_bias": False, "scale_input": False},
)

NEMOTRON_OMNI_TYPES = ("NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Super_Omni_Reasoning_V3")
"""The model types of releases, which are their architectures too."""

NEMOTRON_KEYS = {
    "llm_config": "text_config",
    "sound_config": "audio_config",
    "img_context_token_id": "image_token_id",
    "sound_context_token_id": "audio_token_id",
    "video_context_token_id": "video_token_id",
    "vit_hidden_size": "vision_hidden_size",
}
"""Keys of releases, and what transformers has in their place."""

KEYS_OF_MEDIA = (
    *("downsample_ratio", "force_image_size", "image_tag_type", "norm_mean", "norm_std", "patch_size", "ps_version"),
    *("img_context_token", "img_start_token", "img_end_token", "sound_context_token", "template", "use_thumbnail"),
)
"""Keys beside `text_config` of encoders, processors and prompts."""


def in_keys_of_nemotron_omni(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a parsed config.json in the keys of transformers, which win over the keys of releases. A release has a
    type of the encoder of sounds that transformers does not know.

    Raises:
        ConfigError: a value that has to be an object is none.
    """
    renamed = {new: raw[old] for old, new in NEMOTRON_KEYS.items() if raw.get(old) is not None}
    if "audio_config" in renamed:
        sounds = object_of(renamed, "audio_config")
        renamed["audio_config"] = {key: value for key, value in sounds.items() if key != "model_type"}
    kept = {key: value for key, value in raw.items() if key not in NEMOTRON_KEYS}
    kept["vision_config"] = in_keys_of_radio(object_of(raw, "vision_config"))
    return kept | {key: value for key, value in renamed.items() if kept.get(key) is None}


def in_keys_of_nemotron_vl(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a parsed config.json of Nemotron Nano VL, which sees each frame of a video as an image, in the keys of
    transformers.

    Raises:
        ConfigError: a value that has to be an object is none.
    """
    found, frames = in_keys_of_nemotron_omni(raw), {"video_temporal_patch_size": None}
    return {**frames, **found, "vision_config": {**frames, **object_of(found, "vision_config")}}
