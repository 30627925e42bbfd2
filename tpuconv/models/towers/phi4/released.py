"""The release of Phi-4-multimodal with code of its own: its config.json in the keys of transformers, and its names."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tpuconv.models.common.beside import AUDIO, VISION, Modality
from tpuconv.models.common.encoder_keys import in_our_keys
from tpuconv.models.common.key_types import object_of
from tpuconv.models.towers.phi4.family import GATED_ROWS, PHI4_CONFORMER, PHI4_IMAGE_ENDS, PHI4_SOUND_ENDS, PHI4_VIT
from tpuconv.notation.forms import Forms
from tpuconv.notation.table import Map

OF_ENCODERS = frozenset({"embd_layer", "img_processor", "audio_processor", "speech_lora", "vision_lora"})
"""The keys of the release that say nothing about the text model."""

SOUND_KEYS = {
    "attention_dim": "hidden_size",
    "attention_heads": "num_attention_heads",
    "linear_units": "intermediate_size",
    "depthwise_seperable_out_channel": "depthwise_separable_out_channel",
    "nemo_conv_settings.conv_channels": "nemo_conv_channels",
    "relative_attention_bias_args.t5_bias_max_distance": "bias_max_distance",
}
"""Keys of `audio_processor.config`, and what `audio_config` of transformers has in their place."""

OF_SOUND_ENDS = ("downsample_rate", "projection_cls", "use_conv_downsample", "use_qformer")
OF_IMAGE_ENDS = (
    *("crop_size", "hd_transform_order", "image_token_compression_cls", "projection_cls", "use_hd_transform"),
    "with_learnable_separator",
)
"""Keys of `embd_layer.audio_embd_layer` and of `embd_layer.image_embd_layer` that say how a model computes."""


def in_keys_of_transformers(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parsed config.json with `vision_config` and `audio_config` in place of the release's keys, where it has
    these. What it says in transformers' keys wins.

    Raises:
        ConfigError: a value that has to be an object is none.
    """
    if not OF_ENCODERS & raw.keys():
        return dict(raw)
    sound_ends, image_ends = (_at(raw, f"embd_layer.{name}_embd_layer") for name in ("audio", "image"))
    audio = in_our_keys(_flat(_at(raw, "audio_processor.config")), SOUND_KEYS)
    audio |= {key: value for key, value in sound_ends.items() if key in OF_SOUND_ENDS}
    vision = {key: value for key, value in image_ends.items() if key in OF_IMAGE_ENDS}
    around = {key: value for key, value in raw.items() if key not in OF_ENCODERS}
    found = {"vision_config": vision | _at(raw, "vision_config"), "audio_config": audio | _at(raw, "audio_config")}
    return around | found


def _at(raw: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Returns the object of a parsed config.json below these keys; an empty one if there is none."""
    found = dict(raw)
    for key in at.split("."):
        found = object_of(found, key)
    return found


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an object with the keys of objects in it, behind their name and a dot."""
    inner = {
        f"{k}.{key}": each for k, value in values.items() if isinstance(value, Mapping) for key, each in value.items()
    }
    return {key: value for key, value in values.items() if not isinstance(value, Mapping)} | inner


RELEASED_VECTORS = {"global_img_feature_extensor": "glb_GN", "sub_img_feature_extensor": "sub_GN"}
RELEASED_HEADS = {
    **{f"self_attn.{x}_proj.": f"self_attn.linear_{x}." for x in "qkv"},
    "self_attn.o_proj.": "self_attn.linear_out.",
}
_NUMBERED = {
    **{"gate_up_proj.": "net.0.linear.", "down_proj.": "net.2."},
    **{"img_projection_up.": "img_projection.0.", "img_projection_down.": "img_projection.2."},
    **{f"{x}_proj_for_speech.": f"audio_projection.speech.{i}." for x, i in (("up", 0), ("down", 2))},
    **{f"{x}_proj_for_vision_speech.": f"audio_projection.vision.{i}." for x, i in (("up", 0), ("down", 2))},
}
RELEASED_PARTS: Mapping[str, str] = {**RELEASED_VECTORS, **RELEASED_HEADS, **_NUMBERED}
"""Parts of the names of transformers, and the ones of the release."""


def _forms(rows: Sequence[Map]) -> Forms:
    """Returns rows with the names of transformers and with the ones of the release, of those that differ in numbers."""
    found = {name: row for row in rows for name in row.hf_names if name.startswith(tuple(_NUMBERED))}
    renamed = tuple(
        replace(row, hf=other + name.removeprefix(part))
        for name, row in found.items()
        for part, other in _NUMBERED.items()
        if name.startswith(part)
    )
    return {"transformers": tuple(found.values()), "released": renamed}


RELEASED_FORMS = (_forms(GATED_ROWS), _forms(PHI4_IMAGE_ENDS.rows), _forms(PHI4_SOUND_ENDS.rows))


PHI4_VISION = Modality(
    VISION,
    PHI4_VIT,
    PHI4_IMAGE_ENDS,
    prefix="model.embed_tokens_extend.image_embed.img_processor.",
    projector_prefix="model.embed_tokens_extend.image_embed.",
    replaces=("embed_tokens_extend.image_embed",),
    placeholder=("image_token_id",),
    placeholder_id=200010,
    other_parts=RELEASED_VECTORS,
)

PHI4_AUDIO = Modality(
    AUDIO,
    PHI4_CONFORMER,
    PHI4_SOUND_ENDS,
    prefix="model.embed_tokens_extend.audio_embed.encoder.",
    projector_prefix="model.embed_tokens_extend.audio_embed.",
    replaces=("embed_tokens_extend.audio_embed",),
    placeholder=("audio_token_id",),
    placeholder_id=200011,
    config_key="audio_config",
    other_parts=RELEASED_HEADS,
)
