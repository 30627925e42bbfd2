"""MaxText's settings of tiny models, and the models of transformers that they are compared with."""

from typing import Any

from helpers.families import Case, hf_model

MODELS = {
    "mistral": "mistral-7b",
    "qwen2": "qwen2.5-7b",
    "qwen3": "qwen3-8b",
    "qwen3_moe": "qwen3-30b-a3b",
    "mixtral": "mixtral-8x7b",
    "gpt_oss": "gpt-oss-20b",
    "deepseek_v3": "deepseek3-671b",
    "kimi_k2": "kimi-k2-1t",
    "deepseek_v2": "deepseek2-16b",
    "llama4_text": "llama4-17b-128e",
    "olmo3": "olmo3-7b-pt",
    "gemma2": "gemma2-9b",
    "gemma3_text": "gemma3-4b",
    "gemma4_text": "gemma4-31b",
    "qwen3_next": "qwen3-next-80b-a3b",
    "qwen3_5_moe_text": "qwen3.5-35b-a3b",
    "deepseek_v32": "deepseek3.2-671b",
    "deepseek_v4": "deepseek4-284b",
}
EXPERTS = {"sparse_matmul": "false", "megablox": "false", "capacity_factor": -1}


def compared_model(case: Case) -> Any:
    """The model of transformers. A head that shares the embedding is rounded: MaxText computes its logits with the
    embedding in bfloat16."""
    import torch

    model = hf_model(case)
    if model.config.tie_word_embeddings:
        factor = model.config.hidden_size**0.5 if case.family.startswith("gemma") else 1.0
        head = (model.lm_head.weight * factor).bfloat16().float() / factor
        model.lm_head.weight = torch.nn.Parameter(head)
    return model


def settings(case: Case, config) -> dict[str, object]:
    """MaxText's settings of a model with this config."""
    config.allow_global_per_layer_attribute_access = True  # of Gemma 4, whose global layers have settings of their own
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope.get("main", rope))
    out = {
        "base_emb_dim": config.hidden_size,
        "base_num_query_heads": config.num_attention_heads,
        "base_num_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "base_mlp_dim": getattr(config, "intermediate_size_mlp", None) or config.intermediate_size,
        "base_num_decoder_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "rope_max_timescale": int(rope["rope_theta"]),
        "logits_via_embedding": str(config.tie_word_embeddings).lower(),
        "normalize_embedding_logits": str(case.family.startswith("gemma")).lower(),
        "logits_dot_in_fp32": "true",
        "normalization_layer_epsilon": config.rms_norm_eps,
    }
    if case.family == "llama":
        name = "mistral-7b" if case.model_type == "mistral" else "llama3-8b"
        out |= {"model_name": "llama3.1-8b" if rope["rope_type"] == "llama3" else name}
    else:
        out |= {"model_name": MODELS[case.family]}
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    experts = experts or getattr(config, "n_routed_experts", None)
    if experts:
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        out |= EXPERTS | {
            "num_experts": experts,
            "base_moe_mlp_dim": width,
            "num_experts_per_tok": getattr(config, "num_experts_per_tok", None) or config.top_k_experts,
        }
    if case.family == "llama4_text":
        out |= {
            "interleave_moe_layer_step": config.interleave_moe_layer_step,
            "use_qk_norm": str(config.use_qk_norm).lower(),
            "chunk_attn_window_size": config.attention_chunk_size,
        }
    if case.family == "gemma2":
        out |= {"base_num_decoder_layers": config.num_hidden_layers // 2}  # MaxText counts pairs
    if case.family == "gemma3_text":
        out |= {"rope_linear_scaling_factor": 1.0}
    if case.family in ("gemma2", "gemma3_text", "olmo3"):
        out |= {"sliding_window_size": config.sliding_window}
    if case.family == "gpt_oss":
        out |= {
            "sliding_window_size": config.sliding_window,
            "rope_factor": int(rope["factor"]),
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
        }
    if case.family in ("qwen3_next", "qwen3_5_moe_text"):
        out |= {
            "gdn_conv_kernel_dim": config.linear_conv_kernel_dim,
            "gdn_key_head_dim": config.linear_key_head_dim,
            "gdn_value_head_dim": config.linear_value_head_dim,
            "gdn_num_key_heads": config.linear_num_key_heads,
            "gdn_num_value_heads": config.linear_num_value_heads,
            "gdn_chunk_size": 8,
            "partial_rotary_factor": rope["partial_rotary_factor"],
        }
    if case.family == "qwen3_5_moe_text":
        out |= {"use_mrope": "false"}
    if case.family == "gemma4_text":
        has_experts = config.enable_moe_block
        out |= {
            "model_name": "gemma4-26b" if has_experts else "gemma4-31b",
            "sliding_window_size": config.sliding_window,
            "global_head_dim": case.config["global_head_dim"],
            "global_num_kv_heads": case.config["num_global_key_value_heads"],
            "global_rope_max_timescale": int(rope["rope_theta"]),
            "share_kv_projections": "true",
            "final_logits_soft_cap": config.final_logit_softcapping,
        }
    if case.family == "deepseek_v32":
        out |= {
            "indexer_n_heads": config.index_n_heads,
            "indexer_head_dim": config.index_head_dim,
            "indexer_topk": config.index_topk,
        }
    if case.family == "deepseek_v4":
        rates = {"sliding_attention": 0, **config.compress_rates}
        out |= {
            "base_mlp_dim": config.moe_intermediate_size,
            "compress_ratios": [rates[kind] for kind in config.layer_types],
            "first_num_hash_layers": config.mlp_layer_types.count("hash_moe"),
            "compressed_rope_max_timescale": int(config.rope_parameters["compress"]["rope_theta"]),
            "sliding_window_size": config.sliding_window,
            "mlp_activations_limit": config.swiglu_limit,
            "sinkhorn_iterations": config.hc_sinkhorn_iters,
            "routed_scaling_factor": config.routed_scaling_factor,
            "qk_rope_head_dim": config.qk_rope_head_dim,
            "q_lora_rank": config.q_lora_rank,
            "o_groups": config.o_groups,
            "o_lora_rank": config.o_lora_rank,
            "indexer_n_heads": config.index_n_heads,
            "indexer_head_dim": config.index_head_dim,
            "indexer_topk": config.index_topk,
        }
    if case.family in ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"):
        out |= {
            "first_num_dense_layers": config.first_k_dense_replace,
            "q_lora_rank": config.q_lora_rank or 0,
            "kv_lora_rank": config.kv_lora_rank,
            "qk_nope_head_dim": config.qk_nope_head_dim,
            "qk_rope_head_dim": config.qk_rope_head_dim,
            "v_head_dim": config.v_head_dim,
            "base_num_kv_heads": config.num_attention_heads,
            "head_dim": config.qk_nope_head_dim + config.qk_rope_head_dim,
            "shared_experts": config.n_shared_experts,
            "routed_scaling_factor": config.routed_scaling_factor,
            "n_routing_groups": config.n_group if (config.n_group or 1) > 1 else -1,
            "topk_routing_group": config.topk_group if (config.n_group or 1) > 1 else -1,
            "rope_factor": int(rope["factor"]),
        }
    return out
