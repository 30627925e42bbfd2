"""Configs of families with experts and selected tokens: keys of releases, and what follows from them."""

from copy import deepcopy
from math import prod
from typing import Any

import pytest
from transformers import AutoConfig

from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.models.registry import find_family, get_family

MIMO = {  # the keys of the released config.json that transformers has others for
    "model_type": "mimo_v2_flash",
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "attention_value_scale": 0.707,
    "hybrid_layer_pattern": [0, 1, 1, 1],
    "moe_layer_freq": [0, 1, 1, 1],
    "layernorm_epsilon": 1e-5,
    "n_shared_experts": None,
    "num_hidden_layers": 4,
    "partial_rotary_factor": 0.334,
    "rope_theta": 5_000_000,
    "routed_scaling_factor": None,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "swa_head_dim": 192,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_rope_theta": 10_000,
    "swa_v_head_dim": 128,
}

M3_LAYERS = [0, 0, 0, 1]
MINIMAX_M3 = {  # the keys of the released text_config
    "model_type": "minimax_m3_vl_text",
    "attention_output_gate": False,
    "dense_intermediate_size": 12288,
    "hidden_act": "swigluoai",
    "moe_layer_freq": M3_LAYERS,
    "n_shared_experts": 1,
    "num_hidden_layers": 4,
    "num_mtp_modules": 0,
    "partial_rotary_factor": 0.5,
    "qk_norm_type": "per_head",
    "rope_theta": 5_000_000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 3072,
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_index_dim": 128,
        "sparse_num_index_heads": 4,
        "sparse_topk_blocks": 16,
        "sparse_block_size": 128,
        "sparse_disable_index_value": M3_LAYERS,
        "sparse_score_type": "max",
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_attention_freq": M3_LAYERS,
    },
}


def parameters(model_type: str, **changes: Any) -> float:
    """The parameters of a model in billions."""
    raw = {"model_type": model_type, **changes}
    family = find_family(raw)
    rows = family.table.bind(family.config.from_hf(raw))
    return sum(prod(shape) for row in rows if not row.row.buffer for shape in row.dst_shapes().values()) / 1e9


@pytest.mark.parametrize(
    ("model_type", "changes", "billions"),
    [
        ("deepseek_v32", {}, 671.9),
        ("glm_moe_dsa", {}, 743.9),
        ("solar_open", {}, 102.7),
        ("mimo_v2_flash", {}, 309.3),
        ("hy_v3", {}, 295.0),
        (
            "minimax_m3_vl",
            {
                "text_config": {
                    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57,
                    "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57,
                }
            },
            427.0,
        ),
        ("dots1", {"hidden_size": 4096, "first_k_dense_replace": 1}, 142.8),
        ("mistral3", {"text_config": {"model_type": "mistral4"}, "tie_word_embeddings": False}, 119.0),
        ("mistral_large4", {}, 1050.1),
        (
            "exaone_moe",
            {
                **{"vocab_size": 153600, "hidden_size": 6144, "intermediate_size": 18432, "num_hidden_layers": 48},
                **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 128},
                **{"moe_intermediate_size": 2048},
            },
            236.6,
        ),
    ],
)
def test_the_published_number_of_parameters(model_type: str, changes: dict[str, Any], billions: float) -> None:
    assert parameters(model_type, **changes) == pytest.approx(billions, rel=2e-3)


def test_the_released_config_of_mimo() -> None:
    family = get_family("mimo_v2_flash")
    config = family.config.from_hf(MIMO)
    kinds = {
        "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    }
    assert config == family.config.from_hf({"model_type": "mimo_v2_flash", "num_hidden_layers": 4, **kinds})
    assert [key for key, value in family.config.ignored_keys(MIMO).items() if value] == []
    theirs = AutoConfig.for_model(**MIMO)
    assert config.windows == (None, theirs.sliding_window, theirs.sliding_window, theirs.sliding_window)
    assert set(config.rope_dims) == {int(192 * 0.334)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swa_num_key_value_heads": 4}, "swa_num_key_value_heads=4 is not 8"),
        ({"swa_v_head_dim": 192}, "swa_v_head_dim=192 is not 128"),
        ({"layernorm_epsilon": 1e-6, "rms_norm_eps": 1e-5}, "layernorm_epsilon=1e-06 is not 1e-05"),
        ({"moe_layer_freq": [0, 2, 1, 1]}, r"moe_layer_freq=\[0, 2, 1, 1\] is not a list of 0 and 1"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias=True"),
        ({"n_shared_experts": 1}, "n_shared_experts=1"),
        ({"num_attention_heads": 36, "swa_num_attention_heads": 36}, "36 is not a multiple of the 8 key-value heads"),
        ({"partial_rotary_factor": 1.5}, "1.5 is not a part of a head"),
    ],
)
def test_what_mimo_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, UnsupportedConfig), match=message):
        get_family("mimo_v2_flash").config.from_hf(MIMO | changes)


