"""config.json files of releases, cut to what matters: keys and values that our own configs do not have. Sizes are those
that were published."""

import json
import re
from dataclasses import asdict, replace
from math import log, prod
from pathlib import Path
from typing import Any

import pytest

from helpers.configs import config_json
from helpers.released import DEEPSEEK_V41_FLASH, KIMI_K3, LING_2_6_FLASH
from helpers.sights_sam import without_window
from tpuconv.convert.plan.source_from_config import source_from_config
from tpuconv.encodings.modelopt import MODELOPT_NVFP4
from tpuconv.encodings.schemes import groups, schemes
from tpuconv.errors import ConfigError, UnsupportedConfig, UsageError
from tpuconv.models.common.config_keys import aliases_of_reference
from tpuconv.models.common.encoder_keys import TEXT_ALONE
from tpuconv.models.longcat_flash_ngram.family import NGRAM_KEYS
from tpuconv.models.registry import Family, all_families, find_family, get_family
from tpuconv.sources.config import encoding_of
from tpuconv.verify.reference_types import reference_config

GLM_5_2 = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "head_dim": 192,
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "indexer_types": ["full"] * 3 + ["shared", "shared", "shared", "full"] * 18 + ["shared"] * 3,
    "max_position_embeddings": 1048576,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    "moe_router_dtype": "float32",
    "num_nextn_predict_layers": 1,
    "qk_head_dim": 256,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "vocab_size": 154880,
}
LING_3_FLASH = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_hybrid",
    "gated_attention_proj_granularity_type": "head_wise",
    "head_dim": 128,
    "layer_group_size": 6,
    "moe_shared_expert_intermediate_size": 768,
    "no_kda_lora": True,
    "num_experts": 512,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "rotary_dim": 64,
    "short_conv_kernel_size": 4,
}
K_EXAONE = {
    "architectures": ["ExaoneMoEForCausalLM"],
    "model_type": "exaone_moe",
    "first_last_k_dense_replace": 1,
    "hidden_size": 6144,
    "intermediate_size": 18432,
    "is_moe_layer": [False] + [True] * 47,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 12,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_shared_experts": 1,
    "sliding_window": 128,
    "vocab_size": 153600,
}
PHI_TINY_MOE = {
    "architectures": ["PhiMoEForCausalLM"],
    "model_type": "phimoe",
    "attention_bias": True,
    "expert_dropout": 0.0,
    "head_dim": 128,
    "intermediate_size": 448,
    "lm_head_bias": True,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
QWEN_3_5_WITHOUT_TOWER = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe_text",
    "num_experts": 180,
}
QWEN_3_8_FLASH_NEXT = {
    "architectures": ["Qwen4ExpForConditionalGeneration"],
    "model_type": "qwen4_exp",
    "image_token_id": 248056,
    "language_model_only": False,
    "text_config": {
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "hc_count": 4,
        "hc_lowrank": 320,
        "head_dim": 256,
        "hidden_size": 2560,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "indexer_head_dim": 128,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 12,
        "linear_num_value_heads": 48,
        "moe_intermediate_size": 640,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 24,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "output_gate_type": "sigmoid",
        "ple_embed_dim": 2560,
        "ple_layer_ids": [2],
        "rope_parameters": {"rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
        "shared_expert_intermediate_size": 640,
        "split_ngram_parts": 128,
    },
}
BLOOM = {
    "architectures": ["BloomForCausalLM"],
    "model_type": "bloom",
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "layer_norm_epsilon": 1e-05,
    "masked_softmax_fusion": True,
    "n_embed": 14336,
    "n_layer": 70,
    "num_attention_heads": 112,
    "pretraining_tp": 4,
    "slow_but_exact": False,
    "vocab_size": 250880,
}
MPT_7B = {
    "architectures": ["MPTForCausalLM"],
    "model_type": "mpt",
    "attn_config": {
        **{"alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0, "clip_qkv": None},
        **{"attn_type": "multihead_attention", "attn_uses_sequence_id": False, "prefix_lm": False, "qk_ln": False},
        "softmax_scale": None,
    },
    "d_model": 4096,
    "emb_pdrop": 0,
    "embedding_fraction": 1.0,
    "expansion_ratio": 4,
    "init_config": {"fan_mode": "fan_in", "name": "kaiming_normal_"},
    "init_device": "cpu",
    "learned_pos_emb": True,
    "logit_scale": None,
    "max_seq_len": 2048,
    "n_heads": 32,
    "n_layers": 32,
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
    "tokenizer_name": "EleutherAI/gpt-neox-20b",
    "verbose": 0,
    "vocab_size": 50432,
}
FALCON_RW_1B = {
    "architectures": ["FalconForCausalLM"],
    "model_type": "falcon",
    "alibi": True,
    "apply_residual_connection_post_layernorm": False,
    "bias": True,
    "hidden_size": 2048,
    "multi_query": False,
    "new_decoder_architecture": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 24,
    "parallel_attn": False,
    "vocab_size": 50304,
}
DBRX = {
    "architectures": ["DbrxForCausalLM"],
    "model_type": "dbrx",
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500000},
    "d_model": 6144,
    "emb_pdrop": 0.0,
    "ffn_config": {
        **{"ffn_hidden_size": 10752, "model_type": "", "moe_jitter_eps": 0.01, "moe_loss_weight": 0.05},
        **{"moe_num_experts": 16, "moe_top_k": 4},
    },
    "max_seq_len": 32768,
    "n_heads": 48,
    "n_layers": 40,
    "router_aux_loss_coef": 0.05,
    "vocab_size": 100352,
}
GLM_4_9B_CHAT = {
    "architectures": ["ChatGLMModel"],
    "model_type": "chatglm",
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "ffn_hidden_size": 13696,
    "fp32_residual_connection": False,
    "hidden_size": 4096,
    "kv_channels": 128,
    "layernorm_epsilon": 1.5625e-07,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_layers": 40,
    "original_rope": True,
    "padded_vocab_size": 151552,
    "post_layer_norm": True,
    "rmsnorm": True,
    "rope_ratio": 500,
    "seq_length": 131072,
}
MINICPM_4_8B = {
    "architectures": ["MiniCPMForCausalLM"],
    "model_type": "minicpm",
    "dim_model_base": 256,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "max_position_embeddings": 32768,
    "mup_denominator": 32,
    "num_key_value_heads": 2,
    "rope_scaling": {
        "rope_type": "longrope",
        "long_factor": [1.0] * 64,
        "short_factor": [1.0] * 64,
        "original_max_position_embeddings": 32768,
    },
    "scale_depth": 1.4,
    "scale_emb": 12,
    "tie_word_embeddings": False,
    "vocab_size": 73448,
}
DEEPSEEK_MOE_16B = {
    "architectures": ["DeepseekForCausalLM"],
    "model_type": "deepseek",
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 28,
    "scoring_func": "softmax",
    "seq_aux": True,
    "vocab_size": 102400,
}
STEP_3 = {
    "architectures": ["Step3TextForCausalLM"],
    "model_type": "step3_text",
    "max_position_embedding": 65536,
    "max_seq_len": 65536,
    "moe_layers_enum": ",".join(map(str, range(4, 60))),
    "moe_num_experts": 48,
    "moe_top_k": 3,
    "norm_expert_weight": False,
    "num_attention_groups": 1,
    "rope_scaling": None,
    "rope_theta": 500000,
    "share_expert_dim": 5120,
}
TELECHAT_3 = {
    "architectures": ["Telechat3ForCausalLM"],
    "model_type": "telechat3",
    "head_dim": 128,
    "rope_scaling": {
        **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "original_max_position_embeddings": 8192},
        **{"rope_type": "telechat3-yarn", "type": "telechat3-yarn"},
    },
    "rope_theta": 1000000.0,
}
TELECHAT_2_7B = {
    **{"architectures": ["TelechatForCausalLM"], "model_type": "telechat", "n_layer": 30, "n_head": 32},
    **{"hidden_size": 4096, "ffn_hidden_size": 12288, "vocab_size": 131072, "layer_norm_epsilon": 1e-5},
    **{"base_seqlen": 8192, "training_seqlen": 8192, "seq_length": 8192, "flash_attn": True, "logn": True},
    **{"embed_layernorm": False, "apply_residual_connection_post_layernorm": False, "hidden_dropout": 0.0},
    **{"attention_dropout": 0.0, "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True},
}
TELECHAT_2_115B = TELECHAT_2_7B | {
    **{"architectures": ["TeleChat2ForCausalLM"], "n_layer": 96, "n_head": 64, "num_key_value_heads": 8},
    **{"hidden_size": 8192, "ffn_hidden_size": 40960},
}
LONGCAT_FLASH_LITE = {
    **{"architectures": ["LongcatFlashNgramForCausalLM"], "model_type": "longcat_flash_ngram", "vocab_size": 131072},
    **{"hidden_size": 3072, "num_layers": 14, "ffn_hidden_size": 6144, "expert_ffn_hidden_size": 1024},
    **{"n_routed_experts": 256, "zero_expert_num": 128, "zero_expert_type": "identity", "moe_topk": 12},
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"num_attention_heads": 32, "routed_scaling_factor": 6.0, "rms_norm_eps": 1e-5, "rope_theta": 5000000.0},
    "rope_scaling": {
        **{"original_max_position_embeddings": 32768, "rope_type": "yarn", "factor": 10},
        **{"beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 1},
    },
    **{"max_position_embeddings": 327680, "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "router_bias": False},
    **{"norm_topk_prob": False, "attention_bias": False, "attention_dropout": 0.0, "attention_method": "MLA"},
    **{"ngram_vocab_size_ratio": 78, "emb_neighbor_num": 4, "emb_split_num": 4, "tie_word_embeddings": False},
    **{"bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16", "use_cache": True},
}
RELEASES = [
    pytest.param(GLM_5_2, 744, id="GLM-5.2"),
    pytest.param(GLM_5_2 | {"num_experts": 256, "mlp_bias": False}, 744, id="GLM-5.2-NVFP4"),
    pytest.param(LING_3_FLASH, 124, id="Ling-3.0-flash"),
    pytest.param(LING_2_6_FLASH, 104, id="Ling-2.6-flash"),
    pytest.param(KIMI_K3, 2780, id="Kimi-K3"),
    pytest.param(DEEPSEEK_V41_FLASH, 748, id="DeepSeek-V4.1-Flash"),  # 197 of them in the tables of n-grams
    pytest.param(K_EXAONE, 236, id="K-EXAONE"),
    pytest.param(PHI_TINY_MOE, 3.76, id="Phi-tiny-MoE"),
    pytest.param(QWEN_3_5_WITHOUT_TOWER, 25.1, id="Qwen3.5-REAP"),
    pytest.param(QWEN_3_8_FLASH_NEXT, 176, id="Qwen3.8-Flash-Next"),  # 51 of them in the table of n-grams
    pytest.param(BLOOM, 176.2, id="BLOOM"),
    pytest.param(MPT_7B, 6.65, id="MPT-7B"),
    pytest.param(FALCON_RW_1B, 1.31, id="Falcon-RW-1B"),
    pytest.param(DBRX, 131.6, id="DBRX"),
    pytest.param(GLM_4_9B_CHAT, 9.4, id="glm-4-9b-chat"),
    pytest.param(MINICPM_4_8B, 8.19, id="MiniCPM4-8B"),
    pytest.param(DEEPSEEK_MOE_16B, 16.4, id="deepseek-moe-16b"),
    pytest.param(STEP_3, 316, id="step3"),
    pytest.param(TELECHAT_3, 36.0, id="TeleChat3-36B"),
    pytest.param(LONGCAT_FLASH_LITE, 68.56, id="LongCat-Flash-Lite"),  # 31.4 of them in the tables of n-grams
    pytest.param(TELECHAT_2_7B, 7.62, id="TeleChat2-7B"),
    pytest.param(TELECHAT_2_115B, 113.3, id="TeleChat2-115B"),
]


def parameters(family: Family, config: Any) -> int:
    """The number of a model's parameters."""
    rows = family.table.bind(config)
    return sum(prod(shape) for row in rows for shape in row.inverse.layout.src_shapes(row.sizes))


@pytest.mark.parametrize(("raw", "billions"), RELEASES)
def test_releases_are_read(raw: dict[str, Any], billions: float) -> None:
    find_family(raw).check_config(raw)


@pytest.mark.slow
@pytest.mark.parametrize(("raw", "billions"), RELEASES)
def test_releases_have_their_size(raw: dict[str, Any], billions: float) -> None:
    family = find_family(raw)
    assert parameters(family, family.read_config(raw)) == pytest.approx(billions * 1e9, rel=0.01)


@pytest.mark.slow
def test_kimi_k3_has_the_tensors_of_its_release() -> None:
    """The numbers of tensors and of stored elements in its 96 files."""
    family = find_family(KIMI_K3)
    config = family.check_config(KIMI_K3, parts=("vision",)).config
    (experts,) = groups(encoding_of(KIMI_K3))
    table = family.table_without_release(parts=config.parts)
    shapes = {name: shape for row in table.bind(config) for name, shape in row.src_shapes().items()}
    packed = {name for name in shapes if experts.takes(name.removesuffix(".weight")) and ".experts." in name}
    assert len(packed) == 92 * 896 * 3
    assert len(shapes) + len(packed) == 497_220
    stored = sum(prod(shape) // 32 * 17 if name in packed else prod(shape) for name, shape in shapes.items())
    assert stored == 1_503_647_073_024


def test_deepseek_v41_has_the_tables_and_tensors_of_its_release() -> None:
    """The hashes of n-grams fill its tables; of its 96,085 tensors 93,418 are the text model's, 40 of them for images.
    11 small matrices have no scales there, and should by its description."""
    family = find_family(DEEPSEEK_V41_FLASH)
    config = family.check_config(DEEPSEEK_V41_FLASH).config
    assert [sum(config.ngram_hash(i).sizes) for i in config.ngram_layers] == [384006168, 384016682]
    assert (config.compress_rope.theta, config.rope.theta) == (160000, 10000)
    stored = source_from_config("x", DEEPSEEK_V41_FLASH, family.table, config).tensors
    plain = [name for name in stored if name.endswith(".scale") and ("compressor" in name or "indexer.wk." in name)]
    assert (len(plain), len(stored) - len(plain)) == (11, 93_418 - 40)
    assert stored["layers.14.engram.embed.scale"].shape == (384016682, 8)
    assert stored["layers.14.engram.wkv.scale"].shape == (800, 192)


@pytest.mark.parametrize("kind", ["main", "compress"])
def test_layers_of_deepseek_v4_rotate_the_same_part_of_a_head(kind: str) -> None:
    """transformers has a part for each of both ropes."""
    ropes = {
        each: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5} for each in ("main", "compress")
    }
    raw = {"model_type": "deepseek_v4", "head_dim": 128, "qk_rope_head_dim": 64, "rope_parameters": ropes}
    assert find_family(raw).check_config(raw).config.rope_dim == 64
    ropes[kind]["partial_rotary_factor"] = 0.25
    with pytest.raises(ConfigError, match=f"partial_rotary_factor=0.25 of {kind} is not qk_rope_head_dim=64"):
        find_family(raw).check_config(raw)


def test_mosaics_objects_are_read() -> None:
    """Their keys are those of config.json; of DBRX transformers reads no `rope_theta` there, and writes another."""
    config = find_family(DBRX).check_config(DBRX).config
    assert (config.rope.theta, config.sizes["K"], config.sizes["M"], config.clip_qkv) == (500000, 8, 10752, 8)
    with pytest.raises(ConfigError, match="rope_theta=500000 outside rope_parameters, 10000"):
        find_family(DBRX).check_config(DBRX | {"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}})
    with pytest.raises(ConfigError, match="attn_config=8 is no object"):
        find_family(DBRX).check_config(DBRX | {"attn_config": 8})
    with pytest.raises(UnsupportedConfig, match="alibi_bias_max=16"):
        find_family(MPT_7B).check_config(MPT_7B | {"attn_config": MPT_7B["attn_config"] | {"alibi_bias_max": 16}})


@pytest.mark.parametrize("infinity", [1e308, {"__float__": "Infinity"}])
def test_time_steps_without_a_limit(infinity: Any) -> None:
    """Of Nemotron 3 Ultra."""
    config = get_family("nemotron_h").config
    given = config.from_hf({"model_type": "nemotron_h", "time_step_limit": [0, infinity]})
    assert given == config.from_hf({"model_type": "nemotron_h"})


def test_the_original_context_beside_the_rotary_parameters() -> None:
    """As Phi-3.5-MoE has it."""
    inside = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    outside = {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 512}
    read = get_family("llama").config.from_hf
    assert read(outside) == read({"rope_scaling": inside}) == read(outside | {"rope_scaling": inside})
    assert read({"original_max_position_embeddings": 512}) == read({})
    with pytest.raises(ConfigError, match="original_max_position_embeddings=8 outside rope_scaling, 512 inside"):
        read({"rope_scaling": inside, "original_max_position_embeddings": 8})


def test_other_names_of_keys_are_those_of_transformers() -> None:
    for config in (family.config for family in all_families()):
        for alias, key in aliases_of_reference(config.model_type).items():
            if key in config.known_keys() and alias not in config.known_keys():
                assert config.in_our_keys({alias: 3})[key] == 3
    config = get_family("deepseek_v3").config
    assert config.from_hf({"num_local_experts": 64}) == config.from_hf({"n_routed_experts": 64})
    raw = {"model_type": "deepseek_v3", "num_local_experts": 64}
    assert find_family(raw).check_config(raw).ignored == ()
    with pytest.raises(UsageError, match=r"`allow_config=\['num_local_experts'\]`: the conversion reads this key"):
        find_family(raw).check_config(raw, ["num_local_experts"])


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5_moe_text"])
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_a_text_model_may_keep_the_prefix_of_the_complete_one(name: str, prefix: str) -> None:
    family = get_family(name)
    config = family.config.from_hf(config_json(name))
    names = {name.replace("model.", prefix, 1) for row in family.table.bind(config) for name in row.src_shapes()}
    outside = "model.visual.patch_embed.proj.weight"
    table = family.table_for([*names, outside], config)
    assert {name for row in table.bind(config) for name in row.src_shapes()} == names
    assert table.ignored(config)(outside)


MINIMAX_M2 = {
    "quant_method": "fp8",
    "fmt": "float8_e4m3fn",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
}
DEEPSEEK_V4_NVFP4 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "group_size": 16,
    "moe_quant_algo": "NVFP4",
    "quant_algo": "MIXED_PRECISION",
    "producer": {"name": "modelopt", "version": "dsv4-nvfp4-experts"},
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
QWEN3_FP8_STATIC = {
    "config_groups": {"group_0": {"weights": {"dynamic": False, "num_bits": 8, "type": "float"}}},
    "ignore": ["lm_head"],
    "quant_algo": "FP8",
    "producer": {"name": "modelopt", "version": "0.31.0"},
}


def test_encodings_of_releases() -> None:
    blocks = "FP8, blocks of 128x128"
    assert [scheme.title for scheme in schemes(MINIMAX_M2)] == [blocks, f"{blocks}, of all experts"]
    assert [scheme.title for scheme in schemes(QWEN3_FP8_STATIC)] == ["ModelOpt FP8"]
    experts, others = groups(encoding_of({"expert_dtype": "fp4", "quantization_config": DEEPSEEK_V4_NVFP4}))
    assert experts.schemes == (MODELOPT_NVFP4,)
    assert experts.takes("layers.3.ffn.experts.0.w1")
    assert not experts.takes("layers.3.ffn.shared_experts.w1")
    assert others.schemes[0].title == "FP8, blocks of 128x128, scales in powers of two"
    with pytest.raises(UnsupportedConfig, match="moe_quant_algo='INT4' is not implemented"):
        groups(DEEPSEEK_V4_NVFP4 | {"moe_quant_algo": "INT4"})


@pytest.mark.parametrize(("method", "why"), [("hqq", "parts of the flattened matrix"), ("quanto", "saves no models")])
def test_what_is_not_read_is_refused_with_the_reason(method: str, why: str) -> None:
    with pytest.raises(UnsupportedConfig, match=f"quant_method='{method}' is not implemented: .*{why}"):
        groups({"quant_method": method})


HUNYUAN_OCR = {
    "architectures": ["HunYuanVLForConditionalGeneration"],
    "model_type": "hunyuan_vl",
    "attention_head_dim": 128,
    "head_dim": 128,
    "hidden_size": 1024,
    "im_start_id": 120118,
    "image_token_id": 120120,
    "mlp_bias": False,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "org_vocab_size": 120818,
    "pad_id": 120002,
    "rope_scaling": {
        **{"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        **{"type": "xdrope", "xdrope_section": [16, 16, 16, 16]},
    },
    "rope_theta": 10000.0,
    "use_qk_norm": True,
    "vision_config": {},
    "vocab_size": 120818,
}
PADDLEOCR_VL = {
    "architectures": ["PaddleOCRVLForConditionalGeneration"],
    "model_type": "paddleocr_vl",
    "compression_ratio": 1.0,
    "head_dim": 128,
    "image_token_id": 100295,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
    "rope_theta": 500000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_bias": False,
    "vision_config": {},
}


def test_keys_at_the_root_of_models_that_read_pages() -> None:
    report = find_family(HUNYUAN_OCR).check_config(HUNYUAN_OCR)
    assert report.config.rope.theta == pytest.approx(10000 * 1000 ** (128 / 126))
    assert report.config.tie_word_embeddings
    assert report.config.mrope.sections == (16, 16, 16, 16)
    paddle = find_family(PADDLEOCR_VL).check_config(PADDLEOCR_VL).config
    assert (paddle.rope.theta, paddle.rope.type, paddle.tie_word_embeddings) == (500000, "default", False)
    with pytest.raises(UnsupportedConfig, match="sliding_window=512"):
        find_family(PADDLEOCR_VL).check_config(PADDLEOCR_VL | {"sliding_window": 512})


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"mrope_section": [16, 16, 32]}, "xdrope_section=.* in rope_scaling, and mrope_section="),
        ({"xdrope_section": [16, 16, 16]}, "are not the 64 pairs of a head"),
        ({"xdrope_section": [32, 32]}, "mrope_section has 2 numbers"),
        ({"xdrope_section": None}, "mrope_section has 0 numbers"),
    ],
)
def test_sections_of_hunyuan_ocr_that_images_cannot_have(change: dict, fault: str) -> None:
    raw = HUNYUAN_OCR | {"rope_scaling": HUNYUAN_OCR["rope_scaling"] | change}
    with pytest.raises((ConfigError, UnsupportedConfig), match=fault):
        find_family(raw).read_config(raw, parts={"vision": None})


def test_a_release_with_code_of_its_own() -> None:
    """HyperCLOVA X SEED Think 32B; transformers has another model type for it."""
    raw = {"architectures": ["HCXVisionV2ForCausalLM"], "model_type": "vlm", "text_config": {}, "vision_config": {}}
    family = find_family(raw)
    assert family is get_family("hyperclovax_vision_v2.hyperclovax")
    config = family.check_config(raw).config
    names = ["model.language_model.model.norm.weight", "model.language_model.lm_head.weight"]
    spelling = {"model.language_model.norm": "model.language_model.model.norm"}
    assert family.table_for(names, config).release.spelling == spelling


def test_the_older_keys_of_dots3_note() -> None:
    """Of releases: what they say of layers with a window, of those with experts, and of indexers."""
    raw = {
        "architectures": ["Dots3NoteForConditionalGeneration"],
        "model_type": "dots3_note",
        "num_hidden_layers": 6,
        "layer_types": ["full_attention", "full_attention", *["sliding_attention"] * 3, "full_attention"],
        "first_k_dense_replace": 1,
        "moe_layer_freq": [1, 1, 0, 1, 1, 1],
        "sliding_window_size": 128,
        "moe_shared_expert_intermediate_size": 768,
        "rope_theta": 10000.0,
        "swa_rope_theta": 500.0,
        "swa_head_dim": 192,
        "swa_qk_nope_head_dim": 128,
        "swa_kv_lora_rank": 256,
        "vision_config": {},
        "audio_config": {},
    }
    config = find_family(raw).check_config(raw).config
    sets = config.layer_sets
    assert (sets["indexer_layers"], sets["I"], config.sizes["W"]) == ((0, 1, 5), (0, 2), 768)
    assert config.windows == (None, None, 128, 128, 128, None)
    assert [rope.theta for rope in config.ropes] == [10000.0, 10000.0, 500.0, 500.0, 500.0, 10000.0]
    assert (config.layer_sizes[2]["P"], config.layer_sizes[2]["R"], config.layer_sizes[2]["C"]) == (128, 64, 256)
    assert not find_family(raw).check_config(raw | {"use_dsa": False}).config.layer_sets["indexer_layers"]
    with pytest.raises(ConfigError, match="per_layer_config"):
        find_family(raw).check_config(raw | {"use_dsa": None, "per_layer_config": {"2": {}, "3": {"v_head_dim": 2}}})


def test_the_keys_of_linear_attention_in_an_object_of_glm5_next() -> None:
    """As transformers reads them; the text model's keys may stand at the root."""
    from transformers import AutoConfig

    inside = {"head_dim": 64, "num_heads": 16, "short_conv_kernel_size": 3, "gate_lower_bound": -2.0}
    raw = {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", *["linear_attention"] * 3],
        "linear_attn_config": inside,
    }
    around = {key: raw[key] for key in ("architectures", "model_type")}
    for given in (raw, around | {"text_config": raw}):
        config = find_family(given).check_config(given).config
        assert [config.sizes[word] for word in ("groups", "key_dim", "value_dim", "taps")] == [16, 64, 64, 3]
        sets = config.layer_sets
        assert (sets["attention_layers"], sets["state_layers"]) == ((0,), (1, 2, 3))
        assert config.linear_lower_bound == -2.0
    for safe, bound in ((True, -5.0), (False, None)):
        changed = inside | {"gate_lower_bound": None, "safe_gate": safe}
        config = find_family(raw).check_config(raw | {"linear_attn_config": changed}).config
        assert config.linear_lower_bound == bound
    theirs = AutoConfig.for_model(**raw).text_config
    assert (theirs.linear_head_dim, theirs.linear_lower_bound, theirs.layer_types[0]) == (64, -2.0, "indexed_attention")


MINIMAX_TEXT = {
    "architectures": ["MiniMaxForCausalLM"],
    "model_type": "minimax",
    "vocab_size": 200064,
    "hidden_size": 6144,
    "intermediate_size": 9216,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 32,
    "layer_types": [*["linear_attention"] * 7, "full_attention"] * 10,
    "rotary_dim": 64,
    "rope_theta": 10_000_000,
}


def test_half_of_the_heads_of_minimax_have_rotary_positions() -> None:
    """Where `rotary_dim` says so, as the code of the models reads it; and the model has the published size."""
    family = find_family(MINIMAX_TEXT)
    config = family.check_config(MINIMAX_TEXT).config
    assert (config.rope_dim, config.layer_sets["attention_layers"][:2], config.rope.theta) == (64, (7, 15), 1e7)
    rows = family.table.bind(config)
    billions = sum(prod(shape) for row in rows for shape in row.dst_shapes().values()) / 1e9
    assert billions == pytest.approx(456, rel=2e-3)
    assert family.table.ignored(config)("model.layers.6.self_attn.slope_rate")
    assert family.config.from_hf({"model_type": "minimax"}).kinds[:2] == ("full_attention", "linear_attention")


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("minimax_text_01", "MiniMaxText01ForCausalLM"), ("minimax_m1", "MiniMaxM1ForCausalLM")],
)
def test_minimax_as_released_reads_as_in_the_format_of_transformers(model_type: str, architecture: str) -> None:
    """The config.json of the releases, whose code is their own: other names for the kinds of layers and the factors."""
    sides = {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}
    factors = {f"{ours}_{side}_factor": (f"layernorm_{theirs}_{side}", 3.5565588200778455 if side == "alpha" else 0.9)
               for ours, theirs in sides.items() for side in ("alpha", "beta")}  # fmt: skip
    raw = {
        **{key: value for key, value in MINIMAX_TEXT.items() if key != "layer_types"},
        **{"architectures": [architecture], "model_type": model_type, "attn_type_list": [*[0] * 7, 1] * 10},
        **dict(factors.values()),
        **{"auto_map": {}, "output_router_logits": False, "postnorm": True, "rms_norm_eps": 1e-5},
        **{"router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "shared_intermediate_size": 0},
        **{"shared_moe_mode": "sigmoid", "sliding_window": None, "use_cache": True, "attention_dropout": 0.0},
    }
    family = find_family(raw)
    config, plain = family.check_config(raw).config, MINIMAX_TEXT | {name: fact[1] for name, fact in factors.items()}
    assert (family.name, asdict(config)) == ("minimax", asdict(family.check_config(plain).config))
    assert not family.config.of_type(model_type).ignored_keys(raw)
    for wrong in (
        {"postnorm": None},
        {"postnorm": False},
        {"attn_type_list": [2] * 80},
        {"shared_intermediate_size": 8},
    ):
        with pytest.raises(UnsupportedConfig if "attn_type_list" not in wrong else ConfigError):
            family.check_config({key: value for key, value in (raw | wrong).items() if value is not None})


def test_the_architecture_chooses_between_families_of_one_model_type() -> None:
    assert [find_family(raw).name for raw in (LING_2_6_FLASH, LING_3_FLASH)] == ["bailing_moe_v2_5", "bailing_hybrid"]
    headless = {"architectures": ["BailingMoeV2_5Model"], "model_type": "bailing_hybrid"}
    assert find_family(headless).name == "bailing_moe_v2_5"


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"linear_silu": True}, UnsupportedConfig),
        ({"rotary_dim": 32}, ConfigError),
        ({"group_norm_size": 3}, ConfigError),
        ({"num_experts_per_tok": 1}, ConfigError),
        ({"num_kv_heads_for_linear_attn": 4}, ConfigError),
        ({"moe_shared_expert_intermediate_size": 8}, ConfigError),
        ({"partial_rotary_factor": 1.0}, ConfigError),
    ],
)
def test_ling_2_6_is_refused(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        find_family(LING_2_6_FLASH).check_config({**LING_2_6_FLASH, **wrong})


LING_2_MINI: dict[str, Any] = {
    **{"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "auto_map": {}},
    **{"attention_dropout": 0.0, "embedding_dropout": 0.0, "output_dropout": 0.0, "hidden_act": "silu"},
    **{"num_hidden_layers": 20, "hidden_size": 2048, "intermediate_size": 5120, "first_k_dense_replace": 1},
    **{"moe_intermediate_size": 512, "moe_shared_expert_intermediate_size": 512, "num_shared_experts": 1},
    **{"num_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True},
    **{"routed_scaling_factor": 2.5, "score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    **{"router_dtype": "fp32", "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128},
    **{"use_qk_norm": True, "use_qkv_bias": False, "use_bias": False, "use_rmsnorm": True, "rope_scaling": None},
    **{"partial_rotary_factor": 0.5, "rope_theta": 600_000, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    **{"vocab_size": 157_184, "max_position_embeddings": 32_768, "num_nextn_predict_layers": 0},
}
LING_LITE: dict[str, Any] = {
    **{"architectures": ["BailingMoeForCausalLM"], "model_type": "bailing_moe", "auto_map": {}},
    **{"attention_dropout": 0.0, "embedding_dropout": 0.0, "output_dropout": 0.0, "hidden_act": "silu"},
    **{"num_hidden_layers": 28, "hidden_size": 2048, "intermediate_size": 5632, "first_k_dense_replace": 0},
    **{"moe_intermediate_size": 1408, "num_shared_experts": 2, "num_experts": 64, "num_experts_per_tok": 6},
    **{"norm_topk_prob": True, "norm_head": False, "norm_softmax": False, "output_router_logits": False},
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "use_qkv_bias": False, "use_bias": False},
    **{"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "rope_scaling": None},
    **{"rope_theta": 600_000, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "vocab_size": 126_464},
    **{"max_position_embeddings": 32_768, "pretraining_tp": 1, "use_cache": True},
}
RING_LINEAR_MINI = {
    **LING_2_MINI,
    **{"architectures": ["BailingMoeLinearV2ForCausalLM"], "model_type": "bailing_moe_linear"},
    **{"layer_group_size": 5, "group_norm_size": 4, "linear_silu": False, "max_position_embeddings": 131_072},
}


@pytest.mark.parametrize(
    "wrong",
    [
        *({"norm_head": True}, {"use_qk_norm": True}, {"score_function": "sigmoid"}, {"norm_topk_prob": False}),
        *({"moe_router_enable_expert_bias": True}, {"use_sliding_window": True}, {"use_bias": True}),
    ],
    ids=str,
)
def test_other_routers_and_heads_of_the_first_ling_are_refused(wrong: dict[str, Any]) -> None:
    family = find_family(LING_LITE)
    assert parameters(family, family.check_config(LING_LITE).config) == 16_801_974_272
    with pytest.raises(UnsupportedConfig):
        family.check_config(LING_LITE | wrong)


@pytest.mark.parametrize(
    ("raw", "name", "published"), [(LING_2_MINI, "bailing_moe", 16.26), (RING_LINEAR_MINI, "bailing_moe_linear", 16.4)]
)
def test_ling_2_has_the_published_size(raw: dict[str, Any], name: str, published: float) -> None:
    family = find_family(raw)
    config = family.check_config(raw).config
    rows = family.table.bind(config)
    billions = sum(prod(shape) for row in rows for shape in row.dst_shapes().values()) / 1e9
    assert (family.name, config.rope_dim, config.sizes["W"]) == (name, 64, 512)
    assert billions == pytest.approx(published, rel=2e-3)
    with pytest.raises(ConfigError, match="moe_shared_expert_intermediate_size=8"):
        family.check_config(raw | {"moe_shared_expert_intermediate_size": 8})


def test_of_ring_linear_other_attention_is_refused() -> None:
    family = find_family(RING_LINEAR_MINI)
    for wrong in ({"linear_silu": True}, {"num_nextn_predict_layers": 1}, {"use_qkv_bias": True}):
        with pytest.raises(UnsupportedConfig):
            family.check_config(RING_LINEAR_MINI | wrong)
    with pytest.raises(ConfigError, match="group_norm_size=3"):
        family.check_config(RING_LINEAR_MINI | {"group_norm_size": 3})


def test_the_layer_for_further_tokens_of_glm_ocr_is_left_out_by_default() -> None:
    raw = {"architectures": ["GlmOcrForConditionalGeneration"], "model_type": "glm_ocr", "text_config": {}}
    family = find_family(raw)
    config = family.check_config(raw).config
    why = family.table.ignored(config)
    assert why("model.language_model.layers.16.eh_proj.weight")
    assert not why("model.language_model.layers.15.mlp.down_proj.weight")
    with pytest.raises(UnsupportedConfig, match="attention_bias=True"):
        family.check_config(raw | {"text_config": {"attention_bias": True}})


PHI_4_MULTIMODAL = {
    "architectures": ["Phi4MMForCausalLM"],
    "model_type": "phi4mm",
    "audio_processor": {"name": "cascades"},
    "embd_layer": {"embedding_cls": "image_audio"},
    "img_processor": None,
    "num_attention_heads": 24,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "speech_lora": {"r": 320},
    "tie_word_embeddings": True,
    "vision_lora": {"r": 256},
}


def test_adapters_of_phi_4_multimodal_are_left_out() -> None:
    """Of the release with code of its own, whose matrices have adapters for images and for sound."""
    family = find_family(PHI_4_MULTIMODAL)
    config = family.check_config(PHI_4_MULTIMODAL).config
    assert (config.rope.type, config.rope_dim, config.tie_word_embeddings) == ("longrope", 96, True)
    qkv = "model.layers.0.self_attn.qkv_proj"
    table = family.table_for([f"{qkv}.base_layer.weight", f"{qkv}.lora_A.vision.weight"], config)
    why = table.ignored(config)
    assert f"{qkv}.base_layer.weight" in {name for row in table.bind(config) for name in row.src_shapes()}
    assert all(why(f"{qkv}.lora_{x}.{kind}.weight") for x in "AB" for kind in ("vision", "speech"))
    assert why("model.embed_tokens_extend.audio_embed.encoder.after_norm.weight")
    assert not why(f"{qkv}.base_layer.weight")


RELEASES = json.loads((Path(__file__).parent / "data" / "releases.json").read_text())
DEEPSEEK_OCR, DEEPSEEK_OCR_2 = (RELEASES[name]["config"] for name in ("deepseek-ocr", "deepseek-ocr-2"))


@pytest.mark.parametrize("released", [DEEPSEEK_OCR, DEEPSEEK_OCR_2], ids=["deepseek-ocr", "deepseek-ocr-2"])
def test_deepseek_ocr_is_read_from_the_keys_of_its_release(released: dict[str, Any], tmp_path: Path) -> None:
    family = find_family(released)
    config = family.check_config(released, parts=("vision",)).config
    (tmp_path / "config.json").write_text(json.dumps(released))
    theirs = reference_config(tmp_path)
    raw = json.loads(theirs.to_json_string(use_diff=False))
    raw = without_window(raw) if raw["model_type"] == "unlimited_ocr" else raw
    other = family.check_config(raw, parts=("vision",)).config
    assert (config.sizes, config.layer_sets, config.rope) == (other.sizes, other.layer_sets, other.rope)
    ours, others = config.parts["vision"], other.parts["vision"]
    assert (ours.sizes, ours.layer_sets, ours.placeholder) == (others.sizes, others.layer_sets, others.placeholder)


def test_the_decoder_of_deepseek_ocr_2_has_the_constants_of_its_code() -> None:
    tower = find_family(DEEPSEEK_OCR_2).check_config(DEEPSEEK_OCR_2, parts=("vision",)).config.parts["vision"].tower
    assert (tower.rope_theta, tower.rms_norm_eps) == (1e6, 1e-6)


def test_the_layers_of_deepseek_ocr_have_no_window(tmp_path: Path) -> None:
    """Which transformers would give the ones of Unlimited-OCR, as which it is compared."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_OCR))
    assert set(reference_config(tmp_path).text_config.layer_types) == {"full_attention"}


def test_deepseek_ocr_is_read_as_its_code_saves_it() -> None:
    """With the keys of the text model around it, and a type of its own."""
    saved = {**DEEPSEEK_OCR["language_config"], **DEEPSEEK_OCR, "model_type": "DeepseekOCR", "hidden_act": "silu"}
    family = find_family(saved)
    config = family.check_config(saved, parts=("vision",)).config
    assert config == family.check_config(DEEPSEEK_OCR, parts=("vision",)).config


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"language_config": {"use_mla": True}}, "language_config.use_mla=True"),
        ({"vision_config": {"model_name": "deeplip"}}, "an encoder of the type 'deeplip' is not implemented"),
        ({"projector_config": {"projector_type": "mlp_gelu"}}, "projector_config.projector_type='mlp_gelu'"),
        ({"architectures": ["DeepseekVLV2ForCausalLM"]}, "not its architecture DeepseekVLV2ForCausalLM"),
    ],
)
def test_other_models_of_the_same_type_are_refused(change: dict[str, Any], why: str) -> None:
    raw = {
        k: {**v, **change.get(k, {})} if isinstance(v, dict) else change.get(k, v) for k, v in DEEPSEEK_OCR_2.items()
    }
    with pytest.raises(UnsupportedConfig, match=re.escape(why)):
        find_family(raw).check_config(raw, parts=("vision",))


@pytest.mark.parametrize(
    "change",
    [
        {"vision_config": {"model_name": "deeplip"}},
        {"vision_config": {"model_name": 3}},
        {"projector_config": {"projector_type": "mlp_gelu"}},
    ],
)
def test_the_text_of_another_deepseek_ocr_is_read_as_its_refusal_says(change: dict[str, Any]) -> None:
    raw = DEEPSEEK_OCR_2 | change
    family = find_family(raw)
    with pytest.raises(UnsupportedConfig) as caught:
        family.check_config(raw, parts=("vision",))
    assert caught.value.hint == TEXT_ALONE
    assert family.check_config(raw).config == family.check_config(DEEPSEEK_OCR_2).config


def test_another_text_model_of_deepseek_ocr_is_no_case_for_the_text_alone() -> None:
    raw = DEEPSEEK_OCR_2 | {"language_config": DEEPSEEK_OCR_2["language_config"] | {"use_mla": True}}
    with pytest.raises(UnsupportedConfig) as caught:
        find_family(raw).check_config(raw)
    assert caught.value.hint != TEXT_ALONE


@pytest.mark.parametrize("name", ["cosmos3_omni", "cosmos3_edge"])
def test_what_generates_is_left_out_of_cosmos(name: str) -> None:
    raw = {"model_type": name, "text_config": {}, "vision_config": {}}
    family = find_family(raw)
    config = family.check_config(raw).config
    why = family.table.ignored(config)
    for generator in ("layers.3.self_attn.add_q_proj.weight", "layers.3.mlp_moe_gen.up_proj.weight", "proj_in.weight"):
        assert why(generator)
    assert not why("layers.3.self_attn.to_q.weight")
    older = [f"layers.3.self_attn.{x}_proj.weight" for x in "qkvo"]
    table = family.table_for([*older, "norm.weight"], config)
    assert {*older, "norm.weight"} <= {name for row in table.bind(config) for name in row.src_shapes()}


def test_scaled_layers_and_older_keys_of_molmo2_are_read() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 8192}
    text = {
        "model_type": "molmo2_text",
        **{"num_hidden_layers": 3, "qkv_bias": True, "layer_norm_eps": 1e-4, "use_qk_norm": True},
        **{"qk_norm_type": "olmo", "norm_after": True, "rope_parameters": yarn, "rope_scaling_layers": [1]},
    }
    raw = {"model_type": "molmo2", "text_config": text, "vit_config": {"hidden_size": 1152}, "adapter_config": {}}
    config = find_family(raw).check_config(raw).config
    assert [(rope.type, rope.theta) for rope in config.ropes] == [("default", 1e6), ("yarn", 1e6), ("default", 1e6)]
    assert (config.attention_bias, config.rms_norm_eps, config.norms_all_heads) == (True, 1e-4, True)
    assert config.sizes["added_vocab"] == 128
    with pytest.raises(UnsupportedConfig, match="qk_norm_type='gemma'"):
        find_family(raw).check_config(raw | {"text_config": text | {"qk_norm_type": "gemma"}})


def test_fuyu_has_the_keys_of_its_text_model_beside_those_of_images() -> None:
    raw = {"model_type": "fuyu", "hidden_size": 64, "num_attention_heads": 2, "rope_theta": 25000.0, "patch_size": 30}
    config = find_family(raw).check_config(raw | {"image_size": 300, "num_channels": 3, "qk_layernorm": True}).config
    assert (config.hidden_size, config.rope.theta, config.rope_dim, config.num_hidden_layers) == (64, 25000.0, 16, 36)


def test_layers_of_north_micro_vision_say_their_rotary_positions() -> None:
    kinds = ["sliding_attention", "full_attention"]
    local = {"rope_theta": 500.0, "mrope_section": [24, 20, 20]}
    raw = {"model_type": "cohere_compass_text", "num_hidden_layers": 2, "layer_types": kinds}
    config = find_family(raw).config
    for rest in ({}, {"rope_theta": 3.0, "rope_type": "default"}):  # which transformers drops
        read = config.from_hf(raw | {"rope_parameters": {"sliding_attention": local, "full_attention": None, **rest}})
        assert [rope and rope.theta for rope in read.ropes] == [500.0, None]
        assert (read.windows, read.logit_scale) == ((4096, None), 1.0)
    with pytest.raises(ConfigError, match="nothing for layers of the type full_attention"):
        config.from_hf(raw | {"rope_parameters": {"sliding_attention": local}})
    with pytest.raises(UnsupportedConfig, match="pooling='mean'"):
        config.from_hf(raw | {"rope_parameters": dict.fromkeys(kinds), "pooling": "mean"})


def test_heads_of_codegen_are_in_four_groups() -> None:
    with pytest.raises(ConfigError, match="n_head=6 is not a multiple of 4"):
        get_family("codegen").config.from_hf({"model_type": "codegen", "n_head": 6, "n_embd": 48, "rotary_dim": 8})


NEMOTRON_BLOCK = {
    "attention": {
        **{"n_heads_in_group": 8, "no_op": False, "num_sink_tokens": None, "replace_with_linear": False},
        **{"sparsify": None, "unshifted_sink": False, "use_prefill_window_in_sink_attention": False},
        "window_length": None,
    },
    "ffn": {"ffn_mult": 5.25, "no_op": False, "replace_with_linear": False, "sparsify": None},
}


def nemotron_nas(*changes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Keys of Llama Nemotron Super 49B, with a layer for each change of its usual one."""
    blocks = [{part: own | change.get(part, {}) for part, own in NEMOTRON_BLOCK.items()} for change in changes]
    return {
        "architectures": ["DeciLMForCausalLM"],
        "model_type": "nemotron-nas",
        **{"hidden_size": 8192, "intermediate_size": None, "num_attention_heads": 64, "num_key_value_heads": None},
        **{"num_hidden_layers": len(blocks), "rms_norm_eps": 1e-05, "vocab_size": 128256, "block_configs": blocks},
    }


def test_blocks_of_nemotron_are_read() -> None:
    raw = nemotron_nas(
        {},
        {"attention": {"no_op": True, "n_heads_in_group": None}, "ffn": {"ffn_mult": 1.3125}},
        {"attention": {"replace_with_linear": True, "n_heads_in_group": None}, "ffn": {"no_op": True}},
        {"attention": {"n_heads_in_group": 16}, "ffn": {"ffn_mult": None, "intermediate_size": 5000}},
    )
    config = find_family(raw).check_config(raw).config
    assert (config.block_kv_heads, config.block_widths) == ((8, None, 0, 4), (28672, 7168, None, 5000))
    assert (config.of_layer(0).sizes["G"], config.of_layer(3).sizes["G"]) == (8, 16)


@pytest.mark.parametrize(
    ("part", "change", "why"),
    [
        ("attention", {"window_length": 4096}, r"window_length=4096 of 'attention' is not implemented"),
        ("ffn", {"replace_with_linear": True}, r"replace_with_linear=True of 'ffn' is not implemented"),
        ("ffn", {"hidden_act": "gelu"}, "hidden_act='gelu' is not implemented"),
        ("attention", {"n_heads_in_group": 7}, "n_heads_in_group=7 does not divide num_attention_heads=64"),
        ("ffn", {"ffn_mult": None}, "gives no width of an MLP"),
    ],
)
def test_other_blocks_of_nemotron_are_refused(part: str, change: dict[str, Any], why: str) -> None:
    raw = nemotron_nas({part: change})
    with pytest.raises((ConfigError, UnsupportedConfig), match=why):
        find_family(raw).check_config(raw)


def test_a_nemotron_without_blocks_for_all_layers_is_refused() -> None:
    raw = nemotron_nas({})
    for change, why in (({"num_hidden_layers": 2}, "1 entries for num_hidden_layers=2"), ({"block_configs": 3}, "=3")):
        with pytest.raises(ConfigError) as error:
            find_family(raw).check_config(raw | change)
        assert why in str(error.value)


PLAMO_3 = {
    "architectures": ["Plamo3ForCausalLM"],
    "model_type": "plamo3",
    **{"head_dim": 128, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4},
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 107520, "image_token_id": None},
    **{"rope_theta": 1000000, "rope_local_theta": 20000, "window_size": 2048, "sliding_window_pattern": 2},
    **{"linear_type": "normal", "image_feature_size": None, "image_proj_type": "linear", "sliding_window": None},
}


def test_windows_and_rotary_positions_of_plamo_3() -> None:
    family, windows = find_family(PLAMO_3), [2048, None, 2048, None]
    config = family.check_config(PLAMO_3).config
    assert ([*config.windows], config.rope.theta, config.local_rope.theta) == (windows, 1_000_000, 20_000)
    older = {key: value for key, value in PLAMO_3.items() if key not in ("window_size", "rope_theta")}
    older |= {"rope_global_theta": 1000000, "sliding_window": windows}
    assert family.check_config(older).config == config
    for key in ("sliding_window", "interleaved_sliding_window"):
        with pytest.raises(ConfigError, match="contradicts itself"):
            family.check_config(PLAMO_3 | {key: [None, 2048, None, None]})
    for wrong in ({"rope_scaling_factor": 16.0}, {"scale_embedding": True}, {"image_token_id": 7}):
        with pytest.raises(UnsupportedConfig):
            family.check_config(PLAMO_3 | wrong)


def test_the_architecture_tells_rnj_1_5_from_gemma_3() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8192}
    raw: dict[str, Any] = {
        **{"architectures": ["Rnj1ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 4096, "head_dim": 128},
        **{"num_hidden_layers": 2, "layer_types": ["chunked_attention", "full_attention"], "sliding_window": 1024},
        "rope_parameters": {"chunked_attention": rope, "full_attention": rope},
    }
    family = find_family(raw)
    config = family.check_config(raw).config
    assert (family.name, config.windows, config.local_rope) == ("rnj1", (1024, None), config.rope)
    assert find_family(raw | {"architectures": ["Gemma3ForCausalLM"]}).name == "gemma3_text"
    for wrong in ({"layer_types": ["sliding_attention", "full_attention"]}, {"sliding_window": 1}):
        with pytest.raises(ConfigError):
            family.check_config(raw | wrong)


def test_shared_experts_of_param_2_have_one_width_together() -> None:
    raw = {
        **{key: value for key, value in LING_2_MINI.items() if key != "num_experts"},
        **{"architectures": ["Param2MoEForCausalLM"], "model_type": "param2moe", "num_experts": 64},
        **{"num_shared_experts": 2, "moe_shared_expert_intermediate_size": 1024, "max_window_layers": 20},
        **{"mtp_loss_scaling_factor": 0},
    }
    family = find_family(raw)
    assert (family.name, family.check_config(raw).config.sizes["W"]) == ("param2moe", 1024)
    with pytest.raises(ConfigError, match="contradicts itself"):
        family.check_config(raw | {"moe_shared_expert_intermediate_size": 512})


def domyn_edge(**changes: Any) -> dict[str, Any]:
    layers = {"nope": ("nope", [-1, 0]), "rope": ("rope", [1024, 0])}
    kinds, windows = zip(*(layers[kind] for kind in ("nope", "rope", "rope", "nope")), strict=True)
    return {
        **{"architectures": ["DomynEdgeForCausalLM"], "model_type": "domynedge", "num_hidden_layers": 4},
        **{"position_layers": [*kinds], "window_sizes": [*windows], "head_dim": 256, "max_window_layers": None},
        **changes,
    }


def test_layers_of_domyn_edge() -> None:
    raw = domyn_edge(head_sizes=[256, 64, 64, 256])
    family = find_family(raw)
    config = family.check_config(raw).config
    assert config.windows == (None, 1025, 1025, None)  # a token sees as many before it, and itself
    assert [rope is not None for rope in config.ropes] == [False, True, True, False]
    assert config.layer_sizes == {1: {"H": 64}, 2: {"H": 64}}
    by_layer = {"1": {"head_dim": 64}, "2": {"head_dim": 64}}
    assert family.check_config(domyn_edge(per_layer_config=by_layer)).config == config
    assert family.check_config(raw | {"per_layer_config": by_layer}).config == config


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"head_sizes": [256, 64]}, "head_sizes has 2 entries for num_hidden_layers=4"),
        ({"head_sizes": [256, 63, 64, 256]}, "rotary positions need pairs"),
        ({"window_sizes": [[0, 0]] * 4}, "are not all -1 or positive"),
        ({"window_sizes": [[4, 4]] * 4}, "tokens would see tokens behind them"),
        ({"window_sizes": [4] * 4}, "is not a list with two numbers for each layer"),
        ({"position_layers": ["rope", "yarn", "nope", "nope"]}, "yarn"),
        ({"per_layer_config": {"7": {"head_dim": 64}}}, "is not a head_dim for some of its layers"),
        ({"head_sizes": [256, 64, 64, 256], "per_layer_config": {"1": {"head_dim": 64}}}, "per_layer_config differ"),
    ],
)
def test_layers_of_domyn_edge_that_are_refused(changes: dict[str, Any], why: str) -> None:
    raw = domyn_edge(**changes)
    with pytest.raises((ConfigError, UnsupportedConfig)) as error:
        find_family(raw).check_config(raw)
    assert why in str(error.value)


