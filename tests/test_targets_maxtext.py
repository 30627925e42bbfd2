"""MaxText's own models, with what `--target maxtext` writes, beside transformers. Slow: it makes an environment of
Python 3.12, and compiles a model twice for each case."""

import numpy as np
import pytest

from helpers.families import BY_ID, Case, hf_model, save
from helpers.oracles import ask
from helpers.released import GPT_OSS_ROPE, KIMI, KIMI_ROPE, LATENT, LLAMA31
from tpuconv import api

pytestmark = [pytest.mark.slow, pytest.mark.oracles]

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
}
EXPERTS = {"sparse_matmul": "false", "megablox": "false", "capacity_factor": -1}


def settings(case: Case, config) -> dict[str, object]:
    """MaxText's settings of a model with this config."""
    config.allow_global_per_layer_attribute_access = True  # of Gemma 4, whose global layers have settings of their own
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
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


GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6, "num_hidden_layers": 4}
DELTA = dict(BY_ID["qwen3_next-plain"].config) | {
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "shared_expert_intermediate_size": 20,
    "rms_norm_eps": 1e-6,
}
LLAMA4 = {
    "intermediate_size": 20,
    "intermediate_size_mlp": 56,
    "head_dim": 8,
    "attention_chunk_size": 6,
    "num_local_experts": 5,
    "num_hidden_layers": 8,
}
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
COMPARED = [
    BY_ID["llama-plain"],
    Case("llama-3.1", "llama", "llama", {"rope_parameters": LLAMA31, "max_position_embeddings": 131072}),
    BY_ID["llama-mistral-full"],
    BY_ID["qwen2-plain"],
    BY_ID["qwen3-tied"],
    BY_ID["qwen3_moe-few-experts"],
    BY_ID["mixtral-plain"],
    # Of the limit and the factor of its activation MaxText has the release's alone.
    Case(
        "gpt_oss-released",
        "gpt_oss",
        "gpt_oss",
        dict(BY_ID["gpt_oss-plain"].config)
        | {"swiglu_limit": 7.0, "max_position_embeddings": 131072}
        | {"rope_parameters": GPT_OSS_ROPE | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
    ),
    Case("deepseek_v3-released", "deepseek_v3", "deepseek_v3", LATENT),
    Case(
        "kimi_k2-released",
        "kimi_k2",
        "deepseek_v3",
        LATENT | KIMI | {"rope_parameters": KIMI_ROPE},
        written_as="kimi_k2",
    ),
    Case("deepseek_v3-plain-query", "deepseek_v3", "deepseek_v3", LATENT | {"q_lora_rank": None}),
    Case(
        "deepseek_v2-released",
        "deepseek_v2",
        "deepseek_v2",
        {name: value for name, value in LATENT.items() if "group" not in name}
        | {"q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False}
        | {"rope_parameters": LATENT["rope_parameters"] | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    # Rotary positions as in Maverick: Scout's scaling is not in MaxText, which has that of Llama 3.1 alone.
    Case("llama4-scout-unscaled", "llama4_text", "llama4_text", LLAMA4),
    Case(
        "llama4-maverick",
        "llama4_text",
        "llama4_text",
        LLAMA4 | {"interleave_moe_layer_step": 2, "use_qk_norm": False},
    ),
    # With YaRN MaxText applies it to the layers with a window too, transformers does not.
    Case("olmo3-unscaled", "olmo3", "olmo3", {"num_hidden_layers": 4, "sliding_window": 6, "num_key_value_heads": 6}),
    Case("gemma2-released", "gemma2", "gemma2", GEMMA),
    Case("gemma3-released", "gemma3_text", "gemma3_text", GEMMA | {"num_hidden_layers": 8}),
    Case("gemma4-dense", "gemma4_text", "gemma4_text", GEMMA4),
    Case(
        "gemma4-experts",
        "gemma4_text",
        "gemma4_text",
        GEMMA4 | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 20},
    ),
    Case("qwen3_next-periods", "qwen3_next", "qwen3_next", DELTA),
    # Of another size than Qwen3-Next: with its random weights float32 alone is 2.6e-5 from float64 in transformers.
    Case("qwen3_5_moe-periods", "qwen3_5_moe_text", "qwen3_5_moe_text", DELTA | {"linear_value_head_dim": 16}),
    Case(
        "deepseek_v32-released",
        "deepseek_v32",
        "deepseek_v32",
        LATENT
        | {"num_key_value_heads": 6, "num_hidden_layers": 3}
        # With few heads many scores are 0, and of equal ones MaxText takes all.
        | {"index_topk": 8, "index_head_dim": 20, "index_n_heads": 16},
    ),
]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """For each case and form the largest difference of the logits, relative to the largest; or the error."""
    import torch

    base = tmp_path_factory.mktemp("maxtext")
    ids = np.random.default_rng(0).integers(3, 100, (2, 12))
    np.save(base / "ids.npy", ids)
    requests, wanted = [], {}
    for case in COMPARED:
        folder = base / case.id
        save(case, folder / "hf")
        model = hf_model(case)
        if model.config.tie_word_embeddings:  # MaxText computes these logits with its embedding in bfloat16
            factor = model.config.hidden_size**0.5 if case.family.startswith("gemma") else 1.0
            head = (model.lm_head.weight * factor).bfloat16().float() / factor
            model.lm_head.weight = torch.nn.Parameter(head)
        with torch.no_grad():
            wanted[case.id] = model(torch.from_numpy(ids)).logits.numpy()
        for scan in (False, True):
            out = folder / str(scan)
            api.convert(folder / "hf", out, target="maxtext", scan_layers=scan)
            given = settings(case, model.config) | {"scan_layers": str(scan).lower()}
            requests.append(
                {
                    "items": str(out / "0" / "items"),
                    "ids": str(base / "ids.npy"),
                    "out": str(out) + ".npy",
                    "settings": given,
                }
            )
    ask("maxtext", "maxtext_logits.py", requests)

    def difference(case: Case, scan: bool) -> float | str:
        path = base / case.id / f"{scan}.npy"
        if not path.exists():
            return path.with_suffix(".error").read_text()
        return float(np.abs(np.load(path) - wanted[case.id]).max() / np.abs(wanted[case.id]).max())

    return difference


@pytest.mark.parametrize("scan", [False, True], ids=["apart", "scanned"])
@pytest.mark.parametrize("case", COMPARED, ids=str)
def test_maxtext_computes_the_logits_of_transformers(case, scan, compared):
    difference = compared(case, scan)
    assert isinstance(difference, float), difference
    assert difference < 5e-5
