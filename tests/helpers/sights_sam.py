"""SAM, alone, beside SigLIP and before a decoder."""

from typing import Any

import numpy as np

from helpers.sights import IMAGE, TEXT, Sight, noise, sight, text_of, tiny
from helpers.sights_llava import LLAMA, SIGLIP_VISION, with_images

SAM: dict[str, Any] = {
    **{"hidden_size": 24, "output_channels": 10, "num_hidden_layers": 3, "num_attention_heads": 3},
    **{"image_size": 28, "patch_size": 4, "window_size": 3, "global_attn_indexes": [1], "mlp_dim": 40},
}
"""An image has 7 x 7 patches, so that windows at the border are not full."""


def got(**changes: Any) -> Sight:
    from transformers import GotOcr2Config, GotOcr2ForConditionalGeneration

    text = {**TEXT, "model_type": "qwen2"}
    config = GotOcr2Config(text_config=text, vision_config={**SAM, **changes}, image_token_index=IMAGE)
    rows = [[5, *with_images(4, 4), 7], [8, 4, *with_images(4), 6]]
    return Sight(tiny(GotOcr2ForConditionalGeneration, config), rows, {"pixel_values": noise(3, 3, 28, 28)})


@sight
def got_ocr2() -> Sight:
    return got()


@sight
def got_ocr2_without_distances() -> Sight:
    return got(use_rel_pos=False, use_abs_pos=False, qkv_bias=False, hidden_act="relu")


@sight
def deepseek_vl_hybrid() -> Sight:
    import torch
    from transformers import DeepseekVLHybridConfig, DeepseekVLHybridForConditionalGeneration

    high = {key: x for key, x in SAM.items() if key != "mlp_dim"} | {"mlp_ratio": 1.5, "global_attn_indexes": [1, 2]}
    config = DeepseekVLHybridConfig(
        text_config=LLAMA,
        vision_config=SIGLIP_VISION,
        high_res_vision_config={**high, "model_type": "sam_vision_model"},
        image_token_id=IMAGE,
    )
    rows = [[5, *with_images(9, 9), 7], [8, 4, *with_images(9), 6]]
    features = {"pixel_values": noise(3, 3, 12, 12), "high_res_pixel_values": noise(3, 3, 28, 28, seed=2)}
    model = tiny(DeepseekVLHybridForConditionalGeneration, config)
    with torch.no_grad():  # convolutions add up, and SAM's features would hide SigLIP's
        model.model.aligner.high_res_vision_proj.weight.mul_(0.03)
    return Sight(model, rows, features)


def ocr(sam: dict[str, Any], image: int, tile: int, queries: int, **encoder: Any) -> Sight:
    """An image with two tiles, and one without."""
    from transformers import DeepseekOcr2Config, DeepseekOcr2ForConditionalGeneration

    decoder = {"hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = DeepseekOcr2Config(
        text_config={**text_of("deepseek_ocr2"), **TEXT},
        vision_config={
            "sam_config": {**SAM, "downsample_channels": [14, 20], **sam},
            "encoder_config": {**decoder, "num_key_value_heads": 1, "vocab_size": 3, **encoder},
        },
        image_token_id=IMAGE,
    )
    rows = [[5, *with_images(2 * 144 + queries + 1), 7], [8, 4, *with_images(queries + 1), 6]]
    features = {
        "pixel_values": noise(2, 3, image, image),
        "pixel_values_local": noise(2, 3, tile, tile, seed=2),
        "num_local_patches": np.array([2, 0]),
    }
    return Sight(tiny(DeepseekOcr2ForConditionalGeneration, config), rows, features)


@sight
def deepseek_ocr2() -> Sight:
    """Positions and distances are interpolated to 9 x 9 and 5 x 5 patches."""
    return ocr({}, 36, 20, 144)


@sight
def deepseek_ocr2_of_large_images() -> Sight:
    """13 x 13 patches are left of 52 x 52; a tile has 6 x 6 of 22 x 22, without positions."""
    sam = {"patch_size": 2, "image_size": 104, "use_abs_pos": False, "qkv_bias": False, "num_hidden_layers": 2}
    return ocr(sam, 104, 44, 256, num_key_value_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 100.0})
