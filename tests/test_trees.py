"""Commands on checkpoints for other programs: the results are the results for a checkpoint of ours."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import tpuconv
from helpers.checkpoints import qwen3_config, random_checkpoint, read_tensors
from helpers.commands import EXAMPLE
from helpers.commands import tpuconv as command
from helpers.conversions import assert_same
from helpers.trainers import save_standard, trained_tree
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import UsageError

PROMPTS = ["Once upon a time"]
FORMS = [("maxtext", True), ("maxtext", False), ("tunix", False), ("nnx", True), ("jax-llm-examples", False)]
FAST = FORMS[:1]
IN_INT8 = "qwix:\n  rules: [{module_path: 'layers/.*(attn/[qkvo]|mlp/.*)', weight_qtype: int8}]\n"


def forms() -> list:
    return [pytest.param(*form, marks=[] if form in FAST else [pytest.mark.slow]) for form in FORMS]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("qwen3") / "hf", qwen3_config())


@pytest.mark.parametrize(("target", "scan"), forms())
def test_quantized_arrays_are_those_of_a_checkpoint_of_ours(target, scan, qwen3, tmp_path):
    api.convert(qwen3, tmp_path / "ours")
    api.convert(qwen3, tmp_path / "theirs", target=target, scan_layers=scan)
    for name in ("ours", "theirs"):
        api.quantize(tmp_path / name, tmp_path / f"{name}-int8", config="int8_default")
    api.verify(tmp_path / "theirs-int8").check()
    ours, theirs = (read_manifest(tmp_path / f"{name}-int8") for name in ("ours", "theirs"))
    assert theirs.target == "tpuconv"
    assert theirs.source_names == read_tensors(qwen3).keys()
    known = {name: replace(array, sources=ours.arrays[name].sources) for name, array in theirs.arrays.items()}
    assert known == ours.arrays


@pytest.mark.slow
def test_the_run_of_a_trainer_is_quantized_for_servers(qwen3, tmp_path):
    api.convert(qwen3, tmp_path / "ours")
    api.convert(qwen3, tmp_path / "theirs", target="maxtext", scan_layers=True)
    save_standard(tmp_path / "run", trained_tree(tmp_path / "theirs"))
    with pytest.raises(UsageError, match="holds a checkpoint of Orbax") as error:
        api.quantize(tmp_path / "run", config="int8_default")
    assert "tpuconv reshard FOLDER OUT --config SRC" in error.value.hint
    api.reshard(tmp_path / "run", tmp_path / "known", config=qwen3)
    for name in ("ours", "known"):
        api.quantize(tmp_path / name, tmp_path / f"{name}-int8", config="int8_default")
        api.export(tmp_path / f"{name}-int8", tmp_path / f"{name}-hf")
    assert_same(read_tensors(tmp_path / "known-hf"), read_tensors(tmp_path / "ours-hf"))


def test_a_plan_knows_the_weights_of_a_checkpoint_for_another_program(qwen3, tmp_path):
    """Of two with equal shapes an interrupted command continues the one that it began."""
    other = random_checkpoint(tmp_path / "other", qwen3_config(), seed=1)
    for name, src in (("a", qwen3), ("copy", qwen3), ("b", other)):
        api.convert(src, tmp_path / name, target="tunix")
    plans = [api.plan_quantization(tmp_path / name, config="int8_default").plan for name in ("a", "copy", "b")]
    assert plans[0].fingerprint == plans[1].fingerprint != plans[2].fingerprint


def test_allowed_keys_of_a_config_stay_allowed(tmp_path):
    src = random_checkpoint(tmp_path / "hf", config := qwen3_config())
    (src / "config.json").write_text(json.dumps({**config, "attention_chunk_size": 8}))
    api.convert(src, tmp_path / "out", target="maxtext", allow_config=["attention_chunk_size"])
    assert tpuconv.load(tmp_path / "out") is not None
    api.quantize(tmp_path / "out", tmp_path / "int8", config="int8_default")
    assert read_manifest(tmp_path / "int8").allow_config == ("attention_chunk_size",)


def test_what_is_not_quantized_says_why(qwen3, tmp_path):
    api.convert(qwen3, tmp_path / "nnx", target="nnx", quantize="int8_default")
    with pytest.raises(UsageError, match="is quantized already, with int8_default"):
        api.quantize(tmp_path / "nnx", config="int8_default")


def test_a_release_and_an_export_are_quantized_as_their_checkpoint_is(qwen3, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    api.convert(qwen3, tmp_path / "ours")
    api.export(tmp_path / "ours", tmp_path / "exported")
    made = [api.quantize(place, config="int8_default").out for place in ("ours", qwen3, "exported")]
    assert [str(each) for each in made] == ["ours-int8_default", "hf-orbax-int8_default", "exported-orbax-int8_default"]
    ours, *others = ({name: x.xxh3 for name, x in read_manifest(each).arrays.items()} for each in made)
    assert others == [ours, ours]


@pytest.mark.slow
def test_a_quantized_export_beside_the_original_has_no_gates(tmp_path):
    api.convert(EXAMPLE, tmp_path / "export", target="huggingface", quantize="int8_weight_only")
    found = api.compare(tmp_path / "export", source=EXAMPLE, prompts=PROMPTS)
    assert found.rounded
    assert found.passed is None
    assert 0 < found.statistics.mean_kl < 0.01


def test_the_explanation_is_that_of_a_checkpoint_of_ours(qwen3, tmp_path):
    api.convert(qwen3, tmp_path / "ours")
    api.convert(qwen3, tmp_path / "theirs", target="maxtext", scan_layers=True)
    words = ("--config", "int8_default", "--explain", "--json")
    ours, theirs = (json.loads(command("quantize", tmp_path / name, *words).stdout) for name in ("ours", "theirs"))
    assert sorted(theirs["parameters"], key=str) == sorted(ours["parameters"], key=str)
    assert "bytes_before" in ours["parameters"][0]


def test_scales_without_the_axes_of_inputs_come_back(qwen3, tmp_path):
    (tmp_path / "mine.yaml").write_text(IN_INT8)
    for name, target in (("ours", "tpuconv"), ("theirs", "jax-llm-examples")):
        api.convert(qwen3, tmp_path / name, target=target, quantize=str(tmp_path / "mine.yaml"))
        api.export(tmp_path / name, tmp_path / f"{name}-hf")
    assert_same(read_tensors(tmp_path / "theirs-hf"), read_tensors(tmp_path / "ours-hf"))


@pytest.mark.slow
@pytest.mark.parametrize(("target", "scan"), FORMS)
def test_layers_are_compared_one_by_one(target, scan, tmp_path):
    api.convert(EXAMPLE, tmp_path / "ours")
    api.convert(EXAMPLE, tmp_path / "theirs", target=target, scan_layers=scan)
    ours, theirs = (api.compare(tmp_path / name, layerwise=True, prompts=PROMPTS) for name in ("ours", "theirs"))
    assert theirs.passed
    assert [each.to_json() for each in theirs.layers] == [each.to_json() for each in ours.layers]


@pytest.mark.slow
def test_fit_compiles_the_model_of_a_target(tmp_path):
    api.convert(EXAMPLE, tmp_path / "ours")
    api.convert(EXAMPLE, tmp_path / "theirs", target="maxtext", scan_layers=True)
    ours, theirs = (api.fit(tmp_path / name, topologies=["v5e:1x1"], context=64) for name in ("ours", "theirs"))
    assert theirs.reports[0].memory.weights == ours.reports[0].memory.weights
    with pytest.raises(UsageError, match="not a checkpoint with the names of tpuconv"):
        api.fit(tmp_path / "theirs", topologies=["v5e:1x1"], write_layouts=True)
