"""Quantized checkpoints exported for servers: every weight as compressed-tensors decompresses it, and back."""

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import tpuconv
from helpers.checkpoints import qwen3_config, random_checkpoint, read_tensors
from helpers.conversions import restore, same_bits
from helpers.families import FAMILIES, Case, save
from helpers.logits import forward
from helpers.quantizing import ONE_OF_EACH
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.convert.serving import pack_words
from tpuconv.errors import UsageError
from tpuconv.models.registry import get_family

CONFIGS = (
    "int8_default",
    "int8_weight_only",
    "fp8_default",
    "fp8_weight_only",
    "int4_weight_only",
)
STACKED = {"gpt_oss", "llama4", "llama4_text"}
"""Families whose releases have the experts stacked in one tensor, for which no format was found."""
CORE = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "olmo2", "deepseek_v3", "kimi_k2")
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


def dequantized(ckpt: Path) -> dict[str, np.ndarray]:
    """Every quantized weight under its released name: values times scales in float32, rounded to bfloat16. Each scale
    is repeated for all values that it stands for, and takes the way of the values."""
    manifest, arrays = read_manifest(ckpt), restore(ckpt)
    family, raw = get_family(manifest.family), json.loads((ckpt / "config.json").read_text())
    out = {}
    for binding in family.table.bind(family.read_config(raw)):
        facts = manifest.quantization["parameters"]
        if not all(stack.names[0] in facts for stack in binding.dst):
            continue

        values = {}
        for stack in binding.dst:
            (name,) = stack.names
            scales = arrays[f"{name}.array.scale"].astype(np.float32)
            for axis, tile in enumerate(facts[name]["tiles"]):
                scales = np.repeat(scales, tile, axis)
            values[name] = arrays[f"{name}.array.qvalue"].astype(np.float32) * scales
        out |= {name: x.astype(ml_dtypes.bfloat16) for name, x in binding.inverse(values.__getitem__).items()}
    return out


def decompressed(folder: Path) -> dict[str, np.ndarray]:
    """What compressed-tensors makes of every quantized weight, in bfloat16, by the description in config.json."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig(**json.loads((folder / "config.json").read_text())["quantization_config"])
    tensors = {name: _to_torch(x) for name, x in read_tensors(folder).items()}
    out = {}
    for name in tensors:
        if not name.endswith(".weight_scale"):
            continue
        base = name.removesuffix(".weight_scale")
        (scheme,) = (s for s in config.config_groups.values() if any(_fits(target, base) for target in s.targets))
        assert not any(_fits(pattern, base) for pattern in config.ignore if pattern != "Linear")
        state = {part.removeprefix(f"{base}."): x for part, x in tensors.items() if part.startswith(f"{base}.")}
        weight = BaseCompressor.get_value_from_registry(scheme.format).decompress(state, scheme)["weight"]
        out[f"{base}.weight"] = weight.to(torch.bfloat16).view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return out


def _fits(target: str, module: str) -> bool:
    return target in ("Linear", module) or (target.startswith("re:") and bool(re.match(target[3:], module)))


def _to_torch(x: np.ndarray) -> torch.Tensor:
    kinds = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
    if x.dtype.name in kinds:
        return torch.from_numpy(x.view(f"i{x.itemsize}").copy()).view(kinds[x.dtype.name])
    return torch.from_numpy(x.copy())


@pytest.mark.parametrize(("case", "config"), EVERY)
def test_every_weight_is_that_of_compressed_tensors(case: Case, config: str, tmp_path: Path) -> None:
    """And our reader reads back what was written: the same quantized values, and as many scales as they stand for."""
    save(case, tmp_path / "hf", "bfloat16")
    api.convert(tmp_path / "hf", tmp_path / "quantized", quantize=config)
    api.export(tmp_path / "quantized", tmp_path / "out")
    ours, theirs = dequantized(tmp_path / "quantized"), decompressed(tmp_path / "out")
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not same_bits(ours[name], theirs[name])]
    api.convert(tmp_path / "out", tmp_path / "again", encoding="keep")
    before, after = restore(tmp_path / "quantized"), restore(tmp_path / "again")
    for name in before:
        if name.endswith("qvalue"):
            assert np.array_equal(before[name].astype(np.float32), after[name].astype(np.float32)), name
    again = dequantized(tmp_path / "again")
    assert not [name for name in ours if not same_bits(ours[name], again[name])]


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


def quantized(folder: Path, rules: str, **config) -> Path:
    """A checkpoint quantized by these rules."""
    random_checkpoint(folder / "hf", qwen3_config(hidden_size=64, intermediate_size=96, head_dim=32, **config))
    (folder / "rules.yaml").write_text(f"summary: test\nqwix:\n  rules:\n{rules}gates: none\n")
    api.convert(folder / "hf", folder / "quantized", quantize=folder / "rules.yaml")
    return folder / "quantized"


def rule(path: str, **fields: object) -> str:
    lines = {"module_path": f"'{path}'", **fields}
    return "".join(f"    {'- ' if i == 0 else '  '}{key}: {value}\n" for i, (key, value) in enumerate(lines.items()))


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
        (rule(".*mlp.*", weight_qtype="int4", weight_calibration_method="minmax"), "have zero points"),
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


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(STACKED))
def test_stacked_experts_are_refused(family: str, tmp_path: Path) -> None:
    save(ONE_OF_EACH[family], tmp_path / "hf", "bfloat16")
    api.convert(tmp_path / "hf", tmp_path / "quantized", quantize="int8_default")
    with pytest.raises(UsageError, match="is not a linear layer's weight"):
        api.export(tmp_path / "quantized", tmp_path / "out")


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_are_packed_as_compressed_tensors_packs_them(bits: int) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    values = np.random.default_rng(0).integers(-(1 << (bits - 1)), 1 << (bits - 1), (5, 21)).astype(np.int8)
    theirs = pack_to_int32(torch.from_numpy(values), bits).numpy()
    assert np.array_equal(pack_words(bits, values)[:, :-1], theirs[:, :-1])
