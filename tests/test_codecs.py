"""Encoded tensors against their definitions: every quantized value, every scheme, parts of tensors, and checkpoints."""

import json
import re
from contextlib import closing

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.checkpoints import qwen3_config, random_checkpoint, read_tensors, write_checkpoint
from helpers.conversions import assert_same, convert, flatten, plan_for, restore
from helpers.schemes import (
    BF16,
    E8M0,
    FP4,
    FP8,
    MODELOPT,
    awq,
    bitsandbytes,
    compressed_config,
    encode,
    fp4_bitsandbytes,
    fp4_experts,
    fp4_groups,
    fp8_beside_fp4,
    fp8_bf16_scales,
    fp8_blocks,
    fp8_channel,
    fp8_config,
    fp8_e8m0_scales,
    fp8_modelopt_blocks,
    fp8_modelopt_channel,
    fp8_named_otherwise,
    fp8_small_blocks,
    fp8_stacked,
    fp8_tensor,
    gptq,
    gptq_2_bits_by_channel,
    gptq_3_bits,
    gptq_any_order,
    gptq_v2,
    in_words,
    int4_asymmetric,
    int4_groups,
    int4_short_rows,
    int4_short_rows_in_groups,
    int8_asymmetric_channel,
    int8_packed,
    int8_short_rows,
    int8_tensor,
    llm_int8,
    modelopt,
    modelopt_awq,
    modelopt_w4a8,
    mxfp8,
    mxfp8_modelopt,
    nf4_nested,
    nvfp4_awq,
    nvfp4_compressed,
    nvfp4_modelopt,
)
from helpers.schemes_packed import PACKED
from tpuconv.convert.plan.types import Options
from tpuconv.encodings.bitsandbytes import bitsandbytes_groups
from tpuconv.encodings.reshaped import shaped
from tpuconv.encodings.scales import check_scales
from tpuconv.encodings.schemes import schemes
from tpuconv.encodings.tensors import decode_names, unused_reason
from tpuconv.errors import MappingError, SourceError, UnsupportedConfig, UsageError
from tpuconv.models.logits import whole_texts
from tpuconv.sources.headers import DTYPES
from tpuconv.sources.hub import fetch_config
from tpuconv.sources.source import open_source
from tpuconv.verify.reference import reference

# Each gives the stored tensors of a weight "w", config.json's description, and the values in float32 by the definition.


SCHEMES = [
    *(
        fp8_blocks,
        fp8_bf16_scales,
        fp8_e8m0_scales,
        fp8_small_blocks,
        fp8_beside_fp4,
        fp4_experts,
        fp8_channel,
        fp8_tensor,
        fp8_named_otherwise,
        fp8_stacked,
    ),
    *(int4_groups, int8_packed, int8_tensor, fp4_groups),
    *(int4_short_rows, int4_short_rows_in_groups, int8_short_rows),
    *(fp8_modelopt_channel, fp8_modelopt_blocks, nvfp4_modelopt, nvfp4_compressed),
    *(awq, gptq, gptq_v2, gptq_any_order, gptq_3_bits, gptq_2_bits_by_channel),
    *(int4_asymmetric, int8_asymmetric_channel, mxfp8_modelopt, mxfp8),
    *(modelopt_awq, nvfp4_awq, bitsandbytes, nf4_nested, llm_int8, *PACKED),
    *(pytest.param(scheme, marks=pytest.mark.slow) for scheme in (modelopt_w4a8, fp4_bitsandbytes)),
]


def one_tensor(source, config, values, **how):
    """The weight "w", the only tensor that is used."""
    tensors, faults = decode_names(source.tensors, config, **how)
    assert not faults
    assert all(unused_reason(name) for name in tensors if name != "w.weight")
    return shaped(tensors, {"w.weight": values.shape})["w.weight"]


