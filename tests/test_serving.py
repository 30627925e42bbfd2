"""Quantized checkpoints exported for servers: every weight as compressed-tensors decompresses it, and back."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tpuconv
from helpers.checkpoints import hollow_checkpoint, read_tensors, write_checkpoint
from helpers.conversions import assert_same, restore, same_bits
from helpers.families import FAMILIES, Case, save
from helpers.logits import forward
from helpers.quantizing import ONE_OF_EACH
from helpers.served import decompressed, dequantized, quantized, rule
from tpuconv import api
from tpuconv.convert.export.serving.rows import pack_words
from tpuconv.errors import ConfigError, SourceError, UsageError

CONFIGS = (
    "int8_default",
    "int8_weight_only",
    "fp8_default",
    "fp8_weight_only",
    "int4_weight_only",
)
CORE = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "olmo2", "deepseek_v3", "kimi_k2", "llama4_text", "llama4")
FAST = {("qwen3", config) for config in CONFIGS} | {("deepseek_v3", "int8_default"), ("mixtral", "int4_weight_only")}
IDS = np.random.default_rng(0).integers(3, 101, (2, 11))

assert set(CORE) <= FAMILIES

EVERY = [
    pytest.param(
        ONE_OF_EACH[family],
        config,
        id=f"{family}-{config}",
        marks=[] if (family, config) in FAST else [pytest.mark.slow],
    )
    for family in CORE
    for config in CONFIGS
]


@pytest.mark.parametrize(("case", "config"), EVERY)
def test_every_weight_is_that_of_compressed_tensors(case: Case, config: str, tmp_path: Path) -> None:
    save(case, tmp_path / "hf", "bfloat16")
    api.convert(tmp_path / "hf", tmp_path / "quantized", quantize=config)
    assert_comes_back(tmp_path)


@pytest.mark.parametrize("qtype", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_inputs_that_fill_no_words_come_back(qtype: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 60, "intermediate_size": 90, "head_dim": 10, "num_attention_heads": 6}
    rules = rule(".*(attn|mlp).*", weight_qtype=qtype, tile_size=10)
    quantized(tmp_path, rules, num_key_value_heads=6, **sizes)
    assert_comes_back(tmp_path)
    api.export(tmp_path / "again", tmp_path / "back")
    out, back = (read_tensors(tmp_path / name) for name in ("out", "back"))
    down = out["model.layers.0.mlp.down_proj.weight_packed"]
    assert down.shape[1] * 32 // int(qtype[3:]) == {"int4": 96, "int8": 92}[qtype]  # of 90
    assert out.keys() == back.keys()
    assert not [name for name in out if not same_bits(out[name], back[name])]


@pytest.mark.parametrize("encoding", ["keep", "dequantize"])
def test_a_shape_other_than_that_of_rows_that_fill_no_words_is_refused(encoding: Any, tmp_path: Path) -> None:
    up = "model.layers.1.mlp.up_proj"
    api.export(quantized(tmp_path, rule(".*mlp.*", weight_qtype="int4"), hidden_size=60), tmp_path / "int4")
    tensors = read_tensors(tmp_path / "int4") | {f"{up}.weight_shape": np.array([96, 59])}
    description = json.loads((tmp_path / "int4" / "config.json").read_text())
    write_checkpoint(tmp_path / "changed", description, tensors)
    with pytest.raises(SourceError, match=rf"{up}.weight_shape says \[96, 59\], but the values are \[96, 60\]"):
        api.convert(tmp_path / "changed", tmp_path / "out", encoding=encoding)


def assert_comes_back(folder: Path) -> None:
    """The export of `quantized` is what compressed-tensors reads. Our reader reads back what was written: the same
    quantized values, and as many scales as they stand for. Written once more they are described as before, with
    activations too."""
    api.export(folder / "quantized", folder / "out")
    ours, theirs = dequantized(folder / "quantized", folder / "out"), decompressed(folder / "out")
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not same_bits(ours[name], theirs[name])]
    api.convert(folder / "out", folder / "again", encoding="keep")
    before, after = restore(folder / "quantized"), restore(folder / "again")
    for name in before:
        if name.endswith("qvalue"):
            assert np.array_equal(before[name].astype(np.float32), after[name].astype(np.float32)), name
    again = dequantized(folder / "again")
    assert not [name for name in ours if not same_bits(ours[name], again[name])]
    api.export(folder / "again", folder / "once_more", scheme="compressed-tensors")
    first, second = (json.loads((folder / name / "config.json").read_text()) for name in ("out", "once_more"))
    assert first["quantization_config"] == second["quantization_config"]


@pytest.mark.parametrize("config", ["int8_weight_only", "int4_weight_only"])
def test_transformers_has_our_logits(config: str, tmp_path: Path) -> None:
    """With the weights alone quantized: activations that are rounded say nothing of them."""
    from transformers import AutoModelForCausalLM

    save(ONE_OF_EACH["qwen3"], tmp_path / "hf", "bfloat16")
    api.convert(tmp_path / "hf", tmp_path / "quantized", quantize=config)
    api.export(tmp_path / "quantized", tmp_path / "out")
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
        want = model(torch.from_numpy(IDS)).logits.numpy()
    have = np.asarray(forward(tpuconv.load(tmp_path / "quantized", "float32"), IDS, np.ones(IDS.shape, bool)))
    assert np.abs(have - want).max() <= 2e-5 * np.abs(want).max()


def test_types_that_differ_by_module_are_groups(tmp_path: Path) -> None:
    rules = rule(".*attn.*", weight_qtype="int8", act_qtype="int8") + rule(".*mlp.*", weight_qtype="int4", tile_size=32)
    api.export(quantized(tmp_path, rules), tmp_path / "out")
    description = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert description["format"] == "mixed-precision"
    groups = {group["format"]: group for group in description["config_groups"].values()}
    assert set(groups) == {"int-quantized", "pack-quantized"}
    assert groups["pack-quantized"]["targets"] == [
        rf"re:model\.layers\.\d+\.mlp\.{part}_proj$" for part in ("gate", "up", "down")
    ]
    assert description["ignore"] == ["lm_head"]
    ours, theirs = dequantized(tmp_path / "quantized"), decompressed(tmp_path / "out")
    assert not [name for name in ours if not same_bits(ours[name], theirs[name])]


@pytest.mark.parametrize("qtype", ["mxfp4", "mxfp8"])
def test_microscaling_formats(qtype: str, tmp_path: Path) -> None:
    """Scales of groups of 32 are exponents of two."""
    api.export(quantized(tmp_path, rule(".*mlp.*", weight_qtype=qtype, tile_size=32)), tmp_path / "out")
    ours, theirs = dequantized(tmp_path / "quantized"), decompressed(tmp_path / "out")
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not same_bits(ours[name], theirs[name])]


BLOCK = 128


def in_blocks(weight: np.ndarray, size: int = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """Values and scales of a matrix in FP8, by definition: in each block the largest absolute value becomes
    448. Scales are in the dtype of the weight, as Qwix has them."""
    rows, columns = (-(-n // size) for n in weight.shape)
    values = np.empty(weight.shape, ml_dtypes.float8_e4m3fn)
    scales = np.empty((rows, columns), np.float32)
    for i, j in np.ndindex(rows, columns):
        place = (slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size))
        block = weight[place].astype(np.float32)
        scales[i, j] = scale = (np.abs(block).max() / 448).astype(ml_dtypes.bfloat16)
        quotients = (block / scale).astype(ml_dtypes.bfloat16).astype(np.float32)  # as Qwix divides
        values[place] = quotients.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    return values, scales


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"head_dim": 64}, {"head_dim": 128}], ids=str)
def test_fp8_in_blocks_is_that_of_its_definition(changes: dict, tmp_path: Path) -> None:
    """Two heads of 64 elements are in a block. The keys are one head, which is a block of fewer rows."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 1}
    save(replace(ONE_OF_EACH["qwen3"], config=sizes | changes), tmp_path / "hf", "bfloat16")
    api.convert(tmp_path / "hf", tmp_path / "quantized", quantize="fp8_block")
    api.export(tmp_path / "quantized", tmp_path / "out", scheme="fp8")
    source, found = read_tensors(tmp_path / "hf"), read_tensors(tmp_path / "out")
    weights = [name for name in source if name.endswith("_proj.weight")]
    for name in weights:
        values, scales = in_blocks(source[name])
        assert same_bits(found[name], values), name
        assert same_bits(found[f"{name}_scale_inv"], scales), name
    description = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert description["weight_block_size"] == [BLOCK, BLOCK]
    api.convert(tmp_path / "hf", tmp_path / "directly", target="huggingface", quantize="fp8_block", scheme="fp8")
    assert_same(read_tensors(tmp_path / "directly"), found)
    # The same model as ours loads, and as it reads what it wrote.
    api.convert(tmp_path / "out", tmp_path / "again", encoding="keep")
    own, again = (
        np.asarray(forward(tpuconv.load(tmp_path / name, "float32"), IDS, np.ones(IDS.shape, bool)))
        for name in ("quantized", "again")
    )
    assert np.abs(own - again).max() <= 2e-5 * np.abs(own).max()
    api.export(tmp_path / "quantized", tmp_path / "compressed")
    ours, theirs = dequantized(tmp_path / "quantized"), decompressed(tmp_path / "compressed")
    assert ours.keys() == theirs.keys() == set(weights)
    assert not [name for name in ours if not same_bits(ours[name], theirs[name])]


