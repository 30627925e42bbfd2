"""Keys of config.json that are not read: listed if the reference does not read them either, refused otherwise."""

import json
import runpy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import tpuconv
from helpers.attacks import made
from helpers.checkpoints import hollow_checkpoint, qwen3_config, random_checkpoint
from helpers.commands import tpuconv as command
from helpers.families import FIRST
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.encodings.unread import unread_keys
from tpuconv.errors import UnsupportedConfig, UsageError
from tpuconv.models.common.config_keys import keys_of_reference
from tpuconv.models.registry import all_families, find_family, get_family
from tpuconv.sources.config import encoding_of
from tpuconv.verify.reference_types import READ_AS

TOOL = Path(__file__).parent.parent / "tools" / "reference_keys.py"
RELEASED = {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}
"""Of a released Qwen3 model."""


def report(raw: dict[str, Any], *allow: str, tensors: tuple[str, ...] = ()) -> Any:
    return find_family(raw).check_config(raw, allow, tensors)


def test_the_table_is_what_transformers_reads() -> None:
    tool = runpy.run_path(str(TOOL))
    assert tool["text"]() == tool["TABLE"].read_text(encoding="utf-8"), f"run `python {TOOL.name}`"
    assert tool["defaults_text"]() == tool["DEFAULTS"].read_text(encoding="utf-8"), f"run `python {TOOL.name}`"


def test_every_key_has_a_default() -> None:
    for family in all_families():
        for model_type in family.architectures.values():
            family.config.of_type(model_type)()


def test_a_default_is_that_of_the_class_or_of_its_model_type_in_transformers() -> None:
    """Mistral's Config derives from Llama's, DeepSeek V3's says what transformers does not."""
    llama, mistral = (get_family("llama").config.of_type(kind)() for kind in ("llama", "mistral"))
    assert (llama.intermediate_size, mistral.intermediate_size) == (11008, 14336)
    assert (llama.rope.theta, get_family("smollm3").config().rope.theta) == (10_000.0, 2_000_000.0)
    assert get_family("deepseek_v3").config().head_dim is None
    assert get_family("gpt_oss").config.default_rope["rope_type"] == get_family("gpt_oss").config().rope.type == "yarn"


def test_every_key_that_a_family_knows_and_transformers_has_is_in_the_table() -> None:
    from transformers import CONFIG_MAPPING

    unknown = set()
    for family in all_families():
        for model_type in family.architectures.values():
            if (theirs := READ_AS.get(model_type, model_type)) in CONFIG_MAPPING:
                kind = CONFIG_MAPPING[theirs]
                assert set(kind.__dataclass_fields__) <= set(keys_of_reference(model_type) or ())
            else:
                unknown.add(model_type)
    assert unknown == {
        "Keye",
        "KeyeVL1_5",
        "PanguEmbedded",
        "TeleFLM",
        "alice_ai",
        "bailing_moe",
        "bailing_moe_linear",
        "bailing_moe_v1",
        "bailing_moe_v2_5",
        "chatglm",
        "deepseek",
        "deepseek_v41",
        "deepseek_v41_text",
        "domynedge",
        "grok",
        "internlm2",
        "iquestloopcoder",
        "k2_horizon",
        "kimi_k3",
        "kimi_vl",
        "longcat_flash_ngram",
        "mimo_v2",
        "minicpm",
        "minimax_m1",
        "minimax_text_01",
        "naive_n05_flash",
        "nanbeige",
        "nemotron-nas",
        "nemotron_h_puzzle",
        "orion",
        "ouro",
        "pangu_ultra_moe",
        "qwen",
        "param2moe",
        "plamo3",
        "rnj1",
        "solar",
        "step1",
        "step3_text",
        "step4",
        "telechat",
        "telechat3",
        "xing4_0",
    }  # whose code is in the releases


def test_a_key_that_the_reference_does_not_read_is_listed() -> None:
    raw = {"model_type": "qwen3", **RELEASED}
    found = report(raw, tensors=("model.layers.0.self_attn.q_norm.weight",))
    assert found.config == find_family(raw).config.from_hf({"model_type": "qwen3"})
    assert {key.key: key.value for key in found.ignored} == RELEASED
    assert not any(key.warning for key in found.ignored)
    assert {key.reason for key in found.ignored} == {"not read by transformers for qwen3"}


@pytest.mark.parametrize(
    ("key", "value", "warns"),
    [("use_qk_norm", True, True), ("residual_scale", 2, True), ("residual_scale", 0.0, False), ("mla", False, False),
     ("dual_chunk_attention_config", {"chunk_size": 4}, True), ("sparse", {}, False), ("flavour", "mild", False),
     ("nothing", None, None)],
)  # fmt: skip
def test_a_value_that_says_something_is_a_warning_where_no_tensor_shows_it(key: str, value: Any, warns: Any) -> None:
    ignored = report({"model_type": "qwen2", key: value}).ignored
    assert [bool(each.warning) for each in ignored] == ([] if warns is None else [warns])


