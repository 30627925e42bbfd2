"""Multimodal releases with code of their own: their config.json, and the prompts that their processors write."""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

import tpuconv
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.conversions import assert_same, restore
from helpers.families import FIRST, save
from helpers.released import STEP5_TEXT
from helpers.whole_sights import made
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import ConfigError, UnsupportedConfig, UsageError
from tpuconv.models.pictures import Preparer
from tpuconv.models.registry import find_family

DOTS: Mapping[str, Any] = {
    "architectures": ["DotsOCRForCausalLM"],
    "model_type": "dots_ocr",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_dots.DotsOCRConfig"},
    "hidden_act": "silu",
    "hidden_size": 1536,
    "image_token_id": 151665,
    "initializer_range": 0.02,
    "intermediate_size": 8960,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "video_token_id": 151656,
    "vision_config": {
        "attn_implementation": "flash_attention_2",
        "embed_dim": 1536,
        "gradient_checkpointing": False,
        "hidden_size": 1536,
        "init_merger_std": 0.02,
        "initializer_range": 0.02,
        "intermediate_size": 4224,
        "is_causal": False,
        "num_attention_heads": 12,
        "num_channels": 3,
        "num_hidden_layers": 42,
        "patch_size": 14,
        "post_norm": True,
        "rms_norm_eps": 1e-05,
        "spatial_merge_size": 2,
        "temporal_patch_size": 1,
        "use_bias": False,
    },
    "vocab_size": 151936,
}
MINICPM_V: Mapping[str, Any] = {
    "architectures": ["MiniCPMV"],
    "model_type": "minicpmv",
    "version": 2.6,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_minicpm.MiniCPMVConfig"},
    "batch_vision_input": True,
    "bos_token_id": 151643,
    "drop_vision_last_layer": False,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "image_size": 448,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "patch_size": 14,
    "query_num": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "slice_config": {"max_slice_nums": 9, "patch_size": 14, "model_type": "minicpmv"},
    "slice_mode": True,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_image_id": True,
    "use_sliding_window": False,
    "vision_batch_size": 16,
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 980,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
    },
    "vocab_size": 151666,
}
WITHOUT_WINDOW = {key: x for key, x in MINICPM_V.items() if "window" not in key}
LONGROPE = {
    **{"rope_type": "longrope", "factor": 1.0, "original_max_position_embeddings": 32786},
    **{"long_factor": [1.0] * 64, "short_factor": [1.0] * 64},
}
MINICPM_V4: Mapping[str, Any] = WITHOUT_WINDOW | {
    **{"version": 4.0, "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 32, "head_dim": 128},
    **{"num_hidden_layers": 32, "num_key_value_heads": 2, "vocab_size": 73448, "rope_theta": 10000.0},
    **{"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_scaling": LONGROPE},
}
MINICPM_V4_5: Mapping[str, Any] = WITHOUT_WINDOW | {
    **{"version": 4.5, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "head_dim": 128},
    **{"num_hidden_layers": 36, "num_key_value_heads": 8, "vocab_size": 151748, "attention_bias": False},
}
WHISPER_MEDIUM = {
    **{"d_model": 1024, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "encoder_layers": 24},
    **{"num_mel_bins": 80, "max_source_positions": 1500, "model_type": "whisper", "decoder_layers": 24},
}
OF_SPEECH: Mapping[str, Any] = {
    **{"architectures": ["MiniCPMO"], "model_type": "minicpmo", "audio_config": WHISPER_MEDIUM},
    **{"audio_chunk_length": 1.0, "init_audio": True, "init_tts": True, "init_vision": True, "stream_input": True},
    **{"chunk_input": True, "listen_speak_type": "asr", "tts_config": {"model_type": "conditional_chattts"}},
}
MINICPM_O: Mapping[str, Any] = MINICPM_V | OF_SPEECH | {"version": "2.6", "vocab_size": 151700, "audio_pool_step": 2}
MINICPM_O4_5: Mapping[str, Any] = {key: x for key, x in (MINICPM_V4_5 | OF_SPEECH).items() if key != "version"}
PHI3_V: Mapping[str, Any] = {
    "_name_or_path": "Phi-3-vision-128k-instruct",
    "architectures": ["Phi3VForCausalLM"],
    "model_type": "phi3_v",
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_phi3_v.Phi3VConfig"},
    "bos_token_id": 1,
    "embd_layer": {
        "embedding_cls": "image",
        "hd_transform_order": "sub_glb",
        "projection_cls": "mlp",
        "use_hd_transform": True,
        "with_learnable_separator": True,
    },
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "img_processor": {
        "image_dim_out": 1024,
        "model_name": "openai/clip-vit-large-patch14-336",
        "name": "clip_vision_model",
        "num_img_tokens": 144,
    },
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"type": "su", "long_factor": [1.0] * 48, "short_factor": [1.0] * 48},
    "rope_theta": 10000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32064,
    "_attn_implementation": "flash_attention_2",
}
OPENCUA: Mapping[str, Any] = {
    "architectures": ["OpenCUAForConditionalGeneration"],
    "model_type": "opencua",
    "auto_map": {"AutoConfig": "configuration_opencua.OpenCUAConfig"},
    "ignore_index": -100,
    "media_placeholder_token_id": 151664,
    "pad_token_id": 0,
    "text_config": {
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 128000,
        "model_type": "qwen2",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "depth": 32,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu",
        "hidden_size": 1280,
        "in_chans": 3,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
    },
}
OVIS25: Mapping[str, Any] = {
    "architectures": ["Ovis2_5"],
    "model_type": "ovis2_5",
    "auto_map": {"AutoModelForCausalLM": "modeling_ovis2_5.Ovis2_5"},
    "hidden_size": 4096,
    "llm_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "pad_token_id": None,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    "torch_dtype": "bfloat16",
    "visual_vocab_size": 65536,
    "vit_config": {
        "attention_dropout": 0.0,
        "fullatt_block_indexes": None,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "hidden_stride": 2,
        "image_size": 512,
        "intermediate_size": 4304,
        "layer_norm_eps": 1e-06,
        "model_type": "siglip2_navit",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 27,
        "num_patches": -1,
        "patch_size": 16,
        "preserve_original_pe": True,
        "temporal_patch_size": 1,
        "use_rope": True,
        "window_size": 112,
    },
}
STEP3: Mapping[str, Any] = {
    "architectures": ["Step3VLForConditionalGeneration"],
    "model_type": "step3_vl",
    "image_token_id": 128001,
    "projector_bias": False,
    "text_config": {
        "architectures": ["Step3TextForCausalLM"],
        "head_dim": 256,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "max_seq_len": 65536,
        "moe_intermediate_size": 5120,
        "moe_layers_enum": ",".join(map(str, range(4, 60))),
        "moe_num_experts": 48,
        "moe_top_k": 3,
        "norm_expert_weight": False,
        "num_attention_groups": 1,
        "num_attention_heads": 64,
        "num_hidden_layers": 61,
        "rope_theta": 500000,
        "share_expert_dim": 5120,
        "share_q_dim": 2048,
        "vocab_size": 128815,
    },
    "understand_projector_stride": 2,
    "vision_config": {
        "hidden_size": 1792,
        "image_size": 728,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_hidden_layers": 63,
        "output_hidden_size": 4096,
        "patch_size": 14,
    },
}
STEP3_10B: Mapping[str, Any] = {
    "architectures": ["StepVLForConditionalGeneration"],
    "model_type": "step_robotics",
    "image_token_id": 151679,
    "projector_bias": False,
    "text_config": {
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 65536,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    "understand_projector_stride": 2,
    "vision_config": {
        "heads": 16,
        "hidden_act": "quick_gelu",
        "image_size": 728,
        "layers": 47,
        "ls_init_value": 0.1,
        "mlp_ratio": 8960 / 1536,
        "model_type": "perception_encoder",
        "num_channels": 3,
        "patch_size": 14,
        "use_abs_posemb": True,
        "use_cls_token": False,
        "use_ln_post": False,
        "use_ln_pre": True,
        "use_rope2d": True,
        "width": 1536,
    },
}
STEP5: Mapping[str, Any] = {
    **{"architectures": ["MMGPTStepRoboticsForCausalLM"], "model_type": "step3p5v"},
    **{key: STEP3_10B[key] for key in ("image_token_id", "projector_bias", "understand_projector_stride")},
    "vision_config": STEP3_10B["vision_config"],
    "text_config": STEP5_TEXT,
}
NVLM: Mapping[str, Any] = {
    "architectures": ["NVLM_D"],
    "model_type": "NVLM_D",
    "downsample_ratio": 0.5,
    "dynamic_image_size": True,
    "force_image_size": 448,
    "llm_config": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "model_type": "qwen2",
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    },
    "max_dynamic_patch": 6,
    "min_dynamic_patch": 1,
    "ps_version": "v2",
    "select_layer": -1,
    "use_thumbnail": True,
    "vision_config": {
        "hidden_size": 3200,
        "image_size": 448,
        "intermediate_size": 12800,
        "model_type": "intern_vit_6b",
        "norm_type": "rms_norm",
        "num_attention_heads": 25,
        "num_hidden_layers": 45,
        "patch_size": 14,
        "qk_normalization": True,
        "qkv_bias": False,
    },
}
KEYE: Mapping[str, Any] = {
    "architectures": ["KeyeForConditionalGeneration"],
    "model_type": "Keye",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "modeling_keye.KeyeForConditionalGeneration"},
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "image_token_id": 151655,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "video_token_id": 151656,
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 384,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "tokens_per_second": 2,
    },
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
    "vocab_size": 151936,
}
INTERN_S1: Mapping[str, Any] = {
    "architectures": ["InternS1ForConditionalGeneration"],
    "model_type": "interns1",
    "auto_map": {"AutoModelForCausalLM": "modeling_interns1.InternS1ForConditionalGeneration"},
    "downsample_ratio": 0.5,
    "image_seq_length": 256,
    "image_token_id": 152957,
    "projector_hidden_act": "gelu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "text_config": {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "max_window_layers": 94,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 1536,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 94,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 153216,
    },
    "vision_config": {
        "attention_bias": False,
        "hidden_act": "gelu",
        "hidden_size": 3200,
        "image_size": [448, 448],
        "intermediate_size": 12800,
        "layer_norm_eps": 1e-06,
        "model_type": "interns1_vision",
        "norm_type": "rms_norm",
        "num_attention_heads": 25,
        "num_hidden_layers": 45,
        "patch_size": [14, 14],
        "use_absolute_position_embeddings": True,
        "use_mean_pooling": True,
        "use_qk_norm": True,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}
