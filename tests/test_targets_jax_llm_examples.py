"""The programs of jax-llm-examples, with what `--target jax-llm-examples` writes, beside transformers. Slow: it makes
an environment, and fetches the repository."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import yaml

import tpuconv
from helpers.families import BY_ID, CASES, Case, hf_model, save
from helpers.logits import forward
from helpers.oracles import ask, repository
from helpers.released import GPT_OSS_ROPE, KIMI, KIMI_ROPE, LATENT, LLAMA31
from tpuconv import api

pytestmark = [pytest.mark.slow, pytest.mark.oracles]

SIZES = {
    "embed": "hidden_size",
    "q_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "num_layers": "num_hidden_layers",
    "vocab_size": "vocab_size",
}
LATENT_SIZES = {
    **{name: SIZES[name] for name in ("embed", "num_layers", "vocab_size")},
    "num_heads": "num_attention_heads",
    "ffw_size": "intermediate_size",
    "first_k_dense": "first_k_dense_replace",
    "moe_ffw_size": "moe_intermediate_size",
    **{name: name for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
    **{name: name for name in ("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group")},
    **{name: name for name in ("routed_scaling_factor", "n_shared_experts")},
}
MOE_SIZES = {"moe_ffw_size": "moe_intermediate_size", "moe_experts_per_tok": "num_experts_per_tok"}
ATTENTION, MLP, EXPERTS = (
    rf"layers/\d+/{part}" for part in ("attn/[qkvo]", "mlp/.*", "moe/((gate|up|down)|shared/.*)")
)


@dataclass(frozen=True)
class Program:
    """A program and a model for it.

    Attributes:
        project: its folder in the repository.
        case: the model.
        sizes: its settings by the keys of config.json.
        others: its other settings, from the rotary positions of config.json and whether it is quantized.
        quantized: what it reads in int8.
        is_explicit: whether its mesh has explicit axes.
        has_orbax: whether its `load_pytree` reads Orbax.
    """

    project: str
    case: Case
    sizes: dict[str, str]
    others: Callable[[dict[str, Any], bool], dict[str, Any]]
    quantized: tuple[str, ...] = ()
    is_explicit: bool = True
    has_orbax: bool = True


def scout() -> Case:
    """Llama 4 as its program has it: one layer of four without positions; chunks, which it has there, are longer."""
    case = next(case for case in CASES if case.family == "llama4")
    layers = {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": 8192}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "attn_temperature_tuning": False}
    kinds = {"layer_types": ["chunked_attention"] * 3 + ["full_attention"]}
    return replace(case, id="llama4-released", config=dict(case.config) | layers | rope | kinds)


def latent(rope: dict[str, Any], quantized: bool) -> dict[str, Any]:
    return {
        "rope_theta": rope["rope_theta"],
        "rope_scaling_factor": rope["factor"],
        "rope_beta_fast": rope["beta_fast"],
        "use_decode_ragged_dot_kernel": False,
        "quantize_moe": quantized,
        "quantize_mlp": quantized,
        "quantize_attn": False,
        "quantize_cache": False,
    }


def qwen3(rope: dict[str, Any], quantized: bool) -> dict[str, Any]:
    parts = dict.fromkeys(("quant_moe", "quant_mlp", "quant_attn"), quantized)
    return {"rope_theta": rope["rope_theta"], "quant_cache": False, **parts}


PROGRAMS = {
    "qwen3": Program(
        "qwen3",
        BY_ID["qwen3-tied"],
        SIZES | {"mlp_ffw_size": "intermediate_size", "tie_embed": "tie_word_embeddings"},
        lambda *given: qwen3(*given) | {"moe_ffw_size": -1, "moe_experts_per_tok": 0, "moe_num_experts": 0},
        (ATTENTION, MLP),
    ),
    "qwen3_moe": Program(
        "qwen3",
        BY_ID["qwen3_moe-few-experts"],
        SIZES | MOE_SIZES | {"moe_num_experts": "num_experts"},
        lambda *given: qwen3(*given) | {"tie_embed": False},
        (ATTENTION, EXPERTS),
    ),
    "llama": Program(
        "llama3",
        Case("llama-3.1", "llama", "llama", {"rope_parameters": LLAMA31, "max_position_embeddings": 131072}),
        SIZES | {"ffw_size": "intermediate_size"},
        lambda rope, _: {"rope_theta": rope["rope_theta"], "quant_layer": False, "quant_cache": False},
        has_orbax=False,
    ),
    "llama4": Program(
        "llama4",
        scout(),
        SIZES
        | {"mlp_ffw_size": "intermediate_size_mlp", "moe_ffw_size": "intermediate_size"}
        | {"moe_layer_interval": "interleave_moe_layer_step", "moe_experts_per_tok": "num_experts_per_tok"}
        | {"moe_num_experts": "num_local_experts", "use_qk_norm": "use_qk_norm"}
        | {"attn_chunk_size": "attention_chunk_size"},
        lambda *given: qwen3(*given) | {"nope_layer_interval": 4, "rope_scaling_factor": 1.0, "quant_attn": False},
        (EXPERTS,),
    ),
    "gpt_oss": Program(
        "gpt_oss",
        Case(
            "gpt_oss-released",
            "gpt_oss",
            "gpt_oss",
            dict(BY_ID["gpt_oss-plain"].config)
            | {"swiglu_limit": 7.0, "max_position_embeddings": 131072}
            | {"rope_parameters": GPT_OSS_ROPE | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
        ),
        SIZES
        | {"moe_ffw_size": "intermediate_size", "moe_experts_per_tok": "num_experts_per_tok"}
        | {"moe_num_experts": "num_local_experts", "sliding_window_size": "sliding_window"}
        | {"sliding_attention_map": "layer_types"},
        lambda rope, quantized: {
            **{"rope_theta": rope["rope_theta"], "rope_factor": rope["factor"], "quant_cache": False},
            **{"quant_attn": quantized, "quant_moe": False},
        },
        (ATTENTION,),
        has_orbax=False,
    ),
    "deepseek_v3": Program(
        "deepseek_r1_jax",
        Case("deepseek_v3-released", "deepseek_v3", "deepseek_v3", LATENT),
        LATENT_SIZES,
        latent,
        (MLP, EXPERTS),
        is_explicit=False,
    ),
    "kimi_k2": Program(
        "kimi_k2",
        Case(
            "kimi_k2-released",
            "kimi_k2",
            "deepseek_v3",
            LATENT | KIMI | {"rope_parameters": KIMI_ROPE},
            written_as="kimi_k2",
        ),
        LATENT_SIZES,
        latent,
        (MLP, EXPERTS),
        is_explicit=False,
    ),
}
HEAD_SIZE = {"qwen3", "qwen3_moe", "llama", "llama4", "gpt_oss"}
OWN_EPSILON = {"llama", "deepseek_v3", "kimi_k2"}
"""Programs whose norms have an epsilon of their own, 1e-6."""


@pytest.mark.parametrize("quantize", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_computes_the_logits_of_transformers(name, quantize, tmp_path):
    """In int8, those of our own model of the same parameters."""
    import torch

    program = PROGRAMS[name]
    if quantize and not program.quantized:
        pytest.skip("the program reads no parameter that Qwix quantizes")
    case = program.case
    if name in OWN_EPSILON:
        case = replace(case, config=dict(case.config) | {"rms_norm_eps": 1e-6})
    save(case, tmp_path / "hf")
    ids = np.random.default_rng(0).integers(3, 100, (2, 12))
    np.save(tmp_path / "ids.npy", ids)
    rules = {"qwix": {"rules": [{"module_path": path, "weight_qtype": "int8"} for path in program.quantized]}}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    options = {"quantize": str(tmp_path / "rules.yaml")} if quantize else {}
    api.convert(tmp_path / "hf", tmp_path / "out", target="jax-llm-examples", **options)
    model = hf_model(case)
    if quantize:
        api.convert(tmp_path / "hf", tmp_path / "own", **options)
        want = np.asarray(forward(tpuconv.load(tmp_path / "own"), ids))
    else:
        with torch.no_grad():
            want = model(torch.from_numpy(ids)).logits.numpy()
    config = getattr(model.config, "text_config", model.config)
    given = {setting: getattr(config, key) for setting, key in program.sizes.items()}
    if name in HEAD_SIZE:
        given["head_dim"] = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    request = {
        "project": str(repository("jax-llm-examples") / program.project),
        "path": str(tmp_path / "out"),
        "ids": str(tmp_path / "ids.npy"),
        "out": str(tmp_path / "logits.npy"),
        "is_explicit": program.is_explicit,
        "has_orbax": program.has_orbax,
        "settings": given | program.others(config.rope_parameters, quantize),
    }
    ask("jax-llm-examples", "jax_llm_examples_logits.py", request)
    difference = np.abs(np.load(tmp_path / "logits.npy") - want).max() / np.abs(want).max()
    assert difference < 2e-5