def test_layers_of_iquest_coder_run_twice() -> None:
    raw = {
        **{"architectures": ["IQuestLoopCoderForCausalLM"], "model_type": "iquestloopcoder", "hidden_size": 5120},
        **{"num_hidden_layers": 80, "intermediate_size": 27648, "num_attention_heads": 40, "rms_norm_eps": 1e-6},
        **{"vocab_size": 76800, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 131072},
        **{"attention_bias": False, "mlp_bias": False, "rope_theta": 500000, "tie_word_embeddings": False},
        **{"loop_num": 2, "loop_window_size": 64},
    }
    config = find_family(raw).check_config(raw).config
    assert config.executed_layers == (*range(80), *range(80))
    assert (config.horizons, config.rope.theta) == ({64}, 500000)


SOLAR_PRO = {
    **{"architectures": ["SolarForCausalLM"], "model_type": "solar", "hidden_size": 5120, "num_hidden_layers": 64},
    **{"num_attention_heads": 40, "sliding_window": 2047, "bskcn_tv": [0.9, 0.8]},
    **{"bskcn_1": [12, 20, 32, 44], "bskcn_2": [20, 32], "bskcn_3": [16, 24, 36, 48], "bskcn_4": [28, 40]},
}


def test_connections_of_solar_pro_that_skip_layers() -> None:
    family = find_family(SOLAR_PRO)
    config = family.check_config(SOLAR_PRO).config
    assert config.skips == (((12, 20, 32, 44), (16, 24, 36, 48)), ((20, 32), (28, 40)))
    assert config.windows == (2047,) * 64
    for wrong in ({"bskcn_3": [8]}, {"bskcn_2": []}, {"bskcn_tv": [0.9]}):
        with pytest.raises(ConfigError, match="bskcn"):
            family.check_config(SOLAR_PRO | wrong)


