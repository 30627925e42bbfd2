"""Configs with the constants of releases, which programs have in their code, and models that programs agree on."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.families import BY_ID, LLAMA3, Case, hf_model, save

LLAMA31 = LLAMA3 | {"rope_theta": 500000.0, "original_max_position_embeddings": 8192}
GPT_OSS_ROPE = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096}
DEEPSEEK_ROPE = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0}
LATENT = dict(BY_ID["deepseek_v3-groups"].config) | {
    "max_position_embeddings": 163840,
    "rope_parameters": DEEPSEEK_ROPE
    | {"rope_theta": 10000.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0},
}
KIMI_ROPE = LATENT["rope_parameters"] | {"rope_theta": 50000.0, "factor": 32.0, "beta_fast": 1.0}
KIMI = {"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0, "max_position_embeddings": 131072}
GEMMA4 = {
    "head_dim": 16,
    "sliding_window": 6,
    "num_hidden_layers": 12,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    "global_head_dim": 24,
    "num_global_key_value_heads": 3,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 20}
GEMMA4_INPUTS = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 101,
}
GEMMA4_SHARED = {
    **GEMMA4_INPUTS,
    "num_hidden_layers": 12,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    "num_kv_shared_layers": 6,
    "use_double_wide_mlp": True,
}


def gemma3n(further: int) -> Case:
    """A Gemma 3n whose layers have embeddings for all ids but the last `further`."""
    return Case(
        f"gemma3n-{further}",
        "gemma3n_text",
        "gemma3n_text",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "vocab_size": 101 + further,
            "vocab_size_per_layer_input": 101,
            "hidden_size_per_layer_input": 6,
            "num_hidden_layers": 10,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
            "num_kv_shared_layers": 5,
            "laurel_rank": 5,
            "activation_sparsity_pattern": [0.0] * 10,
            "final_logit_softcapping": 30.0,
            "altup_num_inputs": 4,
        },
    )


def save_with_constant_norms(case: Case, folder: Path):
    """Writes a model, and returns it. In the library gemma and in Tunix the router of Gemma 4 takes the inputs of the
    experts, after their norm, and in transformers before it. Both are the same where this norm has no scale."""
    save(case, folder)
    model, tensors = hf_model(case), read_tensors(folder)
    for name, scale in model.named_parameters():
        if name.endswith("pre_feedforward_layernorm_2.weight"):
            scale.data.fill_(1.0)
            tensors[name] = np.ones_like(tensors[name])
    write_checkpoint(folder, json.loads((folder / "config.json").read_text()), tensors)
    return model


KIMI_K3_VISION = {
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "init_pos_emb_height": 64,
    "init_pos_emb_time": 4,
    "init_pos_emb_width": 64,
    "linear_bias": False,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_hidden_size": 1024,
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "patch_embed_proj_bias": False,
    "patch_size": 14,
    "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
    "qkv_hidden_size": 1536,
    "text_hidden_size": 7168,
    "vt_hidden_size": 1024,
    "vt_intermediate_size": 4096,
    "vt_num_attention_heads": 12,
    "vt_num_hidden_layers": 27,
}
KIMI_K3_MXFP4 = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
                "zp_dtype": None,
            },
        }
    },
    "format": "mxfp4-pack-quantized",
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
"""The description of encoded weights, which stands in `text_config`."""
DEEPSEEK_V41_ENCODING = {
    "activation_scheme": "dynamic",
    "expert_dtype": "fp4",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [32, 32],
}
"""The description of encoded weights, which stands beside `text_config`."""

STEP5_TEXT: Mapping[str, Any] = {
    "architectures": ["Step4ForCausalLM"],
    "model_type": "step4",
    "att_impl_type": "GQA",
    "fp32_residual_connection": True,
    "head_dim": 192,
    "head_dim_full_attention": 192,
    "head_dim_sliding_attention": 192,
    "hidden_size": 4096,
    "intermediate_size": 13824,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 23 + ["sliding_attention"] * 3,
    "max_seq_len": 1048576,
    "moe_intermediate_size": 1536,
    "moe_layers_enum": ",".join(map(str, range(3, 91))),
    "moe_num_experts": 352,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "moe_top_k": 8,
    "need_fp32_gate": True,
    "norm_dtype": "float32",
    "norm_expert_weight": True,
    "num_attention_groups": 4,
    "num_attention_groups_full_attention": 4,
    "num_attention_groups_sliding_attention": 4,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_nextn_predict_layers": 3,
    "num_sliding_attention_heads": 64,
    "partial_rotary_factors": [1.0, 1.0, 1.0, 1 / 3] * 256,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 1.0,
        "original_max_position_embeddings": 1048576,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "rope_theta": [10000, 10000, 10000, 10000000] * 256,
    "share_expert_dim": 1536,
    "sliding_window": 512,
    "sparse_config": {
        "enabled": True,
        "proxy_dim": 256,
        "sparse_indexer_rope_dim": 32,
        "sparse_indexer_use_rope": True,
        "sparse_indexer_num_heads": 16,
        "sparse_indexer_num_k_heads": 1,
        "sparse_indexer_q_norm_type": "rmsnorm",
        "sparse_indexer_k_norm_type": "layernorm",
        "sparse_indexer_csa_z_norm_type": "none",
        "sparse_indexer_softmax_variant": "ssmax",
        "sparse_indexer_ssmax_s_granularity": "q_head",
        "num_provider_groups": 4,
        "topk": 512,
        "region_block_size": 8,
        "compression_method": "csa_block_compress",
        "attention_impl": "sparse_gqa",
        "apply_to_layer_types": ["full_attention"],
    },
    "swiglu_limits": [7.0] * 92,
    "swiglu_limits_shared": [7.0] * 92,
    "use_head_wise_attn_gate": True,
    "use_moe": True,
    "use_moe_router_bias": True,
    "vocab_size": 128896,
    "yarn_only_types": ["full_attention"],
}
