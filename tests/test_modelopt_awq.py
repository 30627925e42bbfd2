"""ModelOpt's AWQ, with activations in 16 bits and in FP8: every quantized value, what ModelOpt writes, what is kept.

`data/modelopt` was written by ModelOpt 0.47.0 on a CPU (`W4A8_AWQ_BETA_CFG`, `export_hf_checkpoint`): a Qwen3 of one
layer with random weights; `original.safetensors` has the matrices before that whose inputs have scales of their own.
"""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from helpers.checkpoints import qwen3_config, random_checkpoint, read_tensors, write_checkpoint
from helpers.conversions import assert_same, convert, plan_for, restore, same_bits
from helpers.encoded import assert_came_back, dequantized
from helpers.schemes import BF16, modelopt_awq, modelopt_w4a8, nvfp4_modelopt
from tpuconv.convert.plan.types import Options
from tpuconv.encodings.tensors import decode_names
from tpuconv.encodings.words import BYTE_DTYPE, Words
from tpuconv.errors import MappingError
from tpuconv.sources.source import open_source

WRITTEN = Path(__file__).parent / "data" / "modelopt"
GROUP = 128


def by_definition(stored: dict[str, np.ndarray]) -> np.ndarray:
    """(value * scale of the group) * scale of the input, each product rounded to float32."""
    packed = stored["weight"]
    codes = np.stack([packed & 15, packed >> 4], 1).reshape(-1, packed.shape[1]).astype(int)
    values = np.where(codes > 7, codes - 16, codes).astype("f4") * np.repeat(stored["weight_scale"], GROUP, 1)
    return values * stored["pre_quant_scale"].astype("f4") if "pre_quant_scale" in stored else values


@pytest.mark.parametrize("dtype", [BF16, np.dtype("f4")], ids=str)
def test_every_value_with_every_scale(dtype, tmp_path):
    scales = np.array([1, 0.37, 6e-8, 0.0123, 3e4], "f4")
    inputs = np.resize(np.array([1, 0.3, 7, 1e-5], BF16), 5 * GROUP)
    codes = np.arange(16, dtype=np.uint8)[:, None] + np.zeros((1, 5 * GROUP), np.uint8)
    stored = {
        "weight": codes[0::2] | codes[1::2] << 4,
        "weight_scale": np.resize(scales, (16, 5)),
        "pre_quant_scale": inputs,
    }
    config = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}
    named = {f"w.{name}": x for name, x in stored.items()}
    source = open_source(write_checkpoint(tmp_path, {"quantization_config": config}, named))
    tensor = decode_names(source.tensors, config)[0]["w.weight"]
    out = np.empty(tensor.size, dtype)
    with closing(source.open()) as reader:
        tensor.read(reader, 0, np.empty(tensor.values.nbytes, np.uint8), out)
    assert same_bits(out.reshape(tensor.shape), by_definition(stored).astype(dtype))


def test_bytes_are_packed_as_they_were():
    values = np.random.default_rng(0).integers(0, 16, (64, 96)).astype(np.uint8)
    words = Words(4, 0, dtype=BYTE_DTYPE)
    packed = words.pack(values)
    assert same_bits(packed, values[0::2] | values[1::2] << 4)
    np.testing.assert_array_equal(words.unpack(packed), values)


def test_what_modelopt_writes(tmp_path):
    folder, plain = WRITTEN / "w4a8", {}
    stored, original = read_tensors(folder), load_file(WRITTEN / "original.safetensors")
    for name, x in stored.items():
        base = name.removesuffix(".weight")
        if not base.endswith("_proj"):
            if base.endswith(("norm", "embed_tokens")):
                plain[name] = x
            continue
        values = by_definition({p.removeprefix(f"{base}."): y for p, y in stored.items() if p.startswith(f"{base}.")})
        plain[name] = values.astype(BF16)
        if name in original:  # others were multiplied into the norm before them
            noise = values - original[name].astype("f4")
            assert 10 * np.log10(np.square(original[name].astype("f4")).sum() / np.square(noise).sum()) > 18, name
    config = {k: v for k, v in json.loads((folder / "config.json").read_text()).items() if k != "quantization_config"}
    write_checkpoint(tmp_path / "plain", config, plain)
    plan = convert(folder, tmp_path / "out")
    convert(tmp_path / "plain", tmp_path / "reference")
    assert_same(restore(tmp_path / "out"), restore(tmp_path / "reference"))
    skipped = {skip.pattern.rpartition(".")[2] for skip in plan.skipped}
    assert skipped == {"input_scale", "weight_scale_2"}
    with pytest.raises(
        MappingError, match=r"o_proj.weight  cannot stay encoded: each of its columns has a scale of its"
    ):
        plan_for(folder, Options(encoding="keep")).check()


