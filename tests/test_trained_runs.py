"""Commands that read a trainer's run by `--config`, and write no checkpoint: each gives what it gives of the run's
export, whose weights are not those of the model that was trained."""

import json
from pathlib import Path

import numpy as np
import pytest

import tpuconv
from helpers.commands import EXAMPLE
from helpers.commands import tpuconv as command
from helpers.conversions import same_bits
from helpers.families import FIRST
from helpers.trainers import adam_state, changed_leaf, save_standard, save_step, trained_tree
from tpuconv import api
from tpuconv.errors import GateError, SourceError, TpuconvError, UsageError

PROMPT = "Once upon a time"
OPTIMIZER, STEP = "arrays of an optimizer's state", "arrays with the number of a step"


@pytest.fixture(scope="module", params=["maxtext", pytest.param("nnx", marks=pytest.mark.slow)])
def run(request, tmp_path_factory) -> Path:
    """A run that changed one matrix, with the optimizer's state: of MaxText scanned, of Flax NNX by its target."""
    folder, scan = tmp_path_factory.mktemp(request.param), request.param == "maxtext"
    api.convert(EXAMPLE, folder / "start", target=request.param, scan_layers=scan)
    tree = trained_tree(folder / "start")
    path = "params.params.decoder.layers.mlp.wo.kernel" if scan else "layers.0.mlp.down.kernel.value"
    values = tree
    for key in path.split("."):
        values = values[key]
    tree = changed_leaf(tree, path, np.asarray(values) * np.asarray(1.5, values.dtype))
    if scan:
        state = {"params": tree["params"], "opt_state": adam_state(tree["params"]), "step": np.int32(3)}
    else:
        state = {"model": tree, "optimizer": {"opt_state": adam_state(tree), "step": np.int32(3)}}
    save_step(folder / "run", 3, state, "items" if scan else "")
    return folder / "run"


@pytest.fixture(scope="module")
def known(run) -> Path:
    """The export of the run."""
    return api.export(run, run.parent / "known", config=EXAMPLE).out


def arrays(model) -> dict[str, np.ndarray]:
    from flax import nnx

    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}


def check_facts(facts, run: Path) -> None:
    """The facts of one run, which name what was not read."""
    (found,) = facts
    assert found.folder == run
    assert found.target == run.parent.name.rstrip("0123456789")
    assert found.arrays == run / "3" / ("items" if found.target == "maxtext" else "default")
    assert {skip.reason for skip in found.skipped} == {OPTIMIZER} | ({STEP} if found.target == "maxtext" else set())


def test_load_gives_the_bits_of_the_export(run, known):
    have, want = arrays(tpuconv.load(run, config=EXAMPLE)), arrays(tpuconv.load(known))
    assert have.keys() == want.keys()
    assert not [name for name in have if not same_bits(have[name], want[name])]


def test_generate_gives_the_text_of_the_export(run, known):
    facts: list = []
    texts = [
        generator([PROMPT, "In the"], max_new_tokens=8, chat=False)
        for generator in (api.generator(run, config=EXAMPLE, on_run=facts.append), api.generator(known))
    ]
    assert texts[0] == texts[1]
    check_facts(facts, run)


def test_the_run_is_compared_with_transformers_on_its_export(run, known):
    """Not on the weights of the model that was trained, which can be given."""
    found, want = (
        api.compare(path, prompts=[PROMPT, "In the"], **given)
        for path, given in ((run, {"config": EXAMPLE}), (known, {}))
    )
    found.check()
    check_facts(found.runs, run)
    assert (found.checkpoint, found.source) == (run, str(run))
    assert found.statistics == want.statistics
    with pytest.raises(GateError, match="computes other outputs"):
        api.compare(run, config=EXAMPLE, source=EXAMPLE, prompts=[PROMPT]).check()
    layers = api.compare(run, config=EXAMPLE, layerwise=True, prompts=[PROMPT])
    layers.check()
    assert layers.layers


