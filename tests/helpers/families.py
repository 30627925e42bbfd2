"""Tiny models of every family, in shapes that real ones have and in some that show mistakes sooner.

Every parametrised test of the models and of the conversion runs over `CASES`. transformers is imported when it is
needed.
"""

import json
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from tpuconv.verify.reference import READ_WITHIN, attention_of, whole_config

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # 0.02 would leave attention nearly uniform and logits near zero, where mistakes do not show.
    "initializer_range": 0.25,
}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 12,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 12}
GROWING = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
MROPE = {"rope_type": "default", "rope_theta": 500.0}
MIXED = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]


@dataclass(frozen=True)
class Case:
    """One tiny model: `id` names it in test ids, `model_type` and `config` make its transformers config. `no_scan` says
    why its layers cannot be scanned; `written_as` is the model_type on disk of a family that transformers reads as
    another."""

    id: str
    family: str
    model_type: str
    config: Mapping[str, Any] = field(hash=False)
    no_scan: str = ""
    written_as: str = ""

    @property
    def key(self) -> str:
        """A name for a file: cases of other sizes may have the same id."""
        return f"{self.id}-{crc32(repr(sorted(self.config.items())).encode()):08x}"

    def hf_config(self) -> Any:
        from transformers import AutoConfig

        sizes = deepcopy(SIZES | dict(self.config))  # transformers writes into them
        if self.family in VISION:
            tied = sizes.get("tie_word_embeddings", False)
            vision = dict(VISION[self.family])
            beside = deepcopy(BESIDE_TEXT.get(self.family, {}))
            for part in (vision, beside.get("audio_config", {}), beside.get("adapter_config", {})):
                part |= {key: sizes["hidden_size"] for key in AS_WIDE_AS_TEXT.get(self.family, ()) if key in part}
            if self.family in OMNI:
                parts = {"text_config": sizes, "vision_config": vision, "audio_config": dict(OMNI_AUDIO)}
                thinker = parts | {"tie_word_embeddings": tied}
                return AutoConfig.for_model(self.model_type, thinker_config=thinker, enable_audio_output=False)
            if self.family == "gemma3n":  # for whose own tower transformers needs timm
                config = AutoConfig.for_model("gemma3n", text_config=sizes, tie_word_embeddings=tied, **beside)
                vars(config)["vision_config"] = AutoConfig.for_model("siglip_vision_model", **vision)
                return config
            return AutoConfig.for_model(
                self.model_type, text_config=sizes, vision_config=vision, tie_word_embeddings=tied, **beside
            )
        return AutoConfig.for_model(self.model_type, **sizes)

    def __str__(self) -> str:
        return self.id


def _case(name: str, model_type: str = "", /, **config: Any) -> Case:
    family = name.partition("-")[0]
    hf_type = model_type or READ_AS.get(family, family)
    return Case(
        name,
        family,
        hf_type,
        config,
        "" if name in REPEATING else NO_SCAN.get(name) or NO_SCAN.get(family, ""),
        family if family in READ_AS else "",
    )


READ_AS = {
    "kimi_k2": "deepseek_v3",
    "bailing_moe": "glm4_moe",
    "exaone": "llama",
    "internlm2": "llama",
    "mimo": "qwen2",
}
"""Families that transformers does not have, and the type of a model that computes the same."""


