"""AMD Quark: what it writes is read as it reads it, what is kept comes back, and what is refused.

`data/quark` was written by AMD Quark 0.13 on a CPU: a Qwen3 of one layer with random weights, whose matrices differ in
encoding. `dequantized.json` has the SHA-256 of what Quark's own reader makes of each weight, in two dtypes.
"""

import hashlib
import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.conversions import assert_same, convert, plan_for, restore, same_bits
from helpers.encoded import assert_came_back, decoded_values, dequantized
from helpers.schemes import BF16
from tpuconv.convert.plan.source_from_config import source_from_config
from tpuconv.convert.plan.types import Options
from tpuconv.encodings.schemes import groups, quantizes_inputs, schemes
from tpuconv.errors import MappingError, SourceError, UnsupportedConfig
from tpuconv.models.registry import get_family

WRITTEN = Path(__file__).parent / "data" / "quark"
KINDS = ["mixed", "order"]


def written(kind: str) -> dict[str, Any]:
    return json.loads((WRITTEN / kind / "config.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_what_quark_writes_is_what_it_reads(kind: str, tmp_path: Path) -> None:
    facts = json.loads((WRITTEN / kind / "dequantized.json").read_text())
    for dtype in (np.dtype("f4"), BF16):
        have = decoded_values(WRITTEN / kind, dtype)
        assert {n: hashlib.sha256(x.tobytes()).hexdigest() for n, x in have.items()} == {
            name: hashes[dtype.name] for name, hashes in facts.items()
        }
    plan = convert(WRITTEN / kind, tmp_path / "out")
    skipped = {name for name in read_tensors(WRITTEN / kind) if name.endswith(("input_scale", "output_scale"))}
    assert sum(skip.count for skip in plan.skipped) == len(skipped)
    assert {skip.reason.partition(",")[0] for skip in plan.skipped} <= {"of quantized activations"}
    config = {k: v for k, v in written(kind).items() if k != "quantization_config"}
    plain = {name: x for name, x in read_tensors(WRITTEN / kind).items() if "_proj." not in name or x.dtype == BF16}
    plain = {name: x for name, x in plain.items() if name.endswith(".weight")} | have
    write_checkpoint(tmp_path / "plain", config, plain)
    convert(tmp_path / "plain", tmp_path / "reference")
    assert_same(restore(tmp_path / "out"), restore(tmp_path / "reference"))


@pytest.mark.parametrize("kind", KINDS)
def test_what_quark_writes_is_kept_and_comes_back(kind: str, tmp_path: Path) -> None:
    plan = convert(WRITTEN / kind, tmp_path / "kept", Options(encoding="keep"))
    convert(WRITTEN / kind, tmp_path / "out")
    have, want = dequantized(restore(tmp_path / "kept")), restore(tmp_path / "out")
    assert not [name for name in want if not same_bits(have[name], want[name])]
    assert_came_back(WRITTEN / kind, tmp_path / "kept", plan)


@pytest.mark.parametrize("kind", KINDS)
def test_config_json_alone_describes_the_tensors(kind: str) -> None:
    """Without the tensors that are skipped. Quark writes scales in bfloat16, and those of int8 of a tensor in
    float32."""
    raw, family = written(kind), get_family("qwen3")
    source = source_from_config("x", raw, family.table, family.read_config(raw))
    stored = {n: x for n, x in read_tensors(WRITTEN / kind).items() if not n.endswith(("input_scale", "output_scale"))}
    assert {n: x.size for n, x in stored.items()} == {n: prod(x.shape) for n, x in source.tensors.items()}
    assert {n: x.nbytes for n, x in stored.items()} == {n: x.nbytes for n, x in source.tensors.items()}


def test_zero_points_that_are_not_zero_are_named(tmp_path: Path) -> None:
    tensors, name = read_tensors(WRITTEN / "order"), "model.layers.0.mlp.down_proj.weight_zero_point"
    folder = write_checkpoint(tmp_path / "hf", written("order"), tensors | {name: np.array(3, np.int8)})
    with pytest.raises(SourceError, match=rf"{name} is 3, not 0"):
        convert(folder, tmp_path / "out")
    folder = write_checkpoint(tmp_path / "other", written("order"), tensors | {name: np.zeros(3, np.int8)})
    with pytest.raises(MappingError) as error:
        plan_for(folder).check()
    assert any("should be I8 []" in line for line in error.value.details)


FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}
INT8 = FP8 | {"dtype": "int8"}
E8M0 = {"qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
NVFP4 = [{"dtype": "fp4", "qscheme": "per_group", "group_size": 16}, FP8 | {"is_scale_quant": True}]


def quark(weight: Any, **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": None},
        "exclude": ["lm_head"],
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        **changes,
    }


@pytest.mark.parametrize(
    ("weight", "title"),
    [
        (FP8, "Quark FP8 by tensor"),
        (FP8 | {"qscheme": "per_channel", "ch_axis": 0}, "Quark FP8 by channel"),
        (FP8 | {"qscheme": "per_block", "block_size": [128, 128]}, "Quark FP8 in blocks of 128x128"),
        (FP8 | {"qscheme": "per_block", "block_size": [32, 32], "scale_type": "float8_e8m0fnu"}, "32x32"),
        (FP8 | E8M0, "Quark MXFP8"),
        ([{"dtype": "fp4"} | E8M0], "Quark MXFP4"),
        (NVFP4, "Quark NVFP4"),
        (INT8 | {"qscheme": "per_channel", "ch_axis": 0}, "Quark INT8 by channel"),
    ],
)
def test_kinds_of_releases(weight: Any, title: str) -> None:
    (scheme,) = schemes(quark(weight))
    assert scheme.title.endswith(title)


@pytest.mark.parametrize(
    ("description", "fault"),
    [
        (quark(FP8 | {"dtype": "fp8_e5m2"}), "dtype='fp8_e5m2'"),
        (quark({"dtype": "fp6_e3m2"} | E8M0), "dtype='fp6_e3m2'"),
        (quark({"dtype": "fp4"} | E8M0 | {"scale_format": "e5m3"}), "scale_format='e5m3'"),
        (quark(FP8 | {"qscheme": "per_channel", "ch_axis": 1}), "ch_axis=1"),
        (quark(INT8 | {"symmetric": False}), "symmetric=False"),
        (quark({"dtype": "int4", "qscheme": "per_channel", "ch_axis": 0}), "dtype='int4', qscheme='per_channel'"),
        (quark({"dtype": "uint4", "qscheme": "per_group", "group_size": 32, "zero_point_type": "float32"}), "float32"),
        (quark([FP8, {"dtype": "int4", "qscheme": "per_channel"}]), "2 stages"),
        (quark(FP8, export={"weight_format": "fake_quantized"}), "weight_format='fake_quantized'"),
        (quark(FP8, algo_config=[{"name": "rotation", "r1": False, "r4": True}]), "rotation"),
        (quark(FP8, algo_config=[{"name": "rotation", "r1": True, "online_r1_rotation": True}]), "rotation"),
        (quark(FP8, algo_config=[{"name": "svdquant"}]), "svdquant"),
        (quark(FP8, algo_config={"name": "rotation", "r4": True}), "rotation"),
        (quark(None), "no weight is quantized"),
    ],
)
def test_other_kinds_are_refused_by_name(description: dict[str, Any], fault: str) -> None:
    with pytest.raises(UnsupportedConfig, match="Quark") as error:
        groups(description)
    assert fault in str(error.value)


def test_rotations_that_are_folded_into_weights_are_no_matter() -> None:
    folded = [{"name": "rotation", "r1": True, "r2": True, "r3": True, "r4": False}, {"name": "awq"}]
    assert schemes(quark(FP8, algo_config=folded))
    assert schemes(quark(FP8, algo_config={"name": "smooth"}, exclude=None, layer_quant_config=None))


def test_modules_are_chosen_as_quark_does_it() -> None:
    of_layers = {"*self_attn*": {"weight": FP8}, "*k_proj": {"weight": INT8}, "*gate": {"weight": None}}
    found = groups(quark({"dtype": "fp4"} | E8M0, layer_quant_config=of_layers, exclude=["*lm_head", "re:.*router.*"]))
    title = {m: next((g.schemes[0].title for g in found if g.takes(m)), None) for m in ("a.self_attn.k_proj", "a.gate")}
    assert title == {"a.self_attn.k_proj": "Quark FP8 by tensor", "a.gate": None}
    assert [g.schemes[0].title for g in found if g.takes("a.mlp.k_proj")] == ["Quark INT8 by tensor"]
    assert [g.schemes[0].title for g in found if g.takes("a.mlp.up_proj")] == ["Quark MXFP4"]
    assert not [g for g in found if g.takes("lm_head") or g.takes("a.router.b")]


def test_inputs_that_transformers_rounds() -> None:
    rounded = {"weight": FP8, "input_tensors": FP8}
    assert quantizes_inputs(quark(FP8, global_quant_config=rounded))
    assert quantizes_inputs(quark(FP8, layer_quant_config={"*k_proj": rounded}))
    assert not quantizes_inputs(quark(FP8))
