"""Models whose code is in their releases: those of transformers that compute the same, in the files of the releases."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from helpers.processors import word_tokenizer
from helpers.sights import (
    END,
    GRIDS,
    IMAGE,
    QWEN_VISION,
    START,
    TEXT,
    Sight,
    noise,
    qwen,
    sight,
    tiny,
    without_head_dim,
)
from helpers.sights_pixtral import INTERN_VISION, QIANFAN_NAMES, squares
from helpers.sights_sounds import kimi_k25

CONTEXT = "<IMG_CONTEXT>"
INTERN_NAMES = QIANFAN_NAMES | {r"\.attention\.([qk])_norm\.": r".attn.\1_norm."}
"""Qianfan-OCR has no norms of queries and keys."""


def of_internvl(
    folder: Path,
    model_type: str = "internvl_chat",
    architecture: str = "InternVLChatModel",
    token: str = CONTEXT,
) -> None:
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
        **{"architectures": [architecture], "model_type": model_type, "llm_config": raw["text_config"]},
        **{"vision_config": own | {"model_type": "intern_vit_6b"}, "force_image_size": own["image_size"]},
        **{"downsample_ratio": raw["downsample_ratio"], "ps_version": "v2", "select_layer": -1, "use_thumbnail": True},
        **{"template": "internvl2_5", "tie_word_embeddings": raw["tie_word_embeddings"]},
    }
    path.write_text(json.dumps(released))
    tokenizer = word_tokenizer({IMAGE: token})
    tokenizer.add_special_tokens({"additional_special_tokens": [token]})
    tokenizer.save_pretrained(folder)


@sight
def internvl_chat() -> Sight:
    from transformers import QianfanOCRConfig, QianfanOCRForConditionalGeneration

    config = QianfanOCRConfig(
        text_config={**TEXT, "model_type": "qwen3"}, vision_config=INTERN_VISION, image_token_id=IMAGE
    )
    return squares(QianfanOCRForConditionalGeneration, config, released=INTERN_NAMES, as_released=of_internvl)


def intern_6b(text: dict[str, Any], as_released: Callable[[Path], None] = of_internvl) -> Sight:
    """With InternViT 6B."""
    from transformers import QianfanOCRConfig, QianfanOCRForConditionalGeneration

    config = QianfanOCRConfig(
        text_config=text,
        vision_config={**INTERN_VISION, "norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False},
        image_token_id=IMAGE,
    )
    return squares(QianfanOCRForConditionalGeneration, config, released=INTERN_NAMES, as_released=as_released)


@sight
def internvl_chat_6b() -> Sight:
    return intern_6b({**TEXT, "model_type": "llama"})


@sight
def skywork_chat() -> Sight:
    as_released = partial(of_internvl, model_type="skywork_chat", architecture="SkyworkR1VChatModel")
    return intern_6b({**without_head_dim(TEXT), "model_type": "qwen2"}, as_released)


@sight
def h2ovl_chat() -> Sight:
    from transformers import QianfanOCRConfig, QianfanOCRForConditionalGeneration

    as_released = partial(of_internvl, model_type="h2ovl_chat", architecture="H2OVLChatModel")
    text = {**TEXT, "model_type": "mistral", "sliding_window": 6}
    config = QianfanOCRConfig(text_config=text, vision_config=INTERN_VISION, image_token_id=IMAGE)
    return squares(QianfanOCRForConditionalGeneration, config, released=INTERN_NAMES, as_released=as_released)


@sight
def nvlm_d() -> Sight:
    from transformers import QianfanOCRConfig

    from helpers.released_code.nvlm import NVLM

    config = QianfanOCRConfig(
        text_config={**without_head_dim(TEXT), "model_type": "qwen2"},
        vision_config={**INTERN_VISION, "norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False},
        image_token_id=IMAGE,
    )
    as_released = partial(of_internvl, model_type="NVLM_D", architecture="NVLM_D", token="<|vision_pad|>")
    return squares(NVLM, config, released=INTERN_NAMES, as_released=as_released)


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


@sight
def dots_ocr() -> Sight:
    from helpers.released_code.dots import Config, DotsOCRForCausalLM

    vision = {
        **{"embed_dim": 24, "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 3},
        **{"num_attention_heads": 2, "num_channels": 3, "patch_size": 4, "spatial_merge_size": 2},
        **{"temporal_patch_size": 1, "rms_norm_eps": 1e-5, "use_bias": False, "post_norm": True, "is_causal": False},
    }
    text = without_head_dim(TEXT) | {"hidden_size": 64, "attention_bias": True}
    config = Config(**text, vision_config=vision, image_token_id=IMAGE, video_token_id=92)
    case = qwen(DotsOCRForCausalLM, config)
    patches = noise(int(GRIDS.prod(axis=1).sum()), 3 * 4 * 4)
    return replace(case, features={**case.features, "pixel_values": patches}, kinds={})


@sight
def opencua() -> Sight:
    from helpers.released_code.opencua import Config, OpenCUAForConditionalGeneration

    config = Config(
        text_config={**without_head_dim(TEXT), "hidden_size": 64, "model_type": "qwen2", "tie_word_embeddings": False},
        vision_config={**QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1]},
        media_placeholder_token_id=IMAGE,
        tie_word_embeddings=False,
    )
    return replace(qwen(OpenCUAForConditionalGeneration, config), kinds={})


def ovis(text: dict[str, Any], as_released: Callable[[Path], None] | None = None) -> Sight:
    from helpers.released_code.ovis2_5 import Config, Ovis2_5

    before, behind, *of_videos = ids = (90, 91, 92, 89)
    vit = {
        **{"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2},
        # a softmax follows, behind which two kinds of GELU, of which the release has one, are nearly the same
        **{"image_size": 24, "patch_size": 4, "hidden_stride": 2, "hidden_act": "silu"},
        **{"num_channels": 3, "num_patches": -1, "temporal_patch_size": 1, "window_size": 112, "use_rope": True},
        **{"preserve_original_pe": True, "fullatt_block_indexes": None, "layer_norm_eps": 1e-6},
        **{"attention_dropout": 0.0, "model_type": "siglip2_navit"},
    }
    config = Config(
        llm_config={**TEXT, **text, "tie_word_embeddings": False},
        vit_config=vit,
        visual_vocab_size=29,
        visual_atom_token_id=IMAGE,
        visual_indicator_token_ids=ids,
    )
    case = qwen(Ovis2_5, config)
    patches = noise(int(GRIDS.prod(axis=1).sum()), 3 * 4 * 4)
    frame = {START: before, END: behind}
    rows = [[frame.get(token, token) for token in row] for row in case.rows]
    rows[1].append(of_videos[0])
    features = {**case.features, "pixel_values": patches}
    return replace(case, rows=rows, features=features, kinds={}, as_released=as_released)


@sight
def ovis2_5() -> Sight:
    return ovis({"model_type": "qwen3"})


def of_type(folder: Path, model_type: str, architecture: str) -> None:
    """Writes another model_type and architecture, whose other keys and tensors are the same."""
    path = folder / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "architectures": [architecture], "model_type": model_type})
    )


@sight
def ovis2_6() -> Sight:
    return ovis({"model_type": "qwen3"}, partial(of_type, model_type="ovis2_6", architecture="Ovis2_6ForCausalLM"))


@sight
def ovis2_6_moe() -> Sight:
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}
    as_released = partial(of_type, model_type="ovis2_6_moe", architecture="Ovis2_6_MoeForCausalLM")
    return ovis({"model_type": "qwen3_moe", **experts}, as_released)


def of_minicpm(folder: Path, model_type: str = "minicpmv", architecture: str = "MiniCPMV") -> None:
    """Writes the config.json of MiniCPM-V or MiniCPM-o, and the tokenizer, which alone says where features stand."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    for key in ("image_token_id", "audio_start_id"):
        raw.pop(key, None)
    path.write_text(json.dumps(raw | {"architectures": [architecture], "model_type": model_type}))
    words = {IMAGE: "<unk>", HEARD: "<|audio_start|>"}
    tokenizer = word_tokenizer(words)
    tokenizer.add_special_tokens({"additional_special_tokens": list(words.values())})
    tokenizer.save_pretrained(folder)


