"""torchao: what transformers writes with it is read as it reads it, what is kept, and what is refused.

`data/torchao` was written by transformers 5.24 with torchao 0.18 on a CPU: a Qwen3 of one layer with random weights,
whose matrices differ in encoding. `dequantized.json` has the SHA-256 of what torchao makes of each weight in float32.
"""

import hashlib
import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.conversions import assert_same, convert, restore, same_bits
from helpers.encoded import decoded_values, dequantized
from helpers.schemes import BF16
from tpuconv import api
from tpuconv.convert.plan.source_from_config import source_from_config
from tpuconv.convert.plan.types import Options
from tpuconv.encodings.schemes import groups, quantizes_inputs, schemes
from tpuconv.errors import ConfigError, SourceError, UnsupportedConfig, UsageError
from tpuconv.models.registry import get_family

WRITTEN = Path(__file__).parent / "data" / "torchao" / "mixed"
CONFIG = json.loads((WRITTEN / "config.json").read_text())


def test_what_torchao_writes_is_what_it_reads(tmp_path: Path) -> None:
    have = decoded_values(WRITTEN, np.dtype("f4"))
    want = json.loads((WRITTEN / "dequantized.json").read_text())
    assert {n: hashlib.sha256(x.tobytes()).hexdigest() for n, x in have.items()} == want
    rounded = decoded_values(WRITTEN, BF16)
    assert not [name for name, x in have.items() if not same_bits(x.astype(BF16), rounded[name])]
    plan = convert(WRITTEN, tmp_path / "out")
    assert plan.mapped == len(plan.source.tensors)
    plain = {name: x for name, x in read_tensors(WRITTEN).items() if name.endswith(".weight")} | rounded
    write_checkpoint(tmp_path / "plain", {k: v for k, v in CONFIG.items() if k != "quantization_config"}, plain)
    convert(tmp_path / "plain", tmp_path / "reference")
    assert_same(restore(tmp_path / "out"), restore(tmp_path / "reference"))


def test_what_is_kept_is_written_in_formats_of_servers_alone(tmp_path: Path) -> None:
    convert(WRITTEN, tmp_path / "kept", Options(encoding="keep"))
    convert(WRITTEN, tmp_path / "out")
    have, want = dequantized(restore(tmp_path / "kept")), restore(tmp_path / "out")
    assert not [name for name in want if not same_bits(have[name], want[name])]
    with pytest.raises(UsageError, match="which no export writes: a checkpoint has no headers of files"):
        api.export(tmp_path / "kept", tmp_path / "back")
    api.export(tmp_path / "out", tmp_path / "back")
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_config_json_alone_describes_the_tensors() -> None:
    """torchao has scales in float32, but for integers in groups or by a chosen axis."""
    family = get_family("qwen3")
    source = source_from_config("x", CONFIG, family.table, family.read_config(CONFIG))
    stored = read_tensors(WRITTEN)
    assert {n: x.size for n, x in stored.items()} == {n: prod(x.shape) for n, x in source.tensors.items()}


def test_zero_points_that_are_not_zero_are_named(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj._weight_zero_point"
    zeros = np.zeros((64, 1), np.int8)
    zeros[7] = 1
    folder = write_checkpoint(tmp_path / "hf", CONFIG, read_tensors(WRITTEN) | {name: zeros})
    for encoding in ("dequantize", "keep"):
        with pytest.raises(SourceError, match=rf"{name}\[7, 0\] is 1, not 0"):
            convert(folder, tmp_path / encoding, Options(encoding=encoding))


def torchao(kind: str, **data: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_version": 2, "_data": data}}}


def of(kind: str, value: Any) -> dict[str, Any]:
    return {"_type": kind, "_data": value}


GROUPS = {"granularity": of("PerGroup", {"group_size": 32}), "weight_dtype": of("torch.dtype", "int4")}


def test_modules_are_chosen_by_name_and_then_by_pattern() -> None:
    found = groups(CONFIG["quantization_config"])
    titles = {
        name: [group.schemes[0].title for group in found if group.takes(f"model.layers.0.{name}_proj")]
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.up", "mlp.gate")
    }
    integers = ["torchao INT8"]
    assert titles == {
        **{"self_attn.q": ["torchao FP8"], "self_attn.k": ["torchao INT8 in groups of 32"], "self_attn.v": integers},
        **{"self_attn.o": [], "mlp.up": integers, "mlp.gate": integers},
    }
    assert not [group for group in found if group.takes("lm_head")]
    named = torchao("Int8WeightOnlyConfig") | {"modules_to_not_convert": ["mlp"]}
    assert not groups(named)[0].takes("mlp.up_proj")


def test_inputs_that_are_rounded() -> None:
    assert quantizes_inputs(CONFIG["quantization_config"])
    assert not quantizes_inputs(torchao("Float8WeightOnlyConfig"))
    (scheme,) = schemes(
        torchao(
            "Int8DynamicActivationIntxWeightConfig",
            weight_granularity=GROUPS["granularity"],
            weight_dtype=GROUPS["weight_dtype"],
        )
    )
    assert scheme.rounds_inputs
    assert scheme.title == "torchao INT8 in groups of 32"


@pytest.mark.parametrize(
    "description",
    [
        torchao("Int4WeightOnlyConfig", group_size=128),
        torchao("Float8WeightOnlyConfig", weight_dtype=of("torch.dtype", "float8_e5m2")),
        torchao("Int8WeightOnlyConfig", group_size=32),
        torchao("IntxWeightOnlyConfig", **GROUPS, mapping_type=of("MappingType", "ASYMMETRIC")),
        torchao("IntxWeightOnlyConfig", **GROUPS, intx_packing_format=of("IntxPackingFormat", "OPAQUE_TORCHAO_AUTO")),
        torchao("IntxWeightOnlyConfig", **GROUPS | {"weight_dtype": of("torch.dtype", "uint4")}),
        torchao("IntxWeightOnlyConfig", **GROUPS | {"granularity": of("PerGroup", {"group_size": 0})}),
        {"quant_method": "torchao", "quant_type": "int8_weight_only"},
    ],
)
def test_other_kinds_are_refused_by_name(description: dict[str, Any]) -> None:
    kind = (
        description["quant_type"]["default"]["_type"] if isinstance(description["quant_type"], dict) else "quant_type"
    )
    with pytest.raises(UnsupportedConfig, match=f"torchao with {kind}.* is not implemented"):
        groups(description)


@pytest.mark.parametrize("default", [5, {"_type": "x"}, {"_type": "FqnToConfig", "_data": {"fqn_to_config": 7}}])
def test_objects_of_another_form_are_named(default: Any) -> None:
    with pytest.raises(ConfigError, match="quant_type"):
        groups({"quant_method": "torchao", "quant_type": {"default": default}})
