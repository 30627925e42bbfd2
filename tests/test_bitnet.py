"""BitNet b1.58, packed by transformers: every byte, what transformers reads, and what is refused."""

import json
from contextlib import closing
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import tpuconv
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.conversions import assert_same, convert, plan_for, restore
from helpers.encoded import decoded_values
from helpers.families import BY_ID, Case, save
from helpers.schemes import BF16
from tpuconv.convert.plan.source_from_config import source_from_config
from tpuconv.convert.plan.types import Options
from tpuconv.encodings.schemes import groups
from tpuconv.encodings.tensors import decode_names
from tpuconv.errors import MappingError, UnsupportedConfig
from tpuconv.models.registry import get_family
from tpuconv.sources.config import without_encoding
from tpuconv.sources.source import open_source

LLAMA = Case("llama-quarters", "llama", "llama", {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48})
OF_CLASS = {"bitlinear": LLAMA, "autobitlinear": BY_ID["bitnet-plain"]}
CLASSES = list(OF_CLASS)


@cache
def integration() -> Any:
    """transformers' module, without the compilation of its functions."""
    with patch("torch.compile", lambda function: function):
        return import_module("transformers.integrations.bitnet")


def packed(kind: str, folder: Path) -> Path:
    """A release with weights that transformers packed, as the method rounds them: by the mean of all."""
    plain, tensors = save(OF_CLASS[kind], folder / "plain", "bfloat16"), {}
    for name, x in read_tensors(plain).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = x
            continue
        weight = torch.from_numpy(x.astype("f4"))
        scale = weight.abs().mean()
        ternary = (weight / scale).round().clamp(-1, 1)
        stored = 1 / scale if kind == "bitlinear" else scale
        tensors[name] = integration().pack_weights(ternary).numpy()
        tensors[f"{name}_scale"] = np.array([stored], "f4").astype(BF16)
    config = json.loads((plain / "config.json").read_text())
    how = {"quant_method": "bitnet", "linear_class": kind, "quantization_mode": "offline"}
    return write_checkpoint(folder / "hf", config | {"quantization_config": how}, tensors)


def read_by_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """The weights of its layers: numbers, by the scale that it applies to their products."""
    from transformers import AutoModelForCausalLM
    from transformers.quantizers import quantizer_bitnet

    bitnet = integration()
    monkeypatch.setattr(quantizer_bitnet, "is_accelerate_available", lambda: True)
    out = {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, module in model.named_modules():
        if isinstance(module, bitnet.BitLinear):
            out[f"{name}.weight"] = bitnet.unpack_weights(module.weight, torch.float32) / module.weight_scale.float()
        elif isinstance(module, bitnet.AutoBitLinear):
            out[f"{name}.weight"] = (module.weight.float() * module.weight_scale.float()).detach()
    return {name: x.numpy() for name, x in out.items()}


@pytest.mark.parametrize("kind", CLASSES)
def test_weights_are_what_transformers_reads(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = packed(kind, tmp_path)
    have, want = decoded_values(folder, np.dtype("f4")), read_by_transformers(folder, monkeypatch)
    assert have.keys() == want.keys()
    for name, x in want.items():
        np.testing.assert_array_equal(have[name], x)
        assert len(np.unique(x)) == 3
    plan = convert(folder, tmp_path / "out")
    assert plan.mapped == len(plan.source.tensors)
    plain = {name: x for name, x in read_tensors(folder).items() if x.dtype == BF16 and not name.endswith("_scale")}
    config = without_encoding(json.loads((folder / "config.json").read_text()))
    write_checkpoint(tmp_path / "decoded", config, plain | decoded_values(folder, BF16))
    convert(tmp_path / "decoded", tmp_path / "reference")
    assert_same(restore(tmp_path / "out"), restore(tmp_path / "reference"))


@pytest.mark.parametrize("kind", CLASSES)
def test_transformers_gets_the_decoded_weights(kind: str, tmp_path: Path) -> None:
    """On the packed ones it would round the inputs of matrices to 8 bits."""
    tpuconv.api.convert(packed(kind, tmp_path), tmp_path / "out")
    found = tpuconv.api.compare(tmp_path / "out", source=str(tmp_path / "hf"))
    assert found.passed
    assert found.layers
    tpuconv.api.convert(tmp_path / "hf", tmp_path / "int8", quantize="int8_weight_only")
    assert tpuconv.api.verify(tmp_path / "int8").passed


@pytest.mark.parametrize("dtype", [BF16, np.dtype("f4")], ids=str)
@pytest.mark.parametrize("kind", CLASSES)
def test_every_part_of_every_byte(kind: str, dtype: np.dtype, tmp_path: Path) -> None:
    scale = np.array([0.37], BF16)
    stored = {"w.weight": np.arange(256, dtype=np.uint8).reshape(8, 32), "w.weight_scale": scale}
    how = {"quant_method": "bitnet", "linear_class": kind}
    source = open_source(write_checkpoint(tmp_path, {"quantization_config": how}, stored))
    tensor = decode_names(source.tensors, how)[0]["w.weight"]
    assert tensor.shape == (32, 32)
    numbers = np.concatenate([(stored["w.weight"] >> shift & 3).astype("f4") - 1 for shift in (0, 2, 4, 6)])
    scale = scale.astype("f4")
    want = (numbers / scale if kind == "bitlinear" else numbers * scale).astype(dtype).reshape(-1)
    with closing(source.open()) as reader:
        for start, stop in ((0, 1024), (0, 32), (250, 520), (255, 257), (1000, 1024)):
            out = np.empty(stop - start, dtype)
            tensor.read(reader, start, np.empty(512, np.uint8), out)
            np.testing.assert_array_equal(out, want[start:stop])


def test_config_json_alone_describes_the_tensors(tmp_path: Path) -> None:
    folder = packed("autobitlinear", tmp_path)
    raw, family = json.loads((folder / "config.json").read_text()), get_family("bitnet")
    source = source_from_config("x", raw, family.table, family.read_config(raw))
    stored = {name: (x.shape, x.nbytes) for name, x in read_tensors(folder).items()}
    assert stored == {name: (x.shape, x.nbytes) for name, x in source.tensors.items()}


def test_weights_cannot_stay_encoded(tmp_path: Path) -> None:
    with pytest.raises(MappingError) as error:
        plan_for(packed("autobitlinear", tmp_path), Options(encoding="keep")).check()
    assert any("no type of Qwix has" in line for line in error.value.details)


def test_a_scale_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = packed("autobitlinear", tmp_path)
    tensors = read_tensors(folder)
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(MappingError) as error:
        plan_for(write_checkpoint(tmp_path / "other", config, tensors)).check()
    assert any("has no weight_scale" in line for line in error.value.details)


@pytest.mark.parametrize(
    "changes",
    [
        {"linear_class": "autobitlinear", "quantization_mode": "online"},
        {"linear_class": "bitlinear", "use_rms_norm": True},
        {"linear_class": "other"},
    ],
)
def test_what_is_not_implemented_is_named(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedConfig, match=f"BitNet with linear_class='{changes['linear_class']}'"):
        groups({"quant_method": "bitnet", **changes})
