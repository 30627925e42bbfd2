"""Configs with the constants of releases, which programs have in their code."""

from helpers.families import BY_ID, LLAMA3

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