def test_telechat3_has_a_factor_of_angles_of_its_own() -> None:
    def factor(**changes: Any) -> Any:
        raw = TELECHAT_3 | {"rope_scaling": TELECHAT_3["rope_scaling"] | changes}
        return find_family(raw).check_config(raw).config.rope.attention_factor

    assert find_family(TELECHAT_3).check_config(TELECHAT_3).config.rope.type == "yarn"
    assert factor() == pytest.approx(0.07 * log(4) + 1)
    assert factor(factor=1.0) == 1
    assert factor(rope_type="yarn", type="yarn") is None
    for wrong in ({"factor": 0.5}, {"factor": "4"}, {"type": "yarn"}):
        with pytest.raises((ConfigError, UnsupportedConfig), match="rope_scaling"):
            factor(**wrong)


def test_the_tables_of_longcat_flash_lite() -> None:
    family = find_family(LONGCAT_FLASH_LITE)
    config = family.check_config(LONGCAT_FLASH_LITE).config
    shapes = {name: shape for row in family.table.bind(config) for name, shape in row.src_shapes().items()}
    tables = [shapes[f"model.ngram_embeddings.embedders.{i}.weight"] for i in range(12)]
    assert tables == [(78 * 131072 + 2 * i + 1, 256) for i in range(12)]
    assert {shapes[f"model.ngram_embeddings.post_projs.{i}.weight"] for i in range(12)} == {(3072, 256)}
    assert config.ngram_lengths == (2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4)
    assert find_family(LONGCAT_FLASH_LITE | {"model_type": "longcat_flash"}) is family
    plain = {key: x for key, x in LONGCAT_FLASH_LITE.items() if key not in NGRAM_KEYS}
    assert family.check_config(plain).config.sizes["ngram_tables"] == 0
    for changes, message in (
        ({"emb_split_num": None}, "ngram_vocab_size_ratio, emb_neighbor_num needs emb_split_num beside it"),
        ({"ngram_vocab_size_ratio": 0}, "ngram_vocab_size_ratio=0 is not positive"),
        ({"emb_neighbor_num": 1}, "emb_neighbor_num"),
        ({"emb_split_num": 1024, "emb_neighbor_num": 5}, "hidden_size=3072 is less than 4096, the number of tables"),
        ({"ngram_vocab_size_ratio": 1 << 14}, "gives a table of more than 2147483647 n-grams"),
        ({"eos_token_id": 131072}, "an eos_token_id in the vocabulary, not 131072"),
        ({"eos_token_id": [1, 2]}, "eos_token_id"),
    ):
        with pytest.raises(ConfigError, match=message):
            family.check_config(LONGCAT_FLASH_LITE | changes)
    for changes in ({"attention_method": "GQA"}, {"nextn_use_scmoe": True}, {"use_longcat_dsa": True}):
        with pytest.raises(UnsupportedConfig, match=next(iter(changes))):
            family.check_config(LONGCAT_FLASH_LITE | changes)


