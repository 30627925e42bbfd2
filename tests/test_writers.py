"""Checkpoints by the libraries that write the released ones, and what those libraries make of them."""

import json
import re
import warnings
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tpuconv
from helpers.buckets import in_memory
from helpers.checkpoints import read_tensors, write_checkpoint, write_safetensors
from helpers.conversions import assert_same, convert, plan_for, restore, same_bits
from helpers.encoded import GPT_OSS, assert_came_back, dequantized, exported, mxfp4, quantized
from helpers.families import BY_ID, CASES, Case, hf_model, save, save_pretrained
from helpers.logits import forward
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.convert.plan import sizes
from tpuconv.convert.plan.types import Options
from tpuconv.encodings.reshaped import shaped, stated_shapes
from tpuconv.encodings.tensors import decode_names
from tpuconv.errors import MappingError
from tpuconv.sources.source import open_source

IDS = np.random.default_rng(0).integers(3, 101, (2, 11))


def values_of(folder: Path, dtype: str) -> dict[str, np.ndarray]:
    """Every tensor as a table would see it, in one read."""
    source = open_source(folder)
    tensors, faults = decode_names(source.tensors, source.encoding)
    assert not faults
    out = {}
    with closing(source.open()) as reader:
        tensors = shaped(tensors, stated_shapes(tensors, reader))
        for name, tensor in tensors.items():
            if tensor.scheme is not None:
                out[name] = np.empty(tensor.size, dtype)
                tensor.read(reader, 0, np.empty(4 * tensor.size + 64, np.uint8), out[name])
                out[name] = out[name].reshape(tensor.shape)
    return out


def assert_logits(ckpt: Path, theirs: Any) -> None:
    with torch.no_grad():
        want = theirs(torch.from_numpy(IDS)).logits.numpy()
    have = np.asarray(forward(tpuconv.load(ckpt, "float32"), IDS, np.ones(IDS.shape, bool)))
    assert np.abs(have - want).max() <= 2e-5 * np.abs(want).max()
    assert (have.argmax(-1) == want.argmax(-1)).all()


# -- transformers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in CASES if case.traits.renamed_by_transformers], ids=str)
def test_what_transformers_saves_under_names_of_its_own_is_read(case, tmp_path):
    """A model that was trained further and saved by transformers, whose names releases do not have."""
    saved = save_pretrained(case, tmp_path / "saved")
    released = save(case, tmp_path / "released")
    assert read_tensors(saved).keys() != read_tensors(released).keys()
    for folder in (saved, released):
        convert(folder, tmp_path / f"{folder.name}-ckpt")
    assert_same(restore(tmp_path / "saved-ckpt"), restore(tmp_path / "released-ckpt"))
    have, want = exported(tmp_path / "saved-ckpt", tmp_path / "export"), read_tensors(saved)
    assert_same(have, {name: want[name] for name in have})


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("case", [case for case in CASES if case.traits.recut_by_transformers], ids=str)
def test_what_transformers_saves_cut_at_other_rows_is_read(case, dtype, tmp_path, monkeypatch):
    """A model that was trained further and saved by transformers, which cuts what it loaded as one tensor in equal
    parts. Slabs are smaller than tensors, and begin and end in any of the parts; a bucket is read by ranges."""
    monkeypatch.setattr(sizes, "SLAB_BYTES", 2000)
    monkeypatch.setattr(sizes, "CHUNK_BYTES", 1000)
    saved, released = save_pretrained(case, tmp_path / "saved"), save(case, tmp_path / "released")
    shapes = [{name: x.shape for name, x in read_tensors(folder).items()} for folder in (saved, released)]
    assert shapes[0] != shapes[1]
    store = in_memory(monkeypatch).store
    for path in saved.iterdir():
        store.put(f"src/{path.name}", path.read_bytes())
    (tmp_path / "workspace").mkdir()
    workspace = tmp_path / "workspace"
    api.convert("gs://bkt/src", tmp_path / "streamed-ckpt", dtype=dtype, workspace=workspace, text_only=True)
    plan = convert(saved, tmp_path / "saved-ckpt", Options(dtype=dtype))
    assert plan.mapped + sum(skip.count for skip in plan.skipped) == len(plan.source.tensors)
    convert(released, tmp_path / "released-ckpt", Options(dtype=dtype))
    want = restore(tmp_path / "released-ckpt")
    assert_same(restore(tmp_path / "saved-ckpt"), want)
    assert_same(restore(tmp_path / "streamed-ckpt"), want)
    have, want = (exported(tmp_path / f"{x}-ckpt", tmp_path / f"{x}-export") for x in ("saved", "released"))
    assert {x.shape for x in have.values()} == {x.shape for x in want.values()}
    assert all(same_bits(have[name], want[name]) for name in have.keys() & want.keys())


