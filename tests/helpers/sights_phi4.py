"""Tiny models of Phi-4-multimodal."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from helpers.families import CASES, SIZES
from helpers.sights import IMAGE, SOUND, Sight, noise, sight, tiny

NO_KEYS: Mapping[str, Any] = {}


def phi4(
    rows: list[list[int]],
    features: dict[str, np.ndarray],
    *,
    vision: Mapping[str, Any] = NO_KEYS,
    audio: Mapping[str, Any] = NO_KEYS,
) -> Sight:
    """A case with the text model of the family's first case."""
    from transformers import Phi4MultimodalConfig, Phi4MultimodalForCausalLM

    case = next(case for case in CASES if case.family == "phi4_multimodal")
    text = {key: value for key, value in case.config.items() if not key.endswith("_config")}
    config = Phi4MultimodalConfig(
        **{**SIZES, **text},
        vision_config={
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "image_size": 16,
            "crop_size": 16,
            "patch_size": 4,
            "image_token_id": IMAGE,
            **vision,
        },
        audio_config={
            "hidden_size": 20,
            "intermediate_size": 28,
            "num_blocks": 2,
            "num_attention_heads": 2,
            "input_size": 12,
            "nemo_conv_channels": 6,
            "ext_pw_out_channel": 20,
            "depthwise_separable_out_channel": 20,
            "bias_max_distance": 4,
            "audio_token_id": SOUND,
            **audio,
        },
    )
    model = tiny(Phi4MultimodalForCausalLM, config)
    normalizing = model.model.embed_tokens_extend.audio_embed.encoder.encoder_embedding
    for buffer in normalizing.buffers():
        buffer.normal_().add_(1)
    return Sight(model, rows, features, parts=("vision", "audio"))


def tiles(side: int, pixels: int, *images: tuple[int, int, int, int]) -> dict[str, np.ndarray]:
    """Images by their rows and columns of tiles, and rows and columns of patches that are no padding."""
    most = 1 + max(h * w for h, w, _, _ in images)
    masks = np.ones((len(images), most, side, side), bool)
    for mask, (h, w, rows, columns) in zip(masks, images, strict=True):
        whole = (np.arange(h * side) < rows)[:, None] & (np.arange(w * side) < columns)
        mask[1 : 1 + h * w] = whole.reshape(h, side, w, side).swapaxes(1, 2).reshape(-1, side, side)
    return {
        "image_pixel_values": noise(len(images), most, 3, pixels, pixels),
        "image_sizes": np.array([(h * pixels, w * pixels) for h, w, _, _ in images]),
        "image_attention_mask": masks,
    }


def sounds(mels: int, *frames: int) -> dict[str, np.ndarray]:
    """Sounds of so many frames, as its feature extractor returns them: one alone has no mask."""
    mask = {"audio_attention_mask": np.arange(max(frames)) < np.array(frames)[:, None]} if len(frames) > 1 else {}
    sizes = np.array([-(-n // 8) for n in frames])
    return {"audio_input_features": noise(len(frames), max(frames), mels, seed=2), "audio_embed_sizes": sizes, **mask}


@sight
def phi4_multimodal() -> Sight:
    """Images of 1 x 2 tiles, the second half padding, of 2 x 1, and of one; sounds beside them."""
    images = [[IMAGE] * n for n in (2 * 4 + 1 + 6, 3 * 3 + 1 + 6, 2 * 3 + 1 + 6)]
    rows = [[5, *images[0], 7, *images[1], 9, *[SOUND] * 4, 11], [8, 4, *[SOUND] * 2, 6, *images[2], 3]]
    features = tiles(4, 16, (1, 2, 4, 6), (2, 1, 5, 4), (1, 1, 4, 4)) | sounds(12, 29, 16)
    return phi4(rows, features)


@sight
def phi4_multimodal_of_odd_tiles() -> Sight:
    """Tiles of 3 x 3 patches, and the output of the first layer; one sound."""
    rows = [[5, *[IMAGE] * (2 * 4 + 1 + 6), 7, 9], [8, 4, *[SOUND] * 5, 6]]
    features = tiles(3, 15, (1, 2, 3, 5)) | sounds(9, 37)
    vision = {"image_size": 15, "crop_size": 15, "patch_size": 5, "feature_layer": 1, "hidden_act": "gelu"}
    audio = {
        **{"input_size": 9, "depthwise_multiplier": 2, "kernel_size": 1, "bias_symmetric": True},
        **{"bias_max_distance": 50, "activation": "relu", "conv_activation": "gelu", "conv_glu_type": "relu"},
    }
    return phi4(rows, features, vision=vision, audio=audio)


@sight
def phi4_multimodal_of_long_sounds() -> Sight:
    """A sound alone, with more features than a window: transformers takes no second one beside it."""
    rows = [[5, *[SOUND] * 512, 7, 9], [8, 4, 3, 6]]
    return phi4(rows, sounds(12, 4093))


@sight
def phi4_multimodal_of_chunks() -> Sight:
    """Sounds alone, whose frames see their own chunk and the one before."""
    rows = [[5, *[SOUND] * 12, 7, 9], [8, 4, *[SOUND] * 9, 6, *[SOUND] * 3]]
    return phi4(rows, sounds(12, 93, 70, 20), audio={"chunk_size": 3, "left_chunk": 1})
