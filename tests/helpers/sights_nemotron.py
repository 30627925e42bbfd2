"""Tiny models of Nemotron Omni."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from helpers.checkpoints import read_tensors
from helpers.processors import word_tokenizer
from helpers.sights import IMAGE, SOUND, TEXT, Sight, noise, sight, tiny

NO_KEYS: Mapping[str, Any] = {}

NEMOTRON_TEXT: Mapping[str, Any] = {
    **{key: value for key, value in TEXT.items() if key != "num_hidden_layers"},
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 9,
    "n_groups": 2,
    "ssm_state_size": 7,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28,
}


def nemotron_config(
    text: Mapping[str, Any], vision: Mapping[str, Any], audio: Mapping[str, Any] | None, **outer: Any
) -> Any:
    """The config of a tiny model; without `audio` it does not hear."""
    from transformers import NemotronH_Omni_Reasoning_V3_Config

    sounds = {
        "hidden_size": 20,
        "intermediate_size": 28,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_mel_bins": 16,
        "subsampling_conv_channels": 6,
        "conv_kernel_size": 5,
        "convolution_bias": False,
        "projection_hidden_size": 22,
        "projection_bias": False,
        **(audio or {}),
    }
    return NemotronH_Omni_Reasoning_V3_Config(
        text_config=dict(text),
        vision_config={
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "mlp_ratio": 1.75,
            "patch_size": 4,
            "max_img_size": 28,
            "video_temporal_patch_size": 2,
            **vision,
        },
        audio_config=None if audio is None else sounds,
        vision_hidden_size=24,
        projector_hidden_size=36,
        image_token_id=IMAGE,
        audio_token_id=SOUND,
        **outer,
    )


def nemotron(
    rows: list[list[int]],
    features: dict[str, np.ndarray],
    *,
    text: Mapping[str, Any] = NO_KEYS,
    vision: Mapping[str, Any] = NO_KEYS,
    audio: Mapping[str, Any] | None = NO_KEYS,
    **outer: Any,
) -> Sight:
    """A case; without `audio` the model does not hear."""
    from transformers import NemotronH_Omni_Reasoning_V3

    config = nemotron_config({**NEMOTRON_TEXT, **text}, vision, audio, **outer)
    model = tiny(NemotronH_Omni_Reasoning_V3, config)
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 1.5)
    return Sight(model, rows, features, parts=("vision",) if audio is None else ("vision", "audio"))


def images(values: int, *grids: tuple[int, int]) -> dict[str, np.ndarray]:
    """Images of so many rows and columns of patches, whose patches have so many values."""
    sizes = np.array(grids)
    return {"pixel_values": noise(int(sizes.prod(axis=1).sum()), values), "image_grid_hw": sizes}


def sounds(mels: int, *frames: int) -> dict[str, np.ndarray]:
    """Sounds of so many frames with the one behind them, as the feature extractor returns them."""
    mask = np.arange(max(frames) + 1) < np.array(frames)[:, None]
    return {"input_features": noise(len(frames), max(frames) + 1, mels, seed=2), "input_features_mask": mask}


@sight
def nemotron_h_omni() -> Sight:
    """Images of which one has more patches than learned positions, and sounds of which one has a feature of no frame of
    its own."""
    rows = [
        [5, *[IMAGE] * 12, 7, *[IMAGE] * 1, 9, *[SOUND] * 4, 11],
        [8, 4, *[SOUND] * 3, 6, *[IMAGE] * 10, 3, *[SOUND] * 2, 12],
    ]
    return nemotron(rows, images(48, (6, 8), (2, 2), (4, 10)) | sounds(16, 29, 16, 9))


@sight
def nemotron_h_omni_of_other_layers() -> Sight:
    """Gated MLPs, a norm before patches are joined, biases, and experts of a text model that read narrower vectors."""
    rows = [[5, *[IMAGE] * 6, 7, 9], [8, 4, *[SOUND] * 5, 6]]
    vision = {
        **{"use_swiglu_ffn": True, "qkv_bias": False, "num_cls_tokens": 2, "num_registers": 0, "layer_norm_eps": 1e-3},
        **{"video_temporal_patch_size": 3, "patch_size": 3, "summary_idxs": [0, 1, 1]},
    }
    audio = {
        **{"attention_bias": True, "convolution_bias": True, "scale_input": True, "projection_bias": True},
        **{"hidden_act": "gelu", "num_mel_bins": 8},
    }
    features = images(27, (4, 6)) | sounds(8, 33)
    text = {"num_nextn_predict_layers": 1, "moe_latent_size": 12}
    return nemotron(rows, features, text=text, vision=vision, audio=audio, video_temporal_patch_size=3)


@sight
def nemotron_h_omni_of_images() -> Sight:
    """Without an encoder of sounds."""
    return nemotron([[5, *[IMAGE] * 4, 7, 9], [8, *[IMAGE] * 6, 3]], images(48, (2, 8), (6, 4)), audio=None)


def of_nano_vl(folder: Path, kind: str = "NemotronH_Nano_VL_V2", template: str = "nemotron5h") -> None:
    """Writes the config.json of a Nemotron Nano VL, whose keys differ from transformers', and leaves out the matrix of
    several frames."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    frames = "video_temporal_patch_size"
    del raw["audio_config"], raw["audio_token_id"], raw[frames], raw["vision_config"][frames]
    renamed = {"text_config": "llm_config", "image_token_id": "img_context_token_id"}
    raw = {renamed.get(key, key): value for key, value in raw.items()}
    raw["vit_hidden_size"] = raw.pop("vision_hidden_size")
    tensors = {name: x for name, x in read_tensors(folder).items() if "video_embedder" not in name}
    save_file(tensors, folder / "model.safetensors")
    path.write_text(json.dumps({**raw, "architectures": [kind], "model_type": kind, "template": template}))


@sight
def nemotron_nano_vl() -> Sight:
    rows, features = [[5, *[IMAGE] * 4, 7, 9], [8, *[IMAGE] * 6, 3]], images(48, (2, 8), (6, 4))
    return replace(nemotron(rows, features, audio=None), as_released=of_nano_vl)


def of_llama_nano_vl(folder: Path) -> None:
    """The same around Llama: the id of the placeholder stands in the tokenizer's files alone."""
    of_nano_vl(folder, "Llama_Nemotron_Nano_VL", "llama_3_1_nemotron_nano_vl")
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    del raw["img_context_token_id"], raw["llm_config"]["num_nextn_predict_layers"]
    path.write_text(json.dumps({**raw, "ps_version": "v2", "image_tag_type": "internvl"}))
    tokenizer = word_tokenizer({IMAGE: "<image>"})
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(folder)


@sight
def llama_nemotron_nano_vl() -> Sight:
    from helpers.released_code.nemotron_vl import LlamaNemotronVL

    rows, features = [[5, *[IMAGE] * 4, 7, 9], [8, *[IMAGE] * 6, 3]], images(48, (2, 8), (6, 4))
    text = {**TEXT, "model_type": "llama", "num_nextn_predict_layers": 0}
    config = nemotron_config(text, {"num_cls_tokens": 4, "num_registers": 0}, None)
    return Sight(
        tiny(LlamaNemotronVL, config),
        rows,
        features,
        released={r"^multi_modal_projector\.": "mlp1."},
        as_released=of_llama_nano_vl,
    )