@pytest.mark.slow
@pytest.mark.parametrize("encoder", [modelopt_awq, modelopt_w4a8])
def test_without_scales_of_inputs_it_is_kept(encoder, tmp_path, small_cuts):
    rng, tensors = np.random.default_rng(0), {}
    for name, x in read_tensors(random_checkpoint(tmp_path / "hf", qwen3_config())).items():
        if name.endswith("_proj.weight"):
            stored, config, _ = encoder(rng, *x.shape)
            del stored["w.pre_quant_scale"]
            tensors |= {part.replace("w", name.removesuffix(".weight"), 1): y for part, y in stored.items()}
        else:
            tensors[name] = x
    write_checkpoint(tmp_path / "hf", qwen3_config(quantization_config=config), tensors)
    plan = convert(tmp_path / "hf", tmp_path / "kept", Options(encoding="keep"))
    convert(tmp_path / "hf", tmp_path / "out")
    arrays = restore(tmp_path / "kept")
    assert {str(x.dtype) for name, x in arrays.items() if name.endswith("qvalue")} == {"int4"}
    assert_same(dequantized(arrays), restore(tmp_path / "out"))
    assert_came_back(tmp_path / "hf", tmp_path / "kept", plan)


FAULTS = {
    "scales of other inputs": (
        lambda t: t.update({"w.pre_quant_scale": t["w.pre_quant_scale"][1:]}),
        "w.pre_quant_scale  BF16 [63] (1 tensor) should be one of F16, BF16, F32, [64]",
    ),
    "scales of inputs in integers": (
        lambda t: t.update({"w.pre_quant_scale": np.ones(64, "i4")}),
        "w.pre_quant_scale  I32 [64] (1 tensor) should be one of F16, BF16, F32, [64]",
    ),
    "scales of inputs alone": (lambda t: t.pop("w.weight"), "has no values that it belongs to"),
    "scales of other groups": (
        lambda t: t.update({"w.weight_scale": t["w.weight_scale"][:, :3].copy()}),
        "w.weight_scale  F32 [8, 3] (1 tensor) should be [8, 4]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_parts_that_do_not_belong_together_are_named(fault, tmp_path):
    spoil, message = FAULTS[fault]
    stored, config, _ = modelopt_awq(np.random.default_rng(0), 8, 64)
    spoil(stored)
    source = open_source(write_checkpoint(tmp_path, {}, stored))
    assert message in "\n".join(decode_names(source.tensors, config)[1])


def test_beside_another_algorithm_with_two_scales(tmp_path):
    rng = np.random.default_rng(0)
    int4, _, _ = modelopt_w4a8(rng, 8, 64)
    nvfp4, _, _ = nvfp4_modelopt(rng, 8, 64)
    layers = {"w": {"quant_algo": "W4A8_AWQ", "group_size": 16}, "v": {"quant_algo": "NVFP4", "group_size": 16}}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    stored = int4 | {name.replace("w", "v", 1): x for name, x in nvfp4.items()}
    tensors, faults = decode_names(open_source(write_checkpoint(tmp_path, {}, stored)).tensors, config)
    assert not faults
    titles = {name: tensor.scheme and tensor.scheme.title for name, tensor in tensors.items()}
    assert titles == {
        "w.weight": "ModelOpt W4A8_AWQ in groups of 16",
        "v.weight": "ModelOpt NVFP4",
        "w.weight_scale_2": None,
    }
