"""MLX: what mlx-lm writes is read as MLX reads it, and what is refused.

`data/mlx` was written by mlx-lm 0.32.2 with MLX 0.32.4 on a CPU: Qwen3 and Qwen3-MoE of one layer with random weights.
Of the first the matrices differ in encoding. `dequantized.json` has the SHA-256 of what `mlx.core.dequantize` makes of
each weight in float32; in bfloat16 it rounds twice, and MLX's own products do not.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tpuconv
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.conversions import assert_same, convert, plan_for, restore
from helpers.encoded import decoded_values
from helpers.families import BY_ID, save
from helpers.schemes import BF16
from tpuconv.convert.plan.source_from_config import source_from_config
from tpuconv.convert.plan.types import Options
from tpuconv.encodings.schemes import groups, schemes
from tpuconv.errors import ConfigError, MappingError, SourceError, UnsupportedConfig, UsageError
from tpuconv.models.registry import get_family
from tpuconv.sources.config import encoding_of, without_encoding

WRITTEN = Path(__file__).parent / "data" / "mlx"
KINDS = {"dense": "qwen3", "experts": "qwen3_moe"}


AFFINE = {"group_size": 64, "bits": 4, "mode": "affine"}


def written(kind: str) -> dict[str, Any]:
    return json.loads((WRITTEN / kind / "config.json").read_text())


def one_by_one(name: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of a release, of which mlx-lm stacks those of experts."""
    if ".switch_mlp." not in name:
        return {name: x}
    return {name.replace(".switch_mlp.", f".experts.{i}."): each for i, each in enumerate(x)}


@pytest.mark.parametrize("kind", KINDS)
def test_what_mlx_writes_is_what_it_reads(kind: str, tmp_path: Path) -> None:
    want = json.loads((WRITTEN / kind / "dequantized.json").read_text())
    have = decoded_values(WRITTEN / kind, np.dtype("f4"))
    assert {n: hashlib.sha256(x.tobytes()).hexdigest() for n, x in have.items()} == want
    rounded = decoded_values(WRITTEN / kind, BF16)
    assert all(np.array_equal(x.astype(BF16).view("u2"), rounded[name].view("u2")) for name, x in have.items())
    plan = convert(WRITTEN / kind, tmp_path / "out")
    assert not plan.skipped
    plain = {name: x for name, x in read_tensors(WRITTEN / kind).items() if name.endswith("norm.weight")} | rounded
    plain = {own: y for name, x in plain.items() for own, y in one_by_one(name, x).items()}
    write_checkpoint(tmp_path / "plain", without_encoding(written(kind)), plain)
    convert(tmp_path / "plain", tmp_path / "reference")
    assert_same(restore(tmp_path / "out"), restore(tmp_path / "reference"))


NUMBERED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@pytest.mark.parametrize("case", ["qwen2_moe-plain", "mixtral-plain"])
def test_experts_are_stacked_under_the_names_of_mlx(case: str, tmp_path: Path) -> None:
    """As `sanitize` of mlx-lm 0.32.2 stacks them."""
    folder = save(BY_ID[case], tmp_path / "hf", "bfloat16")
    tensors: dict[str, Any] = {}
    for name, x in read_tensors(folder).items():
        if found := re.fullmatch(r"(.*)\.experts\.(\d+)\.(\w+)\.weight", name):
            front, _, matrix = found.groups()
            tensors.setdefault(f"{front}.switch_mlp.{NUMBERED.get(matrix, matrix)}.weight", []).append(name)
        else:
            tensors[name] = x
    plain = read_tensors(folder)
    stacked = {
        name: np.stack([plain[x] for x in sorted(own, key=lambda x: int(re.search(r"experts\.(\d+)", x)[1]))])
        if isinstance(own, list)
        else own
        for name, own in tensors.items()
    }
    assert len(stacked) < len(plain)
    config = json.loads((folder / "config.json").read_text()) | {"quantization": AFFINE}
    convert(write_checkpoint(tmp_path / "mlx", config, stacked), tmp_path / "out")
    convert(folder, tmp_path / "reference")
    assert_same(restore(tmp_path / "out"), restore(tmp_path / "reference"))


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_loaded_quantized_and_exported(kind: str, tmp_path: Path) -> None:
    convert(WRITTEN / kind, tmp_path / "out")
    have, want = (tpuconv.load(x, "bfloat16")(np.arange(3, 9)[None]) for x in (WRITTEN / kind, tmp_path / "out"))
    assert np.array_equal(have, want)
    tpuconv.api.convert(WRITTEN / kind, tmp_path / "int8", quantize="int8_weight_only")
    assert tpuconv.api.verify(tmp_path / "int8").passed
    tpuconv.api.export(tmp_path / "out", tmp_path / "back")
    assert not {"quantization", "quantization_config"} & json.loads((tmp_path / "back/config.json").read_text()).keys()
    convert(tmp_path / "back", tmp_path / "again")
    assert_same(restore(tmp_path / "again"), restore(tmp_path / "out"))


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_gets_the_decoded_weights(kind: str, tmp_path: Path) -> None:
    tpuconv.api.convert(WRITTEN / kind, tmp_path / "out")
    found = tpuconv.api.compare(tmp_path / "out", source=str(WRITTEN / kind))
    assert found.passed
    assert found.layers
    with pytest.raises(UsageError, match="does not read weights that MLX encoded"):
        tpuconv.api.compare(tmp_path / "out", source=str(WRITTEN / kind), mesh={"tensor": 1})


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_stays_encoded(kind: str) -> None:
    with pytest.raises(UsageError, match="embeddings are among them"):
        plan_for(WRITTEN / kind, Options(encoding="keep"))