def test_gates_of_linear_attention_stay_plain_in_blocks_of_fp8(tmp_path: Path) -> None:
    """Qwen3-Next has both in one matrix, by heads, as no block of either."""
    sizes = dict.fromkeys(("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"), BLOCK)
    sizes |= dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), BLOCK)
    case = ONE_OF_EACH["qwen3_next"]
    save(replace(case, config={**case.config, **sizes}), tmp_path / "hf", "bfloat16")
    api.convert(tmp_path / "hf", tmp_path / "out", target="huggingface", quantize="fp8_block", scheme="fp8")
    description = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    plain = description["modules_to_not_convert"]
    assert {name.rpartition(".")[2] for name in plain if "linear_attn" in name} == {"in_proj_ba"}


def test_an_export_in_blocks_of_fp8_is_that_of_its_definition(tmp_path: Path) -> None:
    """Axes of 64 and 96 elements, in blocks of 32."""
    ckpt = quantized(tmp_path, rule(".*mlp.*", weight_qtype="float8_e4m3fn", tile_size=32, tile_axes="block"))
    api.export(ckpt, tmp_path / "out", scheme="fp8")
    source, found = read_tensors(tmp_path / "hf"), read_tensors(tmp_path / "out")
    name = "model.layers.0.mlp.down_proj.weight"
    values, scales = in_blocks(source[name], 32)
    assert same_bits(found[name], values)
    assert same_bits(found[f"{name}_scale_inv"], scales)