def test_tensors_of_wrong_sizes_are_no_cut_at_other_rows(tmp_path):
    """Parts that lack a row, are wider, or are no matrices are refused as any tensor of a wrong shape."""
    case = BY_ID["molmo2-plain"]
    saved = save_pretrained(case, tmp_path / "saved")
    tensors, name = read_tensors(saved), "model.transformer.wte.embedding"
    for wrong in (tensors[name][1:], np.concatenate([tensors[name]] * 2, 1), np.float32(1).reshape(())):
        write_safetensors(saved / "model.safetensors", tensors | {name: wrong})
        with pytest.raises(MappingError, match="do not match") as error:
            plan_for(saved).check()
        assert any(name in detail for detail in error.value.details)


# -- compressed-tensors -----------------------------------------------------------------------------------------------


FP8 = {"num_bits": 8, "type": "float"}
MX = {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
KINDS: dict[str, dict[str, Any]] = {
    "fp8-tensor": {"strategy": "tensor", **FP8},
    "fp8-channel": {"strategy": "channel", **FP8},
    "fp8-block": {"strategy": "block", "block_structure": [20, 8], **FP8},  # partial ones
    "mxfp8": {**MX, **FP8},
    "mxfp4": {**MX, "num_bits": 4, "type": "float"},
    "int4-group": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8},
    "int4-channel": {"num_bits": 4, "type": "int", "strategy": "channel"},
    "int8-group": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 16},
    "int8-channel": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
}
ACTIVATIONS = {  # what these releases do with activations, which decides how weights are stored
    "fp8-tensor": {**FP8, "strategy": "tensor", "dynamic": False},
    "int8-channel": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
    "nvfp4": {**KINDS["nvfp4"], "dynamic": "local"},
}


def scheme(kind: str, targets: list[str] | None = None) -> Any:
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="pip install compressed-tensors")
    activations = ACTIVATIONS.get(kind)
    return quantization.QuantizationScheme(
        targets=targets or ["Linear"],
        weights=quantization.QuantizationArgs(**(KINDS | KINDS_OF_ODD)[kind]),
        input_activations=activations and quantization.QuantizationArgs(**activations),
    )


def ranges(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest of each block, as an observer would have seen them."""
    rows, columns = weight.shape
    if args.strategy == "tensor":
        block = [rows, columns]
    elif args.strategy == "channel":
        block = [1, columns]
    else:
        block = args.block_structure or [1, args.group_size]
    padded = torch.nn.functional.pad(weight, (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(0, (-1, block[0])).unflatten(-1, (-1, block[1]))
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    return (low.reshape(1), high.reshape(1)) if args.strategy == "tensor" else (low, high)


def write_compressed(case: Case, groups: dict[str, Any], folder: Path) -> Path:
    """As llm-compressor does it: schemes, scales from what was observed, compression, `save_pretrained`."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    model = hf_model(case).to(torch.bfloat16)
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in model.modules():
        if own := getattr(module, "quantization_scheme", None):
            observed, whole = ranges(module.weight.data, own.weights), None
            if hasattr(module, "weight_global_scale"):
                whole = generate_gparam(observed[0].amin(), observed[1].amax())
                module.weight_global_scale.data = whole
            scales, zeros = calculate_qparams(*observed, own.weights, global_scale=whole)
            module.weight_scale.data = scales.to(module.weight_scale.dtype)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data = zeros.to(module.weight_zero_point.dtype)
            for name in ("input_scale", "input_global_scale"):
                if hasattr(module, name):
                    getattr(module, name).data.fill_(0.25)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder


def decompressed(folder: Path, groups: dict[str, Any]) -> dict[str, np.ndarray]:
    """What the library's own decompression gives for every weight, in bfloat16."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format

    tensors = {name: _to_torch(x) for name, x in read_tensors(folder).items()}
    out = {}
    for name in tensors:
        if name.endswith(".weight_scale"):
            base = name.removesuffix(".weight_scale")
            own = next(group for group in groups.values() if _is_target(base, group))
            state = {part.removeprefix(f"{base}."): x for part, x in tensors.items() if part.startswith(f"{base}.")}
            kind = BaseCompressor.get_value_from_registry(infer_module_format(torch.nn.Linear, own).value)
            out[f"{base}.weight"] = kind.decompress(state, own)["weight"].to(torch.bfloat16)
    return {name: x.view(torch.int16).numpy().view("u2") for name, x in out.items()}


def _is_target(base: str, group: Any) -> bool:
    return any(t == "Linear" or re.match(t.removeprefix("re:"), base) for t in group.targets)


def _to_torch(x: np.ndarray) -> torch.Tensor:
    kinds = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
    if x.dtype.name in kinds:
        return torch.from_numpy(x.view(f"i{x.itemsize}").copy()).view(kinds[x.dtype.name])
    return torch.from_numpy(x.copy())


def read_by_transformers(folder: Path, **changes: Any) -> Any:
    """In float32, from weights in bfloat16, and with the weights alone quantized: activations that are rounded say
    nothing of them."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You passed `quantization_config`")
        how = changes.get("quantization_config", CompressedTensorsConfig(dequantize=True))
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=how).eval()