@pytest.mark.parametrize("kind", KINDS)
def test_config_json_alone_describes_the_tensors(kind: str) -> None:
    """Each expert by itself, as the release has them."""
    raw, family = written(kind), get_family(KINDS[kind])
    source = source_from_config("x", raw, family.table, family.read_config(raw))
    stored = {own: y for n, x in read_tensors(WRITTEN / kind).items() for own, y in one_by_one(n, x).items()}
    assert {n: (x.shape, x.nbytes) for n, x in stored.items()} == {
        n: (x.shape, x.nbytes) for n, x in source.tensors.items()
    }


def test_matrices_without_whole_groups_stay_plain() -> None:
    raw, family = written("dense") | {"hidden_size": 80}, get_family("qwen3")
    source = source_from_config("x", raw, family.table, family.read_config(raw))
    names = {name.rpartition(".layers.0.")[2] for name in source.tensors if name.endswith((".scales", ".biases"))}
    assert names == {"self_attn.o_proj.scales", "self_attn.o_proj.biases", "mlp.up_proj.scales", "mlp.down_proj.scales"}


FAULTS = {
    "no offsets": ({".biases": None}, "has no biases"),
    "offsets of another shape": ({".biases": np.zeros((64, 2), BF16)}, "or F32 [64, 1] by the values"),
    "offsets of another dtype": ({".biases": np.zeros((64, 1), "i4")}, "should be F16 or BF16 or F32 [64, 1]"),
    "no scales": ({".scales": None}, "has no scales"),
    "scales of other groups": ({".scales": np.ones((64, 3), BF16)}, "should be [64, 1] by the block size"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_parts_that_do_not_belong_together_are_named(fault: str, tmp_path: Path) -> None:
    changes, message = FAULTS[fault]
    tensors, module = read_tensors(WRITTEN / "experts"), "model.layers.0.self_attn.q_proj"
    for suffix, x in changes.items():
        del tensors[module + suffix]
        tensors |= {} if x is None else {module + suffix: x}
    with pytest.raises(MappingError) as error:
        plan_for(write_checkpoint(tmp_path, written("experts"), tensors)).check()
    assert any(message in line for line in error.value.details), error.value.details


@pytest.mark.parametrize("part", ["scales", "biases"])
def test_numbers_that_are_not_finite_are_named(part: str, tmp_path: Path) -> None:
    tensors, name = read_tensors(WRITTEN / "experts"), f"model.layers.0.mlp.switch_mlp.up_proj.{part}"
    tensors[name] = tensors[name].copy()
    tensors[name][2, 1] = np.inf
    folder = write_checkpoint(tmp_path / "hf", written("experts"), tensors)
    with pytest.raises(SourceError, match=rf"{name}\[2, 1, 0\] is inf"):
        convert(folder, tmp_path / "out")


def described(**changes: Any) -> Any:
    return encoding_of({"model_type": "llama", "quantization": AFFINE | changes})


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_a_description_is_known_by_its_keys(key: str) -> None:
    raw = {key: {"group_size": 32, "bits": 3}, "model_type": "llama"}
    assert [scheme.title for scheme in schemes(encoding_of(raw))] == ["MLX 3 bits in groups of 32"]
    assert without_encoding(raw) == {"model_type": "llama"}
    assert without_encoding({"quantization": 8}) == {"quantization": 8}


def test_modules_have_descriptions_of_their_own() -> None:
    found = groups(described(a={"group_size": 32, "bits": 8}, b=False, c=True, **{"d.switch_mlp.e": {"bits": 2}}))
    titles = {m: [g.schemes[0].title for g in found if g.takes(m)] for m in ("a", "b", "c", "x", "d.experts.7.e")}
    usual = "MLX 4 bits in groups of 64"
    assert titles["b"] == []
    assert titles | {"b": 0} == {
        **{"a": ["MLX 8 bits in groups of 32"], "b": 0, "c": [usual], "x": [usual]},
        "d.experts.7.e": ["MLX 2 bits in groups of 64"],
    }


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"bits": 7}, UnsupportedConfig, "bits=7"),
        ({"mode": "mxfp4"}, UnsupportedConfig, "mode='mxfp4', bits=4 and group_size=64"),
        ({"mode": "nvfp4", "group_size": 16, "global_scale": True}, UnsupportedConfig, "and a global_scale"),
        ({"x": {"mode": "affine", "bits": 1, "group_size": 64}}, UnsupportedConfig, "bits=1"),
        ({"x": 5}, ConfigError, "quantization, x: must be an object, not 5"),
        ({"x": {"bits": "4"}}, ConfigError, "quantization, x: bits must be an integer or null"),
    ],
)
def test_what_is_not_implemented_is_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        groups(described(**changes))


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_moe", "step3p5"])
def test_models_whose_norms_mlx_changes_are_refused(model_type: str) -> None:
    with pytest.raises(UnsupportedConfig, match="adds 1 to the norms"):
        groups(encoding_of({"model_type": model_type, "quantization": AFFINE}))
