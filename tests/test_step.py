"""Step-3.5, 3.7 and 5 Preview as they are released: keys of config.json that transformers replaces by others, and
layers for further tokens."""

import json
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from helpers.released import STEP5_TEXT
from tpuconv.errors import ConfigError, TpuconvError, UnsupportedConfig
from tpuconv.models.registry import find_family
from tpuconv.models.step3p5.family import Config

PERIODS = 12  # of a layer that sees all tokens and three with the window; the last three layers are for further tokens
RELEASED: dict[str, Any] = {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "bos_token_id": 0,
    "eos_token_id": [1, 2, 128007],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "original_max_position_embeddings": 131072,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "yarn_only_types": ["full_attention"],
    "hidden_size": 4096,
    "intermediate_size": 11264,
    "num_hidden_layers": 45,
    "num_nextn_predict_layers": 3,
    "max_seq_len": 262144,
    "max_position_embeddings": 262144,
    "vocab_size": 128896,
    "torch_dtype": "bfloat16",
    "use_qk_norm": True,
    "moe_layers_enum": ",".join(map(str, range(3, 45))),
    "num_attention_heads": 64,
    "num_attention_groups": 8,
    "head_dim": 128,
    "use_moe": True,
    "moe_num_experts": 288,
    "moe_top_k": 8,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "moe_layer_offset": 0,
    "moe_every_n_layer": 1,
    "norm_expert_weight": True,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "att_impl_type": "GQA",
    "tie_word_embeddings": False,
    "rope_theta": [5_000_000.0, 10_000.0, 10_000.0, 10_000.0] * PERIODS,
    "use_head_wise_attn_gate": True,
    "sliding_window": 512,
    "use_moe_router_bias": True,
    "need_fp32_gate": True,
    "sink": False,
    "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * PERIODS,
    "use_rope_layers": [],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * PERIODS,
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 96,
        "num_attention_groups": 8,
        "head_dim": 128,
        "true_head_dim": 128,
    },
    "swiglu_limits": [0.0] * 43 + [7.0, 7.0, 0.0, 0.0, 0.0],
    "swiglu_limits_shared": [0.0] * 44 + [16.0, 0.0, 0.0, 0.0],
    "zero_centered": True,
}


def read(**changes: Any) -> Any:
    raw = {key: value for key, value in (RELEASED | changes).items() if value is not None}
    return find_family(raw).check_config(raw)


def test_the_release_is_read_as_transformers_reads_it() -> None:
    report = read()
    assert not report.ignored
    text = {key: value for key, value in deepcopy(RELEASED).items() if key != "architectures"}
    newer = json.loads(AutoConfig.for_model("step3p7", text_config=text).to_json_string())
    assert Config.from_hf(newer["text_config"]) == replace(report.config, query_pre_attn_scalar=128)
    assert find_family(newer).config.from_hf(newer).limits == report.config.limits
    whole = {"model_type": "step3p7", "text_config": RELEASED, "understand_projector_stride": 2, "image_token_id": 1}
    assert find_family(whole).config.from_hf(whole).ropes == report.config.ropes
    assert not find_family(whole).check_config(whole).ignored


def test_what_layers_have() -> None:
    config = read().config
    assert (config.sizes["N"], config.sizes["full_heads"], config.sizes["K"]) == (96, 64, 8)
    assert config.windows[:5] == (None, 512, 512, 512, None)
    assert config.rope_dims[:2] == (64, 128)
    assert [rope.type for rope in config.ropes[:2]] == ["llama3", "default"]
    assert config.layer_sets["I"] == (0, 1, 2)
    assert config.limits[42:] == ((None, None), (7.0, None), (7.0, 16.0))
    assert config.unscannable
    why = find_family(RELEASED).table.ignored(config)
    assert all(why(f"model.layers.{layer}.transformer.shared_head.norm.weight") for layer in (45, 47))
    assert not why("model.layers.44.input_layernorm.weight")