def test_a_misspelt_key_is_told_of_the_one_that_is_near() -> None:
    (key,) = report({"model_type": "llama", "tie_word_embedings": True}).ignored
    assert "near: tie_word_embeddings" in key.warning


def test_keys_beside_and_in_the_text_config_of_llama4() -> None:
    raw = {"model_type": "llama4", "qkv_bias": False, "text_config": {"cross_attention": True}}
    assert {key.key: bool(key.warning) for key in report(raw).ignored} == {"qkv_bias": False, "cross_attention": True}
    (key,) = report({"model_type": "llama4_text", "cross_attention": True}).ignored
    assert key.warning
    with pytest.raises(UnsupportedConfig, match="hidden_size=8"):
        report({**raw, "hidden_size": 8})


def test_a_newer_name_of_a_key_is_no_ignored_one() -> None:
    assert report({"model_type": "qwen3_moe", "num_local_experts": 128}).ignored == ()


@pytest.mark.parametrize(
    ("model_type", "key"), [("deepseek_v2", "topk_method"), ("axk2", "n_group"), ("mimo_v2_flash", "n_shared_experts"),
                            ("glm4", "partial_rotary_factor"), ("bamba", "time_step_limit")],
)  # fmt: skip
def test_a_null_that_is_as_good_as_absent(model_type: str, key: str) -> None:
    assert report({"model_type": model_type, key: None}) == report({"model_type": model_type})


@pytest.mark.parametrize("family", FIRST)
def test_what_transformers_writes_is_no_warning(family: str, hf: Any) -> None:
    """Keys of its own are known to have no effect. (GPT-2 and its like have another name for a size of the test.)"""
    raw = json.loads((hf(FIRST[family]) / "config.json").read_text())
    assert {key.key for key in report(raw).ignored if key.warning} <= {"intermediate_size"}


