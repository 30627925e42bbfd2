"""Tiny models of Llama 3.2 Vision, whose layers attend to images."""

from typing import Any

import numpy as np

from helpers.sights import IMAGE, TEXT, Sight, noise, sight, tiny


def mllama(rows: list[list[int]], tiles: list[list[int]], ratios: list[list[int]], **vision: Any) -> Sight:
    """A case whose texts have images of so many tiles; 0 in place of images that a text does not have."""
    from transformers import MllamaConfig, MllamaForConditionalGeneration
    from transformers.models.mllama.processing_mllama import (
        convert_sparse_cross_attention_mask_to_dense,
        get_cross_attention_token_mask,
    )

    text = {key: value for key, value in TEXT.items() if key not in ("vocab_size", "head_dim")}
    seen = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_global_layers": 2,
        "attention_heads": 3,
        "image_size": 12,
        "patch_size": 4,
        "intermediate_layers_indices": [0, 2],
        "vision_output_dim": 72,
        **vision,
    }
    # The placeholder is the first id behind the vocabulary, as in releases.
    text |= {"vocab_size": IMAGE, "num_hidden_layers": 5, "cross_attention_layers": [1, 4]}
    config = MllamaConfig(text_config=text, vision_config=seen, image_token_index=IMAGE)
    model = tiny(MllamaForConditionalGeneration, config)
    most, count = model.config.vision_config.max_num_tiles, np.array(tiles)
    longest = max(map(len, rows))
    padded = [[0] * (longest - len(row)) + row for row in rows]
    # A processor gives images that are not there one tile, of pixels that are 0.
    is_tile = np.arange(most) < np.maximum(count, 1)[..., None]
    side = seen["image_size"]
    pixels = noise(*count.shape, most, 3, side, side) * (np.arange(most) < count[..., None])[..., None, None, None]
    features = {
        "pixel_values": pixels,
        "aspect_ratio_ids": np.array(ratios),
        "aspect_ratio_mask": is_tile.astype(np.int64),
        "cross_attention_mask": convert_sparse_cross_attention_mask_to_dense(
            [get_cross_attention_token_mask(row, IMAGE) for row in padded],
            num_tiles=[[n for n in row if n] for row in tiles],
            max_num_tiles=most,
            length=longest,
        ),
    }
    return Sight(model, rows, features, by_token=("cross_attention_mask",))


@sight
def mllama_of_one_image() -> Sight:
    """An image in each text, of four tiles and of two."""
    return mllama([[IMAGE, 1, 5, 9, 3], [1, 8, IMAGE, 6]], [[4], [2]], [[6], [5]])


@sight
def mllama_of_several_images() -> Sight:
    """Images one after the other and apart, and tokens before all images; the other text has one."""
    rows = [[1, 5, IMAGE, IMAGE, 9, 3, IMAGE, 11, 7], [1, 8, 4, IMAGE, 6]]
    vision = {
        **{"max_num_tiles": 3, "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1], [1, 3], [3, 1]]},
        **{"hidden_act": "quick_gelu", "intermediate_layers_indices": [-1], "vision_output_dim": 48, "norm_eps": 1e-3},
    }
    return mllama(rows, [[3, 1, 2], [2, 0, 0]], [[4, 1, 3], [2, 0, 0]], **vision)
