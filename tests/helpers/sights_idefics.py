"""Towers for padded images: Idefics, SmolVLM, Aria."""

from typing import Any

import numpy as np

from helpers.sights import IMAGE, TEXT, Sight, noise, sight, tiny
from helpers.sights_llava import LLAMA, with_images

NAVIT_VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 32,
    "patch_size": 4,
}


def padded_images(*sizes: tuple[int, int], side: tuple[int, int] = (24, 24)) -> dict[str, np.ndarray]:
    """Images and their masks: the pixels in their upper left corner, the rest is 0."""
    pixels, mask = noise(len(sizes), 3, *side), np.zeros((len(sizes), *side), bool)
    for i, (height, width) in enumerate(sizes):
        mask[i, :height, :width] = True
    return {"pixel_values": pixels * mask[:, None], "pixel_attention_mask": mask}


def idefics(cls: Any, config: Any, tokens: int, side: tuple[int, int]) -> Sight:
    """Two texts, with two images and with one, which has padding in place of the second."""
    images = padded_images((16, 20), side, (8, 24), (0, 0), side=side)
    features = {name: array.reshape(2, 2, *array.shape[1:]) for name, array in images.items()}
    rows = [[5, *with_images(tokens, tokens), 7], [8, 4, *with_images(tokens), 6]]
    return Sight(tiny(cls, config), rows, features)


@sight
def idefics3() -> Sight:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    config = Idefics3Config(text_config=LLAMA, vision_config=NAVIT_VISION, image_token_id=IMAGE, scale_factor=3)
    return idefics(Idefics3ForConditionalGeneration, config, 4, (24, 24))


@sight
def smolvlm() -> Sight:
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    config = SmolVLMConfig(text_config=LLAMA, vision_config=NAVIT_VISION, image_token_id=IMAGE, scale_factor=2)
    return idefics(SmolVLMForConditionalGeneration, config, 9, (24, 24))


PERCEIVER = {
    "hidden_size": 32,
    "resampler_n_latents": 5,
    "resampler_depth": 2,
    "resampler_n_heads": 6,
    "resampler_head_dim": 10,
    "num_key_value_heads": 2,
    "rms_norm_eps": 0.01,
}


@sight
def idefics2() -> Sight:
    """Parts of patches are padding."""
    from transformers import Idefics2Config, Idefics2ForConditionalGeneration

    config = Idefics2Config(
        text_config={**TEXT, "model_type": "mistral"},
        vision_config=NAVIT_VISION,
        perceiver_config=PERCEIVER,
        image_token_id=IMAGE,
    )
    return idefics(Idefics2ForConditionalGeneration, config, 5, (24, 30))


@sight
def aria() -> Sight:
    from transformers import AriaConfig, AriaForConditionalGeneration

    experts = {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 2, "intermediate_size": 24}
    config = AriaConfig(
        text_config={**TEXT, "model_type": "aria_text", **experts},
        vision_config={**NAVIT_VISION, "model_type": "idefics3_vision"},
        image_token_index=IMAGE,
        projector_patch_to_query_dict={"36": 5, "64": 7},
    )
    rows = [[5, *with_images(5, 5), 7], [8, 4, *with_images(5), 6]]
    images = padded_images((16, 20), (24, 24), (8, 24))
    features = {"pixel_values": images["pixel_values"], "pixel_mask": images["pixel_attention_mask"]}
    return Sight(tiny(AriaForConditionalGeneration, config), rows, features)


def docling(side: int, tokens: int, features: dict[str, np.ndarray], **changes: Any) -> Sight:
    """Two texts with two tiles and with one."""
    from transformers import AutoConfig, AutoModelForMultimodalLM

    factors = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}
    text = {**TEXT, **factors, "logits_scaling": 2.0, "num_hidden_layers": 4}
    vision = {**NAVIT_VISION, "num_hidden_layers": 3, "image_size": 4 * side, "out_hidden_size": 32, **changes}
    config = AutoConfig.for_model(
        "granite_docling",
        text_config=text,
        vision_config={**vision, "deepstack_visual_indexes": [0, 1]},
        image_token_id=IMAGE,
        density_router_hidden_size=7 if vision.get("use_fine_route", True) else None,
    )
    rows = [[5, *with_images(tokens, tokens), 7], [8, 4, *with_images(tokens), 6]]
    tiles = {
        "pixel_values": noise(2, 2, 3, 4 * side, 4 * side),
        "pixel_attention_mask": np.array([[True, True], [True, False]]),
    }
    return Sight(tiny(AutoModelForMultimodalLM, config), rows, {**tiles, **features})


@sight
def granite_docling() -> Sight:
    return docling(9, 9, {}, use_fine_route=False, scale_factor=3)


@sight
def granite_docling_fine() -> Sight:
    return docling(8, 16, {"tile_fine_mask": np.ones((2, 2), bool)})
