"""Configs with the constants of releases, which programs have in their code, and models that programs agree on."""

import json
from pathlib import Path

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
