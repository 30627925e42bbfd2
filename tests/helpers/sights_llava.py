"""LLaVA and its kin."""

from dataclasses import replace
from typing import Any

import numpy as np

from helpers.sights import END, IMAGE, START, TEXT, Sight, noise, sight, tiny
from helpers.timm_models import with_timm

CLIP_VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 12,
    "patch_size": 4,
}
SIGLIP_VISION = {**CLIP_VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
OLDER_TOWER = {r"^vision_tower\.": "vision_tower.vision_model."}
NEWER = {
    r"^language_model\.lm_head": "lm_head",
    r"^language_model\.model": "model.language_model",
    r"^(vision_tower|multi_modal_projector|image_newline)": r"model.\1",
}
"""Names as transformers 4.52 and later wrote them."""
LLAMA = {**TEXT, "model_type": "llama"}


def with_images(*counts: int) -> list[int]:
    """Images of so many placeholders, with something around each."""
    return [token for count in counts for token in (START, *[IMAGE] * count, END)]


@sight
def llava() -> Sight:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(text_config=LLAMA, vision_config=CLIP_VISION, image_token_index=IMAGE)
    rows = [[5, *with_images(9, 9), 7], [8, 4, *with_images(9), 6]]
    features = {"pixel_values": noise(3, 3, 12, 12)}
    return Sight(tiny(LlavaForConditionalGeneration, config), rows, features, released=OLDER_TOWER)


@sight
def llava_of_several_layers() -> Sight:
    """Two hidden states side by side, the class token is seen, other activations, no biases."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        text_config=LLAMA,
        vision_config=CLIP_VISION,
        image_token_index=IMAGE,
        vision_feature_layer=[-2, 1],
        vision_feature_select_strategy="full",
        projector_hidden_act="silu",
        multimodal_projector_bias=False,
    )
    rows = [[5, *with_images(10, 10), 7], [8, 4, *with_images(10), 6]]
    return Sight(tiny(LlavaForConditionalGeneration, config), rows, {"pixel_values": noise(3, 3, 12, 12)})


PIXTRAL_VISION = {**CLIP_VISION, "model_type": "pixtral", "image_size": 24, "head_dim": 8, "hidden_act": "silu"}


@sight
def llava_pixtral() -> Sight:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        text_config={**TEXT, "model_type": "mistral"},
        vision_config=PIXTRAL_VISION,
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    rows = [[5, *with_images(10, 6), 7], [8, 4, *with_images(12), 6]]
    features = {"pixel_values": noise(3, 3, 24, 24), "image_sizes": np.array([[8, 20], [24, 4], [16, 12]])}
    return Sight(tiny(LlavaForConditionalGeneration, config), rows, features)


@sight
def vipllava() -> Sight:
    from transformers import VipLlavaConfig, VipLlavaForConditionalGeneration

    config = VipLlavaConfig(
        text_config=LLAMA, vision_config=CLIP_VISION, image_token_index=IMAGE, vision_feature_layers=[-2, 3, 1]
    )
    rows = [[5, *with_images(9, 9), 7], [8, 4, *with_images(9), 6]]
    features = {"pixel_values": noise(3, 3, 12, 12)}
    return Sight(tiny(VipLlavaForConditionalGeneration, config), rows, features, released=NEWER)


def tiled(
    cls: Any, config: Any, image_sizes: Any, tiles: int, rows: Any, *, released: Any = OLDER_TOWER, **changes: Any
) -> Sight:
    sizes = np.array(image_sizes)
    features = {"pixel_values": noise(len(sizes), tiles, 3, 12, 12), "image_sizes": sizes}
    return Sight(tiny(cls, config), rows, features, released=released, **changes)


GRID = [[12, 24], [24, 12], [24, 24], [36, 12]]


@sight
def llava_next() -> Sight:
    from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration

    config = LlavaNextConfig(
        text_config={**TEXT, "model_type": "mistral"},
        vision_config=CLIP_VISION,
        image_token_index=IMAGE,
        image_grid_pinpoints=GRID,
    )
    # whole 9; 3 x 6 with 3 ends; 9 x 1 with 9 ends; 4 x 6 with 4 ends
    rows = [[5, *with_images(9 + 21, 9 + 18), 7], [8, 4, *with_images(9 + 28), 6]]
    sizes = [(50, 100), (90, 10), (70, 100)]
    return tiled(LlavaNextForConditionalGeneration, config, sizes, 5, rows, released={**OLDER_TOWER, **NEWER})


@sight
def granite_vision() -> Sight:
    """Granite Vision 3: several hidden states of SigLIP, and a factor of logits that transformers leaves out."""
    from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration

    text = {"model_type": "granite", "logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.4}
    config = LlavaNextConfig(
        text_config={**TEXT, **text, "attention_multiplier": 0.2},
        vision_config=SIGLIP_VISION,
        image_token_index=IMAGE,
        image_grid_pinpoints=GRID,
        vision_feature_layer=[-3, -2, -1],
        vision_feature_select_strategy="full",
    )
    rows = [[5, *with_images(9 + 21, 9 + 18), 7], [8, 4, *with_images(9 + 28), 6]]
    return tiled(LlavaNextForConditionalGeneration, config, [(50, 100), (90, 10), (70, 100)], 5, rows)


def granite4(vision: dict[str, Any], side: int, text: dict[str, Any], **changes: Any) -> Sight:
    """Tiles of 4 x 4 features, and Q-Formers of two heads."""
    from transformers import Granite4VisionConfig, Granite4VisionForConditionalGeneration

    factors = {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.4}
    config = Granite4VisionConfig(
        text_config={**TEXT, **factors, "attention_multiplier": 0.2, "num_hidden_layers": 5, **text},
        vision_config={**vision, "hidden_size": 132, "image_size": side, "num_hidden_layers": 4},
        image_token_index=IMAGE,
        image_grid_pinpoints=[[h // 12 * side, w // 12 * side] for h, w in GRID],
        **changes,
    )
    # whole 16; 4 x 8 with 4 ends; 12 x 2 with 12 ends; 6 x 8 with 6 ends
    rows = [[5, *with_images(16 + 36, 16 + 36), 7], [8, 4, *with_images(16 + 54), 6]]
    sizes = np.array([(50, 100), (90, 10), (70, 100)])
    features = {"pixel_values": noise(3, 5, 3, side, side), "image_sizes": sizes}
    return Sight(tiny(Granite4VisionForConditionalGeneration, config), rows, features)


@sight
def granite4_vision() -> Sight:
    """Two layers get nothing, and of two projectors for layer 1 the last one counts."""
    return granite4(
        SIGLIP_VISION,
        32,
        {},
        vision_feature_select_strategy="full",
        downsample_rate="2/4",
        deepstack_layer_map=[[1, 1], [-2, 0]],
        spatial_vision_layer=-1,
        spatial_target_layers=[1, 4],
        qformer_config={"num_hidden_layers": 3, "intermediate_size": 40, "cross_attention_frequency": 2},
    )


@sight
def granite4_vision_of_means() -> Sight:
    """Means over patches in part, CLIP, and an input of the first layer without images."""
    return granite4(
        CLIP_VISION,
        24,
        {"attention_bias": True},
        downsample_rate="2/3",
        deepstack_layer_map=[[1, 2], [3, 4]],
        spatial_target_layers=[],
        qformer_config={"num_hidden_layers": 1, "intermediate_size": 40, "use_qformer_text_input": True},
    )


@sight
def llava_next_video() -> Sight:
    from transformers import LlavaNextVideoConfig, LlavaNextVideoForConditionalGeneration

    config = LlavaNextVideoConfig(
        text_config=LLAMA,
        vision_config=CLIP_VISION,
        image_token_index=IMAGE,
        video_token_index=92,
        image_grid_pinpoints=GRID,
    )
    rows = [[5, *with_images(9 + 21), 7], [8, 4, *with_images(9 + 28), 6]]
    return tiled(LlavaNextVideoForConditionalGeneration, config, [(50, 100), (70, 100)], 5, rows)


@sight
def llava_onevision() -> Sight:
    """The second image has more features than three tiles, and the third is not cut."""
    from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

    config = LlavaOnevisionConfig(
        text_config={**TEXT, "model_type": "qwen2", "num_hidden_layers": 2},
        vision_config=SIGLIP_VISION,
        image_token_index=IMAGE,
        video_token_index=92,
        image_grid_pinpoints=[*GRID, [24, 36]],
        vision_aspect_ratio="anyres_max_3",
    )
    # whole 9; 9 x 3 with 9 ends; 6 x 9, made 4 x 6, with 4 ends
    rows = [[5, *with_images(9 + 36), 7], [8, 4, *with_images(9 + 28), 6], [9, *with_images(9 + 1, 9 + 1)]]
    sizes = [(100, 30), (50, 75), (30, 40), (9, 9)]
    case = tiled(LlavaOnevisionForConditionalGeneration, config, sizes, 7, rows, later=((4, 8), (9, 11), (3, 1)))
    return replace(case, features={**case.features, "batch_num_images": np.array([1, 1, 2])})


@sight
def video_llava() -> Sight:
    """The tower for videos comes along."""
    from transformers import VideoLlavaConfig, VideoLlavaForConditionalGeneration

    config = VideoLlavaConfig(
        text_config=LLAMA, vision_config=CLIP_VISION, image_token_index=IMAGE, video_token_index=92
    )
    rows = [[5, *with_images(9, 9), 7], [8, 4, *with_images(9), 6]]
    older = {r"^(image|video)_tower\.": r"\1_tower.vision_model."}
    case = Sight(tiny(VideoLlavaForConditionalGeneration, config), rows, {"pixel_values": noise(3, 3, 12, 12)})
    return replace(case, parts=("vision", "video"), released=older)


def perception(architecture: str, rows: list[list[int]], pixels: np.ndarray, **changes: Any) -> Sight:
    """Images of 4 x 4 patches, of which four are one feature."""
    from transformers import PerceptionLMConfig, PerceptionLMForConditionalGeneration

    with_timm()
    args = {"embed_dim": 32, "num_heads": 2, "depth": 3, "img_size": [24, 24], "patch_size": 6, "global_pool": ""}
    vision = {"architecture": architecture, "model_args": {**args, "ref_feat_shape": [4, 4], **changes}}
    config = PerceptionLMConfig(
        text_config=LLAMA,
        vision_config=vision,
        vision_use_cls_token="large" in architecture,
        projector_pooling_ratio=2,
        image_token_id=IMAGE,
    )
    return Sight(tiny(PerceptionLMForConditionalGeneration, config), rows, {"pixel_values": pixels})


@sight
def perception_lm() -> Sight:
    """An image in three tiles, and one in as many."""
    core = {"init_values": 0.1, "use_post_transformer_norm": False}
    rows = [[5, 9, *with_images(12), 7], [8, 4, *with_images(12), 6]]
    return perception("vit_pe_core_large_patch14_336", rows, noise(2, 3, 3, 24, 24), **core)


@sight
def perception_lm_without_class_token() -> Sight:
    """Images of one tile."""
    rows = [[5, *with_images(4, 4), 7], [8, 4, *with_images(4), 6]]
    return perception("vit_pe_core_gigantic_patch14_448", rows, noise(3, 1, 3, 24, 24))
