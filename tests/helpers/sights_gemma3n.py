"""A tiny Gemma 3n, whose encoder of images is timm's with a sixteenth of the channels."""

from typing import Any

import numpy as np

from helpers.sights import TEXT, Sight, noise, sight, tiny
from helpers.timm_models import with_timm

WORDS = 90
"""The ids of text. Behind them are the ids of images, then the ids of sounds, of which two stand around them."""
END_OF_IMAGE, IMAGE, END_OF_SOUND, SOUND = 90, 91, 93, 94
IMAGES, SOUNDS = 15, 6
"""The placeholders of an image, and of a sound."""


def gemma3n_config() -> Any:
    """A config of transformers. Images have 3 x 5 features."""
    from transformers import Gemma3nConfig

    text = {
        **TEXT,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 6,
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": WORDS,
        "laurel_rank": 5,
        "altup_num_inputs": 3,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    }
    args = {"channel_multiplier": 1 / 16, "msfa_output_resolution": [3, 5]}
    audio = {
        "hidden_size": 24,
        "input_feat_size": 10,
        "vocab_size": 4,
        "vocab_offset": END_OF_SOUND,
        "sscp_conv_channel_size": [8, 6],
        "conf_num_attention_heads": 3,
        "conf_num_hidden_layers": 2,
        "conf_attention_chunk_size": 5,
        "conf_attention_context_left": 4,
        "conf_reduction_factor": 3,
        "conf_conv_kernel_size": 4,
        "rms_norm_eps": 1e-3,
    }
    return Gemma3nConfig(
        text_config=text,
        vision_config={"vocab_size": 3, "vocab_offset": WORDS, "rms_norm_eps": 1e-3, "model_args": args},
        audio_config=audio,
        vision_soft_tokens_per_image=IMAGES,
        audio_soft_tokens_per_image=SOUNDS,
        image_token_id=IMAGE,
        audio_token_id=SOUND,
        boi_token_id=88,
        eoi_token_id=END_OF_IMAGE,
        boa_token_id=89,
        eoa_token_id=END_OF_SOUND,
    )


def of_unit_size(model: Any) -> Any:
    """The model with kernels of convolutions divided by the root of what they sum over, and norms near 1: else scores
    of attention are so large that float32 loses their differences."""
    import torch

    with torch.no_grad():
        for name, parameter in model.model.vision_tower.named_parameters():
            if parameter.ndim == 4:
                parameter.copy_(torch.randn_like(parameter) / parameter[0].numel() ** 0.5)
            elif ".bn" in name:
                parameter.add_(1)
    return model


@sight
def gemma3n() -> Sight:
    from transformers import Gemma3nForConditionalGeneration

    with_timm()
    image, sound = [88, *[IMAGE] * IMAGES, END_OF_IMAGE], [89, *[SOUND] * SOUNDS, END_OF_SOUND]
    rows = [[5, 9, *image, 3, *sound, 11, 7], [8, 4, *sound, *image, 6, *image]]
    is_sound = np.ones((2, 50), bool)  # of which the last features are not all of the placeholders
    is_sound[1, 25:] = False
    features = {
        "pixel_values": noise(3, 3, 96, 160),
        "input_features": noise(2, 50, 10),
        "input_features_mask": is_sound,
    }
    # with other seeds the differences of rounding double in some layers of the text
    model = of_unit_size(tiny(Gemma3nForConditionalGeneration, gemma3n_config(), seed=8))
    return Sight(model, rows, features, parts=("vision", "audio"))


@sight
def fast_vlm() -> Sight:
    """Images of 2 x 3 features."""
    from transformers import FastVlmConfig, FastVlmForConditionalGeneration

    with_timm()
    args = {"inference_mode": True, "layers": [1, 2, 1, 1, 2], "embed_dims": [4, 8, 16, 32, 64]}
    vision = {"architecture": "fastvit_mci3", "hidden_size": 128, "model_args": args}
    config = FastVlmConfig(text_config={**TEXT, "model_type": "qwen2"}, vision_config=vision, image_token_index=IMAGE)
    rows = [[5, 9, *[IMAGE] * 6, 3, *[IMAGE] * 6, 7], [8, 4, *[IMAGE] * 6, 6]]
    model = of_unit_size(tiny(FastVlmForConditionalGeneration, config))
    return Sight(model, rows, {"pixel_values": noise(3, 3, 100, 170)})