RELEASES: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "opencua": (OPENCUA, "8.3"),
    "NVLM_D": (NVLM, "79.4"),
    "step3_vl": (STEP3, "321.0"),
    "step_robotics": (STEP3_10B, "10.2"),
    "step3p5v": (STEP5, "600.5"),
    "ovis2_5": (OVIS25, "9.2"),
    "interns1": (INTERN_S1, "240.7"),
    "Keye": (KEYE, "8.6"),
    "KeyeVL1_5": (KEYE | {"architectures": ["KeyeVL1_5ForConditionalGeneration"], "model_type": "KeyeVL1_5"}, "8.6"),
    "phi3_v": (PHI3_V, "4.1"),
    "dots_ocr": (DOTS, "3.0"),
    "minicpmv": (MINICPM_V, "8.1"),
    "minicpmv_4": (MINICPM_V4, "4.1"),
    "minicpmv_4_5": (MINICPM_V4_5, "8.7"),
    "minicpmo": (MINICPM_O, "8.4"),
    "minicpmo_4_5": (MINICPM_O4_5, "9.0"),
}
"""By case the config.json of a release, and the billions of its parameters."""


@pytest.mark.parametrize("name", RELEASES)
def test_a_release_has_its_size(name: str) -> None:
    raw, billions = RELEASES[name]
    family = find_family(raw)
    parts = dict.fromkeys(each.part for each in family.modalities if each.part == "vision" or each.config_key in raw)
    report = family.check_config(raw, parts=parts)
    rows = family.table_without_release(parts=report.config.parts).bind(report.config)
    numbers = [prod(shape) for row in rows for shape in row.src_shapes().values()]
    assert f"{sum(numbers) / 1e9:.1f}" == billions
    assert not report.ignored


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("dots_ocr", {"attention_bias": False}, "attention_bias=False is not implemented"),
        ("dots_ocr", {"vision_config": {"use_bias": True}}, "use_bias=True of an encoder is not implemented"),
        ("dots_ocr", {"vision_config": {"post_norm": False}}, "post_norm=False of an encoder is not implemented"),
        ("dots_ocr", {"vision_config": {"temporal_patch_size": 2}}, "temporal_patch_size=2 of an encoder"),
        ("dots_ocr", {"vision_config": [1]}, r"vision_config=\[1\] is not an object"),
        (
            "phi3_v",
            {"embd_layer": {"projection_cls": "linear"}},
            "embd_layer.projection_cls='linear' is not",
        ),
        (
            "phi3_v",
            {"embd_layer": {"hd_transform_order": "glb_sub"}},
            "hd_transform_order='glb_sub' is not",
        ),
        ("phi3_v", {"img_processor": {"type_feature": "cls_patch"}}, "type_feature='cls_patch' is not implemented"),
        ("phi3_v", {"img_processor": {"image_dim_out": 512}}, "image_dim_out=512 does not fit an encoder of 24 x 24"),
        ("phi3_v", {"img_processor": {"layer_idx": 25}}, r"has no hidden states \[25\]"),
        ("step3_vl", {"understand_projector_stride": 0}, "understand_projector_stride=0 of 52 x 52 patches"),
        ("step_robotics", {"vision_config": {"use_cls_token": True}}, "use_cls_token=True of an encoder"),
        ("step_robotics", {"vision_config": {"use_rope2d": False}}, "use_rope2d=False of an encoder"),
        ("Keye", {"use_sliding_window": True}, "use_sliding_window=True is not implemented"),
        ("ovis2_5", {"vit_config": {"use_rope": False}}, "use_rope=False of an encoder is not implemented"),
        ("ovis2_5", {"vit_config": {"fullatt_block_indexes": "0|1"}}, "fullatt_block_indexes='0|1' of an encoder"),
        ("ovis2_5", {"vit_config": [1]}, r"vit_config=\[1\] is not an object"),
        ("ovis2_5", {"llm_config": 1}, "llm_config=1 is not an object"),
        ("ovis2_5", {"visual_vocab_size": 4}, "4 visual_indicator_token_ids do not fit .* of 4"),
        ("minicpmv", {"version": 2.5}, "version=2.5 of MiniCPM is not implemented"),
        ("minicpmv", {"version": None}, "version=None of MiniCPM is not implemented"),
        ("minicpmv", {"drop_vision_last_layer": True}, "drop_vision_last_layer=True is not implemented"),
        ("minicpmv", {"hidden_size": 1152, "num_attention_heads": 12}, r"as wide as the text model \(1152\)"),
        ("minicpmo", {"version": 3.0}, "version='3.0' of MiniCPM is not implemented"),
        ("minicpmo", {"audio_pool_step": 0}, "audio_pool_step=0"),
        ("minicpmo", {"audio_config": {"d_model": 1024}}, "encoder_ffn_dim=1536 is not 4 times d_model=1024"),
        ("minicpmv", {"hidden_size": 112}, "hidden_size=112 is no width of a resampler with 0 heads"),
    ],
)
def test_other_values_are_refused(name: str, change: dict[str, Any], fault: str) -> None:
    raw = {**RELEASES[name][0], **change}
    with pytest.raises((ConfigError, UnsupportedConfig), match=fault):
        find_family(raw).read_config(raw, parts=dict.fromkeys(each.part for each in find_family(raw).modalities))


