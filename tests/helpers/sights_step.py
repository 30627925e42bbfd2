"""Step-3.7, Step-3, Step3-VL and Step-5 Preview."""

from typing import Any

import numpy as np

from helpers.sights import IMAGE, TEXT, Sight, noise, sight, text_of, tiny
from helpers.sights_llava import with_images

VISION: dict[str, Any] = {
    **{"width": 24, "layers": 3, "heads": 3, "image_size": 28, "patch_size": 4, "mlp_ratio": 1.7},
}


def step(features: dict[str, np.ndarray], *counts: int, seed: int = 0, **changes: Any) -> Sight:
    """Two texts, the first with two images."""
    from transformers import AutoConfig, AutoModelForMultimodalLM

    text = {**text_of("step3p7"), "vocab_size": 97}
    config = AutoConfig.for_model("step3p7", text_config=text, vision_config=VISION, image_token_id=IMAGE, **changes)
    rows = [[5, *with_images(*counts[:2]), 7], [8, 4, *with_images(counts[2]), 6]]
    return Sight(tiny(AutoModelForMultimodalLM, config, seed), rows, features)


@sight
def step3p7() -> Sight:
    """Images of 7 x 7 patches, of which the first has three tiles of 5 x 5, and the last one."""
    tiles = {"pixel_values_local": noise(4, 3, 20, 20, seed=2), "num_local_patches": np.array([3, 0, 1])}
    return step({"pixel_values": noise(3, 3, 28, 28), **tiles}, 16, 4, 8)


@sight
def step3p7_without_tiles() -> Sight:
    # with the weights of seed 0 the fourth and the fifth expert of a token have scores that differ by 1e-6
    return step({"pixel_values": noise(3, 3, 28, 28)}, 4, 4, 4, seed=1, projector_bias=True)


TILES = {"patch_pixel_values": noise(4, 3, 28, 28, seed=2), "num_patches": np.array([3, 0, 1])}


@sight
def step3_vl() -> Sight:
    """Images of 11 x 11 patches, of which the first has three tiles of 7 x 7, and the last one."""
    from helpers.released_code.step_vision import Config, Step3VLForConditionalGeneration

    text = {**text_of("step3_text"), "vocab_size": 97, "model_type": "step3_text", "tie_word_embeddings": False}
    vision = {
        **{"hidden_size": 24, "intermediate_size": 40, "output_hidden_size": 20, "num_hidden_layers": 3},
        **{"num_attention_heads": 3, "image_size": 44, "patch_size": 4, "hidden_act": "quick_gelu"},
        **{"num_channels": 3, "layer_norm_eps": 1e-5, "model_type": "step3_vision_encoder"},
    }
    config = Config(text_config=text, vision_config=vision, understand_projector_stride=2, image_token_id=IMAGE)
    rows = [[5, *with_images(3 * 4 + 9, 9), 7], [8, 4, *with_images(4 + 9), 6]]
    return Sight(tiny(Step3VLForConditionalGeneration, config), rows, {"pixel_values": noise(3, 3, 44, 44), **TILES})


def released(kind: str, text: dict[str, Any]) -> Sight:
    """Images of 11 x 11 patches, of which the first has three tiles of 7 x 7, and the last one."""
    from helpers.released_code import step_vision

    vision = {
        **{"width": 24, "layers": 3, "heads": 3, "image_size": 44, "patch_size": 4, "mlp_ratio": 1.7},
        **{"hidden_act": "quick_gelu", "ls_init_value": 0.1, "num_channels": 3, "output_dim": None},
        **{"use_abs_posemb": True, "use_cls_token": False, "use_ln_post": False, "use_ln_pre": True},
        **{"use_rope2d": True, "model_type": "perception_encoder"},
    }
    model = getattr(step_vision, kind)
    config = model.config_class(text_config=text, vision_config=vision, image_token_id=IMAGE)
    rows = [[5, *with_images(3 * 4 + 9, 9), 7], [8, 4, *with_images(4 + 9), 6]]
    return Sight(tiny(model, config), rows, {"pixel_values": noise(3, 3, 44, 44), **TILES})


@sight
def step_robotics() -> Sight:
    text = {**TEXT, "model_type": "qwen3", "tie_word_embeddings": False}
    return released("StepVLForConditionalGeneration", text)


@sight
def step3p5v() -> Sight:
    text = {**text_of("step4"), "vocab_size": 97, "model_type": "step4", "tie_word_embeddings": False}
    return released("MMGPTStepRoboticsForCausalLM", text)
