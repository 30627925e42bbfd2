"""What config.json of a quantized export says of modules, read as vLLM 0.32 reads it: it looks for the name of each of
its modules among the ignored ones, then among the targets, then for its class."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from helpers.checkpoints import read_tensors
from helpers.encoded import fp8, fp8_channel, write_encoded
from helpers.quantizing import ONE_OF_EACH
from helpers.served import quantized, rule
from helpers.whole_sights import made
from tpuconv import api
from tpuconv.convert.export.serving.description import FUSED, describe_encoding
from tpuconv.convert.export.serving.formats import FORMATS, IN_AWQ, IN_COMPRESSED, IN_FP8, WeightGroup
from tpuconv.errors import UsageError
from tpuconv.quantize.apply import HEAD_NOTE

INT8 = WeightGroup(FORMATS[IN_COMPRESSED]["int8", True], (None, None), activations=True, asymmetric=False)
INT4 = WeightGroup(FORMATS[IN_COMPRESSED]["int4", False], (1, 32), activations=False, asymmetric=False)
UNTIED = replace(ONE_OF_EACH["qwen3"], config={**ONE_OF_EACH["qwen3"].config, "tie_word_embeddings": False})
ATTENTION = [f"model.layers.{layer}.self_attn.o_proj" for layer in range(12)]


def fits(patterns: Sequence[str], module: str) -> bool:
    return any(re.match(p[3:], module) if p.startswith("re:") else p == module for p in patterns)


def rules_file(folder: Path, rules: str) -> Path:
    (folder / "rules.yaml").write_text(f"summary: test\nqwix:\n  rules:\n{rules}gates: none\n")
    return folder / "rules.yaml"


def described(out: Path) -> dict:
    return json.loads((out / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("config", ["int8_default", pytest.param("int4_ends_int8", marks=pytest.mark.slow)])
def test_a_head_stays_plain_where_its_rule_is_for_others_too(config, hf, tmp_path):
    source = hf(UNTIED, "bfloat16")
    assert api.plan(source, target="huggingface", quantize=config).notes == (HEAD_NOTE,)
    done = api.convert(source, tmp_path / "out", target="huggingface", quantize=config)
    assert HEAD_NOTE in done.quantization.notes
    assert done.serve == (f"vllm serve {tmp_path}/out", f"MODEL_IMPL_TYPE=vllm vllm serve {tmp_path}/out")
    assert "lm_head.weight_scale" not in read_tensors(tmp_path / "out")
    assert described(tmp_path / "out")["ignore"] == ["lm_head"]


def test_blocks_that_a_release_keeps_are_noted(hf, tmp_path):
    """A rule for scales of outputs does not round its values again."""
    case = ONE_OF_EACH["qwen3"]
    for encoding in (fp8, fp8_channel):
        write_encoded(case, encoding, lambda case: hf(case, "bfloat16"), tmp_path / encoding.__name__)
    (note,) = api.plan(tmp_path / "fp8", quantize="fp8_weight_only").notes
    kept = r"\d+ parameters keep their values of the release: float8_e4m3fn with a scale for each block of 5x7"
    assert re.fullmatch(kept, note)
    assert not api.plan(tmp_path / "fp8", quantize="int8_weight_only").notes
    assert not api.plan(tmp_path / "fp8_channel", quantize="fp8_weight_only").notes
    assert api.convert(tmp_path / "fp8", tmp_path / "out", quantize="fp8_weight_only").serve == ()


def test_a_head_with_a_rule_of_its_own_is_named(hf, tmp_path):
    """And so is that of a checkpoint that has it quantized: to vLLM a head is no linear layer."""
    source, int8 = hf(UNTIED, "bfloat16"), {"weight_qtype": "int8", "act_qtype": "int8"}
    rules = rules_file(tmp_path, rule("layers/.*/(attn|mlp)/.*", **int8) + rule("lm_head", **int8))
    assert not api.plan(source, target="huggingface", quantize=rules).notes
    api.convert(source, tmp_path / "out", target="huggingface", quantize=rules)
    api.convert(source, tmp_path / "ckpt", quantize="int8_default")
    api.export(tmp_path / "ckpt", tmp_path / "export")
    for out in (tmp_path / "out", tmp_path / "export"):
        assert "lm_head.weight_scale" in read_tensors(out)
        (group,) = described(out)["config_groups"].values()
        assert group["targets"] == ["Linear", "lm_head"]


def test_blocks_of_fp8_have_activations_in_groups(tmp_path):
    rules = rule(".*mlp.*", weight_qtype="float8_e4m3fn", tile_size=32, tile_axes="block")
    api.export(quantized(tmp_path, rules), tmp_path / "out")
    (group,) = described(tmp_path / "out")["config_groups"].values()
    assert group["weights"]["block_structure"] == [32, 32]
    activations = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True}
    assert group["input_activations"] == activations | {"strategy": "group", "group_size": 32}
    api.convert(tmp_path / "out", tmp_path / "again", encoding="keep")


@pytest.mark.parametrize(
    ("family", "experts"),
    [
        ("gpt_oss", "model.layers.1.mlp.experts"),
        pytest.param("qwen3_moe", "model.layers.1.mlp.experts", marks=pytest.mark.slow),
        pytest.param("mixtral", "model.layers.1.block_sparse_moe.experts", marks=pytest.mark.slow),
        pytest.param("llama4_text", "model.layers.1.feed_forward.experts", marks=pytest.mark.slow),
        pytest.param("granitemoe", "model.layers.1.block_sparse_moe.experts", marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", "language_model.model.layers.1.mlp.experts", marks=pytest.mark.slow),
    ],
)
def test_experts_that_are_not_quantized_are_ignored(family, experts, hf, tmp_path):
    rules = rules_file(tmp_path, rule(r"layers/\d+/attn/.*", weight_qtype="int8", act_qtype="int8"))
    api.convert(hf(ONE_OF_EACH[family], "bfloat16"), tmp_path / "out", target="huggingface", quantize=rules)
    ignored = described(tmp_path / "out")["ignore"]
    assert fits(ignored, f"{experts}.0.gate_proj")
    assert fits(ignored, experts)
    assert not fits(ignored, experts.replace("experts", "experts_of_others"))


def test_groups_of_a_complete_row_stay_groups(hf, tmp_path):
    """The down projection of experts has 32 inputs, gate and up have more."""
    case = ONE_OF_EACH["qwen3_moe"]
    case = replace(case, config={**case.config, "moe_intermediate_size": 32})
    for scheme in (IN_COMPRESSED, IN_AWQ):
        out = tmp_path / scheme
        api.convert(
            hf(case, "bfloat16"), out, target="huggingface", quantize="int4_weight_only",
            **({} if scheme == IN_COMPRESSED else {"scheme": scheme}),
        )  # fmt: skip
    (group,) = described(tmp_path / IN_COMPRESSED)["config_groups"].values()
    assert (group["weights"]["strategy"], group["weights"]["group_size"]) == ("group", 32)
    assert described(tmp_path / IN_AWQ)["group_size"] == 32


JOINED = [
    *((f"model.layers.0.self_attn.{names[0]}", f"model.layers.0.self_attn.{names[-1]}") for names in FUSED),
    ("model.layers.0.mlp.shared_experts.gate_proj", "model.layers.0.mlp.shared_experts.up_proj"),
    ("model.layers.0.mlp.experts.0.down_proj", "model.layers.0.mlp.experts.0.gate_proj"),
    ("model.layers.0.block_sparse_moe.experts.0.w2", "model.layers.0.block_sparse_moe.experts.3.w1"),
    ("model.layers.0.feed_forward.experts.0.gate_proj", "model.layers.0.feed_forward.experts"),
]


@pytest.mark.parametrize("pair", JOINED, ids=lambda pair: " ".join(name.partition("0.")[2] for name in pair))
def test_what_servers_join_is_quantized_alike(pair):
    one, other = pair
    with pytest.raises(UsageError, match="are not quantized alike, and servers join them") as error:
        describe_encoding(IN_COMPRESSED, {INT8: [one]}, [other])
    assert one in error.value.message
    assert other in error.value.message
    assert '`target="huggingface"`' in error.value.hint
    with pytest.raises(UsageError, match="are not quantized alike"):
        describe_encoding(IN_COMPRESSED, {INT8: [other], INT4: [one]}, [])
    describe_encoding(IN_COMPRESSED, {INT8: [one, other.replace("layers.0", "layers.1")]}, [])


def test_a_router_among_the_experts_is_none():
    """As JetMoE has it."""
    experts = [f"model.layers.0.mlp.experts.{expert}.up_proj" for expert in range(4)]
    config = describe_encoding(IN_COMPRESSED, {INT8: experts}, ["model.layers.0.mlp.experts.router.layer"])
    assert config["ignore"] == ["model.layers.0.mlp.experts.router.layer", "lm_head"]


def test_each_expert_is_ignored_by_the_name_of_all():
    """vLLM looks for the experts of a layer, as one module, in what AWQ and FP8 leave plain."""
    plain = [f"model.layers.0.mlp.experts.{expert}.{x}_proj" for expert in range(4) for x in ("gate", "up", "down")]
    awq = WeightGroup(FORMATS[IN_AWQ]["int4", False], (1, 32), activations=False, asymmetric=True)
    fp8 = WeightGroup(FORMATS[IN_FP8]["float8_e4m3fn", False], (128, 128), activations=False, asymmetric=False)
    for scheme, group in ((IN_AWQ, awq), (IN_FP8, fp8)):
        names = describe_encoding(scheme, {group: ATTENTION}, plain)["modules_to_not_convert"]
        assert names == ["model.layers.0.mlp.experts", "lm_head"]


def test_patterns_hold_where_servers_rename_the_model():
    """vLLM has `language_model.model.` for `model.language_model.`, and translates names, not patterns."""
    attention = [f"model.language_model.layers.{i}.self_attn.o_proj" for i in range(12)]
    tower = [f"model.visual.blocks.{i}.mlp.fc1" for i in range(12)]
    both = [f"model.{x}.layers.{i}.fc2" for x in ("language_model", "audio") for i in range(2)]
    config = describe_encoding(IN_COMPRESSED, {INT8: [*attention, "lm_head"], INT4: both[:2]}, [*tower, *both[2:]])
    int8, int4 = (group["targets"] for group in config["config_groups"].values())
    assert all(fits(int8, name) for name in (*attention, "lm_head", "language_model.lm_head"))
    assert all(fits(int8, name.replace("model.language_model.", "language_model.model.")) for name in attention)
    assert all(fits(config["ignore"], name.replace("model.visual", "visual")) for name in tower)
    assert set(both[2:]) <= set(config["ignore"])  # no pattern: it would fit the other part
    assert not any(fits(config["ignore"], name) for name in (*attention, *both[:2]))
    assert all(fits(int4, name) for name in both[:2])


def test_no_pattern_fits_two_parts_of_one_module():
    """What is ignored there has names alone."""
    text, sound = ([f"whole.{x}.layers.{i}.self_attn.q_proj" for i in range(2)] for x in ("model", "audio_tower"))
    config = describe_encoding(IN_COMPRESSED, {INT8: text[:1], INT4: text[1:]}, sound)
    assert config["ignore"][:2] == sound
    assert not any(fits(config["ignore"], name) for name in text)
    of_layer_0, of_layer_1 = (group["targets"] for group in config["config_groups"].values())
    assert not fits(of_layer_0, text[1])
    assert not fits(of_layer_1, text[0])


ATTENTION_IN_FP8 = rule(r"layers/\d+/attn/(?!router).*", weight_qtype="float8_e4m3fn")


@pytest.mark.parametrize("name", ["gemma3n_text", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_linear_layers_named_like_embeddings_are_ignored(name, hf, tmp_path):
    """As `altup_unembed_projections` are."""
    assert_transformers_has_all(hf(ONE_OF_EACH[name], "bfloat16"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "gemma4", "llama4", "mistral3", "muse_glimmer", "qwen3_omni_moe"])
def test_linear_layers_of_encoders_are_ignored_under_the_names_of_transformers(name, tmp_path):
    """Which are not those of the tensors, and by which encoders have layers of text models, or of embeddings."""
    made(name).save(tmp_path / "hf")
    assert_transformers_has_all(tmp_path / "hf", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
def test_layers_of_several_types_have_the_names_of_transformers(name, tmp_path):
    made(name).save(tmp_path / "hf")
    fp8, act_qtype = {"weight_qtype": "float8_e4m3fn"}, "float8_e4m3fn"
    rules = rule("layers/[01]/attn/.*", **fp8) + rule("layers/.*/attn/.*", **fp8, act_qtype=act_qtype)
    assert_transformers_has_all(tmp_path / "hf", tmp_path, rules)


def assert_transformers_has_all(source: Path, folder: Path, rules: str = ATTENTION_IN_FP8) -> None:
    """transformers takes no plain layer for a quantized one, whose scales would be missing."""
    api.convert(source, folder / "ckpt", quantize=rules_file(folder, rules))
    api.export(folder / "ckpt", folder / "out")
    (architecture,) = json.loads((source / "config.json").read_text())["architectures"]
    _, found = getattr(transformers, architecture).from_pretrained(folder / "out", output_loading_info=True)
    assert not any(found.values())
