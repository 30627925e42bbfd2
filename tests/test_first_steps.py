"""What a new user writes that is not quite what a command takes: it is taken, or told."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.commands import EXAMPLE, tpuconv
from tpuconv import api, load
from tpuconv.commands.params import id_of_page
from tpuconv.errors import UsageError
from tpuconv.verify.topology.chips import Slice, parse_topologies, slice_of_cloud


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("v5e-8", "v5e:2x4"),
        ("v5litepod-16", "v5e:4x4"),
        ("v6e-1", "v6e:1x1"),
        ("v5p-8", "v5p:2x2x1"),  # two cores in each chip
        ("v4-16", "v4:2x2x2"),
        ("v5e:2x4", "v5e:2x4"),
        ("tpu7x-8", "tpu7x:2x2x1"),
        ("v7x-2", "tpu7x:1x1x1"),
    ],
)
def test_slices_have_the_names_of_the_cloud(text: str, name: str) -> None:
    assert slice_of_cloud(text) == name
    assert Slice.parse(text.upper()).name == name
    assert [[each.name for each in group] for group in parse_topologies([text])] == [[name]]


@pytest.mark.parametrize(
    ("text", "why", "names"),
    [
        ("v5litepod-3", "v5e has no slice of 3 chips", "v5e-1, v5e-4, v5e-8"),
        ("v7x-3", "tpu7x has no slice of 3 cores", "tpu7x-2, tpu7x-8, tpu7x-16"),
        ("v5p-1", "v5p has no slice of 1 cores", "v5p-2, v5p-8, v5p-16"),
    ],
)
def test_a_number_of_chips_that_is_not_offered_is_told_with_those_that_are(text: str, why: str, names: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        Slice.parse(text)
    assert f"its slices are {names}" in caught.value.hint


def test_chips_have_other_names() -> None:
    assert Slice.parse("Ironwood:2x2x1").name == "tpu7x:2x2x1"
    assert {each.kind for group in parse_topologies(["v7x", "trillium"]) for each in group} == {"tpu7x", "v6e"}


def test_other_names_are_refused_with_the_forms() -> None:
    with pytest.raises(UsageError) as caught:
        Slice.parse("v9-8")
    assert "v5e-16" in caught.value.hint


@pytest.mark.parametrize(
    "address",
    [
        "https://huggingface.co/Qwen/Qwen3-8B",
        "https://huggingface.co/Qwen/Qwen3-8B/",
        "https://huggingface.co/Qwen/Qwen3-8B/tree/main",
        "https://mirror.example/Qwen/Qwen3-8B",
        "hf://Qwen/Qwen3-8B",
        "Qwen/Qwen3-8B",
    ],
)
def test_the_address_of_a_model_is_its_id(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/")
    assert id_of_page(address) == "Qwen/Qwen3-8B"


@pytest.mark.parametrize("text", ["https://huggingface.co/Qwen/Qwen3-8B/tree/v2", "https://other.example/a/b", "./a"])
def test_other_addresses_stay_as_they_are(text: str) -> None:
    assert id_of_page(text) == text


def test_another_branch_is_told() -> None:
    address = "https://huggingface.co/Qwen/Qwen3-8B/tree/v2"
    assert "give the id alone: Qwen/Qwen3-8B" in tpuconv("convert", address, code=2).stderr


def test_swapped_arguments_are_told(tmp_path: Path) -> None:
    said = tpuconv("convert", "new", EXAMPLE, cwd=tmp_path, code=2).stderr
    assert "SRC is the first argument" in said
    assert f"`tpuconv convert {EXAMPLE} new`" in said


def test_the_base_of_an_adapter_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "my-lora"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"")
    for base, named in (
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        (str(EXAMPLE), str(EXAMPLE)),
        ("/gone", "BASE"),
        (3, "BASE"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        said = tpuconv("convert", "my-lora", cwd=tmp_path, code=2).stderr
        assert f"`tpuconv convert {named} --adapter my-lora`" in said
        assert re.match(r"UsageError\[TC\d+\]: my-lora holds an adapter", said)


def test_help_is_a_command_too() -> None:
    assert tpuconv("help").stdout == tpuconv("--help").stdout
    assert tpuconv("help", "fit").stdout == tpuconv("fit", "--help").stdout
    assert "did you mean 'fit'" in tpuconv("help", "fitt", code=2).stderr


def test_values_are_completed() -> None:
    from tpuconv.cli import tpuconv as group

    def completions(command: str, name: str, begun: str) -> set[str]:
        import click

        (param,) = (param for param in group.command_of(command).params if param.name == name)
        found = param.shell_complete(click.Context(group.command_of(command)), begun)
        return {item.value for item in found}

    assert completions("convert", "quantize", "int8_d") == {"int8_default"}
    assert completions("convert", "target", "max") == {"maxtext"}
    assert completions("families", "name", "qwen3_n") == {"qwen3_next"}
    assert completions("quantize", "shown_config", "nf4") == {"nf4_weight_only"}


def test_checkpoints_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import click

    from tpuconv.cli import tpuconv as group

    monkeypatch.chdir(tmp_path)
    for name in ("runs/a-orbax", "b-orbax", "b-other"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("runs/a-orbax", "b-orbax"):
        (tmp_path / name / "tpuconv.json").write_text("{}")
    for command in ("verify", "quantize", "generate", "benchmark", "export", "reshard", "push"):
        (param, *_) = (param for param in group.command_of(command).params if isinstance(param, click.Argument))
        for begun, found in (
            ("", [("b-orbax", "plain")]),
            ("b-o", [("b-orbax", "plain")]),
            ("runs/", [("runs/a-orbax", "plain")]),
            ("ru", [("ru", "dir")]),
            ("nowhere/", [("nowhere/", "dir")]),
        ):
            items = param.shell_complete(click.Context(group.command_of(command)), begun)
            assert [(item.value, item.type) for item in items] == found


IDS = [[5, 9, 11], [3, 1, 4]]


def test_ids_are_an_array_or_a_list(model: Any) -> None:
    import torch

    logits_BTV = model(np.array(IDS))
    for ids in (IDS, tuple(map(tuple, IDS)), torch.tensor(IDS)):
        assert (model(ids) == logits_BTV).all()


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        ([5, 9, 11], "of shape (3,) and type int64"),
        ("In the beginning", "of shape () and type <U16"),
        ([[5.0, 9.0]], "of shape (1, 2) and type float64"),
        ([[]], "of shape (1, 0) and type float64"),
        (np.zeros((2, 0), int), "of shape (2, 0) and type int64"),
        ([[5, 9], [3]], "no array: "),
        (np.zeros((1, 1, 2), np.int32), "of shape (1, 1, 2) and type int32"),
    ],
)
def test_ids_of_another_form_are_told(ids: Any, why: str, model: Any) -> None:
    with pytest.raises(UsageError, match=f"ids_BT is {re.escape(why)}") as caught:
        model(ids)
    assert "[texts, tokens]" in caught.value.hint


@pytest.fixture(scope="module")
def model() -> Any:
    return load(EXAMPLE)


def test_an_interruption_while_the_program_is_imported_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "tpuconv", "doctor"],
        capture_output=True,
        env=os.environ | {"PYTHONPATH": path},
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_an_out_where_no_folder_can_be_made_is_told_to_change() -> None:
    said = tpuconv("convert", EXAMPLE, "/proc/x", code=8).stderr
    assert "/proc/.x.tpuconv cannot be written: No such file or directory" in said
    assert "choose another OUT" in said


def test_a_dry_run_refuses_a_workspace_that_has_no_use(tmp_path: Path) -> None:
    for out in ((), (tmp_path / "out",)):
        args = ("quantize", EXAMPLE, *out, "--config", "int4_gptq", "--workspace", tmp_path / "mine")
        assert "leave --workspace out" in tpuconv(*args, "--dry-run", cwd=tmp_path, code=2).stderr
        assert "leave --workspace out" in tpuconv(*args, cwd=tmp_path, code=2).stderr
    assert not list(tmp_path.iterdir())


def test_the_interface_of_the_commands_needs_no_import_of_its_own() -> None:
    program = "import sys, tpuconv; assert 'api' in dir(tpuconv); tpuconv.api.convert; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_stage_that_is_complete_has_one_bar(capsys: pytest.CaptureFixture[str]) -> None:
    """Reports go on at the total, while an output is published."""
    bar = api.Bar()
    for stage, done in (("converting", 0), ("converting", 8), ("converting", 8), ("checking", 8), ("checking", 8)):
        bar(api.Progress(stage, done, 8))
    assert capsys.readouterr().err.count("\n") == 2
    bar(api.Progress("checking", 0, 8))  # another run
    bar(api.Progress("checking", 8, 8))
    assert capsys.readouterr().err.count("\n") == 1


def test_an_error_of_the_hub_shows_no_lines_of_its_client(tmp_path: Path) -> None:
    program = "import tpuconv; tpuconv.load('org/nowhere')"
    offline = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    said = subprocess.run(
        [sys.executable, "-c", program], env=offline, capture_output=True, text=True, check=False
    ).stderr
    assert "cannot be reached" in said
    assert "site-packages" not in said


def test_the_text_of_a_model_is_a_line(model: Any) -> None:
    assert repr(model) == str(model) == "<qwen3: 5 layers, 1,604,800 parameters, bfloat16>"


def test_more_positions_than_a_function_has_are_told() -> None:
    with pytest.raises(
        TypeError, match=r"load\(\) too many positional arguments: it takes src, dtype, mesh by position"
    ):
        load(EXAMPLE, None, None, True)  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"compare\(\).*: it takes ckpt by position"):
        api.compare("a", "b")  # type: ignore[misc]
