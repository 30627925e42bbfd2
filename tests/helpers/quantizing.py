"""Quantization in this process, of a small model of each family."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from flax import nnx

import tpuconv
from helpers.conversions import LIMITS, assert_same
from helpers.families import BY_ID, CASES, Case
from tpuconv.checkpoint.reader import open_checkpoint
from tpuconv.convert.plan.arrays import with_quantization
from tpuconv.convert.plan.coverage import make_plan
from tpuconv.convert.plan.types import Options
from tpuconv.convert.run.conversion import run
from tpuconv.models.logits import forward
from tpuconv.models.registry import find_family, get_family
from tpuconv.quantize.apply import quantization
from tpuconv.quantize.calibrate.data import CalibrationData
from tpuconv.quantize.config import QuantConfig
from tpuconv.quantize.rules import LAYER
from tpuconv.sources.source import open_source
from tpuconv.storage.journal import Journal

MLA = {
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 64,
}
SHARED = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
LINEAR = {"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 32}  # with heads of 32
EVEN = {
    "kimi_linear": {**MLA, "num_key_value_heads": 4, "linear_head_dim": 32},
    **{
        name: {
            **{"head_dim": 32, "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 32},
            **{"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64},
        }
        for name in ("nemotron_h", "nemo_speechlm")
    },
    "nemotron_h_puzzle": {
        **{"head_dim": 32, "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 32},
        "moe_shared_expert_intermediate_size": 64,
        "block_configs": [
            *({"block_type": "mamba"}, {"block_type": "moe", "moe_intermediate_size": 64, "num_experts_per_tok": 3}),
            *(
                {"block_type": "attention"},
                {"block_type": "moe", "moe_intermediate_size": 96, "num_experts_per_tok": 1},
            ),
            {"block_type": "mamba"},
        ],
    },
    "lfm2_moe": {"head_dim": 32, "moe_intermediate_size": 64},
    "granitemoehybrid": {**MAMBA, "head_dim": 32, "shared_intermediate_size": 64},
    "recurrent_gemma": {"num_attention_heads": 2, "intermediate_size": 128},
    "mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 32},
    **{name: {"state_size": 32, "time_step_rank": 32} for name in ("mamba", "falcon_mamba")},
    "jamba": {"num_attention_heads": 2, "mamba_d_state": 32, "mamba_dt_rank": 32},
    "bamba": {**MAMBA, "head_dim": 32},
    "falcon_h1": {**MAMBA, "head_dim": 32, "mamba_d_ssm": 128},
    "zamba": {"num_key_value_heads": 4, "n_mamba_heads": 2, "mamba_d_state": 32, "mamba_dt_rank": 32},
    "zamba2": {"n_mamba_heads": 4, "mamba_d_state": 32, "adapter_rank": 32},
    **{
        name: {**MLA, "num_key_value_heads": 4}
        for name in ("deepseek_v2", "glm4_moe_lite", "axk1", "pangu_ultra_moe", "xing4_0")
    },
    **{name: {**MLA, "num_key_value_heads": 4} for name in ("mistral4", "mistral4_text")},
    **{name: {"head_dim": 32, **SHARED} for name in ("laguna", "kolibri1", "flint")},
    **{
        name: {**MLA, "num_key_value_heads": 4, "index_head_dim": 32}
        for name in ("deepseek_v32", "glm_moe_dsa", "hy_v4", "mistral_large4")
    },
    "glm5_next": {
        **{**MLA, "num_key_value_heads": 4, "qk_rope_head_dim": 0, "qk_nope_head_dim": 64, "index_head_dim": 32},
        "linear_head_dim": 32,
    },
    "axk2": {**MLA, "num_key_value_heads": 4, "index_head_dim": 32, "gated_norm_rank": 32},
    **{
        name: {
            **MLA,
            **{"num_key_value_heads": 4, "index_head_dim": 32, "shared_experts_intermediate_size": 64, "head_dim": 64},
            **{"swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_kv_lora_rank": 64, "swa_head_dim": 64},
            **{"swa_q_lora_rank": 32, "swa_qk_nope_head_dim": 32, "swa_qk_rope_head_dim": 32, "swa_v_head_dim": 32},
        }
        for name in ("dots3_note_text", "dots3_note")
    },
    "deepseek_ocr2": {"num_attention_heads": 2, "moe_intermediate_size": 64},
    "phi4_multimodal": {"num_attention_heads": 2},
    "muse_spark": {"head_dim": 32, "moe_intermediate_size": 64, "moe_hidden_size": 32},
    "minicpm3": {key: x for key, x in MLA.items() if key != "moe_intermediate_size"} | {"num_key_value_heads": 4},
    "helium": {"num_attention_heads": 2, "head_dim": 32},
    "granitemoe_swa": {"head_dim": 32, "shared_intermediate_size": 64},
    **{
        name: {"head_dim": 32, "moe_intermediate_size": 64}
        for name in ("solar_open", "dots1", "hy_v3", "exaone_moe", "afmoe", "mellum", "beam")
    },
    **{name: {"num_attention_heads": 2} for name in ("falcon", "glm4v", "glm46v", "glm_ocr", "gpt_neox")},
    **{name: {"num_attention_heads": 2} for name in ("glmga", "stablelm", "mllama", "mllama_text_model")},
    "diffllama": {"num_attention_heads": 2, "num_key_value_heads": 2},
    "hy_v4_vl": {**MLA, "num_key_value_heads": 4, "index_head_dim": 32},
    "lara_mini": LINEAR | SHARED,
    "sarvam_mla": {key: x for key, x in MLA.items() if key != "q_lora_rank"},
    "glm4v_moe": {"head_dim": 32, "moe_intermediate_size": 64},
    "hunyuan_vl": {
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 4, 4, 4]},
    },
    "olmo_hybrid": {"num_attention_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "kimi_k3": {**MLA, "num_key_value_heads": 4, "linear_head_dim": 32, "routed_expert_hidden_size": 32},
    "bailing_moe_v2_5": {**MLA, "head_dim": 32, "partial_rotary_factor": 1.0},
    "bailing_hybrid": {key: x for key, x in MLA.items() if key != "q_lora_rank"} | {"head_dim": 32},
    "deepseek_v4": {"head_dim": 32, "q_lora_rank": 64, "o_lora_rank": 32, "index_head_dim": 32},
    "deepseek_v41": {
        **{"head_dim": 32, "q_lora_rank": 64, "o_lora_rank": 32, "index_head_dim": 32, "intermediate_size": 64},
        "engram_head_dim": 32,
    },
    **{
        name: {
            **{key: x for key, x in MLA.items() if key != "moe_intermediate_size"},
            **{"num_key_value_heads": 4, "head_dim": 32, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 64},
            "num_hidden_layers": 6,  # three layers of two attentions
            **ngrams,
        }
        for name, ngrams in {
            "longcat_flash": {},
            "longcat_flash_ngram": {"emb_neighbor_num": 3, "emb_split_num": 1},
        }.items()
    },
    "cohere2_moe": {"head_dim": 32, "intermediate_size": 64, "prefix_dense_intermediate_size": 64},
    **{name: {"head_dim": 32, "v_head_dim": 32, "moe_intermediate_size": 64} for name in ("mimo_v2", "mimo_v2_flash")},
    "naive_n05_flash": {"head_dim": 32, "v_head_dim": 32, "moe_intermediate_size": 64, "index_head_dim": 32},
    **{name: {"num_attention_heads": 2} for name in ("cohere", "cohere2", "olmoe", "flex_olmo", "qwen2_vl")},
    **{name: LINEAR for name in ("qwen3_5_text", "qwen3_5")},
    **{
        name: LINEAR | SHARED | {"indexer_head_dim": 32, "hc_lowrank": 32, "ple_embed_dim": 64}
        for name in ("qwen4_exp_text", "qwen4_exp")
    },
    **{
        name: LINEAR | SHARED
        for name in ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe", "intern_s2_preview", "alice_ai")
    },
    **{
        name: {"head_dim": 32, "moe_intermediate_size": 64}
        for name in ("glm4_moe", "bailing_moe", "bailing_moe_linear", "param2moe", "sarvam_moe")
    },
    "ernie4_5_moe": {"head_dim": 32, "moe_intermediate_size": 64},
    "ernie4_5_vl_moe": {
        **{"head_dim": 32, "moe_intermediate_size": [64, 96]},
        "rope_parameters": {"rope_type": "default", "mrope_section": [5, 5, 6]},
    },
    **{
        name: {"head_dim": 32, "swa_head_dim": 32, "d_rel": 32, "moe_intermediate_size": 64}
        for name in ("inkling_text", "inkling_mm_model", "inkling2_text", "inkling2")
    },
    **{
        name: {"head_dim": 32, "swa_head_dim": 32, "d_rel": 32, "moe_intermediate_size": 64, "loop_gate_rank": 32}
        for name in ("inkling2_loop_text", "inkling2_loop")
    },
    "qwen": {"kv_channels": 32, "intermediate_size": 192},
    "qwen2_moe": {"num_attention_heads": 2, **SHARED},
    **{name: {"head_dim": 32, "moe_intermediate_size": 64} for name in ("qwen3_moe", "qwen3_omni_moe", "grok")},
    "step3_text": {
        **{"head_dim": 32, "share_q_dim": 32, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    },
    **{name: {"head_dim": 32, "moe_intermediate_size": 64, "share_expert_dim": 64} for name in ("step3p5", "step3p7")},
    "step4": {
        **{"head_dim": 32, "moe_intermediate_size": 64, "share_expert_dim": 64},
        "sparse_config": {**BY_ID["step4-plain"].config["sparse_config"], "proxy_dim": 32},
    },
    **{
        name: {
            **{"head_dim": 32, "partial_rotary_factor": 0.5, "rotary_dim": 16, "intermediate_size": 64},
            **{"dense_intermediate_size": 96, "shared_intermediate_size": 64, "index_head_dim": 32, "index_n_heads": 2},
        }
        for name in ("minimax_m3_vl", "minimax_m3_vl_text")
    },
    "deepseek_v3": MLA,
    "youtu": {key: x for key, x in MLA.items() if key != "moe_intermediate_size"} | {"num_key_value_heads": 4},
    "kimi_k2": MLA,
    "kimi_k25": MLA,
    "kimi_vl": MLA,
    "qwen2_5_vl": {"num_attention_heads": 2},
    "qwen3_vl_moe": {"head_dim": 32, "moe_intermediate_size": 64},
    "gemma4": {"head_dim": 32, "global_head_dim": 64, "hidden_size_per_layer_input": 32},
    **{name: {"head_dim": 32, "global_head_dim": 64} for name in ("gemma4_unified", "gemma4_unified_text")},
    "diffusion_gemma": {"head_dim": 32, "global_head_dim": 64, "moe_intermediate_size": 64},
    **{name: {"num_attention_heads": 2} for name in ("bitnet", "bloom", "gpt2", "gpt_bigcode", "gpt_neo", "mpt")},
    **{name: {"num_attention_heads": 2} for name in ("biogpt", "cohere_compass_text", "emu3", "fuyu", "persimmon")},
    "codegen": {"hidden_size": 128, "n_inner": 96, "num_attention_heads": 4, "num_key_value_heads": 4, "rotary_dim": 8},
    "xglm": {"num_attention_heads": 2, "ffn_dim": 96},
    "ctrl": {"num_attention_heads": 2, "dff": 96},
    **{name: {"num_attention_heads": 2} for name in ("openai-gpt", "gpt_neox_japanese")},
    "opt": {"num_attention_heads": 2, "ffn_dim": 96},
    "jetmoe": {"kv_channels": 32, "num_key_value_heads": 2},
    "dbrx": {
        "d_model": 64,
        "num_attention_heads": 2,
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gptj": {"num_attention_heads": 2, "num_key_value_heads": 2, "rotary_dim": 16},
    **{
        name: {"head_dim": 32, "hidden_size_per_layer_input": 32, "laurel_rank": 32}
        for name in ("gemma3n_text", "gemma3n")
    },
    "gemma4_text": {"head_dim": 32, "global_head_dim": 64, "hidden_size_per_layer_input": 32},
    "llama4": {"head_dim": 32, "intermediate_size_mlp": 96},
    "llama4_text": {"head_dim": 32, "intermediate_size_mlp": 96},
    **{name: {"num_attention_heads": 2} for name in ("qwen2", "exaone", "internlm2")},
    **{name: {"num_attention_heads": 2} for name in ("orion", "minicpm", "PanguEmbedded", "TeleFLM")},
    **{name: {"num_attention_heads": 2} for name in ("step1", "telechat")},
    "deepseek": {"num_attention_heads": 2, "moe_intermediate_size": 64},
    "bailing_moe_v1": {"head_dim": 32, "moe_intermediate_size": 64},
    "nemotron-nas": {
        "head_dim": 32,
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"intermediate_size": 96}},
            {"attention": {"no_op": True}, "ffn": {"intermediate_size": 64}},
            {"attention": {"n_heads_in_group": 1}, "ffn": {"no_op": True}},
            {"attention": {"replace_with_linear": True}, "ffn": {"intermediate_size": 64}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"intermediate_size": 32}},
        ],
    },
    "domynedge": {"head_sizes": [64, 32, 32, 64]},
    "mimo": {"head_dim": 32},
    "zaya": {"head_dim": 32, "moe_intermediate_size": 64, "router_hidden_size": 32},
    "modernbert_decoder": {"num_attention_heads": 2},
    "olmo2": {"num_attention_heads": 2},
}
"""Sizes that tiles of 32 divide, beside those that all families have."""


def even(case: Case) -> Case:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4} | EVEN.get(
        case.family, {"head_dim": 32}
    )
    if not {"num_hidden_layers", "layer_types"} & set(case.config):
        sizes["num_hidden_layers"] = 3
    rope = case.config.get("rope_parameters") or {}
    if len(rope.get("mrope_section", ())) == 3:
        pairs = int(16 * rope.get("partial_rotary_factor", 1))
        others = 3 * pairs // 8
        sizes = {"rope_parameters": {**rope, "mrope_section": [pairs - 2 * others, others, others]}} | sizes
    return replace(case, config={**case.config, **sizes})


ONE_OF_EACH = {case.family: even(case) for case in reversed(CASES)}


def quantize(ckpt: Path, out: Path, rules: QuantConfig, data: CalibrationData | None = None):
    """As `tpuconv quantize` does it."""
    source = open_checkpoint(ckpt)
    options = Options(scan_layers=source.manifest.scan_layers)
    return _quantize(source, get_family(source.manifest.family), source.table(), options, out, rules, data)


def quantize_source(folder: Path, out: Path, rules: QuantConfig, options: Options | None = None):
    """In one pass from the source, as `convert --quantize` does it."""
    source = open_source(folder)
    family = find_family(source.config)
    return _quantize(source, family, family.table, options or Options(), out, rules)


def _quantize(source, family, table, options: Options, out: Path, rules: QuantConfig, data=None):
    config = family.config.from_hf(source.config)
    plain = make_plan(source, family.name, table, config, options)
    plan = with_quantization(plain, quantization(plain, family, config, rules, data))
    for _ in run(plan, out, LIMITS):
        pass
    return plan


def leaves(model) -> dict[str, np.ndarray]:
    return {".".join(map(str, path)): np.asarray(x[...]) for path, x in nnx.to_flat_state(nnx.state(model))}


def stacked(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Those of all layers as one array each."""
    out: dict[str, np.ndarray] = {}
    by_layer: dict[str, dict[int, np.ndarray]] = {}
    for name, x in arrays.items():
        if match := LAYER.fullmatch(name):
            by_layer.setdefault(f"layers.{match[2]}", {})[int(match[1])] = x
        else:
            out[name] = x
    return out | {name: np.stack([own[i] for i in sorted(own)]) for name, own in by_layer.items()}


def assert_same_model(scanned: Path, separate: Path) -> None:
    """The same arrays and logits, to the bit; these in float32, since what XLA leaves unrounded of bfloat16 is not the
    same in a loop, quantized or not."""
    have, want = tpuconv.load(scanned), tpuconv.load(separate)
    assert_same(leaves(have), stacked(leaves(want)))
    logits = [forward(tpuconv.load(path, "float32"), [[3, 1, 4, 1, 5]], "float32")() for path in (scanned, separate)]
    assert np.array_equal(*logits)


@contextmanager
def interrupted(entry: str, when: str) -> Iterator[None]:
    """Ctrl-C "before" or "after" this entry of the journal is written, in the work inside the block."""
    record = Journal.record

    def interrupting(self: Journal, name: str, *results: Any) -> None:
        if name != entry or when == "after":
            record(self, name, *results)
        if name == entry:
            raise KeyboardInterrupt

    with patch.object(Journal, "record", interrupting), pytest.raises(KeyboardInterrupt):
        yield
