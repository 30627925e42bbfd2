"""MiMo V2.5 as released: its config.json, the sizes of its encoders, and features that do not fit."""

from collections.abc import Mapping
from math import prod
from typing import Any

import pytest

import tpuconv
from helpers.whole_sights import made
from tpuconv.errors import ConfigError, UnsupportedConfig, UsageError
from tpuconv.models.registry import find_family

BOTH = ("vision", "audio")
MIMO_V25: Mapping[str, Any] = {
    "architectures": ["MiMoV2ForCausalLM"],
    "model_type": "mimo_v2",
    "auto_map": {"AutoConfig": "configuration_mimo_v2.MiMoV2Config"},
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "attention_bias": False,
    "attention_chunk_size": 128,
    "attention_dropout": 0.0,
    "attention_projection_layout": "fused_qkv",
    "attention_value_scale": 0.707,
    "audio_config": {
        "add_post_norm": True,
        "audio_channels": 20,
        "audio_segment_size": 6000,
        "group_size": 4,
        "input_full_attention": True,
        "input_local_attn_heads": 16,
        "input_local_dim": 1024,
        "input_local_head_dim": 64,
        "input_local_hidden_dropout": 0.0,
        "input_local_intermediate_size": 4096,
        "input_local_layers": 6,
        "out_hidden_size": 4096,
        "partial_rotary_factor": 1.0,
        "projection_layers": 2,
        "rope_theta": 640000,
        "speech_vocab_size": "1280",
        "speech_zeroemb_idx": "1024",
    },
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 192,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "hybrid_block_size": None,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, *[0, 1, 1, 1, 1, 1] * 7, 0],
    "image_token_id": 151655,
    "initializer_range": 0.02,
    "intermediate_size": 16384,
    "layernorm_epsilon": 1e-05,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": [0, *[1] * 47],
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": None,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "pad_token_id": 151643,
    "partial_rotary_factor": 0.334,
    "processor_config": {"audio_sampling_rate": 24000, "audio_token_id": 151669, "patch_size": 16, "rope_type": "rope"},
    "rope_scaling": {"rope_type": "default", "type": "default"},
    "rope_theta": 10000000,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "sliding_window": 128,
    "sliding_window_size": 128,
    "swa_head_dim": 192,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_rope_theta": 10000,
    "swa_v_head_dim": 128,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "v_head_dim": 128,
    "video_token_id": 151656,
    "vision_config": {
        "depth": 28,
        "fullatt_block_indexes": [0, 9, 18, 27],
        "hidden_act": "silu",
        "hidden_size": 1280,
        "in_chans": 3,
        "intermediate_size": 4608,
        "num_heads": 32,
        "num_key_value_heads": 8,
        "num_query_groups": 4,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "spatial_patch_size": 16,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "use_sink": True,
        "visual_token_window_size": 64,
        "vit_window_attn_types": [*[-1, 0, 0, 0, 0, 1, 1, 1, 1] * 3, -1],
        "window_size": 128,
    },
    "vision_end_token_id": 151653,
    "vision_model_type": "mimovl",
    "vision_start_token_id": 151652,
    "vocab_size": 152576,
}
FLAT_ROPE = {"partial_rotary_factor": 0.334, "rope_theta": 1e7, "rope_type": "default", "type": "default"}
MIMO_V26: Mapping[str, Any] = {
    **{key: value for key, value in MIMO_V25.items() if key != "rope_scaling"},
    **{"num_nextn_predict_layers": 3, "rope_parameters": FLAT_ROPE},
}
"""With keys that transformers 5 wrote."""


def test_the_release_has_its_tensors() -> None:
    """Its encoder of images has 729 million parameters in 364 tensors, the one of sounds 261 million, and all 310
    billion."""
    family = find_family(MIMO_V25)
    report = family.check_config(MIMO_V25, parts=BOTH)
    assert not report.ignored
    rows = family.table_without_release(parts=report.config.parts).bind(report.config)
    shapes = {name: shape for row in rows for name, shape in row.src_shapes().items()}
    vision = {name: prod(shape) for name, shape in shapes.items() if name.startswith("visual.")}
    audio = {name: prod(shape) for name, shape in shapes.items() if name.startswith(("audio_enc", "speech_emb"))}
    assert (len(vision), round(sum(vision.values()) / 1e6)) == (364, 729)
    assert (len(audio), round(sum(audio.values()) / 1e6)) == (20 + 6 * 12 + 1 + 2, 261)
    assert round(sum(map(prod, shapes.values())) / 1e9) == 310
    assert shapes["visual.blocks.1.attn.qkv.weight"] == (3072, 1280)
    assert shapes["visual.blocks.1.attn.proj.weight"] == (1280, 2048)
    assert shapes["visual.blocks.1.attn.sinks"] == (32,)
    assert "visual.blocks.9.attn.sinks" not in shapes


