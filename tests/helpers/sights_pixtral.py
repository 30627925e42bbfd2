"""Towers for images of any size as one sequence: Pixtral. Towers with a class token whose patches are joined:
InternViT."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from helpers.sights import IMAGE, TEXT, Sight, noise, sight, text_of, tiny
from helpers.sights_llava import PIXTRAL_VISION, with_images

SIZES = np.array([[16, 24], [24, 8], [8, 16]])


def of_any_size(cls: Any, config: Any, **changes: Any) -> Sight:
    """Three images, of which patches of 4 x 4 are joined 2 x 2."""
    rows = [[5, *with_images(6, 3), 7], [8, 4, *with_images(2), 6]]
    features = {"pixel_values": noise(3, 3, 24, 24), "image_sizes": SIZES}
    return Sight(tiny(cls, config), rows, features, **changes)


@sight
def mistral3() -> Sight:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    text = {**TEXT, "model_type": "ministral3", "rms_norm_eps": 0.01}
    config = Mistral3Config(text_config=text, vision_config=PIXTRAL_VISION, image_token_index=IMAGE)
    return of_any_size(Mistral3ForConditionalGeneration, config)


@sight
def mistral3_of_an_earlier_layer() -> Sight:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    config = Mistral3Config(
        text_config={**TEXT, "model_type": "mistral"},
        vision_config={key: value for key, value in PIXTRAL_VISION.items() if key != "hidden_act"},
        image_token_index=IMAGE,
        vision_feature_layer=-2,
        multimodal_projector_bias=True,
        projector_hidden_act="silu",
        tie_word_embeddings=False,
    )
    return of_any_size(Mistral3ForConditionalGeneration, config)


@sight
def lighton_ocr() -> Sight:
    from transformers import LightOnOcrConfig, LightOnOcrForConditionalGeneration

    config = LightOnOcrConfig(
        text_config={**TEXT, "model_type": "qwen3"}, vision_config=PIXTRAL_VISION, image_token_id=IMAGE
    )
    return of_any_size(LightOnOcrForConditionalGeneration, config)


@sight
def mistral4() -> Sight:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    text = {
        **{key: value for key, value in TEXT.items() if key != "head_dim"},
        "model_type": "mistral4",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
    }
    config = Mistral3Config(text_config=text, vision_config=PIXTRAL_VISION, image_token_index=IMAGE)
    return of_any_size(Mistral3ForConditionalGeneration, config)


@sight
def mistral_large4() -> Sight:
    from transformers import MistralLarge4Config, MistralLarge4ForConditionalGeneration

    # equal tokens at the beginning have equal scores in the first indexer: which of them few places keep is chance
    text = {**text_of("mistral_large4"), "vocab_size": 97, "index_topk": 128}
    config = MistralLarge4Config(text_config=text, vision_config=PIXTRAL_VISION, image_token_index=IMAGE)
    case = of_any_size(MistralLarge4ForConditionalGeneration, config)
    # the reference counts padding in the positions that scale attention
    return replace(case, rows=[case.rows[0], [*case.rows[1], *range(10, 18)]])


INTERN_VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": [24, 24],
    "patch_size": [4, 4],
}


def squares(cls: Any, config: Any, **changes: Any) -> Sight:
    rows = [[5, *with_images(9, 9), 7], [8, 4, *with_images(9), 6]]
    return Sight(tiny(cls, config), rows, {"pixel_values": noise(3, 3, 24, 24)}, **changes)


@sight
def internvl() -> Sight:
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    config = InternVLConfig(
        text_config={**TEXT, "model_type": "qwen2"}, vision_config=INTERN_VISION, image_token_id=IMAGE
    )
    return squares(InternVLForConditionalGeneration, config)


@sight
def internvl_with_norms() -> Sight:
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    more = {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": True, "use_mean_pooling": False}
    config = InternVLConfig(
        text_config={**TEXT, "model_type": "qwen3"},
        vision_config={**INTERN_VISION, **more, "use_mask_token": True},
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    )
    return squares(InternVLForConditionalGeneration, config)


def of_interns1(folder: Path) -> None:
    """Writes the model_type and the architecture of Intern-S1, whose tensors and other keys are InternVL's."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    vision = {**raw["vision_config"], "model_type": "interns1_vision", "architectures": ["InternS1VisionModel"]}
    released = {"architectures": ["InternS1ForConditionalGeneration"], "model_type": "interns1"}
    path.write_text(json.dumps({**raw, **released, "vision_config": vision}))


INTERNS1_NAMES = {
    r"^(vision_tower|multi_modal_projector)\.": r"model.\1.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^language_model\.model\.": "model.language_model.",
}


@sight
def interns1() -> Sight:
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}
    config = InternVLConfig(
        text_config={**TEXT, "model_type": "qwen3_moe", **experts},
        vision_config={**INTERN_VISION, "attention_bias": True, "norm_type": "layer_norm"},
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    )
    return squares(InternVLForConditionalGeneration, config, released=INTERNS1_NAMES, as_released=of_interns1)


QIANFAN_NAMES = {r"^language_model\.model\.encoder\.": "language_model.model."}
"""transformers renames the text model too."""


@sight
def qianfan_ocr() -> Sight:
    from transformers import QianfanOCRConfig, QianfanOCRForConditionalGeneration

    config = QianfanOCRConfig(
        text_config={**TEXT, "model_type": "qwen3"}, vision_config=INTERN_VISION, image_token_id=IMAGE
    )
    return squares(QianfanOCRForConditionalGeneration, config, released=QIANFAN_NAMES)