def test_two_models_one_of_which_is_a_run(run, known):
    same = api.compare_checkpoints(known, run, config=EXAMPLE, prompts=[PROMPT])
    check_facts(same.runs, run)
    assert same.statistics.mean_kl == 0
    assert {tensor.largest for tensor in same.tensors} == {0}
    changed = api.compare_checkpoints(run, EXAMPLE, config=EXAMPLE, prompts=[PROMPT])
    assert changed.statistics.mean_kl > 0
    assert {name.split(".", 2)[2] for name in (t.name for t in changed.tensors if t.largest)} == {"mlp.down.kernel"}
    both = api.compare_checkpoints(run, run, config=EXAMPLE, prompts=[PROMPT])
    assert both.statistics.mean_kl == 0
    assert [facts["folder"] for facts in both.to_json()["runs"]] == [str(run), str(run)]


@pytest.mark.slow
def test_benchmark_runs_the_model_of_the_run(run, known):
    sizes = {"prompt_length": [4], "new_tokens": [4], "repeats": 1}
    found, want = api.benchmark(run, config=EXAMPLE, **sizes), api.benchmark(known, **sizes)
    assert (found.checkpoint, found.text) == (run, want.text)
    check_facts(found.runs, run)


def test_inspect_shows_the_arrays_as_of_a_checkpoint(run, tmp_path):
    start = run.parent / "start"
    found, want = (
        api.inspect(path, mesh={"fsdp": 2}, **given).to_json()
        for path, given in ((run, {"config": EXAMPLE}), (start, {}))
    )
    (facts,) = found.pop("runs")
    assert {skip["reason"] for skip in facts["skipped"]} >= {OPTIMIZER}
    assert found == want | {"format": "orbax"}
    page = api.inspect(run, config=EXAMPLE, html=tmp_path / "page.html", beside=start)
    assert page.comparison.only_reference == page.comparison.only_other == []
    different = [each.name for each in page.comparison.differences if each.largest]
    assert len(different) == 1
    assert "mlp" in different[0]
    assert (tmp_path / "page.html").stat().st_size


def test_the_text_of_a_multimodal_model_is_compared_layer_by_layer(hf, tmp_path):
    """transformers would fill in random numbers for the encoder."""
    source = hf(FIRST["gemma3"])
    api.convert(source, tmp_path / "start", target="nnx", text_only=True)
    save_standard(tmp_path / "run", trained_tree(tmp_path / "start"))
    found = api.compare(tmp_path / "run", config=source)
    found.check()
    assert found.layers
    assert any("vision" in skip.reason for skip in found.runs[0].skipped)
    same = api.compare_checkpoints(source, tmp_path / "run", config=source)
    assert {tensor.largest for tensor in same.tensors} == {0}
    with pytest.raises(UsageError, match="has the text model alone") as info:
        api.compare(tmp_path / "run", config=source, mesh={"tensor": 1})
    assert info.value.hint == "leave `mesh=` out"


@pytest.mark.slow
def test_of_the_hub_no_weights_are_downloaded(run, hub_cache, serve_hub):
    """The folder of the model is gone when the text is generated."""
    serve_hub({"org/tiny": EXAMPLE})
    generator = api.generator(run, config="org/tiny")
    assert generator([PROMPT], max_new_tokens=4)
    assert api.compare(run, config="org/tiny", prompts=[PROMPT]).passed
    assert not list(hub_cache.rglob("*.safetensors"))


# -- the commands -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_commands_tell_what_they_read(run, known):
    folder, given = run.parent, ("--config", EXAMPLE)
    shown = command("generate", "run", "--prompt", PROMPT, "--max-new-tokens", "4", *given, cwd=folder)
    assert f"run: read as {run.parent.name[:-1]}: run/3/" in shown.stderr
    assert f"{OPTIMIZER}: " in shown.stderr
    want = command("generate", "known", "--prompt", PROMPT, "--max-new-tokens", "4", cwd=folder).stdout
    assert shown.stdout == want
    for name, *options in (
        ("generate", "run", "--prompt", PROMPT, "--max-new-tokens", "2"),
        ("verify", "run", "--compare-hf"),
        ("compare", "known", "run"),
        ("inspect", "run"),
        ("benchmark", "run", "--prompt-length", "4", "--new-tokens", "2", "--repeats", "1"),
    ):
        facts = json.loads(command(name, *options, *given, "--json", cwd=folder).stdout)
        (found,) = facts["runs"]
        assert (found["folder"], found["target"]) == ("run", run.parent.name[:-1])
        assert {skip["reason"] for skip in found["skipped"]} >= {OPTIMIZER}
    for name, *options in (("inspect", "run"), ("compare", "known", "run")):
        shown = command(name, *options, *given, cwd=folder).stdout
        assert "not read: " in shown
        assert OPTIMIZER in " ".join(shown.split())


