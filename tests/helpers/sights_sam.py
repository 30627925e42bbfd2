"""SAM, alone, beside SigLIP, and before a decoder or CLIP."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.sights import IMAGE, TEXT, Sight, noise, sight, text_of, tiny
from helpers.sights_llava import LLAMA, SIGLIP_VISION, with_images

SAM: dict[str, Any] = {
    **{"hidden_size": 24, "output_channels": 10, "num_hidden_layers": 3, "num_attention_heads": 3},
    **{"image_size": 28, "patch_size": 4, "window_size": 3, "global_attn_indexes": [1], "mlp_dim": 40},
}
"""An image has 7 x 7 patches, so that windows at the border are not full."""


def got(model_type: str = "got_ocr2", **changes: Any) -> Sight:
    from transformers import AutoConfig, GotOcr2ForConditionalGeneration

    facts = {"text_config": {**TEXT, "model_type": "qwen2"}, "image_token_index": IMAGE}
    config = AutoConfig.for_model(model_type, vision_config={**SAM, **changes}, **facts)
    rows = [[5, *with_images(4, 4), 7], [8, 4, *with_images(4), 6]]
    return Sight(tiny(GotOcr2ForConditionalGeneration, config), rows, {"pixel_values": noise(3, 3, 28, 28)})


@sight
def got_ocr2() -> Sight:
    return got()


@sight
def got_ocr2_without_distances() -> Sight:
    return got(use_rel_pos=False, use_abs_pos=False, qkv_bias=False, hidden_act="relu")


@sight
def pp_chart2table() -> Sight:
    return got("pp_chart2table")


@sight
def deepseek_vl_hybrid() -> Sight:
    import torch
    from transformers import DeepseekVLHybridConfig, DeepseekVLHybridForConditionalGeneration

    high = {key: x for key, x in SAM.items() if key != "mlp_dim"} | {"mlp_ratio": 1.5, "global_attn_indexes": [1, 2]}
    config = DeepseekVLHybridConfig(
        text_config=LLAMA,
        vision_config=SIGLIP_VISION,
        high_res_vision_config={**high, "model_type": "sam_vision_model"},
        image_token_id=IMAGE,
    )
    rows = [[5, *with_images(9, 9), 7], [8, 4, *with_images(9), 6]]
    features = {"pixel_values": noise(3, 3, 12, 12), "high_res_pixel_values": noise(3, 3, 28, 28, seed=2)}
    model = tiny(DeepseekVLHybridForConditionalGeneration, config)
    with torch.no_grad():  # convolutions add up, and SAM's features would hide SigLIP's
        model.model.aligner.high_res_vision_proj.weight.mul_(0.03)
    return Sight(model, rows, features)


def ocr(sam: dict[str, Any], image: int, tile: int, queries: int, **encoder: Any) -> Sight:
    """An image with two tiles, and one without."""
    from transformers import DeepseekOcr2Config, DeepseekOcr2ForConditionalGeneration

    decoder = {"hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = DeepseekOcr2Config(
        text_config={**text_of("deepseek_ocr2"), **TEXT},
        vision_config={
            "sam_config": {**SAM, "downsample_channels": [14, 20], **sam},
            "encoder_config": {**decoder, "num_key_value_heads": 1, "vocab_size": 3, **encoder},
        },
        image_token_id=IMAGE,
    )
    rows = [[5, *with_images(2 * 144 + queries + 1), 7], [8, 4, *with_images(queries + 1), 6]]
    features = {
        "pixel_values": noise(2, 3, image, image),
        "pixel_values_local": noise(2, 3, tile, tile, seed=2),
        "num_local_patches": np.array([2, 0]),
    }
    return Sight(tiny(DeepseekOcr2ForConditionalGeneration, config), rows, features)


@sight
def deepseek_ocr2() -> Sight:
    """Positions and distances are interpolated to 9 x 9 and 5 x 5 patches."""
    return ocr({}, 36, 20, 144)


@sight
def deepseek_ocr2_of_large_images() -> Sight:
    """13 x 13 patches are left of 52 x 52; a tile has 6 x 6 of 22 x 22, without positions."""
    sam = {"patch_size": 2, "image_size": 104, "use_abs_pos": False, "qkv_bias": False, "num_hidden_layers": 2}
    return ocr(sam, 104, 44, 256, num_key_value_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 100.0})


def without_window(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of DeepSeek-OCR, of Unlimited-OCR's."""
    text = {key: x for key, x in raw["text_config"].items() if key not in ("layer_types", "sliding_window")}
    return {**raw, "text_config": text, "model_type": "deepseek_vl_v2", "architectures": ["DeepseekOCRForCausalLM"]}


