"""AWQ and GPTQ against their definitions: every quantized value with every zero point, what auto-round writes, and what
is refused.

`data/auto-round` was written by auto-round 0.16.1 on a CPU: a Qwen3 of one layer with random weights in groups of 32,
in its formats auto_gptq and auto_awq, and with 2 bits in its own packing; `original.safetensors` has the matrices
before that.
"""

import json
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from helpers import encoded as encodings
from helpers.checkpoints import qwen3_config, random_checkpoint, read_tensors, write_checkpoint
from helpers.conversions import assert_same, convert, plan_for, restore, same_bits
from helpers.encoded import dequantized, exported
from helpers.schemes import (
    AWQ_ORDER,
    BF16,
    awq,
    gptq,
    gptq_2_bits_by_channel,
    gptq_3_bits,
    gptq_any_order,
    in_words,
    modelopt_awq,
    modelopt_w4a8,
)
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.convert.plan.types import Options
from tpuconv.encodings.schemes import groups, schemes
from tpuconv.encodings.tensors import decode_names
from tpuconv.encodings.words import Words
from tpuconv.errors import MappingError, SourceError, UnsupportedConfig
from tpuconv.sources.source import open_source

AUTO_ROUND = Path(__file__).parent / "data" / "auto-round"
SCALES = np.array([1, -0.37, 6e-8, 6.1e-5, 0.0123, 65504, 0], np.float16)


def values_of(tmp_path: Path, stored: dict[str, np.ndarray], config: dict, dtype: np.dtype) -> np.ndarray:
    source = open_source(write_checkpoint(tmp_path, {"quantization_config": config}, stored))
    tensors, faults = decode_names(source.tensors, config)
    assert not faults
    (tensor,) = tensors.values()
    out = np.empty(tensor.size, dtype)
    with closing(source.open()) as reader:
        tensor.read(reader, 0, np.empty(tensor.values.nbytes, np.uint8), out)
    return out.reshape(tensor.shape)