@pytest.mark.parametrize(
    ("name", "text_type", "front"),
    [
        ("dots_ocr", "qwen2", ""),
        ("phi3_v", "phi3", ""),
        ("opencua", "qwen2", "language_model."),
        ("ovis2_5", "qwen3", "llm."),
        ("interns1", "qwen3_moe", "language_model."),
        ("NVLM_D", "qwen2", "language_model."),
        ("step3_vl", "step3_text", ""),
        ("step_robotics", "qwen3", ""),
        ("step3p5v", "step4", ""),
        ("minicpmv", "qwen2", "llm."),
        ("minicpmv_4", "llama", "llm."),
        ("minicpmv_4_5", "qwen3", "llm."),
        ("minicpmo", "qwen2", "llm."),
        ("minicpmo_4_5", "qwen3", "llm."),
    ],
)
def test_the_text_model_is_of_its_family(name: str, text_type: str, front: str, tmp_path: Path) -> None:
    alone = save(FIRST[text_type], tmp_path / "text")
    text = json.loads((alone / "config.json").read_text())
    inside = next((key for key in ("llm_config", "text_config") if key in RELEASES[name][0]), None)
    raw = {**RELEASES[name][0], **(text if inside is None else {inside: text})}
    raw |= {key: RELEASES[name][0][key] for key in ("architectures", "model_type")}
    for key in ("rope_scaling", "rope_theta"):
        raw.pop(key, None)
    write_checkpoint(tmp_path / "whole", raw, {f"{front}{each}": x for each, x in read_tensors(alone).items()})
    for folder in ("text", "whole"):
        api.convert(tmp_path / folder, tmp_path / f"{folder}-out")
    assert read_manifest(tmp_path / "whole-out").family == f"{raw['model_type']}.{text_type}"
    assert_same(restore(tmp_path / "whole-out"), restore(tmp_path / "text-out"))