class ReleasedOcr(Sight):
    """DeepSeek-OCR, which transformers has as Unlimited-OCR without its window. Releases have CLIP's matrix of patches
    too, which nothing reads."""

    def config_json(self) -> dict[str, Any]:
        return without_window(super().config_json())

    def save(self, folder: Path) -> None:
        super().save(folder)
        self.complete(folder, "model.vision_model")

    def save_modules(self, folder: Path) -> None:
        super().save_modules(folder)
        self.complete(folder, "model.vision_tower.vision_encoder")

    def complete(self, folder: Path, clip: str) -> None:
        raw, tensors = json.loads((folder / "config.json").read_text()), read_tensors(folder)
        width, patch = (raw["vision_config"]["encoder_config"][key] for key in ("hidden_size", "patch_size"))
        unread = noise(width, 3, patch, patch, seed=3)
        tensors[f"{clip}.embeddings.patch_embedding.weight"] = unread.astype(tensors["lm_head.weight"].dtype)
        write_checkpoint(folder, without_window(raw), tensors)


def first_ocr(tile: int, grids: list[tuple[int, int]], features: list[int], **encoder: Any) -> Sight:
    """Images of 9 x 9 patches with columns and rows of tiles of each; `features` along a side of a tile, an image."""
    from transformers import AutoConfig, UnlimitedOcrForConditionalGeneration

    clip = {"hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**text_of("deepseek_ocr2"), **TEXT, "num_key_value_heads": 4}  # transformers has no fewer than heads
    config = AutoConfig.for_model(
        "unlimited_ocr",
        text_config={**text, "layer_types": ["full_attention"] * text["num_hidden_layers"]},
        vision_config={
            "sam_config": {**SAM, "downsample_channels": [14, 20]},
            "encoder_config": {**clip, "image_size": 20, "patch_size": 5, **encoder},
        },
        image_token_id=IMAGE,
    )
    of_tile, of_image = features
    tiles = [w * h if w * h > 1 else 0 for w, h in grids]
    counts = [
        of_image * (of_image + 1) + 1 + (h * of_tile * (w * of_tile + 1) if n else 0)
        for (w, h), n in zip(grids, tiles, strict=True)
    ]
    images = {"pixel_values": noise(len(grids), 3, 36, 36), "num_local_patches": np.array(tiles)}
    if sum(tiles):
        images["pixel_values_local"] = noise(sum(tiles), 3, tile, tile, seed=2)
    rows = [[5, *with_images(*counts[:-1]), 7], [8, 4, *with_images(counts[-1]), 6]]
    return ReleasedOcr(
        tiny(UnlimitedOcrForConditionalGeneration, config), rows, {**images, "patches_grid": np.array(grids)}
    )


@sight
def deepseek_ocr() -> Sight:
    """Positions of CLIP are interpolated to 3 x 3 and 2 x 2 patches."""
    return first_ocr(20, [(3, 2), (1, 1), (1, 2)], [2, 3])


@sight
def deepseek_ocr_without_tiles() -> Sight:
    """CLIP has as many positions as patches."""
    return first_ocr(20, [(1, 1), (1, 1), (1, 1)], [2, 3], image_size=15, hidden_act="gelu", layer_norm_eps=1e-3)