@pytest.mark.parametrize("dtype", [BF16, np.dtype("f4")], ids=str)
@pytest.mark.parametrize("form", ["awq", "gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_value_with_every_zero_point_and_scale(bits, form, dtype, tmp_path):
    if form == "awq" and bits != 4:
        return
    n = 1 << bits
    rows = max(n, 32)  # one group of all values
    codes = np.arange(rows)[:, None] % n + np.zeros((1, 32 * n), int)
    zeros, scales = np.arange(32 * n)[None] % n, np.resize(np.repeat(SCALES, n), (1, 32 * n))
    want = (codes - zeros).astype("f4") * scales.astype("f4")
    config = {"quant_method": form[:4].rstrip("_"), "bits": bits, "group_size": rows, "sym": False}
    if form == "awq":
        packed = {"w.qweight": in_words(codes, 4, 1, AWQ_ORDER), "w.qzeros": in_words(zeros, 4, 1, AWQ_ORDER)}
    else:
        kept = (zeros - (form == "gptq")) % n
        packed = {"w.qweight": in_words(codes, bits, 0), "w.qzeros": in_words(kept, bits, 1)}
        config["checkpoint_format"] = form
    assert same_bits(values_of(tmp_path, packed | {"w.scales": scales}, config, dtype), want.astype(dtype))


@pytest.mark.parametrize(
    ("stated", "shift"),
    [
        ({"format": "gptq_v2"}, 0),
        ({"format": "GPTQ"}, 1),
        ({"format": "gptq", "checkpoint_format": "gptq_v2"}, 0),
        ({"format": "gptq_v2", "checkpoint_format": None}, 0),
    ],
    ids=str,
)
def test_the_format_of_gptq_has_two_keys(stated, shift, tmp_path):
    """transformers reads both, and the older one first."""
    codes, zeros = np.arange(32)[:, None] % 16 + np.zeros((1, 32), int), np.arange(32)[None] % 15 + 1
    packed = {"w.qweight": in_words(codes, 4, 0), "w.qzeros": in_words(zeros - shift, 4, 1)}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, **stated}
    got = values_of(tmp_path, packed | {"w.scales": np.ones((1, 32), np.float16)}, config, np.dtype("f4"))
    assert np.array_equal(got, codes - zeros)


@pytest.mark.parametrize(
    "stated",
    [{"format": "gemv"}, {"version": "gemv"}, {"checkpoint_format": "gemv_fast"}, {"backend": "llm-awq"}],
    ids=str,
)
def test_other_packings_of_awq_are_refused_by_every_key_that_names_them(stated):
    with pytest.raises(UnsupportedConfig, match=f"AWQ with version='{next(iter(stated.values()))}' and bits=4"):
        groups({"quant_method": "awq", "bits": 4, "group_size": 16, **stated})
    assert groups({"quant_method": "awq", "bits": 4, "group_size": 16, "format": "gemm", "backend": "auto"})


@pytest.mark.parametrize(
    ("form", "file", "content"),
    [
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": 8, "desc_act": False, "sym": True}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 16, "zero_point": True, "version": "GEMM"}),
        ("awq", "quantize_config.json", {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True}),
        ("gptq", "quantization_config.json", {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": True}),
    ],
)
def test_older_releases_say_beside_config_json_how_they_are_encoded(form, file, content, tmp_path):
    random_checkpoint(tmp_path / "plain", qwen3_config(), "float32")
    encodings.encoded(tmp_path / "plain", tmp_path / "whole", {"awq": encodings.awq, "gptq": encodings.gptq}[form])
    older = Path(shutil.copytree(tmp_path / "whole", tmp_path / "older"))
    config = json.loads((older / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == form
    (older / "config.json").write_text(json.dumps(config))
    (older / file).write_text(json.dumps(content))
    api.convert(tmp_path / "whole", tmp_path / "a")
    api.convert(older, tmp_path / "b")
    arrays = [{name: x["xxh3"] for name, x in read_manifest(tmp_path / out).raw["arrays"].items()} for out in "ab"]
    assert arrays[0] == arrays[1]
    api.export(tmp_path / "b", tmp_path / "back")
    assert not (tmp_path / "back" / file).exists()  # what is written is not encoded any more


@pytest.mark.parametrize("form", ["gptq", "awq"])
@pytest.mark.parametrize("target", ["tpuconv", "huggingface"])
def test_biases_of_zeros_are_left_out_and_others_are_an_error(form, target, tmp_path):
    """Programs write them for matrices that the model has without biases."""
    random_checkpoint(tmp_path / "plain", qwen3_config(), "float32")
    encodings.encoded(tmp_path / "plain", tmp_path / "without", {"awq": encodings.awq, "gptq": encodings.gptq}[form])
    config, tensors = json.loads((tmp_path / "without/config.json").read_text()), read_tensors(tmp_path / "without")
    for name in [name for name in tensors if name.endswith(".scales")]:
        tensors[name.replace(".scales", ".bias")] = np.zeros(tensors[name].shape[1], np.float16)
    write_checkpoint(tmp_path / "with", config, tensors, shards=2)
    done = [api.convert(tmp_path / name, tmp_path / f"{name}-out", target=target) for name in ("without", "with")]
    (skip,) = {each.reason for each in done[1].skipped} - {each.reason for each in done[0].skipped}
    assert "all must be 0" in skip
    facts = [json.loads((each.out / "tpuconv.json").read_text()) for each in done]
    if target == "tpuconv":
        assert [x["xxh3"] for x in facts[0]["arrays"].values()] == [x["xxh3"] for x in facts[1]["arrays"].values()]
    else:
        assert facts[0]["files"]["model.safetensors"] == facts[1]["files"]["model.safetensors"]
    tensors["model.layers.1.mlp.down_proj.bias"][7] = -1e-7
    write_checkpoint(tmp_path / "wrong", config, tensors)
    with pytest.raises(SourceError, match=r"layers\.1\.mlp\.down_proj\.bias has values other than 0"):
        api.convert(tmp_path / "wrong", tmp_path / "wrong-out", target=target)


def test_a_file_of_another_quantization_is_no_description(tmp_path):
    random_checkpoint(tmp_path / "hf", qwen3_config(), "float32")
    (tmp_path / "hf/quantize_config.json").write_text('{"per_channel": false, "reduce_range": false}')  # of ONNX
    assert open_source(tmp_path / "hf").encoding is None


@pytest.mark.parametrize("words", [Words(2, 0), Words(3, 1), Words(4, 1, AWQ_ORDER), Words(4, 0), Words(8, 1)], ids=str)
def test_words_are_packed_as_they_were(words):
    values = np.random.default_rng(0).integers(0, words.mask + 1, (64, 96)).astype(np.uint8)
    packed = words.pack(values)
    np.testing.assert_array_equal(packed, in_words(values, words.bits, words.axis, words.order))
    np.testing.assert_array_equal(words.unpack(packed), values)
    some = values[:5, :7]  # the last words are filled up with zeros
    np.testing.assert_array_equal(words.unpack(words.pack(some))[:5, :7], some)


def by_definition(stored: dict[str, np.ndarray], is_awq: bool) -> np.ndarray:
    words, zeros = (
        stored[part].view(np.uint32)[..., None] >> np.arange(0, 32, 4) & 15 for part in ("qweight", "qzeros")
    )
    if is_awq:  # [in, out / 8, 8], where nibble i is output AWQ_ORDER[i]
        codes, zeros = (x[..., np.argsort(AWQ_ORDER)].reshape(len(x), -1) for x in (words, zeros))
    else:  # [in / 8, out, 8]
        codes, zeros = words.swapaxes(1, 2).reshape(-1, words.shape[1]), zeros.reshape(len(zeros), -1) + 1
    rows = np.arange(len(codes)) // 32
    return ((codes.astype("f4") - zeros[rows]) * stored["scales"].astype("f4")[rows]).T


@pytest.mark.parametrize(
    "form", ["awq", *(pytest.param(form, marks=pytest.mark.slow) for form in ("gptq", "gptq_symmetric"))]
)
def test_what_auto_round_writes(form, tmp_path):
    original, stored = load_file(AUTO_ROUND / "original.safetensors"), read_tensors(AUTO_ROUND / form)
    plain = {name: x for name, x in stored.items() if "_proj." not in name}
    for name, x in original.items():
        base = name.removesuffix("weight")
        parts = {part.removeprefix(base): y for part, y in stored.items() if part.startswith(base)}
        values = by_definition(parts, form == "awq")
        noise = values - x.astype("f4")
        assert 10 * np.log10(np.square(x.astype("f4")).sum() / np.square(noise).sum()) > 19, name
        plain[name] = values.astype(BF16)
    config = json.loads((AUTO_ROUND / form / "config.json").read_text())
    write_checkpoint(tmp_path / "plain", {k: v for k, v in config.items() if k != "quantization_config"}, plain)
    for folder, out in ((AUTO_ROUND / form, "out"), (tmp_path / "plain", "reference")):
        convert(folder, tmp_path / out)
    want = restore(tmp_path / "reference")
    assert_same(restore(tmp_path / "out"), want)
    convert(AUTO_ROUND / form, tmp_path / "kept", Options(encoding="keep"))
    arrays = restore(tmp_path / "kept")
    assert any(name.endswith("zero_point") for name in arrays) == (form != "gptq_symmetric")
    assert {str(x.dtype) for name, x in arrays.items() if name.endswith("array.scale")} == {"float32"}
    assert_same(dequantized(arrays), want)
    back = exported(tmp_path / "kept", tmp_path / "back")
    assert back.keys() == stored.keys()
    assert not [name for name in stored if not same_bits(back[name], stored[name])]


NATIVE = {
    "gptq": {"packing_format": "auto_round:auto_gptq", "quant_method": "auto-round"},
    "gptq_symmetric": {"backend": "auto_round:gptq:exllamav2", "quant_method": "intel/auto-round"},
    "awq": {"packing_format": "auto_round:auto_awq", "block_name_to_quantize": "model.layers"},
}


@pytest.mark.parametrize(
    "form", ["gptq", *(pytest.param(x, marks=pytest.mark.slow) for x in ("gptq_symmetric", "awq"))]
)
def test_the_format_of_auto_round(form, tmp_path):
    folder = Path(shutil.copytree(AUTO_ROUND / form, tmp_path / "native"))
    config = json.loads((folder / "config.json").read_text())
    described = {key: config["quantization_config"][key] for key in ("bits", "data_type", "group_size", "sym")}
    config["quantization_config"] = described | {"quant_method": "auto-round"} | NATIVE[form]
    (folder / "config.json").write_text(json.dumps(config))
    for name, encoding in (("decoded", "dequantize"), ("kept", "keep")):
        for source in (folder, AUTO_ROUND / form):
            api.convert(source, tmp_path / f"{source.name}-{name}", encoding=encoding)
        assert_same(restore(tmp_path / f"native-{name}"), restore(tmp_path / f"{form}-{name}"))
    api.export(tmp_path / "native-kept", tmp_path / "back")
    back, stored = read_tensors(tmp_path / "back"), read_tensors(folder)
    assert back.keys() == stored.keys()
    assert not [name for name in stored if not same_bits(back[name], stored[name])]
    written = json.loads((tmp_path / "back/config.json").read_text())["quantization_config"]
    assert written == config["quantization_config"]


def test_the_packing_of_auto_round(tmp_path):
    """Of 2 bits: 16 to a word, from the lowest on, with zero points as they are."""
    original, stored = load_file(AUTO_ROUND / "original.safetensors"), read_tensors(AUTO_ROUND / "native")
    api.convert(AUTO_ROUND / "native", tmp_path / "out", target="huggingface", dtype="float32")
    found = read_tensors(tmp_path / "out")
    shifts = np.arange(0, 32, 2)
    for name, x in original.items():
        words, zeros, scales = (stored[f"{name.removesuffix('weight')}{x}"] for x in ("qweight", "qzeros", "scales"))
        codes = (words[:, None, :] >> shifts[:, None] & 3).reshape(-1, words.shape[1])
        offsets = (zeros[..., None] >> shifts & 3).reshape(len(zeros), -1)
        rows = np.arange(len(codes)) // 32
        want = ((codes - offsets[rows]).astype("f4") * scales.astype("f4")[rows]).T
        np.testing.assert_array_equal(found[name], want)
        assert np.corrcoef(want.ravel(), x.astype("f4").ravel())[0, 1] > 0.9, name


def test_modules_that_auto_round_describes_apart():
    description = {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "block_name_to_quantize": "model.language_model.layers",
        "extra_config": {
            "model.language_model.layers.0.mlp.up_proj": {"bits": 8},
            r".*down_proj.*": {"bits": 2, "group_size": 32},
            r".*mlp\.gate$": {"bits": 16, "data_type": "float"},
            "model.layers.0.mlp.down_proj": {"bits": 8},
        },
    }
    modules = [f"model.layers.{i}.mlp.{x}" for i in (0, 1) for x in ("up_proj", "down_proj", "gate")]
    modules += ["model.visual.blocks.0.up_proj", "lm_head"]

    def titles(changes):
        known = groups(description | changes)
        takers = [next((group for group in known if group.takes(module)), None) for module in modules]
        return [group and group.schemes[0].title.removeprefix("GPTQ ") for group in takers]

    by_8, by_4, by_2 = (f"{bits} bits in groups of {size}" for bits, size in ((8, 128), (4, 128), (2, 32)))
    assert titles({}) == [by_8, by_8, None, by_4, by_2, None, None, None]
    head = {"extra_config": {"lm_head": {"bits": 8}}, "block_name_to_quantize": None}
    assert titles(head | {"modules_to_not_convert": ["visual", ".mlp.gate"]}) == [by_4, by_4, None] * 2 + [None, by_8]


@pytest.mark.parametrize(
    "changes",
    [
        {"packing_format": "auto_round:llm_compressor", "data_type": "mx_fp"},
        {"packing_format": "auto_round:fp8_static"},
        {"act_bits": 8},
        {"rotation_config": {"block_size": 32}},
    ],
    ids=["MX", "FP8", "inputs", "rotations"],
)
def test_what_auto_round_writes_otherwise_is_refused(changes):
    with pytest.raises(UnsupportedConfig, match="auto-round with packing_format") as e:
        groups({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4} | changes)
    assert "auto_round:auto_awq" in e.value.hint


FAULTS = {
    "no zero points": (awq, lambda t: t.pop("w.qzeros"), "has no qzeros"),
    "no scales": (awq, lambda t: t.pop("w.scales"), "has no scales"),
    "zero points alone": (awq, lambda t: t.pop("w.qweight"), "has no values that it belongs to"),
    "zero points of other groups": (
        gptq,
        lambda t: t.update({"w.qzeros": t["w.qzeros"][:1]}),
        r"w.qzeros  I32 [1, 4] (1 tensor) should be I32 [4, 4]",
    ),
    "scales of other groups": (gptq, lambda t: t.update({"w.scales": t["w.scales"][:1]}), "should be [4, 32]"),
    "scales in integers": (awq, lambda t: t.update({"w.scales": t["w.scales"].astype("i2")}), "should be one of F16"),
    "no order": (gptq_any_order, lambda t: t.pop("w.g_idx"), "has no g_idx"),
    "a short order": (gptq_any_order, lambda t: t.update({"w.g_idx": t["w.g_idx"][1:]}), "should be I32 [64]"),
    "a word too many": (
        gptq_3_bits,
        lambda t: t.update({"w.qweight": t["w.qweight"][[*range(6), 5]]}),
        "w.qweight  I32 [7, 32] (1 tensor) should be [6, 32]: 32 values fill 3 words",
    ),
    "no words": (
        gptq_2_bits_by_channel,
        lambda t: t.update({"w.qweight": t["w.qweight"][:0]}),
        "w.qweight  I32 [0, 32] (1 tensor) has no values that it belongs to",
    ),
    "the plain weight too": (
        gptq,
        lambda t: t.update({"w.weight": np.ones((32, 64), np.float16)}),
        "w.weight  F16 [32, 64] (1 tensor) is the weight that qweight beside it holds: remove one of the two",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_parts_that_do_not_belong_together_are_named(fault, tmp_path):
    form, spoil, message = FAULTS[fault]
    stored, config, _ = form(np.random.default_rng(0), 64, 32)
    spoil(stored)
    source = open_source(write_checkpoint(tmp_path, {}, stored))
    assert message in "\n".join(decode_names(source.tensors, config)[1])


@pytest.mark.parametrize(
    ("form", "part"), [(gptq, "g_idx"), (modelopt_awq, "pre_quant_scale")], ids=["groups", "scales of inputs"]
)
def test_a_part_that_only_other_layers_have_is_named(form, part, tmp_path):
    """A matrix without it would be taken for one whose groups are in order, or whose inputs have no scales."""
    stored, config, _ = form(np.random.default_rng(0), 64, 32)
    layers = {name.replace("w", f"layers.{i}.w", 1): x for i in range(3) for name, x in stored.items()}
    del layers[f"layers.1.w.{part}"]
    source = open_source(write_checkpoint(tmp_path, {}, layers))
    (fault,) = decode_names(source.tensors, config)[1]
    assert fault.startswith("layers.1.w.")
    assert fault.endswith(f"has no {part}, and others of its kind have one")
    kept = {name: x for name, x in layers.items() if not name.endswith(part)}  # none of them has it
    assert not decode_names(open_source(write_checkpoint(tmp_path, {}, kept)).tensors, config)[1]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
def test_symmetric_zero_points_of_the_other_format_are_named(form, bits, tmp_path):
    """Each weight would be off by a scale."""
    stored, config, _ = gptq(np.random.default_rng(0), 64, 32, bits=bits, stored_as=form)
    middle = np.full(stored["w.scales"].shape, 1 << (bits - 1))
    config |= {"sym": True}
    other = {"gptq": "gptq_v2", "gptq_v2": "gptq"}[form]
    stored["w.qzeros"] = in_words(middle - (form == "gptq"), bits, 1)
    values_of(tmp_path, stored, config, BF16)
    with pytest.raises(SourceError, match=r"w\.qzeros is \d+ everywhere by checkpoint_format") as e:
        values_of(tmp_path, stored, config | {"checkpoint_format": other}, BF16)
    assert f"in the format '{form}'" in e.value.hint
    values_of(
        tmp_path, stored, config | {"checkpoint_format": other, "sym": False}, BF16
    )  # which no format contradicts


def test_scales_of_groups_of_another_size_are_named(tmp_path):
    """Where config.json does not say the size, it is the one that fits most weights, short ones too."""
    layers, values = {}, {}
    for i, columns in enumerate((64, 64, 16, 48)):
        stored, config, values[f"layers.{i}.w.weight"] = modelopt_w4a8(np.random.default_rng(i), 8, columns)
        layers |= {name.replace("w", f"layers.{i}.w", 1): x for name, x in stored.items()}
    tensors, faults = decode_names(open_source(write_checkpoint(tmp_path, {}, layers)).tensors, config)
    assert not faults
    assert {tensor.scheme.title for tensor in tensors.values() if tensor.scheme} == {
        "ModelOpt W4A8_AWQ in groups of 16"
    }
    assert {name: x.shape for name, x in values.items()} == {name: tensors[name].shape for name in values}
    layers["layers.1.w.weight_scale"] = np.ascontiguousarray(layers["layers.1.w.weight_scale"][:, :2])
    (fault,) = decode_names(open_source(write_checkpoint(tmp_path, {}, layers)).tensors, config)[1]
    assert fault.startswith("layers.1.w.weight  ")
    assert "is ModelOpt W4A8_AWQ in groups of 32 by its scales, unlike most weights" in fault


def test_a_group_that_does_not_exist_is_named(tmp_path):
    stored, config, _ = gptq_any_order(np.random.default_rng(0), 64, 32)
    stored["w.g_idx"][5] = 4
    with pytest.raises(SourceError, match=r"w\.g_idx\[5\] is 4, of 4 groups"):
        values_of(tmp_path, stored, config, BF16)


def encoded_mlp(folder: Path, changes: dict, spoil=lambda t: None, **how) -> dict[str, np.ndarray]:
    """A checkpoint whose `up_proj` are in GPTQ with random values; those values."""
    rng, tensors, values = np.random.default_rng(0), {}, {}
    for name, x in read_tensors(random_checkpoint(folder, qwen3_config(hidden_size=64, intermediate_size=96))).items():
        if not name.endswith("up_proj.weight"):
            tensors[name] = values[name] = x
            continue
        stored, config, own = gptq(rng, x.shape[1], x.shape[0], **how)
        spoil(stored)
        tensors |= {part.replace("w", name.removesuffix(".weight"), 1): y for part, y in stored.items()}
        values[name] = np.ascontiguousarray(own.T).astype(BF16)
    config = qwen3_config(hidden_size=64, intermediate_size=96, quantization_config=config | changes)
    write_checkpoint(folder, config, tensors)
    return values


@pytest.mark.parametrize("scan_layers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_groups_in_any_order_are_dequantized_and_not_kept(scan_layers, tmp_path, small_cuts):
    values = encoded_mlp(tmp_path / "hf", {}, ordered=True)
    write_checkpoint(tmp_path / "plain", qwen3_config(hidden_size=64, intermediate_size=96), values)
    for name in ("hf", "plain"):
        convert(tmp_path / name, tmp_path / f"{name}-orbax", Options(scan_layers=scan_layers))
    assert_same(restore(tmp_path / "hf-orbax"), restore(tmp_path / "plain-orbax"))
    with pytest.raises(MappingError, match=r"up_proj.weight  cannot stay encoded: its groups are in any order"):
        plan_for(tmp_path / "hf", Options(encoding="keep")).check()


@pytest.mark.slow
def test_what_contradicts_the_description_is_not_kept(tmp_path):
    encoded_mlp(tmp_path / "zeros", {"sym": True})
    with pytest.raises(SourceError, match=r"up_proj.qzeros does not hold zero points in the middle"):
        convert(tmp_path / "zeros", tmp_path / "out", Options(encoding="keep"))
    encoded_mlp(tmp_path / "order", {"desc_act": False}, ordered=True)
    with pytest.raises(SourceError, match=r"up_proj.g_idx does not hold groups in order"):
        convert(tmp_path / "order", tmp_path / "other", Options(encoding="keep"))


@pytest.mark.slow
def test_modules_with_bits_of_their_own(tmp_path):
    """The tables of values tell which they are."""
    dynamic = {r"+:.*\.up_proj": {"bits": 8}, r"-:.*\.down_proj": {}}
    values = encoded_mlp(tmp_path / "hf", {"bits": 4, "dynamic": dynamic}, bits=8)
    write_checkpoint(tmp_path / "plain", qwen3_config(hidden_size=64, intermediate_size=96), values)
    for name in ("hf", "plain"):
        convert(tmp_path / name, tmp_path / f"{name}-orbax")
    assert_same(restore(tmp_path / "hf-orbax"), restore(tmp_path / "plain-orbax"))
    up, rest = groups({"quant_method": "gptq", "bits": 4, "dynamic": dynamic})
    assert [up.takes(f"model.layers.0.mlp.{x}_proj") for x in ("up", "gate", "down")] == [True, False, False]
    assert [rest.takes(f"model.layers.0.mlp.{x}_proj") for x in ("up", "gate", "down")] == [True, True, False]


def test_which_modules_a_description_names():
    (group,) = groups({"quant_method": "awq", "modules_to_not_convert": ["mlp.gate"]})
    assert [group.takes(f"layers.0.{x}") for x in ("mlp.gate", "mlp.experts.0.up_proj")] == [False, True]
    inside = [["self_attn.q_proj"], ["mlp.up_proj"]]
    (group,) = groups({"quant_method": "gptq", "modules_in_block_to_quantize": inside, "lm_head": True})
    names = ("layers.0.self_attn.q_proj", "layers.0.mlp.up_proj", "layers.0.mlp.down_proj", "lm_head")
    assert [group.takes(name) for name in names] == [True, True, False, True]
    assert not groups({"quant_method": "gptq"})[0].takes("lm_head")
    minimax = {"quant_method": "fp8", "weight_block_size": [128, 128], "ignored_layers": ["layers.0.mlp"]}
    assert [groups(minimax)[0].takes(f"layers.{i}.mlp") for i in (0, 1)] == [False, True]


def test_titles_tell_schemes_apart():
    titles = {
        schemes({"quant_method": "gptq", "bits": bits, "group_size": size, "sym": sym, "desc_act": order})[0].title
        for bits in (4, 8)
        for size in (-1, 128)
        for sym in (True, False)
        for order in (True, False)
    }
    assert len(titles) == 12  # with one group there is but one order