# -- what is refused --------------------------------------------------------------------------------------------------

READERS = {
    "load": tpuconv.load,
    "generate": api.generator,
    "verify --compare-hf": api.compare,
    "verify --server": lambda place, **given: api.compare_server(place, "http://127.0.0.1:9", **given),
    "compare": lambda place, **given: api.compare_checkpoints(place, EXAMPLE, **given),
    "benchmark": api.benchmark,
    "inspect": api.inspect,
}


@pytest.mark.parametrize("name", READERS)
def test_a_run_needs_the_config_and_nothing_else_takes_it(name, run):
    read = READERS[name]
    with pytest.raises(UsageError, match=r"is a checkpoint of Orbax without tpuconv\.json") as info:
        read(run)
    assert "`config=SRC`" in info.value.hint
    with pytest.raises(UsageError, match="has a manifest of tpuconv, so `config=` is not needed"):
        read(run.parent / "start", config=EXAMPLE)
    with pytest.raises(UsageError, match="holds no Orbax checkpoint"):
        read(EXAMPLE, config=EXAMPLE)


def test_options_of_a_conversion_are_not_for_a_run(run):
    with pytest.raises(UsageError, match="is a trainer's checkpoint, which has the form") as info:
        tpuconv.load(run, config=EXAMPLE, scan_layers=True)
    assert "`scan_layers=`" in info.value.hint


def test_another_model_and_a_damaged_run(run, hf, tmp_path):
    with pytest.raises(TpuconvError, match="is not a checkpoint of this"):
        api.generator(run, config=hf(FIRST["llama"]))
    command("generate", run, "--prompt", PROMPT, code=UsageError.exit_code)
    said = command("verify", run, "--config", EXAMPLE, code=UsageError.exit_code).stderr
    assert "--config goes with --compare-hf or --server" in said


@pytest.fixture
def diverged(tmp_path) -> Path:
    """A run with one value that is not a number, and LoRA with one too."""
    api.convert(EXAMPLE, tmp_path / "start", target="nnx")
    tree = trained_tree(tmp_path / "start")
    leaf = np.array(tree["layers"]["0"]["mlp"]["down"]["kernel"]["value"])
    leaf[3, 5] = np.nan
    save_step(tmp_path / "run", 3, changed_leaf(tree, "layers.0.mlp.down.kernel.value", leaf), "")
    return tmp_path / "run"


@pytest.mark.parametrize("write", [api.export, api.reshard])
def test_a_run_that_diverged_is_not_written(write, diverged, tmp_path) -> None:
    with pytest.raises(SourceError, match=r"down\.kernel\.value is not finite") as refused:
        write(diverged, tmp_path / "out", config=EXAMPLE)
    assert list(refused.value.details) == [
        "the first is layers.0.mlp.down.kernel.value[3, 5], which is nan in bfloat16",
    ]
    assert not (tmp_path / "out").exists()
    written = write(diverged, tmp_path / "out", config=EXAMPLE, allow_nonfinite=True, overwrite=True)
    assert api.verify(written.out).passed


def test_the_option_for_it_is_for_runs_alone(known, tmp_path) -> None:
    api.convert(EXAMPLE, tmp_path / "ours")
    with pytest.raises(UsageError, match="only for a trainer's checkpoint"):
        api.export(tmp_path / "ours", tmp_path / "out", allow_nonfinite=True)
    with pytest.raises(UsageError, match="only for a trainer's checkpoint"):
        api.reshard(tmp_path / "ours", tmp_path / "out", mesh={"tensor": 2}, allow_nonfinite=True)
