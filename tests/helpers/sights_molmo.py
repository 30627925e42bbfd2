"""Molmo 2: crops of images, whose patches are pooled."""

from pathlib import Path
from typing import Any

import numpy as np

from helpers.families import resplit_embedding
from helpers.sights import END, IMAGE, START, TEXT, Sight, noise, sight, tiny

VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "image_size": [12, 20],
    "patch_size": 4,
}
ADAPTER = {
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 6,
    "intermediate_size": 28,
    "text_hidden_size": 32,
    "vision_feature_layer": [2, 0],
}
PATCHES = 15
COLUMN = 92
VOCABULARY = 90


class MolmoSight(Sight):
    def save(self, folder: Path) -> None:
        """Writes the model with the embedding cut as in releases; transformers writes two halves."""
        super().save(folder)
        resplit_embedding(folder / "model.safetensors", VOCABULARY)


def molmo(seed: int, text: dict[str, Any], vision: dict[str, Any], adapter: dict[str, Any]) -> Sight:
    """Three images, of which the second has two crops. Three features are pooled of two patches, the others of four."""
    from transformers import Molmo2Config, Molmo2ForConditionalGeneration

    config = Molmo2Config(
        text_config={**TEXT, "vocab_size": VOCABULARY, "additional_vocab_size": 7, **text},
        vision_config={**VISION, **vision},
        adapter_config={**ADAPTER, **adapter},
        image_patch_id=IMAGE,
        image_start_token_id=START,
        image_end_token_id=END,
        image_col_id=COLUMN,
    )

    def image(*rows: int) -> list[int]:
        return [START, *(token for row in rows for token in (*[IMAGE] * row, COLUMN)), END]

    rows = [[5, 9, *image(3, 3), 3, *image(2, 2), *image(3), 11, 7], [8, 4, *image(4), 6]]
    grids = np.array([(2, 3, 0, 0), (2, 2, 1, 3), (1, 4, 0, 0)])
    pooled = np.random.default_rng(3).integers(0, PATCHES, (17, 4))
    pooled += PATCHES * np.repeat([0, 1, 2, 3], (6, 4, 3, 4))[:, None]
    pooled[[1, 3, 16], 2:] = -1
    features = {"pixel_values": noise(4, PATCHES, 48), "image_token_pooling": pooled, "image_grids": grids}
    kinds = {"mm_token_type_ids": dict.fromkeys((IMAGE, START, END, COLUMN), 1)}
    return MolmoSight(tiny(Molmo2ForConditionalGeneration, config, seed), rows, features, kinds)


@sight
def molmo2() -> Sight:
    return molmo(0, {}, {}, {})


@sight
def molmo2_with_norms_after() -> Sight:
    """Molmo 2 with OLMo 3, and an adapter with fewer heads of keys."""
    return molmo(
        1,
        {"norm_after": True, "qk_norm_type": "olmo", "attention_bias": True},
        {"attention_bias": False, "num_key_value_heads": 4},
        {"num_attention_heads": 4, "num_key_value_heads": 2, "mlp_bias": True, "vision_feature_layer": [-1]},
    )