@pytest.mark.slow
def test_experts_in_blocks_of_fp8_are_read_back(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "head_dim": 128, "moe_intermediate_size": 128, "intermediate_size": 256}
    case = ONE_OF_EACH["qwen3_moe"]
    case = replace(case, config={**case.config, **sizes, "num_attention_heads": 2, "num_key_value_heads": 1})
    save(case, tmp_path / "hf", "bfloat16")
    api.convert(tmp_path / "hf", tmp_path / "quantized", quantize="fp8_block", scan_layers=True)
    api.export(tmp_path / "quantized", tmp_path / "out", scheme="fp8")
    source, found = read_tensors(tmp_path / "hf"), read_tensors(tmp_path / "out")
    experts = [name for name in found if ".experts." in name and name.endswith(".weight")]
    assert experts
    for name in experts:
        values, scales = in_blocks(source[name])
        assert same_bits(found[name], values), name
        assert same_bits(found[f"{name}_scale_inv"], scales), name
    model = tpuconv.load(tmp_path / "quantized", "float32")
    api.convert(tmp_path / "out", tmp_path / "again", encoding="keep")
    own, again = (
        np.asarray(forward(each, IDS, np.ones(IDS.shape, bool)))
        for each in (model, tpuconv.load(tmp_path / "again", "float32"))
    )
    assert np.abs(own - again).max() <= 2e-5 * np.abs(own).max()


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (rule(".*mlp.*", weight_qtype="float8_e4m3fn", tile_size=64, tile_axes="block"), "do not divide axis 0, of 96"),
        (rule(".*mlp.*", weight_qtype="float8_e4m3fn", tile_axes="block"), "needs a tile_size"),
        (rule(".*mlp.*", weight_qtype="mxfp8", tile_size=32, tile_axes="block"), "groups of inputs alone"),
        (
            rule(".*", weight_qtype="int8", act_qtype="int8", tile_size=32, tile_axes="block"),
            "works with weights only",
        ),
    ],
)
def test_blocks_that_do_not_fit_are_refused(rules: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        quantized(tmp_path, rules)


def test_a_layer_of_another_type_is_named_alone(tmp_path: Path) -> None:
    rules = rule("layers/0/.*", weight_qtype="int8", act_qtype="int8") + rule(
        "layers/.*", weight_qtype="int4", tile_size=32
    )
    api.export(quantized(tmp_path, rules), tmp_path / "out")
    ours, theirs = dequantized(tmp_path / "quantized"), decompressed(tmp_path / "out")
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not same_bits(ours[name], theirs[name])]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (rule(".*mlp.*", weight_qtype="nf4", tile_size=32), "are nf4: no format of servers has this"),
        (rule(".*mlp.*", weight_qtype="int2", tile_size=32), "are int2: no format of servers has this"),
        (
            rule(".*mlp.*", weight_qtype="int4", act_qtype="int8", tile_size=32),
            "are int4 with activations in int8: no format of servers has this",
        ),
        (
            rule(".*mlp.*", weight_qtype="int8", act_qtype="int8", tile_size=32),
            "have scales for groups of 32 inputs, which int-quantized does not have",
        ),
        (rule(".*attn/q", weight_qtype="int8", act_qtype="int8"), "are not quantized alike"),
    ],
)
def test_what_no_format_holds_is_refused_with_the_rule(rules: str, message: str, tmp_path: Path) -> None:
    ckpt = quantized(tmp_path, rules)
    with pytest.raises(UsageError) as error:
        api.export(ckpt, tmp_path / "out")
    assert message in error.value.message
    assert "rule" in (error.value.hint or "")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("gpt2", r"which is a matrix \[in, out\], and servers read \[out, in\]"),
        ("gpt_oss", "is not a linear layer's weight"),
        ("jetmoe", "which is a stack of matrices, and servers read one by one"),
    ],
)
def test_matrices_that_no_server_reads_are_refused_by_the_plan(family: str, message: str, hf: Any) -> None:
    with pytest.raises(UsageError, match=message) as error:
        api.plan(hf(ONE_OF_EACH[family], "bfloat16"), target="huggingface", quantize="int8_default")
    assert error.value.hint == "leave out `quantize=`; or change rule 1 of the quantization config"  # no checkpoint
    with pytest.raises(UsageError, match=message) as error:
        api.plan(hf(ONE_OF_EACH[family], "bfloat16"), target="huggingface", quantize="auto:8.5")
    assert "a config without a rule for them" in (error.value.hint or "")


