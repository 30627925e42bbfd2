"""MaxText's own models, with what `--target maxtext` writes, beside transformers. Slow: it makes an environment of
Python 3.12, and compiles a model twice for each case."""

import numpy as np
import pytest

from helpers.families import CASES, LLAMA3, Case, hf_model, save
from helpers.oracles import ask
from tpuconv import api

pytestmark = pytest.mark.slow

BY_ID = {case.id: case for case in CASES}
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
    "olmo3": "olmo3-7b-pt",
    "gemma2": "gemma2-9b",
    "gemma3_text": "gemma3-4b",
}
EXPERTS = {"sparse_matmul": "false", "megablox": "false", "capacity_factor": -1}


def settings(case: Case, config) -> dict[str, object]:
    """MaxText's settings of a model with this config."""
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    out = {
        "base_emb_dim": config.hidden_size,
        "base_num_query_heads": config.num_attention_heads,
        "base_num_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "base_mlp_dim": config.intermediate_size,
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
            "num_experts_per_tok": config.num_experts_per_tok,
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
    if case.family in ("deepseek_v2", "deepseek_v3", "kimi_k2"):
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
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6, "num_hidden_layers": 4}
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
    # With YaRN MaxText applies it to the layers with a window too, transformers does not.
    Case("olmo3-unscaled", "olmo3", "olmo3", {"num_hidden_layers": 4, "sliding_window": 6, "num_key_value_heads": 6}),
    Case("gemma2-released", "gemma2", "gemma2", GEMMA),
    Case("gemma3-released", "gemma3_text", "gemma3_text", GEMMA | {"num_hidden_layers": 8}),
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
