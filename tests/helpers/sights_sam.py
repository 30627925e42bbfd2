"""SAM, alone and beside SigLIP."""

from typing import Any

from helpers.sights import IMAGE, TEXT, Sight, noise, sight, tiny
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