@pytest.mark.parametrize("scheme", SCHEMES)
@given(data=st.data())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_part_of_an_encoded_tensor_is_decoded_to_the_bit(scheme, data, tmp_path):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows, columns = data.draw(st.integers(1, 23)), data.draw(st.integers(2, 70))
    stored, config, values = scheme(rng, rows, columns)
    source = open_source(write_checkpoint(tmp_path, {"quantization_config": config}, stored))
    tensor = one_tensor(source, config, values)
    assert tensor.shape == values.shape
    columns = values.shape[-1]
    rows = values.size // columns
    if data.draw(st.booleans()):  # whole rows, or a part of one: what a box of a tensor is made of
        first, last = sorted(data.draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
        start, stop = first * columns, last * columns
    else:
        row = data.draw(st.integers(0, rows - 1)) * columns
        start, stop = sorted(data.draw(st.tuples(st.integers(0, columns // 2), st.integers(0, columns // 2))))
        start, stop = row + 2 * start, row + 2 * stop
    for dtype in (BF16, np.dtype("f4")):
        out = np.empty(stop - start, dtype)
        with closing(source.open()) as reader:
            tensor.read(reader, start, np.empty(tensor.values.nbytes, np.uint8), out)
        want = values.reshape(-1)[start:stop].astype(dtype)
        np.testing.assert_array_equal(out.view(f"u{dtype.itemsize}"), want.view(f"u{dtype.itemsize}"))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scale_that_is_none_is_named_with_its_place(scheme, tmp_path):
    stored, config, values = scheme(np.random.default_rng(0), 8, 64)
    source = open_source(write_checkpoint(tmp_path, {"quantization_config": config}, stored))
    used = {info.name for info in one_tensor(source, config, values).stored}
    ends = ("_scale", "_inv", "_scales", ".scales", ".scale", "_scale_2", ".absmax", "_absmax", ".SCB")
    for name in (name for name in used if name.endswith(ends)):
        scales = stored[name]
        if name.endswith(".absmax") and scales.dtype == np.uint8:  # numbers of a table
            continue
        for value in (np.nan, np.inf) if schemes(config)[0].any_sign else (0, -1, np.nan, np.inf):
            bad = scales.copy()
            if scales.dtype == np.uint8:  # powers of two, of which one is no number
                bad.reshape(-1)[-1] = 255
            elif scales.dtype == E8M0:
                bad.view(np.uint8).reshape(-1)[-1] = 255
            else:
                bad.reshape(-1)[-1] = value
            folder = write_checkpoint(tmp_path, {"quantization_config": config}, {**stored, name: bad})
            source = open_source(folder)
            last = [n - 1 for n in bad.shape]
            out, raw = np.empty(values.size, "f4"), np.empty(values.nbytes, np.uint8)
            with closing(source.open()) as reader:
                with pytest.raises(SourceError, match=re.escape(f"{name}{last} is ") + ".* not a valid scale"):
                    one_tensor(source, config, values).read(reader, 0, raw, out)
                with np.errstate(invalid="ignore", divide="ignore"):
                    one_tensor(source, config, values, any_scales=True).read(reader, 0, raw, out)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scales_of_another_dtype_are_the_same_numbers_or_named(scheme, tmp_path):
    """Bytes may be exponents, numbers in FP8 or integers: only those that the scheme has are read."""
    stored, config, values = scheme(np.random.default_rng(0), 8, 64)
    source = open_source(write_checkpoint(tmp_path, {"quantization_config": config}, stored))
    tensor = one_tensor(source, config, values)
    for info in filter(None, (tensor.scales, tensor.tensor_scale, tensor.column_scales)):
        if info.name.endswith("absmax"):
            continue
        exponents, outs = info.dtype in ("U8", "F8_E8M0"), {}
        for name, dtype in DTYPES.items():
            twos = np.full(info.shape, 128 if name == "U8" and exponents else 2).astype(dtype)
            changed = {"quantization_config": config}, {**stored, info.name: twos}
            source = open_source(write_checkpoint(tmp_path, *changed))
            tensors, faults = decode_names(source.tensors, config)
            if faults:
                assert f"{info.name}  {name} {list(info.shape)} (1 tensor) should be " in "\n".join(faults)
                continue
            assert name == info.dtype or dtype.kind not in "iub" or exponents, name
            outs[name] = np.empty(values.size, "f4")
            with closing(source.open()) as reader:
                raw = np.empty(values.nbytes, np.uint8)
                shaped(tensors, {"w.weight": values.shape})["w.weight"].read(reader, 0, raw, outs[name])
        assert not [name for name, out in outs.items() if not np.array_equal(out, outs[info.dtype])]
        if info.dtype == "U8":
            assert set(outs) == {"U8", "F8_E8M0"}


def packed_by_channel(rng, rows, columns, bits):
    """By the definition of compressed-tensors: symmetric, with a scale for each row."""
    codes, scales = rng.integers(0, 1 << bits, (rows, columns)), rng.uniform(0.01, 1, (rows, 1)).astype(BF16)
    stored = {"weight_packed": in_words(codes, bits, 1), "weight_scale": scales}
    return stored, (codes - (1 << (bits - 1))).astype("f4") * scales.astype("f4")


@pytest.mark.parametrize("first", ["attn", "mlp"])
def test_a_matrix_that_two_groups_fit_belongs_to_the_one_that_names_it(first, tmp_path):
    """Rows of int8 in words have the shape of rows of int4, twice as long."""
    rng, bits = np.random.default_rng(0), {"attn": 8, "mlp": 4}
    described, stored, values = {}, {}, {}
    for module in sorted(bits, key=lambda module: module != first):
        weights = {"type": "int", "num_bits": bits[module], "strategy": "channel", "symmetric": True}
        described[f"group_{len(described)}"] = {"targets": [f"re:.*{module}$"], "weights": weights}
        parts, values[f"{module}.weight"] = packed_by_channel(rng, 6, 32, bits[module])
        stored |= {f"{module}.{part}": x for part, x in parts.items()}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": described}
    source = open_source(write_checkpoint(tmp_path, {"quantization_config": config}, stored))
    tensors, faults = decode_names(source.tensors, config)
    assert not faults
    for name, want in values.items():
        out = np.empty(want.size, "f4")
        with closing(source.open()) as reader:
            tensors[name].read(reader, 0, np.empty(want.nbytes, np.uint8), out)
        np.testing.assert_array_equal(out.reshape(tensors[name].shape), want)


def test_scales_that_are_none_are_counted():
    check_scales("w.scale", np.ones((2, 3), BF16))
    with pytest.raises(SourceError, match=r"w\.scale\[0, 2\] is -1, which is not a valid scale; 2 of 6 are invalid"):
        check_scales("w.scale", np.array([[1, 1, -1], [1, np.nan, 1]], "f4"))


def test_every_code_has_its_value():
    e4m3 = schemes(fp8_config(1, 1))[0].table
    codes = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(e4m3, codes.view(torch.float8_e4m3fn).to(torch.float32).numpy())
    int4 = schemes(compressed_config(type="int", num_bits=4, strategy="group", group_size=32, symmetric=True))[0].table
    assert list(int4) == list(range(-8, 8))
    assert list(schemes({"quant_method": "mxfp4"})[0].table) == list(FP4)
    int8, packed_int8 = schemes(compressed_config(type="int", num_bits=8, strategy="channel"))
    assert list(int8.table) == [*range(128), *range(-128, 0)]
    assert list(packed_int8.table) == list(range(-128, 128))


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 10, 2, 16)).astype(np.uint8)
    scales = rng.integers(100, 150, (3, 10, 2)).astype(np.uint8)
    config = {"quant_method": "mxfp4"}
    source = open_source(
        write_checkpoint(tmp_path, {}, {"experts.gate_up_proj_blocks": blocks, "experts.gate_up_proj_scales": scales})
    )
    tensors, faults = decode_names(source.tensors, config)
    assert not faults
    tensor = tensors["experts.gate_up_proj"]
    assert tensor.shape == (3, 10, 64)
    out = np.empty(tensor.size, BF16)
    with closing(source.open()) as reader:
        tensor.read(reader, 0, np.empty(4096, np.uint8), out)
    theirs = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.bfloat16)
    assert theirs.shape == (3, 64, 10)  # they transpose as well, which is the table's business with us
    ours = out.reshape(tensor.shape).transpose(0, 2, 1).astype("f4")
    np.testing.assert_array_equal(ours, theirs.float().numpy())


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_checkpoint_in_fp8_is_converted_as_its_values_would_be(dtype, scan_layers, tmp_path, small_cuts):
    folder = random_checkpoint(tmp_path / "hf", qwen3_config())
    values = encode(folder, (8, 12), shards=2)
    write_checkpoint(tmp_path / "plain", qwen3_config(), values)
    (folder / "model.safetensors").unlink()
    options = Options(dtype="auto", scan_layers=scan_layers)
    plan = convert(folder, tmp_path / "out", options)
    convert(tmp_path / "plain", tmp_path / "reference", options)
    assert_same(restore(tmp_path / "out"), restore(tmp_path / "reference"))
    assert plan.mapped == len(plan.source.tensors)
    if dtype == "float32":
        convert(folder, tmp_path / "float32", Options(dtype="float32", scan_layers=scan_layers))
        rounded = {name: x.astype(BF16) for name, x in restore(tmp_path / "float32").items()}
        assert_same(rounded, restore(tmp_path / "out"))


@pytest.mark.parametrize("algorithm", MODELOPT)
def test_a_release_of_modelopt_is_described_beside_its_config(algorithm, tmp_path):
    values = modelopt(algorithm, tmp_path / "hf")
    write_checkpoint(tmp_path / "plain", qwen3_config(), values)
    plan = convert(tmp_path / "hf", tmp_path / "out")
    convert(tmp_path / "plain", tmp_path / "reference")
    assert_same(restore(tmp_path / "out"), restore(tmp_path / "reference"))
    skipped = {skip.pattern: skip.reason for skip in plan.skipped}
    assert "activations" in skipped["model.layers.{0...2}.mlp.down_proj.input_scale"]
    assert "activations" in skipped["model.layers.0.self_attn.k_proj.k_scale"]
    assert schemes(fetch_config(str(tmp_path / "hf" / "config.json"))["quantization_config"])


def test_transformers_is_not_shown_codes_for_weights(tmp_path):
    modelopt("FP8", tmp_path)
    with pytest.raises(UsageError, match=r"described in hf_quant_config\.json"):
        reference(tmp_path, whole_texts([[1, 2]]), "float32")


FAULTS = {
    "a missing scale": (lambda t: t.pop("model.layers.1.mlp.up_proj.weight_scale_inv"), "has no weight_scale_inv"),
    "an orphan scale": (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "has no values that it belongs to"),
    "a scale of another shape": (
        lambda t: t.update({"model.layers.1.mlp.up_proj.weight_scale_inv": np.ones((3, 3), "f4")}),
        "should be [10, 3] by the block size",
    ),
}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.pop("w.weight_scale_2"), "has no weight_scale_2"),
        (lambda t: t.update({"w.weight_scale_2": np.ones(3, "f4")}), "should be one number"),
        (lambda t: t.pop("w.weight"), "w.weight_scale_2  F32"),
    ],
)
def test_the_scale_of_a_tensor_belongs_to_it(spoil, message, tmp_path):
    stored, config, _ = nvfp4_modelopt(np.random.default_rng(0), 3, 40)
    spoil(stored)
    source = open_source(write_checkpoint(tmp_path, {}, stored))
    assert message in "\n".join(decode_names(source.tensors, config)[1])