def test_rotary_positions_of_both_releases() -> None:
    first, second = (find_family(raw).check_config(raw).config for raw in (MIMO_V25, MIMO_V26))
    for config in (first, second):
        assert (config.rope.theta, config.local_rope.theta) == (1e7, 1e4)
        assert (config.full_rotary, config.local_rotary) == (0.334, 0.334)
    yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    with pytest.raises(UnsupportedConfig, match=r"rope_scaling=.*yarn.* is not implemented for mimo_v2"):
        find_family(MIMO_V25).check_config(MIMO_V25 | yarn)


def test_a_text_model_alone_has_no_encoders() -> None:
    raw = {key: x for key, x in MIMO_V25.items() if key not in ("vision_config", "audio_config")}
    family = find_family(raw)
    assert family.parts_among(["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"]) == ()
    assert family.check_config(raw).config.num_hidden_layers == 48


@pytest.mark.parametrize(
    ("key", "change", "fault"),
    [
        ("vision_config", {"vit_window_attn_types": [0, 1]}, "vit_window_attn_types is of 2 layers, and depth=28"),
        ("vision_config", {"vit_window_attn_types": [2] * 28}, "vit_window_attn_types has 2, not 0, 1 or -1"),
        ("vision_config", {"vit_window_attn_types": None}, "vit_window_attn_types is of 0 layers"),
        ("vision_config", {"kv_channels": 32}, "qk_channels=64 and kv_channels=32 are not the same"),
        ("vision_config", {"kv_channels": 0, "qk_channels": 0}, "qk_channels=0 and kv_channels=0 are not"),
        ("vision_config", {"visual_token_window_size": 0}, "visual_token_window_size=0"),
        ("vision_config", {"num_key_value_heads": 5}, "num_heads=32 is no multiple of num_key_value_heads=5"),
        ("vision_config", {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05 of an encoder is not implemented"),
        ("audio_config", {"speech_vocab_size": "1025-129"}, "speech_vocab_size='1025-129' is not the same number"),
        ("audio_config", {"speech_vocab_size": "many"}, "speech_vocab_size='many' is not the same number"),
        ("audio_config", {"input_local_attn_heads": 8}, "times input_local_head_dim=64 is not input_local_dim=1024"),
        ("audio_config", {"input_local_head_dim": 65, "input_local_dim": 1040}, "input_local_head_dim=65 is odd"),
        ("audio_config", {"group_size": 0}, "group_size=0"),
        ("audio_config", {"projection_layers": 1}, "projection_layers=1 of an encoder is not implemented"),
        ("audio_config", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 of an encoder"),
        ("audio_config", {"input_full_attention": False}, "input_full_attention=False of an encoder"),
        ("audio_config", {"add_post_norm": False}, "add_post_norm=False of an encoder"),
    ],
)
def test_other_values_are_refused(key: str, change: dict[str, Any], fault: str) -> None:
    raw = {**MIMO_V25, key: {**MIMO_V25[key], **change}}
    with pytest.raises((ConfigError, UnsupportedConfig), match=fault):
        find_family(raw).read_config(raw, parts=BOTH)


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"use_sink": False}, {"use_sink": False, "vit_window_attn_types": None}])
def test_layers_without_sinks(change: dict[str, Any]) -> None:
    raw = {**MIMO_V25, "vision_config": {**MIMO_V25["vision_config"], **change}}
    config = find_family(raw).read_config(raw, parts=BOTH)
    tower = config.parts["vision"].tower
    assert tower.sizes["J"] == ()
    assert tower.by_columns(5) is ("vit_window_attn_types" not in change)


@pytest.mark.slow
def test_codes_that_do_not_fit_are_named(whole: Any) -> None:
    case, model = made("mimo_v2"), tpuconv.load(whole("mimo_v2")[1])
    codes = case.features["audio_codes"]
    for changed, fault in (
        (codes[:-1], r"shape \(23, 3\) with numbers to 10; the model has rows of 3 codes less than 11, and 4 rows"),
        (codes[:, :2], r"shape \(24, 2\)"),
        (codes + 1, "numbers to 11"),
        (codes - 1, "numbers to 9"),
    ):
        with pytest.raises(UsageError, match=fault):
            model.see(case.ids_BT, case.mask_BT, **{**case.features, "audio_codes": changed})
