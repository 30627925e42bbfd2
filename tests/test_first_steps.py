"""What a new user writes that is not quite what a command takes: it is taken, or told."""

import json
from pathlib import Path

import pytest

from helpers.commands import EXAMPLE, tpuconv
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
    ],
)
def test_slices_have_the_names_of_the_cloud(text: str, name: str) -> None:
    assert slice_of_cloud(text) == name
    assert Slice.parse(text.upper()).name == name
    assert [[each.name for each in group] for group in parse_topologies([text])] == [[name]]


@pytest.mark.parametrize("text", ["v5e-7", "v5p-1", "tpu7x-8", "v9-8"])
def test_other_names_are_refused_with_the_forms(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Slice.parse(text)
    assert "v5e-16" in caught.value.hint


@pytest.mark.parametrize(
    "address",
    [
        "https://huggingface.co/Qwen/Qwen3-8B",
        "https://huggingface.co/Qwen/Qwen3-8B/",
        "https://huggingface.co/Qwen/Qwen3-8B/tree/main",
        "https://mirror.example/Qwen/Qwen3-8B",
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


def test_help_is_a_command_too() -> None:
    assert tpuconv("help").stdout == tpuconv("--help").stdout
    assert tpuconv("help", "fit").stdout == tpuconv("fit", "--help").stdout
    assert "Did you mean 'fit'" in tpuconv("help", "fitt", code=2).stderr


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
