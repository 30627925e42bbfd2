"""SigLIP and SigLIP 2 with other projectors."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from helpers.sights import END, IMAGE, LINEAR, START, TEXT, Sight, noise, sight, tiny, wide
from helpers.sights_llava import LLAMA, SIGLIP_VISION, with_images


@sight
def deepseek_vl() -> Sight:
    """The tower has a head that nothing reads."""
    from transformers import DeepseekVLConfig, DeepseekVLForConditionalGeneration

    vision = {**SIGLIP_VISION, "vision_use_head": True}
    config = DeepseekVLConfig(text_config=LLAMA, vision_config=vision, image_token_id=IMAGE)
    rows = [[5, *with_images(9, 9), 7], [8, 4, *with_images(9), 6]]
    return Sight(tiny(DeepseekVLForConditionalGeneration, config), rows, {"pixel_values": noise(3, 3, 12, 12)})


def of_shapes(most: int, *shapes: tuple[int, int]) -> dict[str, np.ndarray]:
    """Patches of images, their numbers of rows and columns, and which patches are no padding."""
    mask = np.array([np.arange(most) < h * w for h, w in shapes])
    patches = noise(len(shapes), most, 48) * mask[..., None]
    return {"pixel_values": patches, "spatial_shapes": np.array(shapes), "pixel_attention_mask": mask}


@sight
def lfm2_vl() -> Sight:
    from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration

    vision = {**SIGLIP_VISION, "model_type": "siglip2_vision_model", "num_patches": 36}
    text = {**TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 48}
    config = Lfm2VlConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, projector_hidden_size=40, downsample_factor=2
    )
    rows = [[5, *with_images(10, 3), 7], [8, 4, *with_images(12), 6]]
    features = of_shapes(48, (4, 10), (6, 2), (8, 6))
    older = {r"^model\.vision_tower\.": "model.vision_tower.vision_model."}
    return Sight(tiny(Lfm2VlForConditionalGeneration, config), rows, features, released=older)


@sight
def lfm2_vl_without_norm() -> Sight:
    from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration

    vision = {**SIGLIP_VISION, "model_type": "siglip2_vision_model", "num_patches": 9, "vision_use_head": True}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 1}
    text = {**TEXT, "model_type": "lfm2_moe", "layer_types": ["conv", "full_attention", "conv"], **experts}
    config = Lfm2VlConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        projector_hidden_size=24,
        projector_use_layernorm=False,
        projector_bias=False,
        projector_hidden_act="silu",
        downsample_factor=1,
    )
    rows = [[5, *with_images(10, 3), 7], [8, 4, *with_images(12), 6]]
    return Sight(tiny(Lfm2VlForConditionalGeneration, config), rows, of_shapes(12, (2, 5), (3, 1), (3, 4)))


GRIDS = np.array([(1, 4, 10), (1, 6, 2), (1, 8, 6)])


def paddle(of_model: Any, of_config: Any) -> Sight:
    vision = {key: value for key, value in SIGLIP_VISION.items() if key not in ("model_type", "vision_use_head")}
    vision |= {"hidden_size": 24, "num_attention_heads": 2, "image_size": 20}
    tokens = {"image_token_id": IMAGE, "video_token_id": 92, "vision_start_token_id": 93, "vision_end_token_id": 94}
    config = of_config(text_config=wide(2, 3, 3), vision_config=vision, **tokens)
    rows = [[5, *with_images(10, 3), 7], [8, 4, *with_images(12), 6]]
    features = {"pixel_values": noise(100, 3, 4, 4), "image_grid_thw": GRIDS}
    return Sight(tiny(of_model, config), rows, features, {"mm_token_type_ids": {IMAGE: 1}})


@sight
def paddleocr_vl() -> Sight:
    from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration

    return paddle(PaddleOCRVLForConditionalGeneration, PaddleOCRVLConfig)


def of_keye(folder: Path) -> None:
    """Writes the config.json of Keye-VL, whose keys of the text model are at the root."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    turned = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {**rope, "type": "default"}}
    path.write_text(json.dumps({**text, **turned, **raw}))


@sight
def keye_vl() -> Sight:
    from helpers.released_code.keye import KeyeConfig, KeyeForConditionalGeneration

    case = paddle(KeyeForConditionalGeneration, KeyeConfig)
    return replace(case, as_released=of_keye)


