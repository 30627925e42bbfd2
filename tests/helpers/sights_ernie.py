"""ERNIE 4.5 VL: tokens of images, and the ones around them, have experts of their own."""

from typing import Any

from helpers.sights import END, GRIDS, IMAGE, START, Sight, noise, sight, tiny, wide

VIDEO, VIDEO_START, VIDEO_END = 92, 90, 91
VISION = {"depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "patch_size": 4}


def ernie(*sections: int, kinds: list[str] | None = None, **changes: Any) -> Sight:
    from transformers import Ernie4_5_VLMoeConfig, Ernie4_5_VLMoeForConditionalGeneration

    experts = {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": [24, 20], "moe_num_shared_experts": 1}
    config = Ernie4_5_VLMoeConfig(
        text_config=wide(*sections, mlp_layer_types=kinds, **{**experts, **changes}),
        vision_config=VISION,
        image_token_id=IMAGE,
        image_start_token_id=START,
        image_end_token_id=END,
        video_token_id=VIDEO,
        video_start_token_id=VIDEO_START,
        video_end_token_id=VIDEO_END,
    )
    rows = [
        [5, 9, START, *[IMAGE] * 15, END, 3, START, *[IMAGE] * 8, END, 11, 7],
        [7, START, *[IMAGE] * 8, END, 3],
        [6, 3, 12, 4],
    ]
    features = {"pixel_values": noise(int(GRIDS.prod(axis=1).sum()), 3 * 4 * 4), "image_grid_thw": GRIDS}
    of_images = {IMAGE: 1, START: 1, END: 1, VIDEO: 2, VIDEO_START: 2, VIDEO_END: 2}
    kinds_of = {"mm_token_type_ids": {IMAGE: 1, VIDEO: 2}, "moe_mm_token_type_ids": of_images}
    later = ((4, 8), (9, 11), (3, 5))
    return Sight(tiny(Ernie4_5_VLMoeForConditionalGeneration, config), rows, features, kinds_of, later)


@sight
def ernie4_5_vl_moe() -> Sight:
    return ernie(3, 3, 2)


@sight
def ernie4_5_vl_moe_without_shared_experts() -> Sight:
    return ernie(2, 2, 4, kinds=["sparse", "dense", "sparse"], moe_num_shared_experts=0, tie_word_embeddings=False)