def test_slices_that_do_not_fit_are_named(whole: Any) -> None:
    case, model = made("minicpmv_2_6"), tpuconv.load(whole("minicpmv_2_6")[1])
    with pytest.raises(UsageError, match=r"patches of \(4, 56\), tgt_sizes 12 of 4 x 4"):
        model.see(case.ids_BT, case.mask_BT, **{**case.features, "tgt_sizes": case.features["tgt_sizes"][[0, 0]]})


def test_tiles_of_phi_3_that_do_not_fit_are_named(whole: Any) -> None:
    case, model = made("phi3_v"), tpuconv.load(whole("phi3_v")[1])
    sizes, pixels = case.features["image_sizes"], case.features["pixel_values"]
    for changed, fault in (
        (
            {"image_sizes": sizes * 2},
            "image 0 has 32 x 64 pixels by image_sizes, which are 2 x 4 tiles, .* 2 beside",
        ),
        ({"image_sizes": sizes // 2}, "which are 0 x 1 tiles"),
        ({"image_sizes": sizes[:2]}, "for 2 images"),
        ({"pixel_values": pixels[..., :12]}, r"has shape \(3, 3, 3, 16, 12\).* 16 x 16"),
    ):
        with pytest.raises(UsageError, match=fault):
            model.see(case.ids_BT, case.mask_BT, **{**case.features, **changed})


@pytest.mark.parametrize("both", [True, False])
def test_the_embedding_of_phi_3_may_stand_twice(both: bool, whole: Any, tmp_path: Path) -> None:
    src, out = whole("phi3_v")
    tensors, name = read_tensors(src), "model.embed_tokens.weight"
    tensors["model.vision_embed_tokens.wte.weight"] = tensors[name].copy() if both else tensors.pop(name)
    write_checkpoint(tmp_path / "src", json.loads((src / "config.json").read_text()), tensors)
    for text_only in (False, True):
        api.convert(tmp_path / "src", tmp_path / f"out-{text_only}", text_only=text_only)
    assert_same(restore(tmp_path / "out-False"), restore(out))
    assert read_manifest(tmp_path / "out-True").arrays.keys() < read_manifest(out).arrays.keys()
    api.export(tmp_path / "out-False", tmp_path / "back")
    assert_same(read_tensors(tmp_path / "back"), read_tensors(src))


def test_time_series_of_intern_s2_are_skipped_and_named(whole: Any, tmp_path: Path) -> None:
    src, out = whole("intern_s2_preview")
    own = {
        f"{front}.weight": np.ones((2, 3), np.float32) for front in ("model.time_series.x", "time_series_forecaster.y")
    }
    tensors = {**read_tensors(src), **own}
    write_checkpoint(tmp_path / "src", json.loads((src / "config.json").read_text()), tensors)
    plan = api.convert(tmp_path / "src", tmp_path / "out")
    assert sum(skip.count for skip in plan.skipped if "time series" in skip.reason) == len(own)
    assert_same(restore(tmp_path / "out"), restore(out))
    api.export(tmp_path / "out", tmp_path / "back", with_skipped=tmp_path / "src")
    assert_same(read_tensors(tmp_path / "back"), tensors)


@pytest.mark.parametrize(
    "name", ["minicpmv", "minicpmo", "ovis2_5", "phi3_v", "NVLM_D", "step3_vl", "step_robotics", "step3p5v"]
)
def test_prompts_without_a_processor_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RELEASES[name][0]))
    with pytest.raises(UsageError, match=f"transformers has no processor for {name}"):
        Preparer(tmp_path, None).prepared("Read it.", [Image.new("RGB", (84, 140))])