@pytest.mark.parametrize("fault", FAULTS)
def test_scales_and_values_that_do_not_belong_together_are_named(fault, tmp_path):
    spoil, message = FAULTS[fault]
    folder = random_checkpoint(tmp_path / "hf", qwen3_config())
    encode(folder, (8, 12))
    tensors = read_tensors(folder)
    spoil(tensors)
    write_checkpoint(folder, json.loads((folder / "config.json").read_text()), tensors)
    with pytest.raises(MappingError) as info:
        plan_for(folder).check()
    assert message in str(info.value)
    assert "model.layers.1.mlp.up_proj" in str(info.value)


def test_the_key_of_older_releases_is_read(tmp_path):
    stored, config, values = int4_groups(np.random.default_rng(0), 3, 40)
    source = open_source(write_checkpoint(tmp_path, {"compression_config": config}, stored))
    assert decode_names(source.tensors, source.encoding)[0]["w.weight"].shape == values.shape


def test_fp8_without_a_description_is_not_cast(tmp_path):
    folder = random_checkpoint(tmp_path / "hf", qwen3_config())
    tensors = read_tensors(folder)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(FP8)
    write_checkpoint(folder, qwen3_config(), tensors)
    with pytest.raises(MappingError, match="does not say how it is encoded"):
        plan_for(folder).check()


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 5},
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        {"quant_method": "gptq", "bits": 4, "is_marlin_format": True},
        {"quant_method": "gptq", "bits": 4, "group_size": 0},
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*up_proj": {"bits": 6}}},
        {"quant_method": "awq", "version": "gemv"},
        {"quant_method": "awq", "bits": 8},
        {"quant_method": "bitsandbytes"},
        {"load_in_4bit": True, "load_in_8bit": True},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "int4"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "float64"},
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_has_fp16_weight": True},
        {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ", "group_size": 32},
        {"quant_method": "mxfp8", "weight_block_size": [1, 16]},
        {"quant_method": "mxfp8", "moe_quant_algo": "NVFP4"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
        {"quant_method": "modelopt", "quantization": {"quant_algo": "W4A8_AWQ", "has_zero_point": True}},
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": -1},
        {"quant_method": "modelopt", "quantization": "FP8"},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W8A8_SQ_PER_CHANNEL"}},
        },
        {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "compressed-tensors"},
        compressed_config(type="int", num_bits=3, strategy="group", group_size=32, symmetric=True),
        compressed_config(type="int", num_bits=4, strategy="tensor", symmetric=False),
        compressed_config(type="float", num_bits=8, strategy="channel", symmetric=False),
        compressed_config(type="int", num_bits=4, strategy="group", group_size=32, actorder="group"),
        compressed_config(type="int", num_bits=4, strategy="group", group_size=32, actorder="GROUP"),
        compressed_config(type="int", num_bits=4, strategy="group", group_size=32, actorder=True),
        compressed_config(type="float", num_bits=8, strategy="tensor_group", group_size=16),
        compressed_config(type="float", num_bits=8, strategy="block", block_structure="128"),
        compressed_config(type="float", num_bits=8, strategy="tensor") | {"format": "marlin-24"},
        compressed_config(type="float", num_bits=8, strategy="tensor") | {"transform_config": {"config_groups": {}}},
        compressed_config(type="float", num_bits=8, strategy="tensor")
        | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        {},
    ],
    ids=str,
)
def test_unknown_encodings_are_refused(config, tmp_path):
    folder = random_checkpoint(tmp_path / "hf", qwen3_config())
    (folder / "config.json").write_text(json.dumps(qwen3_config(quantization_config=config)))
    with pytest.raises(UnsupportedConfig) as info:
        plan_for(folder)
    assert info.value.exit_code == 5
    assert "without config_groups" not in info.value.message or "remove its quantization_config" in (
        info.value.hint or ""
    )


