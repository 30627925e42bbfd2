"""Models whose code is in their releases: those of transformers that compute the same, in the files of the releases."""

import json
from dataclasses import replace
from pathlib import Path

from helpers.processors import word_tokenizer
from helpers.sights import IMAGE, TEXT, Sight, sight
from helpers.sights_pixtral import INTERN_VISION, QIANFAN_NAMES, squares
from helpers.sights_sounds import kimi_k25

CONTEXT = "<IMG_CONTEXT>"
INTERN_NAMES = QIANFAN_NAMES | {r"\.attention\.([qk])_norm\.": r".attn.\1_norm."}
"""Qianfan-OCR has no norms of queries and keys."""


def of_internvl(folder: Path) -> None:
    """Writes the config.json of InternVL with code of its own, whose names Qianfan-OCR has."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    vision = raw["vision_config"]
    same = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "norm_type", "hidden_act"),
        "layer_norm_eps",
    )
    own = {
        **{key: vision[key] for key in same},
        **{"image_size": vision["image_size"][0], "patch_size": vision["patch_size"][0]},
        **{"qkv_bias": vision["attention_bias"], "qk_normalization": vision["use_qk_norm"], "use_flash_attn": True},
    }
    released = {
        **{"architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "llm_config": raw["text_config"]},
        **{"vision_config": own | {"model_type": "intern_vit_6b"}, "force_image_size": own["image_size"]},
        **{"downsample_ratio": raw["downsample_ratio"], "ps_version": "v2", "select_layer": -1, "use_thumbnail": True},
        **{"template": "internvl2_5", "tie_word_embeddings": raw["tie_word_embeddings"]},
    }
    path.write_text(json.dumps(released))
    tokenizer = word_tokenizer({IMAGE: CONTEXT})
    tokenizer.add_special_tokens({"additional_special_tokens": [CONTEXT]})
    tokenizer.save_pretrained(folder)


@sight
def internvl_chat() -> Sight:
    from transformers import QianfanOCRConfig, QianfanOCRForConditionalGeneration

    config = QianfanOCRConfig(
        text_config={**TEXT, "model_type": "qwen3"}, vision_config=INTERN_VISION, image_token_id=IMAGE
    )
    return squares(QianfanOCRForConditionalGeneration, config, released=INTERN_NAMES, as_released=of_internvl)


@sight
def internvl_chat_6b() -> Sight:
    from transformers import QianfanOCRConfig, QianfanOCRForConditionalGeneration

    config = QianfanOCRConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**INTERN_VISION, "norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False},
        image_token_id=IMAGE,
    )
    return squares(QianfanOCRForConditionalGeneration, config, released=INTERN_NAMES, as_released=of_internvl)


KIMI_NAMES = {
    r"^language_model\.model\.blocks\.": "language_model.model.layers.",
    r"^vision_tower\.encoder\.patch_embed\.": "vision_tower.patch_embed.",
    r"^(?:model\.)?mm_projector\.proj\.0\.": "multi_modal_projector.linear_1.",
    r"^(?:model\.)?mm_projector\.proj\.2\.": "multi_modal_projector.linear_2.",
    r"^(?:model\.)?mm_projector\.": "multi_modal_projector.",
}


def of_kimi_vl(folder: Path) -> None:
    """Writes the config.json of Kimi-VL, whose frames are images."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    vision = raw["vision_config"]
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size")
    own = {
        **{key: vision[key] for key in (*same, "merge_kernel_size")},
        **{f"init_pos_emb_{side}": vision[f"pos_emb_{side}"] for side in ("height", "width")},
    }
    released = {
        **{"architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl", "ignore_index": -100},
        **{"media_placeholder_token_id": IMAGE, "tie_word_embeddings": raw["tie_word_embeddings"]},
        **{"text_config": raw["text_config"], "vision_config": {**own, "model_type": "moonvit"}},
    }
    path.write_text(json.dumps(released))


@sight
def kimi_vl() -> Sight:
    return replace(kimi_k25(), released=KIMI_NAMES, as_released=of_kimi_vl)