def test_telechat_2_states_the_length_of_its_training() -> None:
    """Its angles depend on it, and on the length of longer texts. The first TeleChat does not state the base."""

    def read(**changes: Any) -> Any:
        return find_family(TELECHAT_2_7B).check_config(TELECHAT_2_7B | changes).config

    assert (read().rope.theta, read().position_limit, read().sizes["K"]) == (10000, 8192, 32)
    assert read(training_seqlen=32768).rope.theta == pytest.approx(10000 * 7 ** (128 / 126))
    assert read(training_seqlen=32768).position_limit == 32768
    assert read(training_seqlen=9000).rope.theta == pytest.approx(10000 * 3 ** (128 / 126))
    assert read(training_seqlen=4096).rope.theta == 10000
    for key, value in (
        *(("embed_layernorm", True), ("apply_residual_connection_post_layernorm", True), ("rope_theta", 1e6)),
        *(("rope_scaling", {"type": "dynamic", "factor": 2.0}), ("hidden_act", "gelu")),
    ):
        with pytest.raises(UnsupportedConfig, match=f"{key}=.* is not implemented for telechat"):
            read(**{key: value})
    first = {key: value for key, value in TELECHAT_2_7B.items() if key != "base_seqlen"}
    with pytest.raises(ConfigError, match="does not have base_seqlen, by which the angles"):
        find_family(first).check_config(first)
    with pytest.raises(ConfigError, match="heads are 4092 wide together, which is not hidden_size=4096"):
        read(n_head=31)