HEARD = 91
"""The token before the placeholders of a sound of MiniCPM-o, which are the ones of images too."""


def minicpm_config(version: float | None, text_type: str, act: str = "gelu_pytorch_tanh", **text: Any) -> Any:
    from transformers import AutoConfig

    vision = {
        **{"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 5, "num_attention_heads": 3},
        **{"image_size": 24, "patch_size": 4, "layer_norm_eps": 1e-6, "model_type": "siglip_vision_model"},
        "hidden_act": act,
    }
    beside = {
        **{"batch_vision_input": True, "drop_vision_last_layer": False, "image_size": 448, "patch_size": 4},
        **{"query_num": 5, "slice_config": {"max_slice_nums": 9, "patch_size": 4}, "slice_mode": True},
        **{"use_image_id": True, "version": version, "vision_batch_size": 16, "vision_config": vision},
    }
    return AutoConfig.for_model(
        text_type, **{**TEXT, "hidden_size": 256, **text}, **beside, image_token_id=IMAGE, tie_word_embeddings=False
    )


def slices_of(*sizes: tuple[int, int]) -> dict[str, np.ndarray]:
    """Slices of so many patches."""
    grids = np.array(sizes)
    return {"pixel_values": noise(1, 3, 4, 4 * int(grids.prod(axis=1).sum())), "tgt_sizes": grids}


SLICE = [START, *[IMAGE] * 5, END]


def minicpm_v(*facts: Any, **text: Any) -> Sight:
    from helpers.released_code.minicpm_v import MiniCPMV

    rows = [[5, 9, *SLICE, 3, *SLICE, 11, 7], [7, *SLICE, 3]]
    model = tiny(MiniCPMV, minicpm_config(*facts, **text))
    return Sight(model, rows, slices_of((2, 3), (4, 1), (2, 2)), as_released=of_minicpm)


def minicpm_o(version: float | None, text_type: str, frames: int, counts: tuple[int, ...], **keys: Any) -> Sight:
    """Sounds of so many frames and less, with so many features; the second text has the last one, and an image."""
    from helpers.released_code.minicpm_o import MiniCPMO

    audio = {
        **{"d_model": 24, "encoder_ffn_dim": 96, "encoder_layers": 2, "encoder_attention_heads": 3},
        **{"num_mel_bins": 10, "max_source_positions": 80, "activation_function": "gelu"},
    }
    text = {"audio_config": audio, "audio_start_id": HEARD, "init_audio": True, "tts_config": {}, **keys}
    first, second, last = ([HEARD, *[IMAGE] * count, 90] for count in counts)
    rows = [[5, 9, *first, 3, *SLICE, *second, 11, 7], [7, *SLICE, 4, *last, 6]]
    lengths = np.array([frames, frames // 3, frames * 3 // 5])
    mel = noise(3, 10, frames) * (np.arange(frames) < lengths[:, None])[:, None]
    features = {**slices_of((2, 3), (4, 1)), "audio_features": mel, "audio_feature_lens": lengths}
    model = tiny(MiniCPMO, minicpm_config(version, text_type, "quick_gelu", **text))
    as_released = partial(of_minicpm, model_type="minicpmo", architecture="MiniCPMO")
    return Sight(model, rows, features, parts=("vision", "audio"), as_released=as_released)


@sight
def minicpmo_2_6() -> Sight:
    return minicpm_o(2.6, "qwen2", 63, (16, 5, 9), head_dim=64, audio_pool_step=2, audio_chunk_length=0.2)


@sight
def minicpmo_4_5() -> Sight:
    """Steps see all of a sound, and no key says the version."""
    return minicpm_o(None, "qwen3", 60, (6, 2, 3), audio_pool_step=5, audio_chunk_length=-1.0)


@sight
def minicpmv_2_6() -> Sight:
    return minicpm_v(2.6, "qwen2", head_dim=64)


@sight
def minicpmv_4_0() -> Sight:
    factors = {"long_factor": [1.0, 1.5, 2.0, 3.0], "short_factor": [1.0, 1.1, 1.2, 1.3]}
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 1.0,
        "original_max_position_embeddings": 64,
        **factors,
    }
    return minicpm_v(4.0, "llama", "quick_gelu", rope_parameters=rope, max_position_embeddings=64)


@sight
def minicpmv_4_5() -> Sight:
    return minicpm_v(4.5, "qwen3")


PHI3_NAMES = {r"(\.img_processor)\.(?!vision_model)": r"\1.vision_model."}
"""transformers wrote this level until version 5."""


@sight
def phi3_v() -> Sight:
    from helpers.released_code.phi3_vision import Config, Phi3VForCausalLM

    vision = {
        **{"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 3},
        **{"image_size": 16, "patch_size": 4},
    }
    rope = {
        **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64},
        **{"long_factor": [1.0, 1.5, 2.0, 3.0], "short_factor": [1.0, 1.1, 1.2, 1.3]},
    }
    config = Config(
        **without_head_dim(TEXT),
        rope_parameters=rope,
        original_max_position_embeddings=64,
        max_position_embeddings=128,
        embd_layer={"hd_transform_order": "sub_glb", "projection_cls": "mlp", "use_hd_transform": True},
        img_processor={"image_dim_out": 24, "name": "clip_vision_model", "num_img_tokens": 4},
        vision_config=vision,
        image_token_id=IMAGE,
    )
    sizes = np.array([(16, 32), (32, 16), (16, 16)])
    rows = [
        [5, 9, *[IMAGE] * (2 * 5 + 1 + 2 * 3), 3, *[IMAGE] * (4 * 3 + 1 + 2 * 3), 11, 7],
        [7, *[IMAGE] * (2 * 3 + 1 + 2 * 3), 3],
    ]
    features = {"pixel_values": noise(3, 3, 3, 16, 16), "image_sizes": sizes}
    return Sight(tiny(Phi3VForCausalLM, config), rows, features, released=PHI3_NAMES)