def test_orbax_still_reads_what_was_decoded(tmp_path):
    from orbax.checkpoint import v1

    folder = random_checkpoint(tmp_path / "hf", qwen3_config())
    values = encode(folder, (8, 12))
    convert(folder, tmp_path / "out")
    arrays = dict(flatten(v1.load(tmp_path / "out" / "params")))
    np.testing.assert_array_equal(
        arrays["layers.0.mlp.up.kernel"].astype("f4"), values["model.layers.0.mlp.up_proj.weight"].T.astype("f4")
    )


@pytest.mark.parametrize("scales", [(4,), (4, 1)])
@pytest.mark.parametrize(
    "quantization",
    [{"quant_method": "fp8", "weight_block_size": None}, {"quant_method": "modelopt", "quant_algo": "FP8"}],
    ids=["fp8", "modelopt"],
)
def test_stacked_matrices_have_no_scale_each(quantization, scales, tmp_path):
    """They would be taken for the scales of rows."""
    values = np.ones((4, 16, 8), ml_dtypes.float8_e4m3fn)
    tensors = {"w.weight": values, "w.weight_scale": np.ones(scales, "f4")}
    source = open_source(write_checkpoint(tmp_path, qwen3_config(quantization_config=quantization), tensors))
    found, faults = decode_names(source.tensors, source.encoding)
    assert faults or "w.weight" not in found


def test_a_short_last_block_is_no_smaller_block():
    """Kept NF4 has blocks of one size: that of the values divided by the scales is another where the last is short."""
    (scheme, *_) = bitsandbytes_groups({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})[0].schemes
    assert scheme.has_blocks_of_rows((8, 64), (8,))
    assert not scheme.has_blocks_of_rows((6, 16), (2,))
    assert not scheme.has_blocks_of_rows((64, 96), (2,))


def test_a_format_that_is_null_is_the_only_one(tmp_path):
    folder = random_checkpoint(tmp_path / "hf", qwen3_config())
    encode(folder, (8, 12))
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"]["fmt"] = None
    (folder / "config.json").write_text(json.dumps(raw))
    plan_for(folder).check()