@pytest.mark.parametrize(
    ("sizes", "head_dim", "kv_heads"),
    [
        ({"global_head_dim": 16}, 16, 4),
        ({"global_head_dim": 32}, 32, 4),
        ({"global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 2}, 16, 2),
        ({"global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 4}, 16, 4),
    ],
)
def test_sizes_that_transformers_leaves_out_of_per_layer_config(sizes: Any, head_dim: int, kv_heads: int) -> None:
    """It writes those that differ from the sizes of all layers."""
    from transformers import Gemma4TextConfig

    kinds = ["sliding_attention", "full_attention"]
    config = Gemma4TextConfig(head_dim=16, num_hidden_layers=2, num_key_value_heads=4, layer_types=kinds, **sizes)
    sizes = get_family("gemma4_text").read_config(json.loads(config.to_json_string(use_diff=False))).sizes
    assert (sizes["full_head_dim"], sizes["full_kv_heads"]) == (head_dim, kv_heads)


def test_an_encoding_that_no_tensor_has_is_listed(tmp_path: Path) -> None:
    config = qwen3_config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    ignored = api.plan(hollow_checkpoint(tmp_path, config)).plan.ignored_config
    assert [(key.key, key.reason) for key in ignored] == [("quantization_config", "no tensor is stored as it says")]


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({}, []),
        ({"activation_scheme": "dynamic", "kv_cache_scheme": {"num_bits": 8}}, []),
        ({"rotation": "hadamard"}, ["quantization_config.rotation"]),
        ({"rotation": None, "sparsity": False, "offsets": []}, []),
    ],
)
def test_keys_of_an_encoding_that_are_not_read_are_listed(changes: Any, keys: list[str], tmp_path: Path) -> None:
    folder = made.encoded_source(tmp_path / "fp8")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    ignored = api.plan(folder).plan.ignored_config
    assert [key.key for key in ignored] == keys
    assert all(key.reason == "not read by tpuconv for fp8" and "may change" in key.warning for key in ignored)


def test_keys_within_a_description_are_found_and_known_ones_are_not() -> None:
    weights = {"num_bits": 4, "type": "int", "group_size": 32, "observer": "minmax", "codebook": "e8p"}
    groups = {"a": {"weights": weights, "input_activations": {"num_bits": 8}}, "b": {"weights": weights}}
    described = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}
    assert unread_keys(described) == {"config_groups.*.weights.codebook": "e8p"}
    stages = {"weight": [{"dtype": "fp4", "is_dynamic": False}, {"dtype": "fp8_e4m3", "permuted": True}]}
    assert unread_keys({"quant_method": "quark", "global_quant_config": stages}) == {
        "global_quant_config.weight.permuted": True
    }
    assert not unread_keys({"quant_method": "mlx", "bits": 4, "group_size": 64, "lm_head": {"bits": 8}})
    assert not unread_keys({"quant_method": "hqq", "rotation": True})  # refused elsewhere


def test_files_of_the_libraries_have_no_unread_keys() -> None:
    for file in (Path(__file__).parent / "data").glob("*/*/config.json"):
        described = encoding_of(json.loads(file.read_text()))
        assert described is None or not unread_keys(described), file


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_defaults_of_transformers_are_no_unread_keys() -> None:
    from transformers.utils import quantization_config as theirs

    made_of = [
        theirs.FineGrainedFP8Config(weight_block_size=(128, 128)),
        theirs.FbgemmFp8Config(),
        theirs.Mxfp4Config(),
        theirs.GPTQConfig(bits=4, dataset="c4", tokenizer="name"),
        theirs.AwqConfig(),
        theirs.AutoRoundConfig(),
        theirs.BitNetQuantConfig(),
    ]
    for config in made_of:
        described = json.loads(config.to_json_string(use_diff=False))
        assert not unread_keys(described), described


def test_a_user_lets_a_key_through() -> None:
    raw = {"model_type": "llama", "sliding_window": 5, "hidden_act": "gelu"}
    with pytest.raises(UnsupportedConfig, match=r"`allow_config=\['sliding_window', 'hidden_act'\]`"):
        report(
            raw,
        )
    with pytest.raises(UnsupportedConfig, match="hidden_act"):
        report(raw, "sliding_window")
    found = report(raw, "sliding_window", "hidden_act")
    assert [(key.key, key.reason) for key in found.ignored] == [
        ("sliding_window", "allowed by `allow_config=`"), ("hidden_act", "allowed by `allow_config=`"),
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"no key 'sliding_windo' \(near: sliding_window\)"):
        report(raw, "sliding_windo")
    with pytest.raises(UsageError, match="reads this key"):
        report({"model_type": "llama", "hidden_size": 8}, "hidden_size")
    beside = {"model_type": "llama4", "text_config": {"sliding_window": 5}}
    assert [key.key for key in report(beside, "sliding_window").ignored] == ["sliding_window"]


@pytest.mark.parametrize(
    ("model_type", "key"), [("qwen3_moe", "num_local_experts"), ("kimi_linear", "linear_attn_config")]
)
def test_another_spelling_of_a_key_is_not_let_through_unread(model_type, key):
    with pytest.raises(UsageError, match=rf"`allow_config=\['{key}'\]`: the conversion reads this key"):
        report({"model_type": model_type, key: 64 if key.startswith("num") else {}}, key)


def test_the_manifest_says_what_was_let_through(tmp_path: Path) -> None:
    """And what reads the checkpoint, by its own config.json, lets it through too."""
    config = qwen3_config(num_hidden_layers=1)
    source = random_checkpoint(tmp_path / "hf", config)
    (source / "config.json").write_text(json.dumps({**config, **RELEASED, "attention_chunk_size": 8}))
    refused = command("convert", source, tmp_path / "out", code=5)
    assert "--allow-config attention_chunk_size" in refused.stderr
    done = command("convert", source, tmp_path / "out", "--allow-config", "attention_chunk_size")
    assert "ignored in config.json: qkv_bias, use_qk_norm, shared_expert_inte" in done.stdout
    assert "attention_chunk_size: allowed by --allow-config" in done.stdout
    manifest = read_manifest(tmp_path / "out")
    assert manifest.raw["options"]["allow_config"] == ["attention_chunk_size"]
    assert tpuconv.load(tmp_path / "out").config.num_hidden_layers == 1
    command("quantize", tmp_path / "out", tmp_path / "q", "--config", "int8_weight_only")
    assert read_manifest(tmp_path / "q").allow_config == ("attention_chunk_size",)
    command("export", tmp_path / "out", tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_keys_of_releases_that_change_nothing_are_no_warnings():
    """Keys of MiniMax M2, Kimi K2.5 and Vicuna."""
    raw = {"model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"], "use_routing_bias": True}
    raw |= {"use_mtp": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1}
    raw |= {"ignore_index": -100, "max_sequence_length": 2048}
    tensors = ["model.layers.0.block_sparse_moe.e_score_correction_bias"]
    assert not [key for key in report(raw, tensors=tensors).ignored if key.warning]
    assert [key.key for key in report(raw).ignored if key.warning] == ["use_routing_bias"]


def test_a_key_with_a_default_that_is_made_may_be_left_out() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Config(get_family("llama").config):  # type: ignore[misc]  # of a package
        further: tuple[int, ...] = field(default_factory=tuple)

    assert Config.from_hf({"model_type": "llama"}).further == ()