@pytest.mark.parametrize("scheme", ["awq", "fp8"])
def test_a_scheme_without_the_type_is_to_be_left_out(scheme: Any, tmp_path: Path) -> None:
    ckpt = quantized(tmp_path, rule(".*mlp.*", weight_qtype="int8"))
    with pytest.raises(UsageError, match=f"are int8: no format of {scheme} has this") as error:
        api.export(ckpt, tmp_path / "out", scheme=scheme)
    assert error.value.hint == "leave out `scheme=`; or change rule 1 of the quantization config"


# The families whose packaged configs quantize what no server reads, by the reason: experts in one tensor, convolutions
# and gates by head, and matrices [in, out]. JAX computes with them.
STACKS = "aria aria_text granitemoe granitemoehybrid jetmoe step3_text step3p5 step3p7 step4 zaya"
NO_LINEAR_LAYERS = (
    "alice_ai dbrx diffusion_gemma gpt_oss granitemoe_swa hy_v4 hy_v4_vl inkling2 inkling2_loop inkling2_loop_text "
    "inkling2_text inkling_mm_model inkling_text lara_mini minimax_m3_vl_text mistral4 mistral4_text muse_spark "
    "nemo_speechlm qwen3_vl_moe recurrent_gemma"
)
REFUSED = {
    **dict.fromkeys(STACKS.split(), "which is a stack of matrices"),
    **dict.fromkeys(NO_LINEAR_LAYERS.split(), "which is not a linear layer's weight"),
    **dict.fromkeys(["gpt2", "openai-gpt"], r"which is a matrix \[in, out\]"),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(ONE_OF_EACH))
def test_packaged_configs_leave_alone_what_no_server_reads(family: str, tmp_path: Path) -> None:
    ONE_OF_EACH[family].hf_config().save_pretrained(tmp_path / "config")
    config = json.loads((tmp_path / "config" / "config.json").read_text())
    folder = hollow_checkpoint(tmp_path / "hf", config)
    if family not in REFUSED:
        api.plan(folder, target="huggingface", quantize="int8_weight_only")
        return
    with pytest.raises(UsageError, match=REFUSED[family]) as error:
        api.plan(folder, target="huggingface", quantize="int8_weight_only")
    assert re.match(r"layers\.\d+\.(moe|attn)\.", error.value.message)


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_are_packed_as_compressed_tensors_packs_them(bits: int) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    values = np.random.default_rng(0).integers(-(1 << (bits - 1)), 1 << (bits - 1), (5, 21)).astype(np.int8)
    theirs = pack_to_int32(torch.from_numpy(values), bits).numpy()
    assert np.array_equal(pack_words(bits, values), theirs)