WIDE = Case("llama-wide", "llama", "llama", {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96})


ODD_SIZES = {"hidden_size": 60, "num_attention_heads": 6, "intermediate_size": 90}
ODD = Case("llama-odd", "llama", "llama", ODD_SIZES)
"""60 and 90 inputs do not fill words of eight integers, nor 90 those of four."""
KINDS_OF_ODD = {
    "int4-groups-of-6": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 6},
    "int4-asymmetric": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 6, "symmetric": False},
}


@pytest.mark.parametrize(
    ("kind", "case"),
    [*((kind, WIDE) for kind in KINDS), *((kind, ODD) for kind in ("int4-channel", *KINDS_OF_ODD))],
    ids=str,
)
def test_what_compressed_tensors_writes_is_read_as_it_reads_it(kind: str, case: Case, tmp_path: Path) -> None:
    groups = {"group_0": scheme(kind)}
    folder = write_compressed(case, groups, tmp_path / "hf")
    theirs, ours = decompressed(folder, groups), values_of(folder, "bfloat16")
    assert len(theirs) == 7 * case.hf_config().num_hidden_layers
    assert theirs.keys() == ours.keys()
    assert not [name for name in theirs if not np.array_equal(ours[name].view("u2"), theirs[name])]
    plan = convert(folder, tmp_path / "plain")
    assert {skip.reason.partition(",")[0] for skip in plan.skipped} <= {"of quantized activations"}
    assert bool(plan.skipped) == (kind in ("fp8-tensor", "nvfp4"))
    assert_logits(tmp_path / "plain", read_by_transformers(folder))
    kept = convert(folder, tmp_path / "kept", Options(encoding="keep"))
    have, want = dequantized(restore(tmp_path / "kept")), restore(tmp_path / "plain")
    assert not [name for name in want if not same_bits(have[name], want[name])]
    assert_came_back(folder, tmp_path / "kept", kept)


def test_mxfp4_of_a_release_is_kept_by_a_rule_that_asks_for_it(tmp_path: Path) -> None:
    folder = write_compressed(WIDE, {"group_0": scheme("mxfp4")}, tmp_path / "hf")
    quantized(
        folder,
        tmp_path / "out",
        "qwix: {rules: [{module_path: 'layers/.*/mlp/.*', weight_qtype: mxfp4, tile_size: 32}]}",
    )
    convert(folder, tmp_path / "kept", Options(encoding="keep"))
    convert(folder, tmp_path / "plain")
    have, kept, plain = (restore(tmp_path / name) for name in ("out", "kept", "plain"))
    facts = read_manifest(tmp_path / "out").quantization["parameters"]
    assert len(facts) == 3 * WIDE.hf_config().num_hidden_layers
    assert all("kept" in own for own in facts.values())
    assert not [n for n in have if not same_bits(have[n], (kept if ".mlp." in n else plain)[n])]


EXPERTS = Case(
    "deepseek_v3-divisible",
    "deepseek_v3",
    "deepseek_v3",
    {**BY_ID["deepseek_v3-groups"].config, "num_hidden_layers": 2, "first_k_dense_replace": 1}
    | {"moe_intermediate_size": 24, "kv_lora_rank": 32, "q_lora_rank": 32},
)