def random_image(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("name", ["Keye", "KeyeVL1_5"])
def test_prompts_of_keye(name: str, tmp_path: Path) -> None:
    """Its processor has the name of SigLIP's, and returns patches of images of any size row by row."""
    settings = {
        **{"image_processor_type": "SiglipImageProcessor", "processor_class": "KeyeProcessor", "resample": 3},
        **{"auto_map": {"AutoImageProcessor": "image_processing_keye.SiglipImageProcessor"}, "do_convert_rgb": True},
        **{"min_pixels": 3136, "max_pixels": 1003520, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
        **{"patch_size": 14, "temporal_patch_size": 1, "merge_size": 2, "do_normalize": True, "do_rescale": True},
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps(RELEASES[name][0]))
    image = random_image(84, 140)
    found = Preparer(tmp_path, None).prepared("Read it.", [image])
    assert found.text == "<|vision_start|>" + "<|image_pad|>" * 15 + "<|vision_end|>Read it."
    assert found.features["image_grid_thw"].tolist() == [[1, 6, 10]]
    pixels = np.asarray(image) / 127.5 - 1
    second_row = found.features["pixel_values"][10]
    np.testing.assert_allclose(second_row, pixels[14:28, :14].transpose(2, 0, 1), atol=1e-5)
    larger = Preparer(tmp_path, None).prepared("", [random_image(1400, 2000)]).features["image_grid_thw"]
    assert larger.tolist() == [[1, 58, 84]]  # at most 1003520 pixels: not those of PaddleOCR-VL's own settings


def test_prompts_of_dots_ocr(tmp_path: Path) -> None:
    """Its processor is Qwen2-VL's with other tokens, and patches are of one frame."""
    size = {"min_pixels": 3136, "max_pixels": 11289600}
    settings = {
        **{"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "DotsVLProcessor", **size},
        **{"patch_size": 14, "temporal_patch_size": 1, "merge_size": 2},
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps(DOTS))
    image = random_image(84, 140)
    found = Preparer(tmp_path, None).prepared("Read it.", [image])
    assert found.text == "<|img|>" + "<|imgpad|>" * 15 + "<|endofimg|>Read it."
    assert found.features["image_grid_thw"].tolist() == [[1, 6, 10]]
    processor = transformers.Qwen2VLImageProcessorPil
    own = {"mean": np.array(processor.image_mean), "std": np.array(processor.image_std)}
    pixels = (np.asarray(image) / 255 - own["mean"]) / own["std"]
    first = found.features["pixel_values"][1].reshape(3, 14, 14)
    np.testing.assert_allclose(first, pixels[:14, 14:28].transpose(2, 0, 1), atol=1e-5)
