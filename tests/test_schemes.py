"""What servers read besides the usual formats of compressed-tensors: AWQ, FP8 in blocks, NVFP4, gpt-oss' MXFP4.

Each is read by its own library where that runs on a CPU, and by our reader.
"""

import json
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.checkpoints import qwen3_config, random_checkpoint, read_tensors
from helpers.conversions import restore, same_bits
from helpers.families import save
from helpers.quantizing import ONE_OF_EACH
from helpers.schemes import encode, modelopt
from helpers.served import decompressed, dequantized, quantized, rule, to_torch
from tpuconv import api
from tpuconv.encodings.passthrough import FLOAT8, separate_scales
from tpuconv.encodings.schemes import groups
from tpuconv.errors import UnsupportedConfig, UsageError

BF16 = ml_dtypes.bfloat16
INT4 = {"weight_qtype": "int4", "tile_size": 32}
ASYMMETRIC = INT4 | {"weight_calibration_method": "minmax"}
FLOAT8_TILES = {"weight_qtype": "float8_e4m3fn", "tile_size": 32}


def export(ckpt: Path, out: Path, scheme: str | None = None) -> dict[str, np.ndarray]:
    """The weights of an export as our reader has them; values that are exact in config.json too."""
    api.export(ckpt, out, scheme=scheme)
    assert api.verify(out).passed
    api.convert(out, out.with_name("again"), encoding="keep")
    before, after = restore(ckpt), restore(out.with_name("again"))
    for name in before:
        if name.endswith("qvalue"):
            assert np.array_equal(before[name].astype(np.float32), after[name].astype(np.float32)), name
    return dequantized(out.with_name("again"))


def same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not same_bits(ours[name], theirs[name])]