NO_SCAN = {
    "qwen3_moe-dense-layers": "dense layers and those with experts have different parameters",
    "deepseek_v3": "dense layers and those with experts have different parameters",
    "kimi_k2": "as deepseek_v3",
    "kimi_k25": "as deepseek_v3",
    "qwen3_omni_moe-dense-layers": "as qwen3_moe",
    "qwen3_vl_moe-dense-layers": "dense layers and those with experts have different parameters",
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v32", "glm_moe_dsa"), "as deepseek_v3"),
    "bailing_moe-plain": "as deepseek_v3",
    "hy_v4": "as glm_moe_dsa",
    **dict.fromkeys(("dots3_note_text", "dots3_note"), "layers with a window have sizes of their own"),
    **dict.fromkeys(("mistral_large4", "glm5_next"), "as glm_moe_dsa"),
    "nemo_speechlm": "layers with a state and with attention",
    "lfm3": "layers with a state and with attention",
    "beam": "each layer has factors of its own",
    **dict.fromkeys(("qwen2_moe-dense-layers", "ernie4_5_moe"), "as deepseek_v3"),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe"),
        "layers with linear and with full attention",
    ),
    **dict.fromkeys(("qwen4_exp_text", "qwen4_exp"), "some layers have embeddings of n-grams"),
    **dict.fromkeys(
        ("lfm2", "lfm2_moe", "granitemoehybrid", "bamba", "nemotron_h", "kimi_linear"),
        "layers with a state and with attention",
    ),
    "llama4": "layers differ in rotary positions, in chunks and in having experts",
    "llama4_text": "as llama4",
    **dict.fromkeys(
        ("gemma4_text", "gemma4", "gemma4_unified", "gemma4_unified_text"), "layers differ in the size of heads"
    ),
    **dict.fromkeys(("gemma3n_text", "gemma3n"), "layers have embeddings of their own"),
    **dict.fromkeys(
        ("dots1-plain", "hy_v3", "exaone_moe", "afmoe-plain", "cohere2_moe-dense-layers", "mistral4-dense-layer"),
        "dense layers and those with experts have different parameters",
    ),
    "mimo_v2_flash": "layers differ in key-value heads",
    "deepseek_v4": "layers differ in how they compress keys",
    **dict.fromkeys(("bailing_hybrid", "olmo_hybrid", "minimax"), "layers with a state and with attention"),
    "glm4v_moe": "as deepseek_v3",
    **dict.fromkeys(("step3p5", "step3p7"), "layers differ in query heads, and in having experts"),
    **dict.fromkeys(("minimax_m3_vl", "minimax_m3_vl_text"), "layers differ in having indexers and experts"),
    **dict.fromkeys(
        (
            "mellum-dense-layers",
            "deepseek_ocr2-plain",
            "laguna-elements",
            "flint-plain",
            "axk1-plain",
            "axk2-plain",
        ),
        "as deepseek_v3",
    ),
}
REPEATING = {
    *("deepseek_v3-all-experts", "deepseek_v3-all-dense", "deepseek_v2-groups", "llama4-scout"),
    *("qwen3_next-plain", "qwen3_5_text-plain", "qwen3_5_moe_text-plain", "granitemoehybrid-attention"),
    *(
        "step3p5-pairs",
        "step3p7-alike",
        "minimax_m3_vl_text-groups",
        "minimax_m3_vl-pairs",
        "qwen4_exp_text-no-n-grams",
        "lfm3-biases",
    ),
}
"""Cases of families in `NO_SCAN` whose layers are alike, or repeat with a period."""
LLAMA4 = {
    "intermediate_size": 20,
    "intermediate_size_mlp": 56,
    "head_dim": 8,
    "attention_chunk_size": 6,
    "floor_scale": 4,
    "attn_scale": 0.4,
    "num_local_experts": 5,
}
LLAMA4_VISION = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vision_output_dim": 8,
    "image_size": 28,
    "projector_input_dim": 8,
    "projector_output_dim": 8,
}
SIGLIP_VISION = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA3 = {
    "head_dim": 10,
    "num_hidden_layers": 3,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 20,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 60.0},
    },
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 48,
    "patch_size": 4,
}
OMNI = {
    "qwen3_omni_moe": "Qwen3OmniMoeForConditionalGeneration",
    "qwen2_5_omni": "Qwen2_5OmniForConditionalGeneration",
}
"""Models whose thinker returns logits, and transformers' class of the whole."""
OMNI_AUDIO = {
    "d_model": 8,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 8,
    "num_mel_bins": 8,
    "output_dim": 48,
    "downsample_hidden_size": 4,
    "n_window": 4,
}
KIMI_VISION = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "pos_emb_height": 2,
    "pos_emb_width": 2,
    "pos_emb_time": 2,
}
GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "num_hidden_layers": 4,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 10,
    "vocab_size_per_layer_input": 101,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 60.0},
    },
}
UNIFIED = {name: value for name, value in GEMMA4.items() if "per_layer" not in name}
GEMMA3N = {
    "head_dim": 10,
    "num_hidden_layers": 5,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 10,
    "vocab_size_per_layer_input": 70,
    "laurel_rank": 9,
    "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0, 0.95],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 60.0},
    },
}
GLM_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "out_hidden_size": 48,
    "intermediate_size": 16,
    "image_size": 28,
    "patch_size": 14,
}
HUNYUAN_VISION = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_image_size": 32,
}
SMALL_TOWER = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
VISION: dict[str, dict[str, Any]] = {
    "llama4": LLAMA4_VISION,
    "gemma3": SIGLIP_VISION,
    "mistral3": SIGLIP_VISION | {"head_dim": 4},
    "qwen2_5_vl": QWEN_VISION | {"fullatt_block_indexes": [0]},
    "qwen2_vl": {"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2, "mlp_ratio": 1, "patch_size": 4},
    "qwen3_vl": QWEN_VISION | {"num_position_embeddings": 4, "deepstack_visual_indexes": [0]},
    "qwen3_vl_moe": QWEN_VISION | {"num_position_embeddings": 4, "deepstack_visual_indexes": [0]},
    "qwen3_5": QWEN_VISION | {"num_position_embeddings": 4},
    "qwen3_5_moe": QWEN_VISION | {"num_position_embeddings": 4},
    "qwen4_exp": QWEN_VISION | {"num_position_embeddings": 4},
    "kimi_k25": KIMI_VISION,
    "mistral4": SIGLIP_VISION | {"head_dim": 4},
    "mistral_large4": SIGLIP_VISION | {"head_dim": 4},
    "gemma4": SIGLIP_VISION | {"head_dim": 4, "num_key_value_heads": 2},
    "glm4v": GLM_VISION,
    "glm4v_moe": GLM_VISION,
    "glm46v": GLM_VISION | {"model_type": "glm4v_vision"},
    "glm_ocr": GLM_VISION,
    "paddleocr_vl": SIGLIP_VISION,
    "hunyuan_vl": HUNYUAN_VISION,
    "granite_docling": SIGLIP_VISION | {"out_hidden_size": 48},
    "step3p7": SIGLIP_VISION,
    "muse_glimmer": KIMI_VISION,
    "muse_spark": KIMI_VISION,
    "qwen3_omni_moe": QWEN_VISION | {"num_position_embeddings": 4, "deepstack_visual_indexes": [0]},
    "qwen2_5_omni": QWEN_VISION | {"fullatt_block_indexes": [0]},
    "minimax_m3_vl": SIGLIP_VISION,
    "gemma4_unified": {"mm_embed_dim": 8, "mm_posemb_size": 4, "patch_size": 2, "pooling_kernel_size": 1},
    "gemma3n": SIGLIP_VISION | {"vocab_size": 3, "vocab_offset": 1000, "rms_norm_eps": 1e-6},
    "deepseek_ocr2": {
        "sam_config": {
            **{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "output_channels": 4, "mlp_dim": 8},
            **{"image_size": 32, "window_size": 2, "global_attn_indexes": [0], "downsample_channels": [4, 8]},
        },
        "encoder_config": {
            **{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
            **{"intermediate_size": 16, "vocab_size": 3},
        },
    },
    "cosmos3_omni": QWEN_VISION | {"num_position_embeddings": 4, "deepstack_visual_indexes": [0]},
    "glm5_next": GLM_VISION | {"projection_intermediate_size": 8},
    "aria": SIGLIP_VISION,
    "cosmos3_edge": {
        **{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
        **{"patch_size": 4, "num_patches": 4},
    },
    **{name: {} for name in ("emu3", "fuyu", "nemo_speechlm")},
    "molmo2": {
        **{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
        **{"head_dim": 4, "intermediate_size": 16, "image_size": [28, 28], "patch_size": 14},
    },
    "dots3_note": {
        **{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
        **{"adapter_in_dim": 8, "adapter_out_dim": 48, "mlp_layer_types": ["dense"]},
    },
}
"""The `vision_config` of families inside multimodal models."""
BESIDE_TEXT = {
    "kimi_k25": {"projection_hidden_size": 8},
    "muse_glimmer": {"out_hidden_size": 32, "projector_hidden_size": 8},
    "muse_spark": {
        **{"out_hidden_size": 32, "projector_hidden_size": 8},
        "audio_config": {
            **{"patch_sizes": [2], "hidden_sizes": [8], "depths": [1], "num_hidden_layers": 1},
            **{"out_hidden_size": 48, "conv_kernel_size": 3},
        },
    },
    "gemma3n": {
        "initializer_range": SIZES["initializer_range"],
        "audio_config": {
            "hidden_size": 8,
            "vocab_size": 3,
            "vocab_offset": 1003,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 1,
            "sscp_conv_channel_size": [4, 2],
            "input_feat_size": 8,
        },
    },
    "minimax_m3_vl": {"projector_hidden_size": 8},
    "cosmos3_edge": {"projector_hidden_size": 8},
    "aria": {"projector_patch_to_query_dict": {4: 2}},
    "nemo_speechlm": {
        "audio_config": {
            "asr_config": SMALL_TOWER | {"num_mel_bins": 8},
            "diarization_config": {
                "audio_config": SMALL_TOWER | {"num_mel_bins": 8},
                "head_config": {"hidden_size": 8, "audio_hidden_size": 8},
            },
        },
        "word_timestamp_config": SMALL_TOWER | {"vocab_size": 5, "blank_token_id": 4},
    },
    "emu3": {
        "vq_config": {
            **{"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "attn_resolutions": []},
            **{"hidden_size": 32, "codebook_size": 4},
        },
        "vocabulary_map": {"<image>": 3, "<|extra_200|>": 4, "<|visual token 000000|>": 5},
    },
    "fuyu": {"initializer_range": SIZES["initializer_range"]},
    "molmo2": {
        "initializer_range": SIZES["initializer_range"],
        "adapter_config": {
            **{"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4},
            **{"intermediate_size": 16, "text_hidden_size": 48, "vision_feature_layer": [0]},
        },
    },
    "dots3_note": {
        "audio_config": {
            **{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
            **{"adapter_input_size": 8, "adapter_out_dim": 48, "downsample_hidden_size": 4, "feature_size": 8},
        }
    },
}
"""Further sizes beside the `text_config`."""
AS_WIDE_AS_TEXT = {
    "granite_docling": ("out_hidden_size",),
    "muse_spark": ("out_hidden_size",),
    "dots3_note": ("adapter_out_dim",),
    "molmo2": ("text_hidden_size",),
}
"""Sizes of what sees or hears that have to be the text model's `hidden_size`."""

DEEPSEEK = {
    "num_key_value_heads": None,
    "moe_intermediate_size": 20,
    "kv_lora_rank": 24,
    "q_lora_rank": 28,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
    "n_routed_experts": 12,
    "n_group": 3,
    "topk_group": 2,
    "num_experts_per_tok": 4,
}

EXPERTS = {"head_dim": 10, "moe_intermediate_size": 20}
LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "q_lora_rank": 28,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
}

# Enough heads that the scores of no two tokens are 0, and fewer selected tokens than tests have.
INDEXED = {"index_topk": 7, "index_n_heads": 16, "index_head_dim": 10, "num_key_value_heads": 6}

MINIMAX = {"intermediate_size": 20, "num_local_experts": 6, "num_experts_per_tok": 3, "block_size": 8}
"""transformers computes lightning attention in blocks, of which tests have several."""

GLM5_NEXT = {
    **DEEPSEEK | INDEXED,
    "qk_rope_head_dim": 0,
    "index_topk": 8,
    "index_kpool": 4,
    "linear_head_dim": 10,
    "linear_num_heads": 3,
    "swiglu_limit": 1.5,
}
"""Pools of which tests have more than are selected."""

MINIMAX_M3 = {
    "head_dim": 12,
    "rotary_dim": 8,
    "partial_rotary_factor": 2 / 3,
    "intermediate_size": 20,
    "dense_intermediate_size": 56,
    "shared_intermediate_size": 28,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "swiglu_limit": 1.5,
    "index_n_heads": 2,
    "index_head_dim": 10,
    "index_block_size": 4,
    "index_topk_blocks": 2,
}
"""Blocks of which tests have more than are selected."""

DEEPSEEK_OCR2 = {"moe_intermediate_size": 20, "n_routed_experts": 6, "num_experts_per_tok": 3}
PHI4_TOWERS = {
    "vision_config": {
        **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16},
        **{"image_size": 28, "patch_size": 14, "crop_size": 28},
    },
    "audio_config": {
        **{"hidden_size": 16, "num_blocks": 1, "num_attention_heads": 2, "intermediate_size": 16, "input_size": 8},
        **{"nemo_conv_channels": 8, "ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16},
    },
}
MUSE_SPARK = {
    "head_dim": 14,
    "moe_intermediate_size": 20,
    "moe_hidden_size": 28,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
}
DOTS3 = {
    **DEEPSEEK | INDEXED,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "shared_experts_intermediate_size": 18,
    "sliding_window": 6,
    "swa_num_attention_heads": 3,
    "swa_num_key_value_heads": 3,
    "swa_q_lora_rank": 20,
    "swa_kv_lora_rank": 30,
    "swa_head_dim": 20,
    "swa_qk_nope_head_dim": 12,
    "swa_v_head_dim": 14,
}
"""Layers with a window have other heads, of another size."""

LARGE4 = {
    "num_key_value_heads": 6,
    "moe_intermediate_size": 20,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "index_topk": 7,
    "index_n_heads": 16,
    "index_head_dim": 10,
}
DEEPSEEK_V4 = {
    "num_key_value_heads": 1,
    "head_dim": 14,
    "q_lora_rank": 28,
    "qk_rope_head_dim": 6,
    "o_lora_rank": 9,
    "o_groups": 2,
    "intermediate_size": 20,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "sliding_window": 5,
    "swiglu_limit": 1.5,
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 6},
    "index_topk": 3,
    "index_n_heads": 16,
    "index_head_dim": 10,
}
LONGCAT = {
    "num_key_value_heads": 6,
    "ffn_hidden_size": 56,
    "expert_ffn_hidden_size": 20,
    "head_dim": 6,
    "kv_lora_rank": 24,
    "q_lora_rank": 28,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
    "n_routed_experts": 7,
    "zero_expert_num": 5,
    "moe_topk": 4,
}
GLM4_MOE = {
    "head_dim": 20,
    "moe_intermediate_size": 20,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
}
LING2 = {"use_qk_norm": True, "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5}
STEP = {
    "head_dim": 10,
    "num_sliding_attention_heads": 8,
    "sliding_window": 6,
    "moe_intermediate_size": 20,
    "share_expert_dim": 28,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "moe_router_scaling_factor": 2.5,
    "num_hidden_layers": 4,
    "rope_parameters": {
        "full_attention": LLAMA3 | {"partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 60.0, "partial_rotary_factor": 1.0},
    },
}
GRANITE = {
    "embedding_multiplier": 3.3,
    "logits_scaling": 1.7,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
}
HYBRID = {
    "rms_norm_eps": 1e-3,  # with a smaller one transformers errs by more than the limit
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
QWEN4 = HYBRID | {
    "hc_lowrank": 9,
    # Enough heads that the scores of no two blocks are 0, and fewer selected blocks than tests have.
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 10,
    "indexer_budget": 6,
    "indexer_compress_ratio": 2,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
NGRAMS = {
    "ple_embed_dim": 24,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 20,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 4,
}
MAMBA = {
    "rms_norm_eps": 1e-4,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
NEMOTRON_H = {
    "layer_norm_epsilon": 1e-4,
    "head_dim": 10,
    "mamba_num_heads": 6,
    "mamba_head_dim": 9,
    "n_groups": 2,
    "ssm_state_size": 7,
    "n_routed_experts": 12,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28,
}
FALCON_H1 = MAMBA | {
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.6,
    "embedding_multiplier": 3.3,
    "lm_head_multiplier": 0.4,
    "mlp_multipliers": [0.9, 0.5],
    "ssm_multipliers": [0.6, 1.2, 0.8, 1.4, 0.7],
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.8,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 5.0, 9.0],
    "original_max_position_embeddings": 6,  # less than tests generate
}


CASES: list[Case] = [
    _case("llama-plain", num_key_value_heads=None),
    _case("llama-biases", attention_bias=True, mlp_bias=True, head_dim=12),
    _case("llama-tied-llama3", tie_word_embeddings=True, rope_parameters=LLAMA3, head_dim=10, num_hidden_layers=3),
    _case("llama-linear", rope_parameters=LINEAR, num_attention_heads=3, num_key_value_heads=1, hidden_size=30),
    _case("llama-mistral", "mistral", sliding_window=5, head_dim=14),
    _case("llama-mistral-full", "mistral", sliding_window=None, rms_norm_eps=1e-3),
    _case("qwen2-plain"),
    _case(
        "qwen2-windows",
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
        num_hidden_layers=3,
        tie_word_embeddings=True,
    ),
    _case("qwen2-yarn", rope_parameters=YARN, num_attention_heads=4, num_key_value_heads=4, hidden_size=64),
    _case("qwen3-tied", head_dim=20, tie_word_embeddings=True),
    _case("qwen3-biases", head_dim=16, attention_bias=True, num_attention_heads=5, num_key_value_heads=1),
    _case(
        "qwen3-layer-types",
        head_dim=10,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=MIXED,
        num_hidden_layers=4,
    ),
    _case("qwen3-yarn", head_dim=16, rope_parameters=YARN | {"truncate": False, "mscale": 1.5, "mscale_all_dim": 0.5}),
    _case("qwen3_moe-few-experts", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20, norm_topk_prob=True),
    _case(
        "qwen3_moe-many-experts",  # more than tokens
        num_experts=96,
        num_experts_per_tok=5,
        moe_intermediate_size=12,
        head_dim=10,
        attention_bias=True,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=6,
        num_hidden_layers=3,
    ),
    _case(
        "qwen3_moe-dense-layers",
        num_experts=7,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        num_hidden_layers=6,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        rope_parameters=YARN,
    ),
    _case("mixtral-plain", num_local_experts=5),
    _case(
        "mixtral-window",
        num_local_experts=90,
        num_experts_per_tok=3,
        sliding_window=5,
        head_dim=14,
        tie_word_embeddings=True,
        num_hidden_layers=3,
        rope_parameters=LLAMA3,
    ),
    _case("gpt_oss-plain", num_local_experts=5, num_experts_per_tok=2, sliding_window=6, head_dim=12, swiglu_limit=1.5),
    _case(
        "gpt_oss-many-experts",  # more than tokens; square matrices, which show no transpose by their shape
        num_local_experts=88,
        num_experts_per_tok=4,
        intermediate_size=48,
        sliding_window=4,
        head_dim=10,
        num_hidden_layers=3,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        swiglu_limit=0.7,
        swiglu_alpha=1.3,
        tie_word_embeddings=True,
        rope_parameters=YARN | {"truncate": False},
    ),
    _case("olmo2-plain", num_key_value_heads=None),
    _case("olmo2-biases", attention_bias=True, tie_word_embeddings=True, rope_parameters=LLAMA3),
    _case("deepseek_v3-groups", **DEEPSEEK, num_hidden_layers=4, first_k_dense_replace=2),
    _case(
        "deepseek_v3-plain-queries",  # more experts than tokens
        **DEEPSEEK | {"q_lora_rank": None, "n_routed_experts": 96, "n_group": 1, "topk_group": 1},
        num_hidden_layers=3,
        first_k_dense_replace=1,
        n_shared_experts=0,
        rope_interleave=False,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        rms_norm_eps=1e-2,
        tie_word_embeddings=True,
    ),
    _case(
        "deepseek_v3-all-experts",  # and a latent so narrow that the absorbed form is always the cheaper one
        **DEEPSEEK | {"kv_lora_rank": 5, "topk_group": 3},
        first_k_dense_replace=0,
        n_shared_experts=3,
        attention_bias=True,
        norm_topk_prob=False,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    _case("deepseek_v3-all-dense", **DEEPSEEK, first_k_dense_replace=3, attention_bias=True),
    _case(
        "kimi_k2-one-group",
        **DEEPSEEK | {"n_routed_experts": 48, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 5},
        num_nextn_predict_layers=0,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        routed_scaling_factor=2.827,
        rms_norm_eps=1e-3,
        rope_parameters=YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    _case(
        "llama4-scout",
        **LLAMA4,
        num_hidden_layers=5,
        no_rope_layer_interval=2,
        rope_parameters=LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 1.0},
    ),
    _case(
        "llama4-maverick",  # dense layers between, no norms of queries and keys, more experts than tokens
        **LLAMA4 | {"num_local_experts": 96, "attention_chunk_size": 7},
        num_hidden_layers=4,
        interleave_moe_layer_step=2,
        use_qk_norm=False,
        attention_bias=True,
    ),
    _case(
        "llama4-lists",
        **LLAMA4,
        num_hidden_layers=3,
        num_experts_per_tok=3,
        moe_layers=[0, 2],
        no_rope_layers=[0, 1, 0],
        layer_types=["chunked_attention", "full_attention", "full_attention"],
        attn_temperature_tuning=False,
        tie_word_embeddings=True,
        num_key_value_heads=6,
    ),
    _case("phi3-plain", sliding_window=None),
    _case(
        "phi3-longrope",
        rope_parameters=LONGROPE | {"partial_rotary_factor": 0.75},
        original_max_position_embeddings=6,
        sliding_window=6,
        tie_word_embeddings=True,
        num_hidden_layers=3,
    ),
    _case("phi3-short", rope_parameters=LONGROPE | {"partial_rotary_factor": 0.75}, max_position_embeddings=128),
    _case("glm-plain", head_dim=12),
    _case("glm-no-bias", head_dim=10, attention_bias=False, tie_word_embeddings=True, partial_rotary_factor=1.0),
    _case("glm4-plain", head_dim=12),
    _case(
        "glm4-odd-heads",
        head_dim=20,
        num_attention_heads=5,
        num_key_value_heads=1,
        rope_parameters=LLAMA3 | {"partial_rotary_factor": 0.4},
        attention_bias=False,
        tie_word_embeddings=True,
        num_hidden_layers=3,
    ),
    _case("seed_oss-plain", head_dim=12),
    _case(
        "seed_oss-biases",
        head_dim=10,
        attention_bias=False,
        attention_out_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope_parameters=LLAMA3,
    ),
    _case("arcee-plain"),
    _case("arcee-biases", attention_bias=True, mlp_bias=True, rope_parameters=YARN, tie_word_embeddings=True),
    _case(
        "glm4_moe-air",
        **GLM4_MOE,
        attention_bias=True,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    ),
    _case(
        "glm4_moe-norms",  # more experts than tokens
        **GLM4_MOE | {"n_routed_experts": 96, "n_group": 4, "topk_group": 2},
        use_qk_norm=True,
        first_k_dense_replace=2,
        num_hidden_layers=4,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        num_attention_heads=5,
        num_key_value_heads=1,
        partial_rotary_factor=0.4,
        tie_word_embeddings=True,
    ),
    _case("exaone-plain", rope_parameters=LLAMA3, tie_word_embeddings=True),
    _case("exaone-own-head", head_dim=10),
    _case("internlm2-plain", rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}),
    _case("internlm2-tied", num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True),
    _case("mimo-plain", head_dim=10),
    _case("bailing_moe-plain", **GLM4_MOE | {"n_group": 3, "topk_group": 2}, **LING2, first_k_dense_replace=1),
    _case(
        "bailing_moe-biases",  # and more experts than tokens
        **GLM4_MOE | {"n_routed_experts": 96},
        **LING2,
        attention_bias=True,
        num_hidden_layers=3,
        first_k_dense_replace=0,
        n_shared_experts=2,
        num_attention_heads=5,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    ),
    _case(
        "glm4_moe_lite-plain",
        **DEEPSEEK | {"n_group": 1, "topk_group": 1, "num_key_value_heads": 6},
        num_hidden_layers=3,
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    _case(
        "glm4_moe_lite-two-dense",
        **DEEPSEEK | {"q_lora_rank": None, "num_key_value_heads": 6},
        num_hidden_layers=3,
        mlp_layer_types=["dense", "dense", "sparse"],
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    _case(
        "deepseek_v2-lite",
        **DEEPSEEK | {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
        num_hidden_layers=3,
        first_k_dense_replace=1,
        rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    _case(
        "deepseek_v2-groups",
        **DEEPSEEK,
        topk_method="group_limited_greedy",
        routed_scaling_factor=16.0,
        attention_bias=True,
        tie_word_embeddings=True,
        n_shared_experts=1,
    ),
    _case(
        "qwen2_moe-plain",
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=28,
    ),
    _case(
        "qwen2_moe-windows",  # more experts than tokens
        num_experts=96,
        num_experts_per_tok=5,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=36,
        norm_topk_prob=True,
        qkv_bias=False,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=2,
        num_hidden_layers=3,
    ),
    _case(
        "qwen2_moe-dense-layers",
        num_experts=7,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=20,
        num_hidden_layers=4,
        mlp_only_layers=[2],
    ),
    _case("olmoe-plain", num_experts=6, num_experts_per_tok=3),
    _case(
        "olmoe-clipped",  # more experts than tokens
        num_experts=90,
        num_experts_per_tok=4,
        intermediate_size=20,
        clip_qkv=0.7,
        attention_bias=True,
        norm_topk_prob=True,
        num_key_value_heads=None,
        tie_word_embeddings=True,
    ),
    _case("granite-plain", **GRANITE),
    _case(
        "granite-biases",
        **GRANITE,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope_parameters=LLAMA3,
        num_hidden_layers=3,
    ),
    _case("granitemoe-plain", **GRANITE, num_local_experts=5),
    _case(
        "granitemoe-shared",  # more experts than tokens
        "granitemoeshared",
        **GRANITE,
        num_local_experts=88,
        num_experts_per_tok=4,
        intermediate_size=20,
        shared_intermediate_size=28,
        tie_word_embeddings=True,
    ),
    _case("granitemoe-none-shared", "granitemoeshared", **GRANITE, num_local_experts=4, attention_bias=True),
    _case("minimax_m2-plain", head_dim=12, num_local_experts=6, num_experts_per_tok=3, rotary_dim=8),
    _case(
        "minimax_m2-many-experts",  # more than tokens
        head_dim=10,
        num_local_experts=90,
        num_experts_per_tok=4,
        intermediate_size=20,
        tie_word_embeddings=True,
        num_hidden_layers=3,
    ),
    _case(
        "minimax_m3_vl_text-plain",
        **MINIMAX_M3,
        num_hidden_layers=4,
        mlp_layer_types=["dense", "sparse", "dense", "sparse"],
        layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "full_attention"],
    ),
    _case(
        "minimax_m3_vl_text-groups",  # other groups of heads than those of keys, more experts than tokens
        **MINIMAX_M3
        | {"index_n_heads": 3, "index_block_size": 3, "index_topk_blocks": 4, "index_local_blocks": 2}
        | {"num_local_experts": 90, "swiglu_limit": 0.4},
        num_hidden_layers=3,
        layer_types=["minimax_m3_sparse"] * 3,
        swiglu_alpha=0.8,
        routed_scaling_factor=1.3,
        tie_word_embeddings=True,
    ),
    _case(
        "minimax_m3_vl-plain",
        **MINIMAX_M3 | {"index_n_heads": 6},
        num_hidden_layers=3,
        mlp_layer_types=["dense", "sparse", "sparse"],
        layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    ),
    _case(
        "minimax_m3_vl-pairs",  # a token's own block is not always selected
        **MINIMAX_M3
        | {"index_n_heads": 1, "index_local_blocks": 0, "index_head_dim": 14}
        | {"partial_rotary_factor": 1.0, "rotary_dim": 12},
        num_hidden_layers=4,
        layer_types=["minimax_m3_sparse", "full_attention"] * 2,
        rope_parameters=LLAMA3,
    ),
    _case("starcoder2-plain", sliding_window=None),
    _case(
        "starcoder2-window",
        sliding_window=5,
        use_bias=False,
        tie_word_embeddings=False,
        rope_parameters=LINEAR,
        num_hidden_layers=3,
        norm_epsilon=1e-3,
    ),
    _case("nemotron-plain"),
    _case(
        "nemotron-biases",
        head_dim=10,
        attention_bias=True,
        mlp_bias=True,
        partial_rotary_factor=0.4,
        tie_word_embeddings=True,
        norm_eps=1e-3,
        num_hidden_layers=3,
    ),
    _case("hunyuan_v1_dense-plain", head_dim=12),
    _case(
        "hunyuan_v1_dense-alpha",
        head_dim=10,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0},
        num_hidden_layers=3,
    ),
    _case("hunyuan_v1_moe-plain", head_dim=12, num_experts=6, moe_topk=3),
    _case(
        "hunyuan_v1_moe-many-experts",  # more than tokens
        head_dim=10,
        num_experts=90,
        moe_topk=[4, 4],
        intermediate_size=20,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0},
    ),
    _case("ernie4_5-plain", head_dim=12, tie_word_embeddings=False),
    _case("ernie4_5-biases", head_dim=10, use_bias=True, rope_parameters=LLAMA3, num_hidden_layers=3),
    _case("ernie4_5_moe-plain", moe_num_experts=6, moe_k=3, moe_intermediate_size=20, num_hidden_layers=3),
    _case(
        "ernie4_5_moe-interval",  # more experts than tokens
        moe_num_experts=90,
        moe_k=4,
        moe_intermediate_size=12,
        moe_num_shared_experts=1,
        moe_layer_interval=2,
        moe_layer_start_index=0,
        moe_layer_end_index=2,
        num_hidden_layers=4,
        tie_word_embeddings=False,
    ),
    _case("apertus-plain"),
    _case("apertus-biases", attention_bias=True, tie_word_embeddings=True, rope_parameters=LLAMA3, num_hidden_layers=3),
    _case("smollm3-plain", num_hidden_layers=4, no_rope_layer_interval=2),
    _case(
        "smollm3-windows",
        num_hidden_layers=3,
        no_rope_layers=[1, 0, 1],
        use_sliding_window=True,
        sliding_window=6,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
        rope_parameters=YARN,
    ),
    _case("exaone4-hybrid", sliding_window=5, sliding_window_pattern=2, num_hidden_layers=4, rope_parameters=LLAMA3),
    _case(
        "exaone4-full",
        sliding_window=None,
        layer_types=["full_attention"] * 2,
        head_dim=10,
        num_attention_heads=5,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    ),
    _case("olmo3-plain", num_key_value_heads=None, sliding_window=6, num_hidden_layers=4),
    _case(
        "olmo3-scaled",
        sliding_window=5,
        attention_bias=True,
        tie_word_embeddings=True,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    _case("cohere2-plain", sliding_window=5, num_hidden_layers=4),
    _case(
        "cohere2-biases",
        sliding_window=6,
        attention_bias=True,
        tie_word_embeddings=False,
        num_hidden_layers=3,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        logit_scale=0.3,
        layer_norm_eps=1e-3,
        rope_parameters=LINEAR,
    ),
    _case(
        "qwen3_next-plain",
        **HYBRID,
        num_hidden_layers=4,
        full_attention_interval=2,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=28,
    ),
    _case(
        "qwen3_next-dense-layers",  # more experts than tokens
        **HYBRID | {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3},
        num_hidden_layers=3,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        num_experts=90,
        num_experts_per_tok=4,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
        norm_topk_prob=False,
        mlp_only_layers=[1],
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    _case("qwen3_5_text-plain", **HYBRID, num_hidden_layers=4, full_attention_interval=2),
    _case(
        "qwen3_5_text-biases",
        **HYBRID | {"linear_num_key_heads": 3, "linear_num_value_heads": 3},
        num_hidden_layers=3,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        attention_bias=True,
        tie_word_embeddings=True,
        partial_rotary_factor=0.5,
    ),
    _case(
        "qwen3_5-plain",
        **HYBRID,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        rope_parameters=MROPE | {"mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.25},
    ),
    _case(
        "qwen3_5_moe_text-plain",
        **HYBRID,
        num_hidden_layers=4,
        full_attention_interval=2,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=28,
    ),
    _case(
        "qwen3_5_moe-plain",
        **HYBRID,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        rope_parameters=MROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25},
        tie_word_embeddings=True,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=28,
    ),
    _case(
        "qwen4_exp_text-plain",
        **QWEN4 | NGRAMS,
        num_hidden_layers=4,
        full_attention_interval=2,
        ple_layer_ids=[1],
        output_gate_type="sigmoid",
        rope_parameters=MROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25},
    ),
    _case(
        "qwen4_exp_text-two-tables",  # more experts than tokens, blocks of three tokens, n-grams of up to four
        **QWEN4
        | NGRAMS
        | {"indexer_compress_ratio": 3, "indexer_budget": 3, "num_experts": 90}
        | {"make_ngram_vocab_size_divisible_by": 512, "linear_num_key_heads": 1, "linear_num_value_heads": 3},
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        ple_layer_ids=[3, 1],
        ngram_size=4,
        ple_conv_kernel_size=3,
        seed=7,
        eos_token_id=[50, 2],
        hc_count=2,
        norm_topk_prob=False,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters=MROPE | {"partial_rotary_factor": 0.5},
    ),
    _case(
        "qwen4_exp_text-no-n-grams",
        **QWEN4 | {"indexer_budget": 40},
        num_hidden_layers=4,
        full_attention_interval=2,
        rope_parameters=YARN | {"partial_rotary_factor": 0.5},
    ),
    _case(
        "qwen4_exp-plain",
        **QWEN4 | NGRAMS,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        ple_layer_ids=[3],
        rope_parameters=MROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25},
    ),
    _case(
        "lfm2-plain",
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False,
    ),
    _case(
        "lfm2-biases",
        num_hidden_layers=4,
        full_attn_idxs=[0, 3],
        conv_bias=True,
        conv_L_cache=5,
        block_multiple_of=8,
        block_ffn_dim_multiplier=1.3,
        num_attention_heads=3,
        num_key_value_heads=1,
    ),
    _case(
        "lfm2_moe-plain",
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        num_dense_layers=1,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
    ),
    _case(
        "lfm2_moe-no-bias",
        num_hidden_layers=2,
        layer_types=["full_attention", "conv"],
        num_dense_layers=0,
        num_experts=8,
        num_experts_per_tok=4,
        moe_intermediate_size=12,
        use_expert_bias=False,
        norm_topk_prob=False,
        routed_scaling_factor=0.7,
        conv_bias=True,
        tie_word_embeddings=False,
    ),
    _case(
        "granitemoehybrid-plain",
        **GRANITE,
        **MAMBA,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_local_experts=5,
        shared_intermediate_size=28,
    ),
    _case(
        "granitemoehybrid-dense",
        **GRANITE,
        **MAMBA | {"mamba_n_groups": 1, "mamba_expand": 3, "mamba_d_conv": 3, "mamba_n_heads": 16},
        num_hidden_layers=3,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=36,
        position_embedding_type="rope",
        attention_bias=True,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        time_step_limit=[0.3, 1.1],
        tie_word_embeddings=True,
    ),
    _case(
        "granitemoehybrid-attention",  # more experts than tokens, and no layer with a state
        **GRANITE,
        **MAMBA,
        num_hidden_layers=2,
        layer_types=["full_attention", "full_attention"],
        num_local_experts=88,
        num_experts_per_tok=4,
        intermediate_size=20,
        shared_intermediate_size=28,
        position_embedding_type="rope",
        rope_parameters=LLAMA3,
    ),
    _case("bamba-plain", **MAMBA, num_hidden_layers=3, attn_layer_indices=[1]),
    _case(
        "bamba-biases",
        **MAMBA | {"mamba_n_groups": 3, "mamba_d_state": 7, "mamba_d_conv": 5},
        num_hidden_layers=3,
        attn_layer_indices=[0],
        head_dim=20,
        attention_bias=True,
        mlp_bias=True,
        mamba_proj_bias=True,
        tie_word_embeddings=True,
        rope_parameters=LINEAR,
    ),
    _case(
        "nemotron_h-plain",
        **NEMOTRON_H,
        num_hidden_layers=5,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    ),
    _case(
        "nemotron_h-latent",
        **NEMOTRON_H | {"n_groups": 3, "mamba_head_dim": 16},
        num_hidden_layers=4,
        hybrid_override_pattern="E*M-",
        moe_latent_size=24,
        num_experts_per_tok=4,
        n_group=3,
        topk_group=2,
        routed_scaling_factor=2.5,
        use_bias=True,
        mlp_bias=True,
        use_conv_bias=False,
        time_step_min=0.4,
    ),
    _case("falcon_h1-plain", **FALCON_H1, mamba_d_ssm=None),
    _case(
        "falcon_h1-norm",
        **FALCON_H1 | {"mamba_n_groups": 3, "mamba_d_conv": 3},
        mamba_d_ssm=54,
        mamba_rms_norm=True,
        num_hidden_layers=3,
        head_dim=10,
        rope_parameters=LLAMA3,
        tie_word_embeddings=True,
    ),
    _case(
        "falcon_h1-norm-last",
        **MAMBA | {"mamba_expand": 1, "mamba_n_groups": 1},
        mamba_d_ssm=48,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        mamba_proj_bias=True,
        projectors_bias=True,
        mamba_conv_bias=False,
        attention_bias=True,
        mlp_bias=True,
        num_attention_heads=3,
        num_key_value_heads=1,
    ),
    _case(
        "kimi_linear-plain",
        **DEEPSEEK | {"q_lora_rank": None, "n_routed_experts": None, "num_key_value_heads": 6},
        rms_norm_eps=1e-3,
        num_local_experts=12,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_head_dim=10,
        linear_num_heads=3,
    ),
    _case(
        "kimi_linear-lists",  # more experts than tokens
        **DEEPSEEK | {"n_routed_experts": None, "n_group": 1, "topk_group": 1, "num_key_value_heads": 6},
        rms_norm_eps=1e-3,
        num_local_experts=90,
        num_hidden_layers=4,
        linear_attn_config={
            **{"full_attn_layers": [1, 4], "kda_layers": [2, 3]},
            **{"head_dim": 14, "num_heads": 2, "short_conv_kernel_size": 3},
        },
        mlp_layer_types=["sparse", "dense", "dense", "sparse"],
        n_shared_experts=2,
        attention_bias=True,
        norm_topk_prob=False,
    ),
    _case("llama4_text-plain", **LLAMA4 | {"attn_scale": 0.2}, interleave_moe_layer_step=2, no_rope_layer_interval=2),
    _case("gemma-plain", head_dim=20, hidden_act="gelu", initializer_range=0.2),
    _case("gemma-biases", head_dim=10, attention_bias=True, tie_word_embeddings=False, num_key_value_heads=1),
    _case("gemma2-plain", head_dim=12, num_hidden_layers=3, sliding_window=5, query_pre_attn_scalar=40),
    _case(
        "gemma2-no-caps",
        head_dim=14,
        num_hidden_layers=3,
        sliding_window=7,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=True,
        tie_word_embeddings=False,
        rope_parameters=LINEAR,
    ),
    _case("gemma2-small-caps", head_dim=10, sliding_window=4, attn_logit_softcapping=3.0, final_logit_softcapping=60.0),
    _case(
        "gemma3_text-plain",
        head_dim=12,
        num_hidden_layers=4,
        sliding_window=5,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=30,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 60.0},
        },
    ),
    _case("ministral3-plain", head_dim=12, rope_parameters=GROWING, num_hidden_layers=3),
    _case(
        "ministral3-window",
        head_dim=10,
        rope_parameters=GROWING | {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 5},
        sliding_window=6,
        tie_word_embeddings=True,
        num_key_value_heads=3,
    ),
    _case("mistral3-ministral3", model_type="ministral3", head_dim=12, rope_parameters=GROWING, num_hidden_layers=3),
    _case("mistral3-mistral", model_type="mistral", sliding_window=5, num_key_value_heads=6),
    _case("mistral3-tied", model_type="mistral", sliding_window=None, head_dim=14, tie_word_embeddings=True),
    _case("qwen2_5_vl-plain", rope_parameters=MROPE | {"mrope_section": [2, 1, 1]}),
    _case(
        "qwen2_5_vl-windows",
        rope_parameters=MROPE | {"mrope_section": [4, 2, 2]},
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    ),
    _case("qwen3_vl-plain", head_dim=12, rope_parameters=MROPE | {"mrope_section": [2, 2, 2]}),
    _case(
        "qwen3_vl-tied",
        head_dim=20,
        rope_parameters=MROPE | {"mrope_section": [4, 3, 3], "mrope_interleaved": True},
        tie_word_embeddings=True,
        attention_bias=True,
        num_hidden_layers=3,
        num_attention_heads=5,
        num_key_value_heads=1,
    ),
    _case(
        "qwen3_vl_moe-plain",
        head_dim=12,
        rope_parameters=MROPE | {"mrope_section": [2, 2, 2], "mrope_interleaved": True},
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
    ),
    _case(
        "qwen3_vl_moe-dense-layers",  # square matrices, which show no transpose by their shape
        rope_parameters=MROPE | {"mrope_section": [2, 1, 1]},
        num_experts=7,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        num_hidden_layers=4,
        mlp_only_layers=[1],
        tie_word_embeddings=True,
    ),
    _case(
        "kimi_k25-plain",
        **DEEPSEEK | {"n_routed_experts": 16, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3},
        model_type="deepseek_v3",
        num_hidden_layers=3,
        num_nextn_predict_layers=0,
        first_k_dense_replace=1,
        routed_scaling_factor=2.827,
        rope_parameters=YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    _case("gemma4_text-plain", **GEMMA4, final_logit_softcapping=50.0),
    _case(
        "gemma4_text-experts",  # values made of keys in layers that see all tokens
        **GEMMA4 | {"hidden_size_per_layer_input": 0},
        attention_k_eq_v=True,
        num_global_key_value_heads=3,
        enable_moe_block=True,
        num_experts=7,
        top_k_experts=3,
        moe_intermediate_size=20,
        tie_word_embeddings=False,
    ),
    _case(
        "gemma4_text-shared",
        **GEMMA4 | {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6},
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
    ),
    _case("gemma4-plain", **GEMMA4, num_kv_shared_layers=1, initializer_range=0.3),
    _case("gemma4-dense", **GEMMA4 | {"hidden_size_per_layer_input": 0}, tie_word_embeddings=False),
    _case("gemma4_unified-plain", **UNIFIED, final_logit_softcapping=50.0),
    _case(
        "gemma4_unified-values-of-keys",
        **UNIFIED,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        tie_word_embeddings=True,
    ),
    _case(
        "mistral4-plain",
        "mistral3",
        **DEEPSEEK | {"n_group": 1, "topk_group": 1, "num_key_value_heads": 6},
        model_type="mistral4",
        num_hidden_layers=3,
        rope_parameters=GROWING,
    ),
    _case(
        "mistral4-dense-layer",  # queries grow within the tests' sequences
        "mistral3",
        **DEEPSEEK | {"num_key_value_heads": 6, "q_lora_rank": None},
        model_type="mistral4",
        first_k_dense_replace=1,
        n_shared_experts=2,
        norm_topk_prob=False,
        routed_scaling_factor=1.7,
        rope_interleave=False,
        tie_word_embeddings=True,
        rope_parameters=GROWING | {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 5},
    ),
    _case(
        "mistral_large4-plain",  # the last two layers read latent vectors of earlier ones
        **LARGE4,
        num_hidden_layers=6,
        no_rope_layer_interval=2,
        index_topk_freq=2,
        kv_source_layers=[0, 1, 2, 3, 2, 3],
    ),
    _case(
        "mistral_large4-groups",
        **LARGE4 | {"n_group": 3, "topk_group": 2, "index_topk": 5},
        num_hidden_layers=4,
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
        n_shared_experts=2,
        routed_scaling_factor=1.7,
        attention_bias=True,
        no_rope_layers=[0, 1, 0, 1],
        kv_source_layers=[0, 1, 0, 1],
        indexer_types=["full", "full", "shared", "full"],
        final_logit_softcapping=3.0,
        tie_word_embeddings=True,
        rope_parameters=YARN | {"mscale_all_dim": 0.7},
    ),
    _case(
        "mistral_large4-own",  # latent vectors in every layer
        **LARGE4 | {"index_topk": 64},
        num_hidden_layers=3,
        first_k_dense_replace=0,
        index_topk_pattern="FSF",
        no_rope_layers=[1, 1, 0],
        final_logit_softcapping=50.0,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    ),
    _case("solar_open-plain", head_dim=12, moe_intermediate_size=20, n_routed_experts=12, num_experts_per_tok=4),
    _case(
        "solar_open-groups",  # more experts than tokens
        head_dim=10,
        moe_intermediate_size=12,
        n_routed_experts=96,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=5,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=False,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters=YARN,
        num_hidden_layers=3,
    ),
    _case(
        "dots1-plain",
        head_dim=12,
        moe_intermediate_size=20,
        n_routed_experts=12,
        n_shared_experts=2,
        num_experts_per_tok=4,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        num_hidden_layers=3,
    ),
    _case(
        "dots1-windows",  # more experts than tokens, in all layers
        head_dim=10,
        moe_intermediate_size=12,
        n_routed_experts=96,
        n_shared_experts=1,
        num_experts_per_tok=5,
        n_group=4,
        topk_group=2,
        sliding_window=5,
        max_window_layers=1,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters=LLAMA3,
        num_hidden_layers=3,
    ),
    _case("hy_v3-plain", head_dim=12, moe_intermediate_size=20, num_experts=12, num_experts_per_tok=4),
    _case(
        "hy_v3-kinds",  # more experts than tokens
        head_dim=10,
        moe_intermediate_size=12,
        num_experts=96,
        num_shared_experts=2,
        num_experts_per_tok=5,
        mlp_layer_types=["sparse", "dense", "sparse"],
        attention_bias=True,
        tie_word_embeddings=True,
        enable_moe_fp32_combine=False,
        rope_parameters=YARN,
        num_hidden_layers=3,
    ),
    _case(
        "exaone_moe-plain",
        head_dim=12,
        moe_intermediate_size=20,
        num_experts=12,
        num_experts_per_tok=4,
        sliding_window=5,
        sliding_window_pattern=2,
        num_hidden_layers=4,
        rope_parameters=LLAMA3,
    ),
    _case(
        "exaone_moe-kinds",  # more experts than tokens
        head_dim=10,
        moe_intermediate_size=12,
        num_experts=96,
        num_shared_experts=2,
        num_experts_per_tok=5,
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        sliding_window=6,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["sparse", "dense", "sparse"],
        tie_word_embeddings=True,
        num_hidden_layers=3,
    ),
    _case(
        "afmoe-plain",
        head_dim=12,
        moe_intermediate_size=20,
        num_experts=12,
        num_experts_per_tok=4,
        num_shared_experts=1,
        route_scale=2.5,
        mup_enabled=True,
        sliding_window=5,
        global_attn_every_n_layers=2,
        num_hidden_layers=3,
    ),
    _case(
        "afmoe-all-experts",  # more experts than tokens
        head_dim=10,
        moe_intermediate_size=12,
        num_experts=96,
        num_experts_per_tok=5,
        num_dense_layers=0,
        sliding_window=6,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        attention_bias=True,
        tie_word_embeddings=True,
        num_key_value_heads=None,
        rope_parameters=YARN,
        num_hidden_layers=3,
    ),
    _case(
        "cohere2_moe-plain",
        head_dim=12,
        num_experts=6,
        num_experts_per_tok=3,
        num_shared_experts=2,
        sliding_window=5,
        num_hidden_layers=4,
        layer_norm_eps=1e-3,
    ),
    _case(
        "cohere2_moe-dense-layers",  # more experts than tokens
        head_dim=10,
        intermediate_size=20,
        prefix_dense_intermediate_size=56,
        num_experts=90,
        num_experts_per_tok=4,
        first_k_dense_replace=2,
        sliding_window=6,
        layer_types=["full_attention", "full_attention", "sliding_attention", "full_attention"],
        expert_selection_fn="sigmoid",
        num_shared_experts=1,
        shared_expert_combination_strategy="sum",
        rms_norm_eps=1e-3,
        attention_bias=True,
        tie_word_embeddings=False,
        logit_scale=0.3,
        num_hidden_layers=4,
    ),
    _case(
        "cohere2_moe-none-shared",
        head_dim=14,
        num_experts=4,
        expert_selection_fn="sigmoid",
        norm_topk_prob=False,
        sliding_window=4,
        num_hidden_layers=3,
    ),
    _case(
        "mimo_v2_flash-plain",
        head_dim=12,
        v_head_dim=10,
        num_attention_heads=8,
        moe_intermediate_size=20,
        n_routed_experts=12,
        num_experts_per_tok=4,
        sliding_window=5,
        num_hidden_layers=3,
    ),
    _case(
        "mimo_v2_flash-biases",  # more experts than tokens, and a part of a head with an odd number of dimensions
        head_dim=10,
        v_head_dim=14,
        num_attention_heads=6,
        num_key_value_heads=1,
        moe_intermediate_size=12,
        n_routed_experts=96,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=5,
        routed_scaling_factor=2.5,
        attention_bias=True,
        attention_value_scale=None,
        tie_word_embeddings=True,
        sliding_window=6,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 60.0, "partial_rotary_factor": 0.3},
        },
    ),
    _case(
        "youtu-plain",
        **{key: x for key, x in DEEPSEEK.items() if "rank" in key or "head_dim" in key},
        num_key_value_heads=6,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    _case(
        "youtu-plain-queries",
        **{key: x for key, x in DEEPSEEK.items() if "rank" in key or "head_dim" in key} | {"q_lora_rank": None},
        num_key_value_heads=6,
        rope_interleave=False,
        attention_bias=True,
        tie_word_embeddings=False,
        num_hidden_layers=3,
    ),
    _case("internlm3-plain", head_dim=12),
    _case(
        "internlm3-biases",
        head_dim=10,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 6.0},
        num_hidden_layers=3,
    ),
    _case("cohere-plain"),
    _case(
        "cohere-norms",
        use_qk_norm=True,
        attention_bias=True,
        tie_word_embeddings=False,
        layer_norm_eps=1e-3,
        logit_scale=0.3,
        num_attention_heads=4,
        num_key_value_heads=1,
        rope_parameters=LINEAR,
        num_hidden_layers=3,
    ),
    _case("flex_olmo-plain", num_experts=6, num_experts_per_tok=3),
    _case(
        "flex_olmo-many-experts",  # more than tokens
        num_experts=90,
        num_experts_per_tok=4,
        intermediate_size=20,
        norm_topk_prob=True,
        attention_bias=True,
        num_key_value_heads=None,
        tie_word_embeddings=True,
        rope_parameters=YARN,
    ),
    _case("qwen2_vl-plain", rope_parameters=MROPE | {"mrope_section": [2, 1, 1]}),
    _case(
        "qwen2_vl-windows",
        rope_parameters=MROPE | {"mrope_section": [4, 2, 2]},
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    ),
    _case("deepseek_v32-plain", **DEEPSEEK | INDEXED, num_hidden_layers=3, first_k_dense_replace=1),
    _case(
        "deepseek_v32-few-tokens",  # all of which are selected
        **DEEPSEEK | INDEXED | {"n_group": 1, "topk_group": 1, "index_topk": 64},
        num_hidden_layers=3,
        mlp_layer_types=["sparse", "dense", "sparse"],
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    _case("glm_moe_dsa-plain", **DEEPSEEK | INDEXED, num_hidden_layers=3, first_k_dense_replace=1),
    _case(
        "glm_moe_dsa-shared",  # layers attend to the tokens that an earlier one selected
        **DEEPSEEK | INDEXED | {"n_group": 1, "topk_group": 1, "index_topk": 5},
        num_hidden_layers=4,
        index_topk_freq=2,
        index_skip_topk_offset=1,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        tie_word_embeddings=True,
        first_k_dense_replace=0,
    ),
    _case("deepseek_v4-plain", **DEEPSEEK_V4, num_hidden_layers=4, num_hash_layers=1),
    _case(
        "deepseek_v4-flash",  # more experts than tokens, all entries selected, the order of the releases
        **DEEPSEEK_V4
        | {"o_groups": 3, "n_routed_experts": 80, "index_topk": 64, "sliding_window": 3, "swiglu_limit": 0.4},
        hc_mult=2,
        hc_sinkhorn_iters=3,
        num_hidden_layers=5,
        layer_types=[
            *("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"),
            *("compressed_sparse_attention", "heavily_compressed_attention"),
        ],
        rope_parameters=YARN,
        tie_word_embeddings=True,
    ),
    _case(
        "bailing_hybrid-plain",
        **DEEPSEEK | {"head_dim": 10, "n_routed_experts": None, "num_experts": 12, "q_lora_rank": None},
        num_hidden_layers=4,
        layer_group_size=2,
        first_k_dense_replace=1,
        rms_norm_eps=1e-4,
    ),
    _case(
        "bailing_hybrid-open-gates",
        **DEEPSEEK | {"head_dim": 8, "n_routed_experts": None, "num_experts": 48, "q_lora_rank": None},
        num_hidden_layers=3,
        layer_group_size=3,
        short_conv_kernel_size=3,
        kda_safe_gate=False,
        n_shared_experts=2,
        rms_norm_eps=1e-3,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    _case("longcat_flash-plain", **LONGCAT, num_hidden_layers=4),
    _case(
        "longcat_flash-many-experts",
        **LONGCAT | {"n_routed_experts": 70, "zero_expert_num": 20, "kv_lora_rank": 5},
        num_hidden_layers=6,  # of three layers with two attentions each
        tie_word_embeddings=True,
        rope_parameters=YARN,
    ),
    _case("gpt_neox-plain", rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 0.5}),
    _case("gpt_neox-sequential", use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True),
    _case("phi-plain", partial_rotary_factor=0.5),
    _case("phi-normed", qk_layernorm=True, num_attention_heads=3, num_key_value_heads=1, rope_parameters=LINEAR),
    _case("phimoe-plain", num_local_experts=5, lm_head_bias=True, attention_bias=True),
    _case("phimoe-many-experts", num_local_experts=48, sliding_window=5, num_hidden_layers=3),
    _case("stablelm-plain", partial_rotary_factor=0.5),
    _case(
        "stablelm-parallel",
        use_parallel_residual=True,
        qk_layernorm=True,
        use_qkv_bias=True,
        tie_word_embeddings=True,
        num_attention_heads=3,
        num_key_value_heads=1,
    ),
    _case("olmo-plain", num_key_value_heads=None),
    _case("olmo-clipped", clip_qkv=0.5, attention_bias=True, tie_word_embeddings=True, rope_parameters=LLAMA3),
    _case("ministral-plain", sliding_window=5, head_dim=14),
    _case(
        "ministral-mixed",
        sliding_window=4,
        head_dim=10,
        layer_types=MIXED,
        num_hidden_layers=4,
        tie_word_embeddings=True,
        rope_parameters=YARN,
    ),
    _case("cwm-plain", sliding_window=5, head_dim=14, num_hidden_layers=5),
    _case("cwm-mixed", sliding_window=4, head_dim=10, layer_types=MIXED, num_hidden_layers=4, rope_parameters=LLAMA3),
    _case(
        "glm4v-plain",
        rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]},
        num_attention_heads=6,
    ),
    _case("glm4v-tied", rope_parameters=MROPE | {"mrope_section": [2, 1, 1]}, tie_word_embeddings=True),
    _case(
        "glm4v_moe-plain",
        **GLM4_MOE | {"head_dim": 16},
        rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        num_hidden_layers=3,
    ),
    _case(
        "glm4v_moe-groups",
        **GLM4_MOE | {"head_dim": 8, "n_group": 3, "topk_group": 2},
        rope_parameters=MROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0},
        attention_bias=False,
        num_hidden_layers=3,
        tie_word_embeddings=True,
    ),
    _case(
        "olmo_hybrid-plain",
        rope_parameters={"rope_type": "default", "rope_theta": None},
        num_hidden_layers=4,
        rms_norm_eps=1e-4,
    ),
    _case(
        "olmo_hybrid-rope",
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        num_hidden_layers=3,
        layer_types=["full_attention", "linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=10,
        linear_value_head_dim=14,
        linear_conv_kernel_dim=3,
        linear_allow_neg_eigval=False,
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
    ),
    _case(
        "step3p5-plain",
        **STEP,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        swiglu_limits=[None, 0.6, 0.0, 0.3],
        swiglu_limits_shared=[0.5, None, 0.4, 0.0],
    ),
    _case(
        "step3p5-pairs",  # more experts than tokens
        **STEP | {"n_routed_experts": 96, "num_sliding_attention_heads": 4, "query_pre_attn_scalar": 20},
        layer_types=MIXED,
        mlp_layer_types=["sparse"] * 4,
        swiglu_limits=[0.5, 0.0, 0.5, 0.0],
        tie_word_embeddings=True,
    ),
    _case(
        "step3p7-plain",
        **STEP,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        mlp_layer_types=["dense", "sparse", "dense", "sparse"],
        swiglu_limits_shared=[0.0, 0.6, 0.3, 0.0],
    ),
    _case(
        "step3p7-alike",  # no layer has the window
        **STEP | {"num_sliding_attention_heads": None},
        mlp_layer_types=["sparse"] * 4,
        tie_word_embeddings=True,
        num_attention_heads=3,
        num_key_value_heads=1,
    ),
    _case("muse_glimmer-plain", head_dim=10, num_hidden_layers=5, sliding_window=6),
    _case(
        "muse_glimmer-apart",  # layers without rotary positions are not those without a window
        head_dim=14,
        num_hidden_layers=4,
        sliding_window=4,
        layer_types=MIXED,
        rope_parameters=LLAMA3,
        layer_rope_theta=[500.0, 500.0, 0, 0],
        attention_bias=True,
        qk_scale_factor=1.7,
        output_multiplier=0.7,
        final_logit_softcapping=3.0,
        post_norm_eps=1e-3,
        tie_word_embeddings=True,
    ),
    _case(
        "qwen3_omni_moe-plain",
        head_dim=10,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        rope_parameters=MROPE | {"mrope_section": [2, 2, 1]},
    ),
    _case(
        "qwen3_omni_moe-dense-layers",
        num_experts=48,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=False,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        attention_bias=True,
        rope_parameters=MROPE | {"mrope_section": [2, 1, 1]},
        tie_word_embeddings=True,
    ),
    _case("qwen2_5_omni-plain", rope_parameters=MROPE | {"mrope_section": [2, 1, 1]}),
    _case(
        "qwen2_5_omni-tied",
        rope_parameters=MROPE | {"mrope_section": [1, 1, 2]},
        num_key_value_heads=3,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
        tie_word_embeddings=True,
    ),
    _case("glm46v-plain", rope_parameters=MROPE | {"mrope_section": [2, 1, 1]}),
    _case(
        "glm46v-tied",
        rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]},
        num_attention_heads=6,
        tie_word_embeddings=True,
    ),
    _case("glm_ocr-plain", rope_parameters=MROPE | {"mrope_section": [2, 1, 1]}),
    _case(
        "glm_ocr-partial",
        head_dim=12,
        rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]},
        num_key_value_heads=3,
        num_hidden_layers=3,
    ),
    _case(
        "glm_ocr-tied",
        rope_parameters=MROPE | {"mrope_section": [1, 2, 1]},
        num_key_value_heads=6,
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
    ),
    _case(
        "paddleocr_vl-plain",
        head_dim=10,
        rope_parameters=MROPE | {"mrope_section": [1, 2, 2]},
        tie_word_embeddings=False,
    ),
    _case(
        "paddleocr_vl-biases",
        head_dim=14,
        num_hidden_layers=3,
        rope_parameters=MROPE | {"mrope_section": [3, 2, 2]},
        use_bias=True,
        tie_word_embeddings=True,
    ),
    _case(
        "paddleocr_vl-groups",
        head_dim=None,
        num_attention_heads=3,
        num_key_value_heads=1,
        rms_norm_eps=1e-3,
        rope_parameters=YARN | {"mrope_section": [2, 3, 3]},
        tie_word_embeddings=False,
    ),
    _case(
        "hunyuan_vl-plain",
        head_dim=8,
        rope_parameters={"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mrope_section": [1, 1, 1, 1]},
        tie_word_embeddings=True,
    ),
    _case(
        "hunyuan_vl-biases",
        head_dim=14,
        attention_bias=True,
        num_hidden_layers=3,
        rope_parameters=MROPE | {"mrope_section": [3, 2, 2]},
        tie_word_embeddings=False,
    ),
    _case(
        "hunyuan_vl-linear",
        head_dim=10,
        num_key_value_heads=None,
        rms_norm_eps=1e-3,
        rope_parameters=LINEAR | {"mrope_section": [2, 2, 1]},
        tie_word_embeddings=True,
    ),
    _case("granite_docling-plain", embedding_multiplier=1.5, attention_multiplier=0.3, tie_word_embeddings=True),
    _case(
        "granite_docling-biases",
        attention_bias=True,
        mlp_bias=True,
        num_hidden_layers=3,
        attention_multiplier=0.25,
        logits_scaling=0.5,
        residual_multiplier=0.7,
        rope_parameters=LLAMA3,
        tie_word_embeddings=False,
    ),
    _case(
        "granite_docling-groups",
        num_attention_heads=3,
        num_key_value_heads=1,
        attention_multiplier=0.2,
        rms_norm_eps=1e-3,
        rope_parameters=YARN,
        tie_word_embeddings=True,
    ),
    _case(
        "mellum-plain",
        **EXPERTS | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
        num_hidden_layers=4,
        sliding_window=5,
        layer_types=MIXED,
        rope_parameters={"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 60.0}},
    ),
    _case(
        "mellum-dense-layers",  # more experts than tokens
        **EXPERTS | {"num_experts": 90, "num_experts_per_tok": 4},
        num_hidden_layers=3,
        mlp_layer_types=["dense", "sparse", "sparse"],
        norm_topk_prob=False,
        attention_bias=True,
        tie_word_embeddings=True,
        num_mtp_layers=1,
    ),
    _case(
        "laguna-plain",
        **EXPERTS | {"num_experts": 6, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 12},
        num_hidden_layers=4,
        sliding_window=5,
        layer_types=MIXED,
        mlp_layer_types=["sparse"] * 4,
        num_attention_heads_per_layer=[4, 6, 4, 6],
        moe_routed_scaling_factor=2.5,
        rope_parameters={
            "full_attention": YARN | {"partial_rotary_factor": 0.4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 60.0},
        },
    ),
    _case(
        "laguna-elements",  # more experts than tokens
        **EXPERTS | {"num_experts": 90, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 14},
        num_hidden_layers=3,
        gating="per-element",
        attention_bias=True,
        moe_router_logit_softcapping=1.5,
        tie_word_embeddings=True,
    ),
    _case(
        "hy_v4-plain",
        **DEEPSEEK | INDEXED | {"n_group": 1, "topk_group": 1, "q_lora_rank": 28},
        num_hidden_layers=4,
        indexer_types=["full", "shared", "full", "shared"],
        initializer_range=0.15,  # else scores are so sharp that a rounded cache makes another model
        swiglu_limit=1.5,
    ),
    _case(
        "hy_v4-streams",  # more experts than tokens
        **DEEPSEEK | INDEXED | {"n_routed_experts": 81, "index_topk": 5},
        num_hidden_layers=3,
        hc_mult=2,
        hc_magnitude=1.3,
        swiglu_limit=0.4,
        mlp_layer_types=["sparse", "dense", "sparse"],
        n_shared_experts=2,
        attention_bias=True,
        rms_norm_eps=1e-3,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        tie_word_embeddings=True,
    ),
    _case("minicpm3-plain", **LATENT, scale_depth=0.9, scale_emb=1.7, dim_model_base=20, num_hidden_layers=3),
    _case(
        "minicpm3-no-factors",
        **LATENT | {"q_lora_rank": None, "v_head_dim": 12},
        scale_depth=None,
        scale_emb=1,
        dim_model_base=None,
        attention_bias=True,
        tie_word_embeddings=False,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    _case("iquestcoder-plain", head_dim=10),
    _case("iquestcoder-biases", head_dim=8, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    _case("helium-plain", head_dim=8),
    _case(
        "helium-biases",
        head_dim=8,
        attention_bias=True,
        mlp_bias=True,
        rms_norm_eps=1e-3,
        rope_parameters=YARN,
        tie_word_embeddings=True,
    ),
    _case(
        "hyperclovax-plain",
        attention_multiplier=0.3,
        embedding_multiplier=1.7,
        logits_scaling=0.6,
        residual_multiplier=0.4,
    ),
    _case("hyperclovax-no-norms", use_post_norm=False, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    _case("vaultgemma-plain", head_dim=10, sliding_window=6, num_hidden_layers=3, query_pre_attn_scalar=20),
    _case(
        "vaultgemma-no-caps",
        head_dim=8,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention"],
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=True,
        tie_word_embeddings=False,
        rope_parameters=LINEAR,
    ),
    _case("jais2-plain"),
    _case(
        "jais2-no-biases",
        attention_bias=False,
        mlp_bias=False,
        num_key_value_heads=None,
        layer_norm_eps=1e-3,
        tie_word_embeddings=True,
        rope_parameters=LLAMA3,
    ),
    _case(
        "kolibri1-plain",
        **EXPERTS | {"num_experts": 6, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 12},
        num_hidden_layers=4,
        sliding_window=5,
        layer_types=MIXED,
    ),
    _case(
        "kolibri1-many-experts",  # more than tokens
        **EXPERTS | {"num_experts": 90, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 14},
        num_hidden_layers=6,
        sliding_window=4,
        norm_topk_prob=True,
        rms_norm_eps=1e-3,
        rope_parameters=YARN,
        tie_word_embeddings=True,
    ),
    _case(
        "flint-plain",
        **EXPERTS | {"num_experts": 6, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 12},
        num_hidden_layers=5,
        sliding_window=5,
    ),
    _case(
        "flint-all-experts",  # more than tokens
        **EXPERTS
        | {
            "num_experts": 90,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 14,
        },
        num_hidden_layers=4,
        sliding_window=4,
        layer_types=MIXED,
        mlp_only_layers=[],
        norm_topk_prob=False,
        attention_bias=True,
        rope_parameters=YARN,
        tie_word_embeddings=True,
    ),
    _case(
        "granite_swa-plain",
        num_hidden_layers=5,
        sliding_window=5,
        attention_multiplier=0.3,
        embedding_multiplier=1.7,
        logits_scaling=1.5,
        residual_multiplier=0.4,
        layer_rope_theta=[0, 500.0, 60, 500.0, 0],
    ),
    _case(
        "granite_swa-biases",
        num_hidden_layers=4,
        head_dim=10,
        sliding_window=4,
        layer_types=MIXED,
        attention_multiplier=0.4,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
        rope_parameters=YARN,
    ),
    _case(
        "granitemoe_swa-plain",
        num_local_experts=6,
        num_experts_per_tok=3,
        intermediate_size=20,
        shared_intermediate_size=12,
        num_hidden_layers=5,
        sliding_window=5,
        attention_multiplier=0.3,
        residual_multiplier=0.4,
        layer_rope_theta=[0, 500.0, 60, 500.0, 0],
    ),
    _case(
        "granitemoe_swa-many-experts",  # more than tokens, none of them shared
        num_local_experts=90,
        num_experts_per_tok=4,
        intermediate_size=20,
        num_hidden_layers=4,
        head_dim=10,
        sliding_window=4,
        layer_types=MIXED,
        attention_multiplier=0.4,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters=YARN,
    ),
    _case("axk1-plain", **DEEPSEEK | {"num_key_value_heads": 6}, num_hidden_layers=3, first_k_dense_replace=1),
    _case(
        "axk1-many-experts",  # more than tokens
        **DEEPSEEK | {"num_key_value_heads": 6, "n_routed_experts": 81, "norm_topk_prob": False},
        num_hidden_layers=2,
        mlp_layer_types=["sparse", "sparse"],
        n_shared_experts=2,
        rope_interleave=False,
        attention_bias=True,
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    _case(
        "axk2-plain",
        **DEEPSEEK | INDEXED | {"n_group": None, "topk_group": None},
        num_hidden_layers=3,
        gated_norm_rank=5,
        initializer_range=0.15,  # gates enlarge what transformers rounds
    ),
    _case(
        "axk2-groups",  # more experts than tokens
        **DEEPSEEK | INDEXED | {"n_routed_experts": 81, "index_topk": 64},
        num_hidden_layers=2,
        mlp_layer_types=["sparse", "sparse"],
        gated_norm_rank=3,
        initializer_range=0.15,
        n_shared_experts=2,
        attention_bias=True,
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    _case("lfm3-plain", head_dim=10, num_hidden_layers=7, sliding_window=5),
    _case(
        "lfm3-biases",
        head_dim=8,
        num_hidden_layers=4,
        sliding_window=4,
        layer_types=["sliding_attention", "conv", "full_attention", "conv"],
        conv_L_cache=3,
        conv_bias=True,
        attention_bias=True,
        use_sandwich_norm=False,
        use_attention_gate=False,
        tie_word_embeddings=False,
        rope_parameters={
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.75, "rope_theta": 500.0},
            "sliding_attention": YARN,
        },
    ),
    _case(
        "beam-plain",
        **EXPERTS | {"num_experts": 12, "num_experts_per_tok": 4, "n_group": 3, "topk_group": 2},
        num_hidden_layers=4,
        sliding_window=5,
        layer_types=MIXED,
        mlp_layer_types=["dense", "sparse", "sparse", "dense"],
    ),
    _case(
        "beam-all-experts",  # more than tokens
        **EXPERTS | {"num_experts": 90, "num_experts_per_tok": 5, "n_group": 1, "topk_group": 1},
        num_hidden_layers=3,
        sliding_window=4,
        mlp_layer_types=["sparse"] * 3,
        norm_topk_prob=False,
        attention_bias=True,
        final_logit_softcapping=None,
        tie_word_embeddings=True,
        rope_parameters={"full_attention": None, "sliding_attention": YARN},
    ),
    _case("nanochat-plain"),
    _case(
        "nanochat-biases",
        attention_bias=True,
        final_logit_softcapping=None,
        num_key_value_heads=None,
        rms_norm_eps=1e-3,
        rope_parameters=YARN,
        tie_word_embeddings=True,
    ),
    _case("gptj-plain", num_key_value_heads=6, rotary_dim=6),
    _case(
        "gptj-own-width",
        num_key_value_heads=None,
        rotary_dim=8,
        n_inner=20,
        layer_norm_epsilon=1e-3,
        num_hidden_layers=3,
    ),
    _case("falcon-plain", num_key_value_heads=None),
    _case(
        "falcon-groups",
        num_key_value_heads=None,
        num_kv_heads=3,
        new_decoder_architecture=True,
        ffn_hidden_size=22,
        tie_word_embeddings=False,
        rope_parameters=YARN,
    ),
    _case(
        "falcon-one-norm",  # Falcon 11B
        num_key_value_heads=None,
        num_kv_heads=2,
        new_decoder_architecture=True,
        num_ln_in_parallel_attn=1,
        num_hidden_layers=3,
    ),
    _case(
        "falcon-one-after-the-other",
        num_key_value_heads=None,
        multi_query=False,
        parallel_attn=False,
        bias=True,
        layer_norm_epsilon=1e-3,
        tie_word_embeddings=False,
    ),
    _case(
        "falcon-distances",  # Falcon-RW
        num_key_value_heads=None,
        alibi=True,
        multi_query=False,
        parallel_attn=False,
        bias=True,
    ),
    _case(
        "falcon-distances-of-groups",
        num_key_value_heads=None,
        alibi=True,
        num_kv_heads=3,
        new_decoder_architecture=True,
        num_hidden_layers=3,
        tie_word_embeddings=False,
    ),
    _case("bitnet-plain", hidden_act="relu2", rms_norm_eps=1e-3),
    _case(
        "bitnet-biases",
        hidden_act="relu2",
        attention_bias=True,
        num_key_value_heads=None,
        num_hidden_layers=3,
        rope_parameters=LLAMA3,
        tie_word_embeddings=True,
    ),
    _case("bloom-plain", num_key_value_heads=None),
    _case(
        "bloom-untied",
        num_key_value_heads=None,
        num_attention_heads=4,
        num_hidden_layers=3,
        layer_norm_epsilon=1e-3,
        tie_word_embeddings=False,
    ),
    _case("mpt-plain", num_key_value_heads=None, max_seq_len=64, init_device="meta"),
    _case(
        "mpt-clipped",
        num_key_value_heads=None,
        num_attention_heads=4,
        max_seq_len=64,
        attn_config={"clip_qkv": 1.5, "softmax_scale": 0.4},
        num_hidden_layers=3,
        layer_norm_epsilon=1e-3,
        tie_word_embeddings=False,
    ),
    _case(
        "dbrx-plain",
        d_model=48,
        attn_config={"clip_qkv": 1.5, "kv_n_heads": 2, "rope_theta": 500.0},
        ffn_config={"ffn_hidden_size": 20, "moe_num_experts": 5, "moe_top_k": 3},
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    _case(
        "dbrx-unclipped",  # transformers needs a number
        d_model=48,
        num_key_value_heads=3,
        attn_config={"clip_qkv": 1e4, "kv_n_heads": 3, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 1, "ffn_act_fn": {"name": "silu"}},
        num_hidden_layers=3,
        rope_parameters=LINEAR,
    ),
    _case("jetmoe-plain", num_attention_heads=4, kv_channels=12, num_local_experts=5),
    _case(
        "jetmoe-more-heads",
        num_attention_heads=9,
        num_key_value_heads=3,
        kv_channels=8,
        num_local_experts=6,
        num_experts_per_tok=3,
        num_hidden_layers=3,
        rms_norm_eps=1e-3,
        rope_parameters=YARN,
        tie_word_embeddings=False,
    ),
    _case("gpt2-plain", num_key_value_heads=None, n_inner=None, n_positions=64),
    _case(
        "gpt2-untied",
        num_key_value_heads=None,
        n_inner=20,
        n_positions=64,
        layer_norm_epsilon=1e-3,
        tie_word_embeddings=False,
    ),
    _case("gpt_bigcode-plain", num_key_value_heads=None, n_inner=None, n_positions=64),
    _case(
        "gpt_bigcode-untied",
        num_key_value_heads=None,
        n_inner=20,
        n_positions=64,
        layer_norm_epsilon=1e-3,
        tie_word_embeddings=False,
    ),
    _case(
        "gpt_neo-plain",
        num_key_value_heads=None,
        attention_types=[[["global", "local"], 1], [["global"], 1]],
        num_hidden_layers=3,
        window_size=4,
        intermediate_size=None,
        max_position_embeddings=64,
    ),
    _case(
        "gpt_neo-global",
        num_key_value_heads=None,
        attention_types=[[["global"], 2]],
        num_hidden_layers=2,
        intermediate_size=20,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    ),
    _case("opt-plain", num_key_value_heads=None, ffn_dim=28, max_position_embeddings=64),
    _case(
        "opt-without-biases",
        num_key_value_heads=None,
        ffn_dim=20,
        max_position_embeddings=64,
        enable_bias=False,
        activation_function="gelu",
        tie_word_embeddings=False,
    ),
    _case("gemma4_unified_text-plain", **UNIFIED, final_logit_softcapping=50.0),
    _case(
        "gemma4_unified_text-values-of-keys",
        **UNIFIED,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        tie_word_embeddings=False,
    ),
    _case("gemma3n_text-plain", **GEMMA3N, final_logit_softcapping=50.0),
    _case(
        "gemma3n_text-widths",  # layers of two widths, the second stream is computed, no layer shares keys
        head_dim=6,
        num_hidden_layers=6,
        intermediate_size=[20, 56, 20, 20, 56, 56],
        sliding_window=5,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=6,
        vocab_size_per_layer_input=101,
        laurel_rank=5,
        altup_num_inputs=3,
        altup_active_idx=1,
        altup_correct_scale=False,
        rms_norm_eps=1e-3,
        final_logit_softcapping=20.0,
        tie_word_embeddings=False,
    ),
    _case(  # with the default factor attention is so sharp that it enlarges what float32 rounds
        "muse_spark-plain", **MUSE_SPARK, num_hidden_layers=3, sliding_window=6, qk_scale_factor=2.0
    ),
    _case(
        "muse_spark-dense-layers",  # and more experts than tokens
        **MUSE_SPARK | {"head_dim": 10, "num_local_experts": 81, "num_experts_per_tok": 2},
        num_hidden_layers=4,
        mlp_layer_types=["dense", "sparse", "dense", "sparse"],
        sliding_window=4,
        layer_types=MIXED,
        rope_parameters=LLAMA3,
        layer_rope_theta=[500.0, 500.0, 0, 0],
        attention_bias=True,
        routed_scaling_factor=1.7,
        residual_gate_temperature=0.05,  # so that some factors are the smallest
        qk_scale_factor=1.7,
        output_multiplier=0.7,
        final_logit_softcapping=3.0,
        post_norm_eps=1e-3,
    ),
    _case("deepseek_ocr2-plain", **DEEPSEEK_OCR2, num_hidden_layers=3, mlp_layer_types=["dense", "sparse", "sparse"]),
    _case(
        "deepseek_ocr2-groups",
        **DEEPSEEK_OCR2 | {"n_routed_experts": 12, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 5},
        topk_method="group_limited_greedy",
        num_hidden_layers=3,
        mlp_layer_types=["sparse"] * 3,
        n_shared_experts=1,
        routed_scaling_factor=1.7,
        num_attention_heads=4,
        num_key_value_heads=1,
        attention_bias=True,
        rms_norm_eps=1e-3,
        rope_parameters=LINEAR,
    ),
    _case("cosmos3_omni-plain", head_dim=10, rope_parameters=MROPE | {"mrope_section": [1, 2, 2]}),
    _case(
        "cosmos3_omni-biases",
        head_dim=14,
        num_hidden_layers=3,
        num_key_value_heads=6,
        attention_bias=True,
        rope_parameters=MROPE | {"mrope_section": [3, 2, 2]},
        rms_norm_eps=1e-3,
    ),
    _case("cosmos3_edge-plain", head_dim=10, rope_parameters=MROPE | {"mrope_section": [1, 2, 2]}),
    _case(
        "cosmos3_edge-biases",
        head_dim=14,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 60.0, "mrope_section": [3, 2, 2]},
        rms_norm_eps=1e-3,
    ),
    _case("phi4_multimodal-plain", **PHI4_TOWERS, num_hidden_layers=3),
    _case(
        "phi4_multimodal-longrope",
        **PHI4_TOWERS,
        num_key_value_heads=6,
        sliding_window=5,
        rms_norm_eps=1e-3,
        rope_parameters=LONGROPE | {"partial_rotary_factor": 0.75},
        original_max_position_embeddings=6,
        tie_word_embeddings=True,
    ),
    _case("aria-plain", head_dim=10, moe_num_experts=6, moe_topk=3),
    _case(
        "aria-shared",  # and more experts than tokens
        head_dim=14,
        num_hidden_layers=3,
        num_key_value_heads=None,
        moe_num_experts=81,
        moe_topk=2,
        moe_num_shared_experts=1,
        attention_bias=True,
        rope_parameters=LLAMA3,
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
    ),
    _case("molmo2-plain", head_dim=10, vocab_size=77, additional_vocab_size=24),
    _case(
        "molmo2-norms-after",
        head_dim=14,
        vocab_size=90,
        additional_vocab_size=11,
        num_hidden_layers=3,
        num_key_value_heads=6,
        norm_after=True,
        qk_norm_type="olmo",
        attention_bias=True,
        rope_parameters=LLAMA3,
        rope_scaling_layers=[0, 2],
        rms_norm_eps=1e-3,
    ),
    _case("emu3-plain"),
    _case(
        "emu3-yarn",
        num_hidden_layers=3,
        num_key_value_heads=6,
        rope_parameters=YARN,
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
    ),
    _case(
        "cohere_compass_text-plain",
        rope_parameters={"full_attention": MROPE | {"mrope_section": [2, 1, 1]}},
        logit_scale=0.5,
    ),
    _case(
        "cohere_compass_text-windows",
        num_hidden_layers=4,
        layer_types=MIXED,
        sliding_window=5,
        num_key_value_heads=6,
        rope_parameters={"full_attention": None, "sliding_attention": LLAMA3},
        attention_bias=True,
        layer_norm_eps=1e-3,
        tie_word_embeddings=False,
    ),
    _case(
        "nemo_speechlm-plain",
        **NEMOTRON_H,
        num_hidden_layers=5,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    ),
    _case(
        "nemo_speechlm-latent",
        **NEMOTRON_H | {"n_groups": 3, "mamba_head_dim": 16},
        num_hidden_layers=3,
        hybrid_override_pattern="E*M",
        moe_latent_size=24,
        num_experts_per_tok=4,
        mlp_bias=True,
    ),
    _case("codegen-plain", num_attention_heads=8, num_key_value_heads=8, rotary_dim=4),
    _case(
        "codegen-own-width",
        num_attention_heads=4,
        num_key_value_heads=None,
        rotary_dim=12,
        n_inner=20,
        layer_norm_epsilon=1e-3,
        num_hidden_layers=3,
    ),
    _case("persimmon-plain"),
    _case(
        "persimmon-without-norms",
        num_hidden_layers=3,
        num_attention_heads=3,
        qk_layernorm=False,
        rope_parameters=LINEAR | {"partial_rotary_factor": 0.25},
        layer_norm_eps=1e-3,
        tie_word_embeddings=True,
    ),
    _case("fuyu-plain"),
    _case("fuyu-without-norms", num_hidden_layers=3, qk_layernorm=False, tie_word_embeddings=True),
    _case("xglm-plain", num_key_value_heads=None, ffn_dim=28),
    _case(
        "xglm-unscaled",
        num_key_value_heads=None,
        ffn_dim=20,
        num_hidden_layers=3,
        scale_embedding=False,
        tie_word_embeddings=False,
    ),
    _case("biogpt-plain", num_key_value_heads=None),
    _case(
        "biogpt-unscaled",
        num_key_value_heads=None,
        num_hidden_layers=3,
        scale_embedding=False,
        tie_word_embeddings=False,
    ),
    _case("dots3_note_text-plain", **DOTS3),
    _case(
        "dots3_note_text-full",  # without indexers
        **DOTS3 | {"n_group": 1, "topk_group": 1, "sliding_window": 4},
        use_dsa=False,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
        n_shared_experts=2,
        routed_scaling_factor=1.7,
        norm_topk_prob=False,
        attention_bias=True,
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
        rope_parameters={
            "full_attention": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
            "sliding_attention": {"rope_type": "default", "rope_theta": 60.0},
        },
    ),
    _case("dots3_note-plain", **DOTS3),
    _case(
        "dots3_note-window",  # a window in all layers
        **DOTS3 | {"num_hidden_layers": 3, "swa_qk_rope_head_dim": 8},
        layer_types=["sliding_attention"] * 3,
        first_k_dense_replace=0,
        swa_rope_theta=70.0,
        tie_word_embeddings=True,
    ),
    _case(
        "glm5_next-plain",
        **GLM5_NEXT,
        num_hidden_layers=4,
        mlp_layer_types=["dense", "sparse", "sparse", "dense"],
        initializer_range=0.15,  # else the last bits of the weights change logits by 2e-5 of the largest
    ),
    _case(
        "glm5_next-shared",  # more experts than tokens; a layer attends to the tokens that the one before selected
        **GLM5_NEXT
        | {"n_routed_experts": 81, "index_kpool": 3, "index_topk": 6, "n_group": 1, "topk_group": 1}
        | {"swiglu_limit": 0.4},
        num_hidden_layers=4,
        layer_types=["full_attention", "indexed_attention", "linear_attention", "indexed_attention"],
        indexer_types=["full", "shared", "shared", "full"],
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
        linear_conv_kernel_dim=3,
        linear_lower_bound=None,
        hc_mult=2,
        hc_sinkhorn_iters=3,
        n_shared_experts=2,
        attention_bias=True,
        norm_topk_prob=False,
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
    ),
    _case(
        "minimax-plain",
        **MINIMAX,
        num_hidden_layers=4,
        layer_types=["full_attention", "linear_attention"] * 2,
        initializer_range=0.15,  # else the last bits of the weights change logits by 2e-5 of the largest
    ),
    _case(
        "minimax-factors",  # and more experts than tokens
        **MINIMAX | {"num_local_experts": 81, "block_size": 256},
        num_hidden_layers=3,
        head_dim=12,
        num_key_value_heads=6,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        sliding_window=5,
        full_attn_alpha_factor=1.7,
        full_attn_beta_factor=0.6,
        linear_attn_alpha_factor=0.8,
        linear_attn_beta_factor=1.3,
        mlp_alpha_factor=1.1,
        mlp_beta_factor=0.7,
        rope_parameters=LLAMA3,
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
    ),
    _case("gemma3n-plain", **GEMMA3N),
    _case("gemma3n-own-head", **GEMMA3N | {"num_kv_shared_layers": 0, "sliding_window": 4}, tie_word_embeddings=False),
    _case("gemma3-plain", **GEMMA3, tie_word_embeddings=True),
    _case("gemma3-own-head", **GEMMA3 | {"sliding_window": 4, "attention_bias": True}, tie_word_embeddings=False),
    _case(
        "gemma3_text-pattern",
        head_dim=10,
        num_hidden_layers=7,
        sliding_window=6,
        final_logit_softcapping=50.0,
        attention_bias=True,
        tie_word_embeddings=False,
        num_attention_heads=3,
        num_key_value_heads=1,
    ),
]


FIRST = {case.family: case for case in reversed(CASES)}
"""The first case of each family."""
BY_ID = {case.id: case for case in CASES}
FAMILIES = set(FIRST)
CORE = {
    *("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss", "olmo2", "deepseek_v3", "kimi_k2"),
    *("llama4", "llama4_text"),
}
"""Families whose cases run in the fast tests. Between them they have every part of the converter."""

FAST = {
    "test_every_parameter_is_one_target_of_the_table",
    "test_every_tensor_is_one_source_of_the_table",
    "test_logits_of_a_sequence",
    "test_what_transformers_saves_under_names_of_its_own_is_read",
}
"""The tests that are fast for the first case of every other family; all else of those families is slow."""

ONCE = {"test_every_parameter_is_one_target_of_the_table"}
"""Those of them that are fast for no other case of the families above either: a model is traced for each."""


def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    """Whether a test, by the name of its function, is slow because of the case among its parameters."""
    case = next((value for value in parameters.values() if isinstance(value, Case)), None)
    if case is None or (case.family in CORE and test not in ONCE):
        return False
    return test not in FAST or case != FIRST[case.family] or parameters.get("scan", False)


COMPUTED_BY = {
    "gemma4_unified_text": "gemma4_text",
    "gemma3n": "gemma3n_text",
    "internlm3": "llama",
    "iquestcoder": "llama",
    "ministral": "llama",
    "glm4v": "glm4",
    "glm4v_moe": "glm4_moe",
    "glm46v": "glm4",
    "glm_ocr": "glm4",
    "hunyuan_vl": "hunyuan_v1_dense",
    "granite_docling": "granite",
    "qwen3_omni_moe": "qwen3_moe",
    "qwen2_5_omni": "qwen2",
    "step3p7": "step3p5",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "dots3_note": "dots3_note_text",
    "cosmos3_omni": "qwen3",
    "phi4_multimodal": "phi3",
    "cosmos3_edge": "arcee",
    "emu3": "llama",
    "nemo_speechlm": "nemotron_h",
    "codegen": "gptj",
    "fuyu": "persimmon",
    "cwm": "llama",
    "qwen2_vl": "qwen2",
    "hy_v3": "dots1",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe_text": "qwen3_next",
    "qwen3_5_moe": "qwen3_next",
    "qwen4_exp": "qwen4_exp_text",
    **READ_AS,
    "glm4_moe_lite": "deepseek_v3",
    "olmo3": "olmo2",
    "llama4_text": "llama4",
}
"""Families with a config or names of their own that run another one's modules."""


def is_inseparable(case: Case) -> bool:
    """Whether no layer of a case can run by itself on hidden states."""
    keys = ("hidden_size_per_layer_input", "num_kv_shared_layers", "ple_layer_ids")
    families = ("glm_moe_dsa", "deepseek_v4", "hy_v4", "mistral_large4", "glm5_next")
    return case.family in families or any(case.config.get(key) for key in keys)


OWN_CACHE = {"llama", "deepseek_v3", "deepseek_v32"}
"""Families with a cache of their own; that of the others is llama's."""


def one_fast_of_each(
    families: Collection[str] = FAMILIES - COMPUTED_BY.keys(), cases: Sequence[Case] = CASES
) -> list[Any]:
    """All cases for `parametrize`, those marked slow that are not the first of these families: by default of all that
    have modules of their own."""
    import pytest

    first = {case.family: case for case in reversed(cases) if case.family in families}
    return [
        pytest.param(case, id=str(case), marks=[] if case in first.values() else [pytest.mark.slow]) for case in cases
    ]


CENTERED = {
    *("qwen3_next", "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe"),
    *(
        "step3p5",
        "step3p7",
        "muse_glimmer",
        "muse_spark",
        "minimax_m3_vl",
        "minimax_m3_vl_text",
        "qwen4_exp_text",
        "qwen4_exp",
    ),
}
"""Families whose norms multiply by 1 + w."""


LABELS = 3
"""Of the models that return scores."""


def hf_model(case: Case, seed: int = 0, returns: str = "") -> Any:
    """The transformers model in float32 with random weights; of hidden states or scores if it `returns` these. Norms
    and biases are random too: as ones and zeros, which they are when new, they would hide that they are used wrongly
    or not at all."""
    import torch
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForMultimodalLM,
        AutoModelForSequenceClassification,
    )

    torch.manual_seed(seed)
    # The text model alone would be saved under other names than those of the released checkpoints.
    is_inside = case.family in VISION or case.family in READ_WITHIN
    language_model = AutoModelForMultimodalLM if is_inside else AutoModelForCausalLM
    headless = {"scores": AutoModelForSequenceClassification, "hidden states": AutoModel}
    auto = headless.get(returns, language_model).from_config
    if case.family in OMNI:
        config = case.hf_config().thinker_config
    else:
        config = whole_config(case.hf_config().to_dict()) if case.family in READ_WITHIN else case.hf_config()
    if returns == "scores":
        config.num_labels = LABELS
    with warnings.catch_warnings():  # of no shared expert a matrix without elements is made
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        model = auto(config, attn_implementation=attention_of(config), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = name.replace("norm_attn_norm", "")  # of which DBRX's attention is a part
            if "norm" in part or name.endswith(("router.scale", "per_expert_scale", "output_scale")):
                parameter.uniform_(0.5, 1.5)
                if case.family in CENTERED and "linear_attn" not in name:
                    parameter -= 1
            elif name.endswith((".bias", "_bias", ".sinks", "_hc.base", ".hc_base", "softmax_scaling.scale")):
                parameter.normal_(0, 0.3)
            elif case.family in ("hy_v4", "glm5_next") and name.endswith(("_hc.scale", ".hc_scale")):
                # So small when new that the streams would be alike; in GLM the matrices beside them are.
                parameter.uniform_(*((2.5, 7.5) if case.family == "glm5_next" else (0.5, 1.5)))
            elif name.endswith("A_log"):
                parameter.uniform_(-4, -1)  # else sums of rates are so large that float32 loses their differences
            elif "ple.conv1d" in name or "index_kpool_compress" in name:
                parameter.normal_(0, 0.3)  # zero or one when new
            elif ".alpha_" in name or name.endswith(".D"):
                parameter.uniform_(-1, 1)
            elif "embed_tokens" in name or "modality_router" in name:
                # The padding token's too, which is zero when new; and of inputs that are divided by the width.
                parameter.normal_(0, 0.25 if "embed" in name else 5)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name or name.endswith(("expert_bias", "rotary_emb.alpha")):
                buffer.normal_(0, 0.2)
            elif name.endswith("tid2eid"):
                buffer.copy_(torch.randint(0, case.config["n_routed_experts"], buffer.shape))
            elif "layer_scalar" in name:
                buffer.uniform_(0.5, 1.5)
    return model


def _drop_empty(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file({name: x for name, x in load_file(path).items() if x.numel()}, path, {"format": "pt"})


def _drop(path: Path, experts: range) -> None:
    from safetensors.torch import load_file, save_file

    kept = {
        name: x
        for name, x in load_file(path).items()
        if int(name.partition("experts.")[2].partition(".")[0] or -1) not in experts
    }
    save_file(kept, path, {"format": "pt"})


def _resplit(path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    for name in [name for name in tensors if "q_conv1d" in name]:
        names = [name.replace("q_conv1d", f"{x}_conv1d") for x in "qkv"]
        widths = [len(tensors[each.replace("_conv1d", "_proj")]) for each in names]
        parts = torch.cat([tensors[each] for each in names]).split(widths)
        tensors |= {each: part.clone() for each, part in zip(names, parts, strict=True)}
    for name in [name for name in tensors if "self_attn.q_proj" in name]:  # whose norms it renames too
        front = name.partition("self_attn.")[0]
        tensors[f"{front}post_attention_layernorm.weight"] = tensors.pop(f"{front}feedforward_layer_norm.weight")
    save_file(tensors, path, {"format": "pt"})


def _unwrap(folder: Path, architecture: str) -> None:
    from safetensors.torch import load_file, save_file

    path, raw = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    kept = {name: x for name, x in load_file(path).items() if not name.startswith("vi")}
    save_file(kept, path, {"format": "pt"})
    text = raw["text_config"] | {key: raw[key] for key in ("transformers_version", "tie_word_embeddings")}
    (folder / "config.json").write_text(json.dumps(text | {"architectures": [architecture]}))


def _resplit_embedding(path: Path, vocabulary: int) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    names = sorted(name for name in tensors if ".wte." in name)  # that of added tokens last
    rows = torch.cat([tensors[name] for name in names])
    parts = rows[:vocabulary], rows[vocabulary:]
    save_file(tensors | {name: x.clone() for name, x in zip(names, parts, strict=True)}, path, {"format": "pt"})


OTHER_NAMES: Mapping[str, tuple[Mapping[str, str], Mapping[str, str], Mapping[str, Any]]] = {
    "bailing_moe": (
        {
            "embed_tokens.": "word_embeddings.",
            "self_attn.qkv.": "attention.query_key_value.",
            "self_attn.o_proj.": "attention.dense.",
            "self_attn.q_norm.": "attention.query_layernorm.",
            "self_attn.k_norm.": "attention.key_layernorm.",
            "gate.e_score_correction_bias": "gate.expert_bias",
        },
        {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts", "attention_bias": "use_qkv_bias"},
        {"architectures": ["BailingMoeV2"], "score_function": "sigmoid", "use_bias": False},
    ),
    "exaone": (
        {
            "model.": "transformer.",
            "embed_tokens.": "wte.",
            "layers.": "h.",
            "input_layernorm.": "ln_1.",
            "post_attention_layernorm.": "ln_2.",
            "norm.": "ln_f.",
            "self_attn.o_proj.": "self_attn.out_proj.",
            "self_attn.": "attn.attention.",
            "mlp.gate_proj.": "mlp.c_fc_0.",
            "mlp.up_proj.": "mlp.c_fc_1.",
            "mlp.down_proj.": "mlp.c_proj.",
        },
        {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function"},
        {"architectures": ["Exaone"]},
    ),
    "internlm2": (
        {
            "embed_tokens.": "tok_embeddings.",
            "input_layernorm.": "attention_norm.",
            "post_attention_layernorm.": "ffn_norm.",
            "self_attn.qkv.": "attention.wqkv.",
            "self_attn.o_proj.": "attention.wo.",
            "mlp.gate_proj.": "feed_forward.w1.",
            "mlp.up_proj.": "feed_forward.w3.",
            "mlp.down_proj.": "feed_forward.w2.",
            "lm_head.": "output.",
        },
        {"attention_bias": "bias"},
        {"architectures": ["InternLM2"]},
    ),
    "mimo": ({}, {}, {"architectures": ["MiMo"], "attention_bias": True, "num_nextn_predict_layers": 1}),
}
"""Of families that transformers does not have: parts of the names that it gives their tensors, and those of releases;
the same of keys of config.json; and keys beside, of architectures the front. `qkv` is one matrix in place of three."""


def _with_other_names(
    folder: Path, names: Mapping[str, str], keys: Mapping[str, str], beside: Mapping[str, Any]
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    path, raw = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors = load_file(path)
    for name in [name for name in tensors if "self_attn.q_proj." in name and "self_attn.qkv." in names]:
        parts = [tensors.pop(name.replace("q_proj", f"{x}_proj")) for x in "qkv"]
        if raw["model_type"] == "llama":  # the queries of a group of heads, its key, its value
            groups = raw["num_key_value_heads"]
            joined = torch.cat([x.reshape(groups, -1, x.shape[-1]) for x in parts], 1).reshape(-1, parts[0].shape[-1])
        else:
            joined = torch.cat(parts)
        tensors[name.replace("q_proj", "qkv")] = joined
    tensors = {reduce(lambda text, pair: text.replace(*pair), names.items(), name): x for name, x in tensors.items()}
    save_file(tensors, path, {"format": "pt"})
    ours = {keys.get(key, key): x for key, x in raw.items()} | dict(beside)
    head = re.search("For[A-Z].*|Model$", raw["architectures"][0])
    ours["architectures"] = [name + (head[0] if head else "") for name in ours["architectures"]]
    (folder / "config.json").write_text(json.dumps(ours))


def _stack_experts(path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    for name in [name for name in tensors if ".experts.0." in name]:
        front, kind = name.split(".experts.0.")
        names = [each for each in tensors if each.startswith(f"{front}.experts.") and each.endswith(kind)]
        names.sort(key=lambda each: int(each.split(".experts.")[1].partition(".")[0]))
        stacked = "gate_and_up_projs" if kind.startswith("up") else "down_projs"
        tensors[f"{front}.experts.{stacked}"] = torch.stack([tensors.pop(each).T for each in names]).contiguous()
    save_file(tensors, path, {"format": "pt"})


def _rename(path: Path, old: str, new: str) -> None:
    from safetensors.torch import load_file, save_file

    save_file({name.replace(old, new): x for name, x in load_file(path).items()}, path, {"format": "pt"})


def save(case: Case, folder: Path, dtype: str = "float32", seed: int = 0, returns: str = "") -> Path:
    """Writes the model as `save_pretrained` does, with weights of `dtype`, but with the names that releases have, and
    gives the folder back."""
    return as_released(case, save_pretrained(case, folder, dtype, seed, returns))


def save_pretrained(case: Case, folder: Path, dtype: str = "float32", seed: int = 0, returns: str = "") -> Path:
    """Writes the model as `save_pretrained` does."""
    import torch

    model = hf_model(case, seed, returns)
    if case.family in OMNI:
        import transformers

        whole = getattr(transformers, OMNI[case.family])(case.hf_config())
        whole.thinker = model
        model = whole
    with warnings.catch_warnings():  # the rotary positions of llama4's vision tower are complex
        warnings.filterwarnings("ignore", "Casting complex values to real")
        model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


RENAMED_BY_TRANSFORMERS = ("deepseek_v4", "hy_v4", "kimi_k25", "kimi_linear", "longcat_flash", "nemo_speechlm")
"""Families of which transformers 5.23 saves tensors under other names than those of releases, or more of them."""
RECUT_BY_TRANSFORMERS = ("molmo2", "olmo_hybrid")
"""Families of which transformers 5.23 saves tensors that are cut at other rows than those of releases."""


def as_released(case: Case, folder: Path) -> Path:
    """Gives the tensors that `save_pretrained` wrote the names that they have in releases."""
    if case.family == "kimi_k25":  # transformers calls the layers of the text model as those of the vision tower
        _rename(folder / "model.safetensors", "language_model.model.blocks.", "language_model.model.layers.")
    if case.family == "deepseek_v4":  # transformers mixes its own names with those of the releases
        names = {
            "model.embed_tokens.": "embed.",
            "model.": "",
            "hc_head.hc_": "hc_head_",
            "attn.norm.": "attn.kv_norm.",
        }
        for old, new in names.items():
            _rename(folder / "model.safetensors", old, new)
    if case.family == "hy_v4":  # transformers calls the gates of MLPs as those of attention
        for part in ("mlp", "shared_experts"):
            _rename(folder / "model.safetensors", f"{part}.linear_gate", f"{part}.gate_proj")
        # Without a prefix before them it puts these parts of names in another order.
        _rename(folder / "model.safetensors", "hc_head.hc_pre.hc_head_", "hc_pre.hc_head.hc_head_")
    if case.family == "longcat_flash":  # transformers writes matrices of the experts that have none
        _drop(folder / "model.safetensors", range(case.config["n_routed_experts"], 1 << 10))
    if case.family == "olmo_hybrid":  # transformers writes three convolutions of the same size
        _resplit(folder / "model.safetensors")
    if case.family == "molmo2":  # transformers writes two halves of the embedding
        _resplit_embedding(folder / "model.safetensors", (SIZES | dict(case.config))["vocab_size"])
    if case.family == "nemo_speechlm":  # transformers writes experts one by one
        _stack_experts(folder / "model.safetensors")
    if case.family == "kimi_linear":  # transformers calls the MLP of dense layers as the experts of others
        for name in ("gate_proj", "up_proj", "down_proj"):
            _rename(folder / "model.safetensors", f"block_sparse_moe.{name}", f"mlp.{name}")
    if case.family in OTHER_NAMES:
        _with_other_names(folder, *OTHER_NAMES[case.family])
    if case.config.get("n_shared_experts") == 0:  # which releases leave out
        _drop_empty(folder / "model.safetensors")
    if case.family == "step3p5":  # which transformers has inside step3p7 alone
        _unwrap(folder, "Step3p5ForCausalLM")
    if case.written_as:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": case.written_as}))
    return folder


_RNG = np.random.default_rng(3)
PROMPTS = [list(map(int, _RNG.integers(3, 101, length))) for length in (9, 4, 1)]
"""Token ids that every case knows, of three lengths."""


def save_with_mtp(case: Case, folder: Path) -> Path:
    """Writes the model of a case of DeepSeek's kind, of 3 layers, with a layer for further tokens beside and its
    copies of the embedding and the head; gives the folder back."""
    from helpers.checkpoints import random_tensor, read_tensors, write_checkpoint

    save(case, folder, "bfloat16")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
    tensors, rng = read_tensors(folder), np.random.default_rng(0)
    front, last = "model.layers.3.", "model.layers.2."
    layer = {name.replace(last, front): x[::-1] for name, x in tensors.items() if name.startswith(last)}
    D = config["hidden_size"]
    norms = {
        f"{front}{name}.weight": random_tensor(rng, (D,), "bfloat16") for name in ("enorm", "hnorm", "shared_head.norm")
    }
    copies = {
        f"{front}embed_tokens.weight": tensors["model.embed_tokens.weight"],
        f"{front}shared_head.head.weight": tensors["lm_head.weight"],
    }
    tensors |= layer | norms | copies | {f"{front}eh_proj.weight": random_tensor(rng, (D, 2 * D), "bfloat16")}
    return write_checkpoint(folder, config, tensors)