def test_the_released_config_of_minimax_m3() -> None:
    family = get_family("minimax_m3_vl_text")
    config = family.config.from_hf(MINIMAX_M3)
    assert family.config.ignored_keys(MINIMAX_M3) == {}
    theirs = AutoConfig.for_model(**deepcopy(MINIMAX_M3))
    assert config == family.config.from_hf(theirs.to_dict())
    assert list(config.kinds) == theirs.layer_types == ["full_attention"] * 3 + ["minimax_m3_sparse"]
    assert list(config.mlp_kinds) == theirs.mlp_layer_types
    assert config.rope_dim == 64
    wrapper = {"model_type": "minimax_m3_vl", "text_config": MINIMAX_M3, "image_token_index": 200025}
    assert vars(get_family("minimax_m3_vl").config.from_hf(wrapper)) == vars(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_dim": 128}, "rotary_dim=128 is not 64"),
        ({"moe_layer_freq": [0, 2, 1, 1]}, r"moe_layer_freq=\[0, 2, 1, 1\] is not a list of 0 and 1"),
        ({"use_gemma_norm": False}, "use_gemma_norm=False"),
        ({"layer_types": ["full_attention"] * 4}, r"sparse_attention_freq=\[0, 0, 0, 1\] is not \[0, 0, 0, 0\]"),
        ({"sparse_attention_config": [1]}, "not an object"),
        ({"sparse_attention_config": {"sparse_init_block": 1}}, "sparse_init_block=1 is not 0"),
        ({"sparse_attention_config": {"sparse_sinks": 1}}, "the unknown 'sparse_sinks'"),
        ({"layer_types": ["minimax_m3_sparse"] * 4, "sparse_attention_config": {"sparse_local_block": 17}}, "is more"),
        ({"layer_types": ["minimax_m3_sparse"] * 4, "sparse_attention_config": {"sparse_index_dim": 32}}, "is less"),
        ({"layer_types": ["minimax_m3_sparse"] * 4, "sparse_attention_config": {"sparse_num_index_heads": 3}}, "=3"),
        ({"layer_types": ["sliding_attention"] * 4}, "unknown 'sliding_attention'"),
        ({"swiglu_limit": 0.0}, "swiglu_limit=0.0 is not positive"),
    ],
)
def test_what_minimax_m3_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, UnsupportedConfig), match=message):
        get_family("minimax_m3_vl_text").config.from_hf(MINIMAX_M3 | changes)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_freq": 0},
        {"index_topk_pattern": "FFSSFS" * 13},
        {"index_topk_pattern": ["full", "shared"] * 39},
        {"indexer_types": ["full"] + ["shared"] * 77, "index_topk_freq": 2},
    ],
)
def test_the_layers_with_an_indexer(given: dict[str, Any]) -> None:
    raw = {"model_type": "glm_moe_dsa", **given}
    theirs = AutoConfig.for_model(**raw).indexer_types
    config = get_family("glm_moe_dsa").config.from_hf(raw)
    assert config.indexers == tuple(i for i, kind in enumerate(theirs) if kind == "full")
    assert config.inseparable


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_types": ["shared"] * 78}, "begins with 'shared'"),
        ({"indexer_types": ["full"]}, "indexer_types has 1 entries"),
        ({"index_topk_pattern": "X" * 78}, "unknown 'X'"),
        ({"index_topk_pattern": ["F", "S"] * 39}, "unknown 'F', 'S'"),  # transformers takes both for "full"
        ({"index_head_dim": 32}, "index_head_dim=32 is less than qk_rope_head_dim=64"),
        ({"layer_types": ["full_attention"] * 78}, "layer_types has the unknown 'full_attention'"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries"),
    ],
)
def test_what_an_indexer_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_family("glm_moe_dsa").config.from_hf({"model_type": "glm_moe_dsa", **changes})


@pytest.mark.parametrize("pattern", [1, 2, 3])
def test_the_first_dense_layers_of_cohere(pattern: int) -> None:
    raw = {"model_type": "cohere2_moe", "first_k_dense_replace": 5, "prefix_dense_sliding_window_pattern": pattern}
    theirs, config = AutoConfig.for_model(**raw), get_family("cohere2_moe").config.from_hf(raw)
    assert list(config.kinds) == theirs.layer_types
    assert list(config.mlp_kinds) == theirs.mlp_layer_types
    turned = [
        kind == "sliding_attention" or (mlp == "dense" and pattern == 1)
        for kind, mlp in zip(theirs.layer_types, theirs.mlp_layer_types, strict=True)
    ]
    assert [rope is not None for rope in config.ropes] == turned


def test_older_names_of_internlm3() -> None:
    read = get_family("internlm3").config.from_hf
    older = {"model_type": "internlm3", "qkv_bias": True, "bias": True}
    assert read(older) == read({"model_type": "internlm3", "attention_bias": True, "mlp_bias": True})
    with pytest.raises(ConfigError, match="differ"):
        read(older | {"bias": False})
    with pytest.raises(ConfigError, match="qkv_bias=True, attention_bias=False"):
        read(older | {"attention_bias": False})


def test_the_text_model_of_mistral_tells_the_family() -> None:
    for text, name in (("mistral", "mistral3"), ("ministral3", "mistral3"), ("mistral4", "mistral4")):
        raw = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"]}
        assert find_family(raw | {"text_config": {"model_type": text}}).name == name


def test_queries_of_mistral4() -> None:
    text = {"model_type": "mistral4", "head_dim": 128}
    raw = {"model_type": "mistral3", "text_config": text}
    read, theirs = get_family("mistral4").config.from_hf, AutoConfig.for_model("mistral4")
    config = read(raw)
    assert config == read(raw | {"text_config": text | {"rope_parameters": theirs.rope_parameters}})
    assert config.llama_4_scaling_beta == theirs.rope_parameters["llama_4_scaling_beta"]
    rope = dict(theirs.rope_parameters) | {"partial_rotary_factor": 0.25}
    with pytest.raises(UnsupportedConfig, match="partial_rotary_factor"):
        read(raw | {"text_config": text | {"rope_parameters": rope}})