@pytest.mark.parametrize("layers", [",".join(map(str, range(3, 45))), list(range(3, 45)), None])
def test_layers_with_experts(layers: Any) -> None:
    assert read(moe_layers_enum=layers).config.layer_sets["J"] == tuple(range(3, 45))


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [
        (UnsupportedConfig, {"sink": True}, "sink=True is not implemented for step3p5, only False"),
        (UnsupportedConfig, {"gating": "per-channel"}, "gating='per-channel' is not implemented"),
        (UnsupportedConfig, {"yarn_only_types": ["sliding_attention"]}, "yarn_only_types="),
        (UnsupportedConfig, {"attention_bias": True}, "attention_bias=True is not implemented"),
        (ConfigError, {"num_key_value_heads": 4}, "num_attention_groups=8, num_key_value_heads=4"),
        (ConfigError, {"moe_layers_enum": "3,x"}, "moe_layers_enum='3,x' does not list layers"),
        (ConfigError, {"rope_theta": [1e4, 2e4] * 24}, "rope_theta=.* is not the same for all layers"),
        (ConfigError, {"rope_theta": [1e4] * 3}, "rope_theta has 3 entries for 45 layers"),
        (ConfigError, {"rope_parameters": {"rope_theta": 1e4}}, "has no object for each type of layer"),
        (ConfigError, {"attention_other_setting": {"head_dim": 64}}, "head_dim=64 of layers with the wi.* not 128"),
        (ConfigError, {"attention_other_setting": 3}, "attention_other_setting=3"),
        (ConfigError, {"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config=.* is not"),
        (ConfigError, {"per_layer_config": 3}, "per_layer_config=.*3.* is not"),
        (ConfigError, {"attention_other_setting": {"num_attention_heads": 9}}, "=9 is not a multiple of num_key_value"),
        (ConfigError, {"swiglu_limits": [1.0]}, "swiglu_limits has 1 entries for num_hidden_layers=45"),
        (ConfigError, {"swiglu_limits_shared": [-1.0] * 45}, "swiglu_limits_shared has a negative number"),
        (ConfigError, {"sliding_window": None}, "'sliding_attention' with sliding_window=None"),
        (ConfigError, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 is not positive"),
        (ConfigError, {"layer_types": ["sliding"] * 45, "rope_theta": None}, "the unknown 'sliding'"),
        (ConfigError, {"num_hidden_layers": 1 << 60}, "num_hidden_layers=.* is more than"),
        (ConfigError, {"partial_rotary_factors": [2.0] * 45}, r"partial_rotary_factor=2\.0 is not a part of a head"),
    ],
    ids=str,
)
def test_what_is_another_model_is_refused(error: type[TpuconvError], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(error, match=message):
        read(**changes)


def test_layers_of_step3() -> None:
    def read_step3(**changes: Any) -> Any:
        raw = {"model_type": "step3_text", **changes}
        return find_family(raw).check_config(raw).config

    config = read_step3(num_attention_groups=1, moe_num_experts=8, moe_top_k=2, share_expert_dim=64)
    assert config.layer_sets["I"] == (0, 1, 2, 3, 60)
    assert (config.sizes["K"], config.sizes["Q"], config.sizes["E"], config.sizes["W"]) == (1, 2048, 8, 64)
    assert config.rope.theta == 500_000
    assert read_step3(moe_layers_enum="2, 3").layer_sets["J"] == (2, 3)
    assert read_step3(moe_layers_enum=None).layer_sets["J"] == tuple(range(1, 61))
    with pytest.raises(ConfigError, match="moe_layers_enum='2,x' does not list layers"):
        read_step3(moe_layers_enum="2,x")
    with pytest.raises(UnsupportedConfig, match="num_key_value_heads=2 is not implemented for step3_text, only 1"):
        read_step3(num_attention_groups=2)


def test_the_release_of_step1_is_read() -> None:
    """The text model of Step-Audio 3B."""
    raw: dict[str, Any] = {
        "architectures": ["Step1ForCausalLM"],
        "model_type": "step1",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_seq_len": 32768,
        "num_attention_groups": 4,
        "num_attention_heads": 48,
        "num_hidden_layers": 32,
        "tie_word_embeddings": False,
        "vocab_size": 74752,
    }
    config = find_family(raw).check_config(raw).config
    assert (config.sizes["K"], config.sizes["G"], config.sizes["H"]) == (4, 12, 64)
    assert config.max_position_embeddings == 32768
    assert config.ropes == (None,) * 32


def test_what_layers_of_the_preview_have() -> None:
    config = find_family(STEP5_TEXT).check_config(STEP5_TEXT).config
    assert config.layer_sets["indexer_layers"] == tuple(range(3, 92, 4))
    assert config.layer_sets["I"] == (0, 1, 2, 91)
    assert config.rope_dims[2:5] == (192, 64, 192)
    assert [rope.theta for rope in config.ropes[2:4]] == [10_000, 10_000_000]
    assert config.horizons == {512, 512 * 8}
    why = find_family(STEP5_TEXT).table.ignored(config)
    assert all(why(f"model.layers.{layer}.eh_proj.weight") for layer in (92, 94))
    assert not why("model.layers.91.self_attn.ssmax_s")


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [
        (UnsupportedConfig, {"enabled": False}, "enabled=False is not implemented for step4, only True"),
        (UnsupportedConfig, {"softmax": "plain"}, "softmax="),
        (ConfigError, {"num_provider_groups": 3}, "num_attention_heads=64 is not a multiple of num_provider_groups=3"),
        (ConfigError, {"sparse_indexer_num_heads": 6}, "sparse_indexer_num_heads=6 is not a multiple of num_provider"),
        (ConfigError, {"sparse_indexer_rope_dim": 258}, "sparse_indexer_rope_dim=258 is not an even part of proxy_dim"),
        (ConfigError, {"sparse_indexer_rope_dim": 3}, "sparse_indexer_rope_dim=3 is not an even part of proxy_dim"),
        (ConfigError, {"topk": 0}, "topk=0 is less than 1"),
    ],
    ids=str,
)
def test_another_selection_is_refused(error: type[TpuconvError], changes: dict[str, Any], message: str) -> None:
    raw = {**STEP5_TEXT, "sparse_config": {**STEP5_TEXT["sparse_config"], **changes}}
    with pytest.raises(error, match=message):
        find_family(raw).check_config(raw)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim_sliding_attention": 128}, "head_dim_sliding_attention=128 is not 192, as in all layers"),
        ({"num_attention_groups_full_attention": 8}, "num_attention_groups_full_attention=8 is not 4"),
        ({"sparse_config": 3}, "sparse_config=3 is not an object"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rotary positions of the type 'dynamic' depend"),
    ],
    ids=str,
)
def test_another_preview_is_refused(changes: dict[str, Any], message: str) -> None:
    raw = {**STEP5_TEXT, **changes}
    with pytest.raises(ConfigError, match=message):
        find_family(raw).check_config(raw)
