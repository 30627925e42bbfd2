"""Towers that take images of any size as one sequence of patches: of Cosmos 3 Edge, Hy4-VL, Hunyuan-VL, MiniMax-M3."""

from typing import Any

import numpy as np

from helpers.sights import GRIDS, IMAGE, QWEN_TOKENS, Sight, noise, qwen, sight, text_of, tiny, wide
from helpers.sights_llava import SIGLIP_VISION, with_images

CLIP_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size")
PACKED: dict[str, Any] = {key: SIGLIP_VISION[key] for key in CLIP_KEYS}


EDGE_NAMES = {
    r"^(model\.visual\..*)\.to_([qkv])\.": r"\1.\2_proj.",
    r"^(model\.visual\..*)\.up_proj\.": r"\1.fc1.",
    r"^(model\.visual\..*)\.down_proj\.": r"\1.fc2.",
}
"""transformers renames the tower's layers as those of the text when it saves them; the release does not."""


@sight
def cosmos3_edge() -> Sight:
    from transformers import AutoConfig, AutoModelForMultimodalLM

    config = AutoConfig.for_model(
        "cosmos3_edge",
        text_config=wide(4, 2, 2),
        vision_config={**PACKED, "num_patches": 64},
        projector_hidden_size=44,
        **QWEN_TOKENS,
    )
    case = qwen(AutoModelForMultimodalLM, config)
    patches = noise(int(GRIDS.prod(axis=1).sum()), 3 * 4 * 4)
    return Sight(case.model, case.rows, {**case.features, "pixel_values": patches}, case.kinds, released=EDGE_NAMES)


def hy4(**changes: Any) -> Sight:
    from transformers import HYV4VLConfig, HYV4VLForConditionalGeneration

    layers = {"num_hidden_layers": 2, "indexer_types": ["full", "shared"], "mlp_layer_types": ["dense", "sparse"]}
    text = {**text_of("hy_v4_vl"), "vocab_size": 97, **layers}
    vision = {**PACKED, "max_image_size": 20, "out_hidden_size": text["hidden_size"], **changes}
    config = HYV4VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=92)
    rows = [[5, 9, *with_images(18, 12), 11, 7], [7, *with_images(10), 3]]
    grids = np.array([(1, 6, 10), (1, 8, 4), (1, 4, 8)])
    features = {"pixel_values": noise(int(grids.prod(axis=1).sum()), 3 * 4 * 4), "image_grid_thw": grids}
    return Sight(tiny(HYV4VLForConditionalGeneration, config), rows, features, {"mm_token_type_ids": {IMAGE: 1}})


@sight
def hy_v4_vl() -> Sight:
    return hy4()


def hunyuan(*sections: int, **changes: Any) -> Sight:
    from transformers import HunYuanVLConfig, HunYuanVLForConditionalGeneration

    text = wide(*sections)
    text["rope_parameters"] |= {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}
    vision = {**PACKED, "max_image_size": 20, **changes}
    config = HunYuanVLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE)
    rows = [[5, 9, *with_images(20, 14), 11, 7], [7, *with_images(12), 3]]
    grids = np.array([(1, 6, 10), (1, 8, 4), (1, 4, 8)])
    features = {"pixel_values": noise(int(grids.prod(axis=1).sum()), 3 * 4 * 4), "image_grid_thw": grids}
    return Sight(tiny(HunYuanVLForConditionalGeneration, config), rows, features, {"mm_token_type_ids": {IMAGE: 1}})


@sight
def hunyuan_vl() -> Sight:
    return hunyuan(2, 2, 2, 2)


@sight
def hunyuan_vl_of_three_axes() -> Sight:
    return hunyuan(4, 1, 3, interpolate_mode="bicubic", hidden_act="gelu_pytorch_tanh", num_hidden_layers=1)


@sight
def hy_v4_vl_with_bicubic_positions() -> Sight:
    return hy4(interpolate_mode="bicubic", hidden_act="gelu_pytorch_tanh")


def lfm3(**changes: Any) -> Sight:
    """Images of which the smallest has fewer rows than the kernel of the convolutions."""
    from transformers import AutoConfig, AutoModelForMultimodalLM

    text = {**text_of("lfm3"), "model_type": "lfm3", "vocab_size": 97}
    vision = {**PACKED, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, **changes}
    config = AutoConfig.for_model(
        "lfm3_vl",
        text_config=text,
        vision_config=vision,
        projector_hidden_size=20,
        **QWEN_TOKENS,
    )
    rows = [[5, 9, *with_images(15, 16), 11, 7], [7, *with_images(3), 3]]
    grids = np.array([(1, 6, 10), (2, 8, 4), (1, 2, 6)])
    features = {"pixel_values": noise(int(grids.prod(axis=1).sum()), 3 * 2 * 4 * 4), "image_grid_thw": grids}
    return Sight(tiny(AutoModelForMultimodalLM, config), rows, features)


@sight
def lfm3_vl() -> Sight:
    return lfm3()


@sight
def lfm3_vl_of_larger_kernels() -> Sight:
    return lfm3(conv_kernel_size=5, layer_types=["full_attention", "conv", "conv", "full_attention"])


@sight
def minimax_m3_vl() -> Sight:
    """A head of the tower has 8 dimensions, of which 6 turn; an image is a clip of two frames. No text is padded, since
    the reference counts padding in the blocks of keys."""
    from transformers import AutoConfig, AutoModelForMultimodalLM

    text = {**text_of("minimax_m3_vl"), "vocab_size": 97}
    config = AutoConfig.for_model(
        "minimax_m3_vl", text_config=text, vision_config=PACKED, image_token_index=IMAGE, projector_hidden_size=20
    )
    rows = [[5, 9, *with_images(15, 16), 11, 7], [7, *with_images(8), 3, *range(10, 37)]]
    grids = np.array([(1, 6, 10), (2, 8, 4), (1, 4, 8)])
    features = {"pixel_values": noise(int(grids.prod(axis=1).sum()), 3 * 2 * 4 * 4), "image_grid_thw": grids}
    return Sight(tiny(AutoModelForMultimodalLM, config), rows, features)
