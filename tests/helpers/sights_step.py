"""Step-3.7."""

from typing import Any

import numpy as np

from helpers.sights import IMAGE, Sight, noise, sight, text_of, tiny
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
