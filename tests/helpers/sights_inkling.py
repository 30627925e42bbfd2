"""Tiny models of Inkling and Inkling 2."""

from typing import Any

import numpy as np

from helpers.families import CASES, SIZES
from helpers.sights import IMAGE, SOUND, Sight, noise, sight, tiny


def text(family: str) -> dict[str, Any]:
    """The keys of the text model of a family's first case, without factors of late positions: transformers counts
    padding as positions, unless it generates."""
    case = next(case for case in CASES if case.family == family)
    return {**SIZES, **case.config, "log_scaling_n_floor": 1000}


@sight
def inkling() -> Sight:
    """Patches of 12 x 12 in 2 frames, which 4 layers fold by 3, 2, 2 and 2; sounds of 5 frequencies."""
    from transformers import InklingConfig, InklingForConditionalGeneration

    config = InklingConfig(
        text_config=text("inkling_text"),
        vision_config={"patch_size": 12, "temporal_patch_size": 2, "num_channels": 2, "n_layers": 4},
        audio_config={"n_mel_bins": 5, "mel_vocab_size": 7},
        image_token_id=IMAGE,
        audio_token_id=SOUND,
    )
    rows = [[5, *[IMAGE] * 6, 7, *[IMAGE] * 4, 9, *[SOUND] * 5], [8, 4, *[IMAGE] * 2, *[SOUND] * 3, 6]]
    features = {
        "pixel_values": noise(12, 2, 12, 12, 2),
        "audio_input_ids": np.random.default_rng(2).integers(0, 7, (2, 5, 5)),
        "audio_input_ids_mask": np.arange(5) < np.array([[5], [3]]),
    }
    return Sight(tiny(InklingForConditionalGeneration, config), rows, features, parts=("vision", "audio"))


@sight
def inkling_of_many_layers() -> Sight:
    """More layers than folds, of which some fold nothing."""
    from transformers import InklingConfig, InklingForConditionalGeneration

    config = InklingConfig(
        text_config=text("inkling_text"),
        vision_config={"patch_size": 6, "temporal_patch_size": 2, "n_layers": 7},
        audio_config={"n_mel_bins": 3, "mel_vocab_size": 4},
        image_token_id=IMAGE,
        audio_token_id=SOUND,
    )
    rows = [[5, *[IMAGE] * 6, 7, *[IMAGE] * 4, 9], [8, 4, *[IMAGE] * 2, 6]]
    features = {"pixel_values": noise(12, 2, 6, 6, 3)}
    return Sight(tiny(InklingForConditionalGeneration, config), rows, features, parts=("vision", "audio"))


VIT = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "patch_size": 3, "num_channels": 2}
VIT |= {"posemb_grid_size": 5, "projection_hidden_dim": 20}
GRIDS = [(1, 2, 3), (1, 4, 1), (1, 1, 2)]


def inkling2_sight(model_type: str, **vision: Any) -> Sight:
    """Images of several sizes, of blocks of 2 x 2 patches."""
    import transformers
    from transformers import CONFIG_MAPPING

    keys = text(f"{model_type}_text") | ({"loop_num_passes": 1} if model_type == "inkling2_loop" else {})
    vision_config = {**VIT, **vision, "text_hidden_size": keys["hidden_size"]}
    config = CONFIG_MAPPING[model_type](text_config=keys, vision_config=vision_config, image_token_id=IMAGE)
    cls = getattr(transformers, type(config).__name__.replace("Config", "ForConditionalGeneration"))
    rows = [[5, *[IMAGE] * 6, 7, *[IMAGE] * 4, 9], [8, 4, *[IMAGE] * 2, 6]]
    side = 3 * vision_config.get("spatial_merge_size", 2)
    features = {"pixel_values": noise(12, side, side, 2), "image_grid_thw": np.array(GRIDS)}
    return Sight(tiny(cls, config), rows, features)


@sight
def inkling2() -> Sight:
    return inkling2_sight("inkling2")


@sight
def inkling2_loop() -> Sight:
    return inkling2_sight("inkling2_loop", projector_bias=True, intermediate_size=40, spatial_merge_size=1)