def description(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def awq_decompressed(folder: Path) -> dict[str, np.ndarray]:
    """By compressed-tensors, which converts AWQ to its own format and decompresses that."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.entrypoints.convert import AutoAWQConverter
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    told = description(folder)
    converter = AutoAWQConverter.from_autoawq_config(told)
    tensors = converter.process({name: to_torch(x) for name, x in read_tensors(folder).items()})
    args = QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=told["group_size"])
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    out = {}
    for name in tensors:
        if not name.endswith(".weight_packed"):
            continue
        base = name.removesuffix(".weight_packed")
        state = {part.removeprefix(f"{base}."): x for part, x in tensors.items() if part.startswith(f"{base}.")}
        state["weight_scale"] = state["weight_scale"].to(torch.float32)
        compressor = BaseCompressor.get_value_from_registry("pack-quantized")
        weight = compressor.decompress(state, scheme)["weight"].to(torch.bfloat16)
        out[f"{base}.weight"] = weight.view(torch.int16).numpy().view(BF16)
    return out


@pytest.mark.parametrize("fields", [INT4, ASYMMETRIC], ids=["symmetric", "zero points"])
def test_awq(fields: dict, tmp_path: Path) -> None:
    ckpt = quantized(tmp_path, rule("layers/.*", **fields))
    again = export(ckpt, tmp_path / "out", "awq")
    ours = dequantized(ckpt)
    same(ours, awq_decompressed(tmp_path / "out"))
    same(ours, again)
    assert description(tmp_path / "out") == {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "modules_to_not_convert": ["lm_head"],
    }
    if fields is INT4:
        zeros = [x for name, x in read_tensors(tmp_path / "out").items() if name.endswith("qzeros")]
        assert {word for x in zeros for word in x.view(np.uint32).reshape(-1).tolist()} == {0x88888888}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "llama4_text", "deepseek_v3"])
def test_awq_with_experts(family: str, tmp_path: Path) -> None:
    save(ONE_OF_EACH[family], tmp_path / "hf", "bfloat16")
    api.convert(tmp_path / "hf", tmp_path / "quantized", quantize="int4_weight_only")
    again = export(tmp_path / "quantized", tmp_path / "out", "awq")
    ours = dequantized(tmp_path / "quantized", tmp_path / "out")
    same(ours, awq_decompressed(tmp_path / "out"))
    same(ours, again)


@pytest.mark.parametrize("qtype", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_zero_points_of_compressed_tensors(qtype: str, tmp_path: Path) -> None:
    ckpt = quantized(tmp_path, rule("layers/.*", **ASYMMETRIC | {"weight_qtype": qtype}))
    again, ours = export(ckpt, tmp_path / "out"), dequantized(ckpt)
    same(ours, decompressed(tmp_path / "out"))
    same(ours, again)


def test_fp8_in_blocks(tmp_path: Path) -> None:
    """transformers dequantizes it when it loads it on a CPU."""
    from transformers import AutoModelForCausalLM

    ckpt = quantized(tmp_path, rule("layers/.*", **FLOAT8_TILES))
    again, ours = export(ckpt, tmp_path / "out", "fp8"), dequantized(ckpt)
    same(ours, again)
    assert description(tmp_path / "out")["weight_block_size"] == [1, 32]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    theirs = {name: x.detach().view(torch.int16).numpy().view(BF16) for name, x in model.state_dict().items()}
    same(ours, {name: theirs[name] for name in ours})


def test_kept_weights_in_another_scheme(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "hf", qwen3_config())
    values = encode(tmp_path / "hf", (8, 16))
    api.convert(tmp_path / "hf", tmp_path / "kept", encoding="keep")
    again = export(tmp_path / "kept", tmp_path / "out", "compressed-tensors")
    same(again, decompressed(tmp_path / "out"))
    same(again, {name: values[name] for name in again})
    (group,) = description(tmp_path / "out")["config_groups"].values()
    assert group["weights"]["block_structure"] == [8, 16]


def test_nvfp4(tmp_path: Path) -> None:
    ckpt = quantized(tmp_path, rule(".*mlp.*", weight_qtype="nvfp4", tile_size=16))
    again, ours = export(ckpt, tmp_path / "out"), dequantized(ckpt)
    same(ours, decompressed(tmp_path / "out"))
    same(ours, again)


@pytest.mark.parametrize("divided", [False, True])
def test_scales_of_blocks_and_of_a_tensor_are_found_in_their_products(divided: bool) -> None:
    rng = np.random.default_rng(divided)
    for largest in (126, 119, 70):  # 448, 240, and one in the middle
        scales = rng.integers(0, largest + 1, (16, 8)).astype(np.uint8)
        scales[0, 0] = largest
        scales = scales.view(FLOAT8).astype(np.float32)
        whole = np.float32(rng.uniform(1e-5, 1e-3))
        products = scales / whole if divided else scales * whole
        found = separate_scales(products, divided=divided)
        assert found is not None
        again = found[0].astype(np.float32)
        assert np.array_equal(again / found[1] if divided else again * found[1], products)
    assert separate_scales(np.float32([1, 1.01, 1.02]), divided=divided) is None


@pytest.mark.parametrize("divided", [False, True])
@given(data=st.data())
def test_the_scales_of_blocks_come_back_by_the_scale_of_their_tensor(divided: bool, data: st.DataObject) -> None:
    whole = np.float32(data.draw(st.floats(1, 2, width=32))) * np.float32(2) ** data.draw(st.integers(-60, 60))
    for _ in range(3):  # tensors that share it
        codes = data.draw(st.lists(st.integers(1, 126), min_size=1, max_size=30))
        scales = np.array(codes, np.uint8).view(FLOAT8)
        products = scales.astype("f4") / whole if divided else scales.astype("f4") * whole
        found = separate_scales(products, divided=divided, tensor_scale=float(whole))
        assert found is not None
        assert same_bits(found[0], scales)
        assert same_bits(found[1], np.array([whole]))
    assert separate_scales(products * np.float32(1.01), divided=divided, tensor_scale=float(whole)) is None


def test_kept_nvfp4_comes_back(tmp_path: Path) -> None:
    modelopt("NVFP4", tmp_path / "hf")
    api.convert(tmp_path / "hf", tmp_path / "kept", encoding="keep")
    with pytest.raises(UsageError, match="without the scales of activations and caches that its config"):
        api.export(tmp_path / "kept", tmp_path / "out")
    api.export(tmp_path / "kept", tmp_path / "out", with_skipped=tmp_path / "hf")
    api.convert(tmp_path / "hf", tmp_path / "at-once", encoding="keep", target="huggingface")
    want = read_tensors(tmp_path / "hf")
    assert [name for name in want if name.endswith(("input_scale", "k_scale"))]
    for out in ("out", "at-once"):
        have = read_tensors(tmp_path / out)
        assert want.keys() == have.keys()
        assert not [name for name in have if not same_bits(have[name], want[name])]


def test_experts_of_gpt_oss_are_in_its_own_mxfp4(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    save(ONE_OF_EACH["gpt_oss"], tmp_path / "hf", "bfloat16")
    rules = rule(".*moe/(gate|up|down)", weight_qtype="mxfp4", tile_size=32)
    (tmp_path / "rules.yaml").write_text(f"summary: test\nqwix:\n  rules:\n{rules}gates: none\n")
    api.convert(tmp_path / "hf", tmp_path / "quantized", quantize=tmp_path / "rules.yaml")
    again = export(tmp_path / "quantized", tmp_path / "out")
    ours, stored = dequantized(tmp_path / "quantized", tmp_path / "out"), read_tensors(tmp_path / "out")
    assert description(tmp_path / "out")["quant_method"] == "mxfp4"
    same(ours, again)
    for name, values in ours.items():
        parts = (torch.from_numpy(stored[f"{name}_{part}"].copy()) for part in ("blocks", "scales"))
        theirs = convert_moe_packed_tensors(*parts, dtype=torch.bfloat16)
        assert same_bits(theirs.transpose(1, 2).contiguous().view(torch.int16).numpy().view(BF16), values), name
    api.convert(tmp_path / "hf", tmp_path / "one", target="huggingface", quantize=tmp_path / "rules.yaml")
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "out" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("rules", "scheme", "message"),
    [
        (rule("layers/.*", weight_qtype="int8"), "awq", "are int8: no format of awq has this"),
        (rule("layers/.*", weight_qtype="float8_e4m3fn"), "fp8", "one size of blocks for all"),
        (rule(".*", **INT4), "awq", "lm_head is quantized"),
        (rule("layers/.*", **INT4) + "  scale_dtype: float32\n", "awq", "have scales in float32"),
        (
            rule("layers/0/.*", **INT4) + rule("layers/.*", **INT4 | {"tile_size": 16}),
            "awq",
            "one size of groups for all",
        ),
        (rule("layers/.*", weight_qtype="mxfp4", tile_size=32), "mxfp4", "is not stacked experts"),
    ],
)
def test_what_a_scheme_does_not_hold_is_refused(rules: str, scheme: str, message: str, tmp_path: Path) -> None:
    ckpt = quantized(tmp_path, rules)
    with pytest.raises(UsageError, match=message):
        api.export(ckpt, tmp_path / "out", scheme=scheme)
    assert not (tmp_path / "out").exists()


def test_outputs_that_fill_no_words_of_awq_are_refused(tmp_path: Path) -> None:
    """Readers, ours too, take the outputs to be all that the words hold."""
    random_checkpoint(tmp_path / "hf", qwen3_config(hidden_size=64, intermediate_size=100, head_dim=32))
    (tmp_path / "rules.yaml").write_text("qwix:\n  rules:\n" + rule(r"layers/\d+/mlp/(gate|up)", **INT4))
    api.convert(tmp_path / "hf", tmp_path / "quantized", quantize=tmp_path / "rules.yaml")
    with pytest.raises(UsageError, match="have 100 outputs, and a word of awq holds 8"):
        api.export(tmp_path / "quantized", tmp_path / "out", scheme="awq")


def test_a_scheme_needs_quantized_parameters(tmp_path: Path) -> None:
    save(ONE_OF_EACH["qwen3"], tmp_path / "hf", "bfloat16")
    with pytest.raises(UsageError, match="no quantized parameters"):
        api.convert(tmp_path / "hf", tmp_path / "out", target="huggingface", scheme="awq")
    with pytest.raises(UsageError, match="does not write formats of servers"):
        api.convert(tmp_path / "hf", tmp_path / "out", scheme="awq")


def test_a_description_of_many_modules_is_fast():
    """NVFP4 releases of models with 200,000 matrices name hundreds that are not encoded."""
    names = [f"model.layers.{layer}.{part}*" for layer in range(100) for part in ("self_attn", "router", "mlp")]
    (group,) = groups({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": names})
    modules = [f"model.layers.{layer}.moe.experts.{e}.up_proj" for layer in range(60) for e in range(128)]
    began = time.process_time()
    assert all(map(group.takes, modules))
    assert time.process_time() - began < 2  # 10 times as long name by name
    assert not any(group.takes(f"model.layers.{layer}.self_attn.q_proj") for layer in range(100))
    (whole,) = groups({"quant_method": "modelopt", "quant_algo": "NVFP4"})
    assert whole.takes("lm_head")


WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"a": {"weights": WEIGHTS}},
}


@pytest.mark.parametrize(
    "description",
    [
        {"quant_method": "fp8", "fmt": "e5m2"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [128, 128], "moe_quant_algo": "W4A16"},
        {"quant_method": "mxfp8", "scale_fmt": "e4m3"},
        {"quant_method": "modelopt", "quantization": "FP8"},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        {**PACKED, "format": "marlin-24"},
        {**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}},
        {**PACKED, "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_has_fp16_weight": True},
    ],
    ids=lambda description: "-".join(map(str, description.values()))[:60],
)
def test_encodings_that_are_refused_say_what_to_do(description):
    with pytest.raises(UnsupportedConfig, match="is not implemented") as e:
        groups(description)
    assert "release" in e.value.hint