@sight
def keye_vl_1_5() -> Sight:
    from helpers.released_code.keye import KeyeVL1_5Config, KeyeVL1_5ForConditionalGeneration

    case = paddle(KeyeVL1_5ForConditionalGeneration, KeyeVL1_5Config)
    return replace(case, as_released=of_keye)


@sight
def video_llama_3() -> Sight:
    """Images of which one is averaged over 2 x 2 patches."""
    from transformers import VideoLlama3Config, VideoLlama3ForConditionalGeneration

    vision = {key: value for key, value in SIGLIP_VISION.items() if key not in ("model_type", "vision_use_head")}
    vision |= {"num_attention_heads": 2}
    config = VideoLlama3Config(
        text_config={**TEXT, "model_type": "qwen2"}, vision_config=vision, image_token_id=IMAGE, video_token_id=92
    )
    rows = [[5, *with_images(10, 12), 7], [8, 4, *with_images(12), 6]]
    features = {"pixel_values": noise(100, 48), "image_grid_thw": GRIDS, "image_merge_sizes": np.array([2, 1, 2])}
    return Sight(tiny(VideoLlama3ForConditionalGeneration, config), rows, features)


def minicpm(name: str, side: int, **changes: Any) -> Sight:
    """Three images, of which blocks of `side` x `side` patches become one feature."""
    from transformers import AutoConfig, AutoModelForMultimodalLM

    vision = {key: value for key, value in SIGLIP_VISION.items() if key not in ("model_type", "vision_use_head")}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    text = {**TEXT, "model_type": "qwen3_5_text", "hidden_size": 64, "head_dim": 16, "rope_parameters": rope, **LINEAR}
    config = AutoConfig.for_model(
        name,
        text_config=text,
        vision_config={**vision, "image_size": 20},
        image_token_id=IMAGE,
        video_token_id=92,
        insert_layer_id=1,
        **changes,
    )
    sizes = np.array([(1, 3), (2, 1), (2, 2)]) * side
    count = int(sizes.prod(axis=1).sum())
    rows = [[5, *with_images(3, 2), 7], [8, 4, *with_images(4), 6]]
    features = {"pixel_values": noise(1, 3, 4, 4 * count), "target_sizes": sizes}
    return Sight(tiny(AutoModelForMultimodalLM, config), rows, features, tolerance=2e-5)


@sight
def minicpmv4_6() -> Sight:
    return minicpm("minicpmv4_6", 8, merger_times=2)


@sight
def minicpmv4_7() -> Sight:
    """An image with four slices in two rows, over which it is stretched, and one without; two side by side."""
    slice_start, slice_end, newline = 90, 91, 89
    markers = {"slice_start_id": slice_start, "slice_end_id": slice_end, "newline_id": newline}
    case = minicpm("minicpmv4_7", 4, image_start_id=START, image_end_id=END, **markers)
    sizes = np.array([(2, 3), (2, 2), (2, 2), (2, 2), (2, 2), (1, 2), (1, 3), (2, 1)]) * 4
    count = int(sizes.prod(axis=1).sum())
    part = [slice_start, *[IMAGE] * 4, slice_end]
    slices = [*part, *part, newline, *part, *part]
    rows = [[5, *with_images(6), *slices, 9, *with_images(2), 7], [8, *with_images(3, 2), 6]]
    features = {"pixel_values": noise(1, 3, 4, 4 * count), "target_sizes": sizes}
    return replace(case, rows=rows, features=features, kinds={"mm_token_type_ids": {IMAGE: 1}})


@sight
def minicpm_ocr() -> Sight:
    return minicpm("minicpm_ocr", 2, downsample_mode="4x")


def ovis(tokens: int, **changes: Any) -> Sight:
    """Images between tokens that the table of visual words has too."""
    from transformers import Ovis2Config, Ovis2ForConditionalGeneration

    vision = {key: value for key, value in SIGLIP_VISION.items() if key not in ("model_type", "vision_use_head")}
    config = Ovis2Config(
        text_config={**TEXT, "model_type": "qwen2"},
        vision_config={**vision, "image_size": 24, "vocab_size": 29, "num_visual_indicator_tokens": 3, **changes},
        image_token_id=IMAGE,
        visual_indicator_token_ids=[93, 94, 92],
        hidden_size=32,
        vocab_size=97,
    )
    rows = [[5, *with_images(tokens, tokens), 7, 92], [8, 4, *with_images(tokens), 6]]
    return Sight(tiny(Ovis2ForConditionalGeneration, config), rows, {"pixel_values": noise(3, 3, 24, 24)})