def test_factors_of_tele_flm() -> None:
    raw = {"model_type": "TeleFLM", "use_mup": True, "input_mult": 2.0, "output_mult": 3.0, "mup_scale_factor": 6.0}
    config = find_family(raw).check_config(raw).config
    assert (config.embedding_factor, config.logit_factor) == (2.0, 0.5)
    with pytest.raises(ConfigError, match=r"mup_scale_factor=0\.0 is not positive"):
        find_family(raw).check_config(raw | {"mup_scale_factor": 0.0})


K2_HORIZON = {
    **{"architectures": ["K2HorizonForCausalLM"], "model_type": "k2_horizon", "vocab_size": 250624},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rope_head_dim": 128, "num_experts": 0},
    **{"query_key_norm": False, "max_position_embeddings": 524288, "mova_num_experts": 0, "use_sliding_window": False},
    **{"rope_parameters": {"rope_type": "default", "rope_theta": 10000000}, "tie_word_embeddings": False},
}
K2_SIZES = {
    **{"hidden_size": 2560, "num_hidden_layers": 36, "intermediate_size": 10240, "layernorm_num_groups": 2},
}
K2_MOVA = {
    **{"hidden_size": 2560, "num_hidden_layers": 48, "intermediate_size": 6144, "layernorm_num_groups": 2},
    **{"num_experts": 100, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_shared_experts": 1},
    **{"mova_num_experts": 64, "mova_num_experts_per_tok": 4, "mlp_only_layers": [0, 1, 2], "moe_gate_bias": True},
    **{"router_score_func": "sigmoid", "router_scaling_factor": 2.5, "norm_topk_prob": True},
    **{"attention_gate_func": "softplus"},
}


@pytest.mark.parametrize(
    ("sizes", "parameters"),
    [
        (K2_SIZES, 5_058_255_360),
        ({**K2_SIZES, "hidden_size": 4096, "intermediate_size": 12288, "layernorm_num_groups": 4}, 8_999_178_240),
        (K2_MOVA, 37_440_000_000),
    ],
)
def test_parameters_of_k2_horizon_are_those_of_its_cards(sizes: dict[str, Any], parameters: int) -> None:
    """Of the largest to 0.01 billion."""
    raw = K2_HORIZON | sizes
    family = find_family(raw)
    config = family.check_config(raw).config
    count = sum(prod(shape) for row in family.table.bind(config) for shape in row.src_shapes().values())
    assert count == parameters if "num_experts" not in sizes else abs(count - parameters) < 1e7
    for wrong in ({"rope_head_dim": 64}, {"layernorm_num_groups": 7}, {"num_experts": 8, "num_experts_per_tok": 9}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            family.check_config(raw | wrong)
    with pytest.raises(UnsupportedConfig, match="use_sliding_window"):
        family.check_config(raw | {"use_sliding_window": True})


PUZZLE_SAME = {"n_routed_experts": 512, "moe_latent_size": 1024, "moe_shared_expert_intermediate_size": 5376}
PUZZLE_MOE = {"block_type": "moe", **PUZZLE_SAME, "moe_intermediate_size": 1280, "num_experts_per_tok": 4}
PUZZLE = {
    **{"architectures": ["NemotronHPuzzleForCausalLM"], "model_type": "nemotron_h_puzzle", "hidden_size": 4096},
    "block_configs": [
        {"block_type": "mamba"},
        PUZZLE_MOE,
        {"block_type": "attention"},
        {**PUZZLE_MOE, "moe_intermediate_size": 2048, "num_experts_per_tok": 12},
    ],
    "mtp_block_configs": [
        {"block_type": "attention"},
        {**PUZZLE_MOE, "moe_intermediate_size": 2688, "num_experts_per_tok": 22},
    ],
    **{"num_nextn_predict_layers": 1, "n_group": 1, "topk_group": 1},
}


def test_layers_of_nemotron_puzzle_have_experts_of_their_own() -> None:
    """Of its config.json, whose other keys are those of Nemotron-H."""
    family = find_family(PUZZLE)
    config = family.check_config(PUZZLE).config
    assert config.kinds == ("linear_attention", "moe", "full_attention", "moe")
    assert [config.of_layer(i).num_experts_per_tok for i in (1, 3, 5)] == [4, 12, 22]
    shapes = {n: s for row in family.table.bind(config, include_mtp=True) for n, s in row.src_shapes().items()}
    experts = ("model.layers.1.mixer", "model.layers.3.mixer", "mtp.layers.1.mixer")
    assert [shapes[f"{name}.experts.511.up_proj.weight"] for name in experts] == [(w, 1024) for w in (1280, 2048, 2688)]
    layers = PUZZLE["block_configs"]
    for wrong, error, text in (
        ([*layers[:3], {"block_type": "moe"}], ConfigError, "moe_intermediate_size of each layer with experts"),
        ([*layers[:3], {**PUZZLE_MOE, "moe_latent_size": 512}], UnsupportedConfig, "moe_latent_size=512 of entry 3"),
        ([*layers[:3], {**PUZZLE_MOE, "num_experts_per_tok": 0}], ConfigError, "num_experts_per_tok=0 of entry 3"),
        ([*layers[:3], {**PUZZLE_MOE, "num_experts_per_tok": 513}], ConfigError, "513 is more than 1 of 1 groups"),
        (["moe"], ConfigError, "is not a list with an object for each layer"),
    ):
        with pytest.raises(error, match=text):
            family.check_config(PUZZLE | {"block_configs": wrong})


XING4 = {
    **{"architectures": ["Xing4_0ForCausalLM"], "model_type": "xing4_0", "vocab_size": 131072, "hidden_size": 3584},
    **{"num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 9216},
    **{"q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 1024},
    **{"first_k_dense_replace": 2, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1, "hc_mult": 4},
    **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 2.0, "norm_topk_prob": True},
    **{"mhc_h_res_clamp_min": -30, "mhc_h_res_clamp_max": 30, "hc_sinkhorn_iters": 20, "hc_eps": 1e-06},
}


def test_parameters_of_xing_are_those_of_the_release() -> None:
    """Those of MTP too, which has copies of the embedding and of the head."""
    family = find_family(XING4)
    config = family.check_config(XING4).config
    bound = family.table.bind(config, include_mtp=True)
    copies = 2 * config.vocab_size * config.hidden_size
    assert sum(prod(shape) for row in bound for shape in row.src_shapes().values()) + copies == 31_215_031_088
    with pytest.raises(ConfigError, match=r"mhc_h_res_clamp_min=31\.0 is more than"):
        family.check_config(XING4 | {"mhc_h_res_clamp_min": 31.0})
    with pytest.raises(UnsupportedConfig, match="n_group=8"):
        family.check_config(XING4 | {"n_group": 8})


ALICE_AI = {
    **{"architectures": ["AliceAIForCausalLM"], "model_type": "alice_ai", "attention_bias": False, "head_dim": 256},
    **{"block_attn_res_block_size": 4, "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 2048},
    **{"kda_allow_negative_eigenvalues": False, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128},
    **{"linear_num_key_heads": 32, "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mlp_only_layers": []},
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 12,
    **{"max_position_embeddings": 262144, "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1},
    **{"norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10},
    **{"num_hidden_layers": 48, "num_key_value_heads": 2, "number_of_conv_states": 3, "partial_rotary_factor": 0.25},
    **{"rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "router_bias_correction": True, "vocab_size": 129024},
    **{"router_score_function": "sigmoid", "shared_expert_intermediate_size": 512, "tie_word_embeddings": False},
}


def test_alice_ai_has_the_parameters_of_its_release() -> None:
    """With its module for multi-token prediction."""
    family = find_family(ALICE_AI)
    report = family.check_config(ALICE_AI)
    assert not report.ignored
    rows = family.table.bind(report.config, include_mtp=True)
    assert sum(prod(shape) for row in rows for shape in row.src_shapes().values()) == 81_286_433_408
    plain = {key: x for key, x in ALICE_AI.items() if key not in ("mtp_num_hidden_layers", "layer_types")}
    defaults = {key: plain[key] for key in ("architectures", "model_type", "rope_theta")}
    for same in (plain | {"num_nextn_predict_layers": 1}, defaults):
        assert family.check_config(same).config.layer_sets == report.config.layer_sets
    assert family.read_config(defaults | {"layer_types": ALICE_AI["layer_types"]}) == family.read_config(
        {key: x for key, x in ALICE_AI.items() if key != "mlp_only_layers"}
    )


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"router_score_function": "softmax"}, UnsupportedConfig),
        ({"router_bias_correction": False}, UnsupportedConfig),
        ({"kda_allow_negative_eigenvalues": True}, UnsupportedConfig),
        ({"mlp_only_layers": [0]}, UnsupportedConfig),
        ({"decoder_sparse_step": 2}, UnsupportedConfig),
        ({"block_attn_res_block_size": 0}, ConfigError),
        ({"linear_num_key_heads": 16}, ConfigError),
        ({"linear_key_head_dim": 64}, ConfigError),
        ({"num_nextn_predict_layers": 2}, ConfigError),
        ({"num_experts_per_tok": 513}, ConfigError),
    ],
)
def test_what_alice_ai_does_not_have_is_refused(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as found:
        find_family(ALICE_AI).check_config(ALICE_AI | wrong)
    assert next(iter(wrong)) in str(found.value)


def test_openpangu_ultra_has_other_names_of_keys() -> None:
    """Of the first release; the second one has DeepSeek's."""
    named = {"architectures": ["PanguUltraMoEForCausalLM"], "model_type": "pangu_ultra_moe", "sandwich_norm": True}
    keys = {
        **{"num_routed_experts": 256, "num_shared_experts": 1, "num_dense_layers": 3, "num_mtp_layers": 1},
        **{"attention_kv_lora_dim": 512, "attention_q_lora_dim": 1536, "attention_qk_dim": 128},
        **{"attention_qk_rope_dim": 64, "attention_v_dim": 128},
    }
    family = find_family(named)
    config = family.check_config(named | keys).config
    renamed = {family.config.aliases[key]: value for key, value in keys.items()}
    assert config == family.check_config(named | renamed).config
    assert config.layer_sets["I"] == (0, 1, 2)
    with pytest.raises(UnsupportedConfig, match="sandwich_norm=False"):
        family.check_config(named | {"sandwich_norm": False})


def test_the_released_config_of_nanbeige() -> None:
    raw = {
        **{"architectures": ["NanbeigeForCausalLM"], "model_type": "nanbeige", "vocab_size": 166144},
        **{"hidden_size": 3072, "intermediate_size": 10752, "num_hidden_layers": 22, "num_attention_heads": 48},
        **{"num_key_value_heads": 8, "head_dim": 128, "kv_channels": 128, "hidden_act": "silu"},
        **{"max_position_embeddings": 262144, "rope_theta": 70000000, "rope_scaling": None, "attention_bias": False},
        **{"attention_dropout": 0.0, "rms_norm_eps": 1e-05, "num_loops": 2, "loop_loss_weights": []},
        **{"skip_loop_final_norm": False, "pretraining_tp": 1, "tie_word_embeddings": False, "pad_token_id": 0},
        **{"bos_token_id": 166100, "eos_token_id": 166101, "torch_dtype": "bfloat16"},
    }
    family = find_family(raw)
    config = family.check_config(raw).config
    assert config == family.check_config({"model_type": "nanbeige"}).config
    assert config.executed_layers == (*range(22), *range(22))
    with pytest.raises(UnsupportedConfig, match="skip_loop_final_norm"):
        family.check_config(raw | {"skip_loop_final_norm": True})


NAIVE_N05 = {
    **{"architectures": ["NaiveN05FlashForCausalLM"], "model_type": "naive_n05_flash", "vocab_size": 152576},
    **{"hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 48, "num_attention_heads": 64},
    **{"num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "swa_num_attention_heads": 64},
    **{"swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128, "hidden_act": "silu"},
    **{"max_position_embeddings": 1048576, "layernorm_epsilon": 1e-05, "rope_theta": 10000000.0},
    **{"swa_rope_theta": 10000.0, "partial_rotary_factor": 0.334, "sliding_window": 128, "attention_bias": False},
    "hybrid_layer_pattern": [int(i != 0 and i % 6 != 5) for i in range(48)],
    "moe_layer_freq": [0, *[1] * 47],
    **{"attention_projection_layout": "split", "attention_value_scale": 0.707, "add_full_attention_sink_bias": False},
    **{"add_swa_attention_sink_bias": True, "n_routed_experts": 256, "moe_intermediate_size": 2048},
    **{"num_experts_per_tok": 8, "routed_scaling_factor": 1.0, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    **{"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "enable_dsa": True, "index_top_k": 2048},
    **{"index_head_dim": 128, "index_n_heads": 16, "index_n_kv_heads": 1, "indexer_activation_dtype": "fp8_e4m3"},
    **{"tie_word_embeddings": False, "pad_token_id": 151643, "eos_token_id": 151645},
}


def test_naive_n05_flash_has_the_parameters_of_its_release() -> None:
    """Its name counts 309 billion. All keys have these values where they are absent."""
    family = find_family(NAIVE_N05)
    report = family.check_config(NAIVE_N05)
    assert not report.ignored
    config = report.config
    assert parameters(family, config) == pytest.approx(309e9, rel=2e-3)
    assert config.layer_sets["indexer_layers"] == (0, 5, 11, 17, 23, 29, 35, 41, 47)
    assert (config.rope.theta, config.local_rope.theta) == (1e7, 1e4)
    assert set(config.rope_dims) == {64}
    kinds = [
        "sliding_attention" if number else "deepseek_sparse_attention" for number in NAIVE_N05["hybrid_layer_pattern"]
    ]
    assert family.read_config(NAIVE_N05 | {"layer_types": kinds}).kinds == config.kinds
    bare = {key: NAIVE_N05[key] for key in ("architectures", "model_type")}
    assert family.read_config(bare) == replace(config, layer_types=None, mlp_layer_types=None)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"enable_dsa": False}, UnsupportedConfig),
        ({"attention_projection_layout": "fused_qkv"}, UnsupportedConfig),
        ({"index_n_kv_heads": 2}, UnsupportedConfig),
        ({"n_group": 8}, UnsupportedConfig),
        ({"indexer_activation_dtype": "int8"}, UnsupportedConfig),
        ({"index_head_dim": 32}, ConfigError),
        ({"swa_head_dim": 128}, ConfigError),
        ({"swa_num_key_value_heads": 6}, ConfigError),
        ({"index_top_k": 0}, ConfigError),
    ],
)
def test_what_naive_n05_flash_does_not_have_is_refused(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as found:
        find_family(NAIVE_N05).check_config(NAIVE_N05 | wrong)
    assert next(iter(wrong)) in str(found.value)


QWEN_7B = {
    "architectures": ["QWenLMHeadModel"],
    "model_type": "qwen",
    "attn_dropout_prob": 0.0,
    "auto_map": {"AutoConfig": "configuration_qwen.QWenConfig"},
    "bf16": False,
    "emb_dropout_prob": 0.0,
    "fp16": False,
    "fp32": False,
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 22016,
    "kv_channels": 128,
    "layer_norm_epsilon": 1e-06,
    "max_position_embeddings": 32768,
    "no_bias": True,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "onnx_safe": None,
    "rotary_emb_base": 10000,
    "rotary_pct": 1.0,
    "scale_attn_weights": True,
    "seq_length": 8192,
    "softmax_in_fp32": False,
    "tie_word_embeddings": False,
    "tokenizer_class": "QWenTokenizer",
    "use_cache": True,
    "use_cache_kernel": False,
    "use_cache_quantization": False,
    "use_dynamic_ntk": True,
    "use_flash_attn": "auto",
    "use_logn_attn": True,
    "vocab_size": 151936,
}


def test_the_first_qwen_is_read_as_released() -> None:
    family = find_family(QWEN_7B)
    report = family.check_config(QWEN_7B)
    assert parameters(family, report.config) == pytest.approx(7.72e9, rel=1e-3)
    assert (report.config.position_limit, report.config.sizes["F"]) == (8192, 11008)
    assert not report.ignored
    with pytest.raises(ConfigError, match="intermediate_size=22015"):
        family.check_config(QWEN_7B | {"intermediate_size": 22015})
    with pytest.raises(UnsupportedConfig, match=r"rotary_pct=0\.5 is not implemented"):
        family.check_config(QWEN_7B | {"rotary_pct": 0.5})
    with pytest.raises(ConfigError, match="rope_theta=0 of the rotary positions is not a positive number"):
        family.check_config(QWEN_7B | {"rotary_emb_base": 0})


def test_the_released_config_of_ouro() -> None:
    raw = {
        **{"architectures": ["OuroForCausalLM"], "model_type": "ouro", "vocab_size": 49152, "hidden_size": 2048},
        **{"intermediate_size": 5632, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 16},
        **{"head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 65536, "max_window_layers": 48},
        **{
            "layer_types": ["full_attention"] * 48,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
        },
        **{"sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False, "total_ut_steps": 4},
        **{"early_exit_threshold": 1.0, "torch_dtype": "bfloat16", "use_cache": True, "attention_dropout": 0.0},
    }
    family = find_family(raw)
    report = family.check_config(raw)
    assert parameters(family, report.config) == 2667974657
    assert len(report.config.executed_layers) == 4 * 48
    assert not report.ignored
    with pytest.raises(UnsupportedConfig, match=r"early_exit_threshold=0\.9 is not implemented"):
        family.check_config(raw | {"early_exit_threshold": 0.9})
    with pytest.raises(ConfigError, match="total_ut_steps=1000000000"):
        family.check_config(raw | {"total_ut_steps": 10**9})