def test_groups_of_their_own_for_attention_and_experts(tmp_path: Path) -> None:
    """As Kimi K2.5: INT4 experts among matrices in FP8, and here two kinds of these. The library compresses what
    `save_pretrained` wrote, expert by expert."""
    groups = {
        "group_0": scheme("int4-group", targets=[r"re:.*mlp\.experts\.\d+\.\w+_proj$"]),
        "group_1": scheme("fp8-channel", targets=[r"re:.*(self_attn|shared_experts)\.\w+$"]),
        "group_2": scheme("fp8-block", targets=[r"re:.*mlp\.(gate|up|down)_proj$"]),
    }
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.utils import calculate_qparams

    plain = save(EXPERTS, tmp_path / "bf16", "bfloat16")
    tensors: dict[str, np.ndarray] = {}
    for name, x in read_tensors(plain).items():
        base = name.removesuffix(".weight")
        own = next((g for g in groups.values() if _is_target(base, g)), None) if x.ndim == 2 else None
        if own is None:
            tensors[name] = x
            continue
        weight = _to_torch(x)
        own.format = infer_module_format(torch.nn.Linear, own)
        scales, _ = calculate_qparams(*ranges(weight, own.weights), own.weights)
        state = {"weight": weight, "weight_scale": scales}
        for part, y in BaseCompressor.get_value_from_registry(own.format.value).compress(state, own).items():
            tensors[f"{base}.{part}"] = _to_numpy(y)
    how = QuantizationConfig(config_groups=groups, format="mixed-precision", quantization_status="compressed")
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": how.model_dump(mode="json")}
    folder = write_checkpoint(tmp_path / "hf", config, tensors)
    theirs, ours = decompressed(folder, groups), values_of(folder, "bfloat16")
    assert theirs.keys() == ours.keys()
    assert not [name for name in theirs if not np.array_equal(ours[name].view("u2"), theirs[name])]
    convert(folder, tmp_path / "plain")
    kept = convert(folder, tmp_path / "kept", Options(encoding="keep"))
    assert len({facts.scheme.title for facts in kept.passthrough.values()}) == 3
    have, want = dequantized(restore(tmp_path / "kept")), restore(tmp_path / "plain")
    assert not [name for name in want if not same_bits(have[name], want[name])]
    assert_came_back(folder, tmp_path / "kept", kept)


def _to_numpy(x: torch.Tensor) -> np.ndarray:
    name = str(x.dtype).removeprefix("torch.")
    if not hasattr(ml_dtypes, name):
        return x.numpy()
    plain = torch.int16 if x.element_size() == 2 else torch.uint8
    return x.contiguous().view(plain).numpy().view(getattr(ml_dtypes, name))


# -- transformers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_fp8_of_transformers_is_read_as_it_reads_it(
    scale_fmt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
    from transformers.quantizers import quantizer_finegrained_fp8
    from transformers.utils.quantization_config import FineGrainedFP8Config

    how = FineGrainedFP8Config(weight_block_size=(4, 4), scale_fmt=scale_fmt, modules_to_not_convert=["lm_head"])
    quantize = Fp8Quantize(SimpleNamespace(quantization_config=how))
    plain = save(BY_ID["qwen3_moe-many-experts"], tmp_path / "bf16", "bfloat16")
    tensors: dict[str, torch.Tensor] = {}
    for name, x in read_tensors(plain).items():
        own = {name: _to_torch(x)}
        tensors |= quantize.convert(own) if name.endswith("_proj.weight") else own
    assert {x.dtype for name, x in tensors.items() if name.endswith("_proj.weight")} == {torch.float8_e4m3fn}
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": how.to_dict()}
    folder = write_checkpoint(tmp_path / "hf", config, {name: _to_numpy(x) for name, x in tensors.items()})

    ours = values_of(folder, "float32")
    for name, x in ours.items():
        parts = {"weight": tensors[name], "weight_scale_inv": tensors[f"{name}_scale_inv"].float()}
        np.testing.assert_array_equal(x, Fp8Dequantize(None).convert(parts)["weight"].numpy())
    convert(folder, tmp_path / "out", Options(dtype="float32"))
    # Only its kernels need the package that it asks for.
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    theirs = read_by_transformers(folder, quantization_config=FineGrainedFP8Config(dequantize=True))
    assert_logits(tmp_path / "out", theirs.float())


@pytest.mark.parametrize("case", GPT_OSS, ids=str)
def test_gpt_oss_in_mxfp4_has_the_logits_of_transformers(case: Case, tmp_path: Path) -> None:
    from transformers.utils.quantization_config import Mxfp4Config

    values = mxfp4(save(case, tmp_path / "bf16", "bfloat16"), tmp_path / "hf")
    assert any("gate_up_proj" in name for name in values)
    convert(tmp_path / "hf", tmp_path / "out")
    theirs = read_by_transformers(tmp_path / "hf", quantization_config=Mxfp4Config(dequantize=True))
    assert_logits(tmp_path / "out", theirs)