@sight
def ovis2() -> Sight:
    return ovis(9, hidden_stride=2, qkv_bias=True)


@sight
def ovis2_of_single_patches() -> Sight:
    return ovis(36, mlp_bias=True)


def janus(**changes: Any) -> Sight:
    """The model has parts that draw images too."""
    from transformers import JanusConfig, JanusForConditionalGeneration

    vision = {
        **{key: SIGLIP_VISION[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")},
        **{"image_size": 12, "patch_size": 4, "projection_dim": 32, "mlp_ratio": 1.7, **changes},
    }
    draws = {
        **{"embed_dim": 4, "num_embeddings": 11, "latent_channels": 6, "base_channels": 32, "num_patches": 3},
        **{"channel_multiplier": [1, 1], "num_res_blocks": 1, "projection_dim": 32, "image_token_embed_dim": 32},
    }
    config = JanusConfig(text_config=LLAMA, vision_config=vision, vq_config=draws, image_token_id=IMAGE)
    rows = [[5, *with_images(9, 9), 7], [8, 4, *with_images(9), 6]]
    model = tiny(JanusForConditionalGeneration, config)
    return Sight(model, rows, {"pixel_values": noise(3, 3, 12, 12)}, derived=r"^model\.(vqmodel|generation_)")


@sight
def janus_pro() -> Sight:
    return janus()


@sight
def janus_of_several_matrices() -> Sight:
    return janus(depth=4, attention_bias=False, hidden_act="gelu_pytorch_tanh")


@sight
def aya_vision() -> Sight:
    """A factor of logits that transformers leaves out."""
    from transformers import AyaVisionConfig, AyaVisionForConditionalGeneration

    config = AyaVisionConfig(
        text_config={**TEXT, "model_type": "cohere2", "num_hidden_layers": 4, "logit_scale": 0.4, "sliding_window": 6},
        vision_config={**SIGLIP_VISION, "image_size": 24},
        image_token_index=IMAGE,
        adapter_layer_norm_eps=1e-5,
    )
    config.alignment_intermediate_size = 28
    rows = [[5, *with_images(9, 9), 7], [8, 4, *with_images(9), 6]]
    return Sight(tiny(AyaVisionForConditionalGeneration, config), rows, {"pixel_values": noise(3, 3, 24, 24)})


@sight
def cohere2_vision() -> Sight:
    from transformers import Cohere2VisionConfig, Cohere2VisionForConditionalGeneration

    config = Cohere2VisionConfig(
        text_config={**TEXT, "model_type": "cohere2", "num_hidden_layers": 4, "logit_scale": 0.4, "sliding_window": 6},
        vision_config={**SIGLIP_VISION, "image_size": 36, "vision_use_head": False},
        image_token_id=IMAGE,
        alignment_intermediate_size=28,
        downsample_factor=3,
    )
    rows = [[5, *with_images(9, 9), 7], [8, 4, *with_images(9), 6]]
    return Sight(tiny(Cohere2VisionForConditionalGeneration, config), rows, {"pixel_values": noise(3, 3, 36, 36)})


def _paligemma(**text: Any) -> Sight:
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    text = {**TEXT, **text, "num_hidden_layers": 4, "hidden_activation": "gelu_pytorch_tanh"}
    config = PaliGemmaConfig(
        text_config=text, vision_config={**SIGLIP_VISION, "vision_use_head": False}, image_token_index=IMAGE
    )
    config.vision_config.projection_dim = config.projection_dim = text["hidden_size"]
    rows = [[5, *with_images(9, 9), 7], [8, 4, *with_images(9), 6]]
    model = tiny(PaliGemmaForConditionalGeneration, config)
    return Sight(model, rows, {"pixel_values": noise(3, 3, 12, 12)}, tells_prompt="token_type_ids")


@sight
def paligemma() -> Sight:
    return _paligemma(model_type="gemma")


@sight
def paligemma2() -> Sight:
    """With a window that is shorter than the prompt, which all tokens of the prompt see."""
    return _paligemma(model_type="gemma2", sliding_window=6, query_pre_attn_scalar=8)
