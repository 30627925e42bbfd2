"""The model cards of outputs, whose metadata the Hub reads."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from helpers.checkpoints import qwen3_config, random_checkpoint
from tpuconv import api
from tpuconv.convert.run.card import serve_commands

SOURCE = """---
license: other
license_name: tiny
license_link: https://example.org/license
language: [en, fr]
pipeline_tag: text-generation
tags: [theirs]
widget: [{text: hello}]
---

# Tiny
"""


@pytest.fixture
def source(tmp_path) -> Path:
    folder = random_checkpoint(tmp_path / "hf", qwen3_config())
    (folder / "README.md").write_text(SOURCE)
    return folder


def metadata(out: Path) -> dict:
    return ModelCard.load(out / "README.md").data.to_dict()


KEPT = {key: yaml.safe_load(SOURCE.split("---")[1])[key] for key in ("license", "license_name", "language")}


def test_a_checkpoint_has_the_license_of_its_source(source, tmp_path):
    api.convert(source, tmp_path / "a")
    found = metadata(tmp_path / "a")
    assert KEPT.items() <= found.items()
    assert found["library_name"] == "tpuconv"
    assert found["tags"] == ["jax", "orbax", "tpu", "tpuconv"]
    assert not {"base_model", "widget"} & found.keys()  # a folder has no name on the Hub
    for make in (
        lambda out: api.quantize(tmp_path / "a", out, config="int8_default"),
        lambda out: api.reshard(tmp_path / "a", out, mesh={"data": 2}),
        lambda out: api.convert(source, out, target="maxtext"),
    ):
        make(tmp_path / "b")
        assert KEPT.items() <= metadata(tmp_path / "b").items()
        assert (tmp_path / "b" / "README.source.md").read_text() == SOURCE
        shutil.rmtree(tmp_path / "b")


def test_a_model_of_the_hub_is_the_base(source, tmp_path, serve_hub):
    serve_hub({"org/tiny": source})
    api.convert("org/tiny", tmp_path / "a")
    assert metadata(tmp_path / "a")["base_model"] == "org/tiny"
    assert "base_model_relation" not in metadata(tmp_path / "a")
    api.quantize(tmp_path / "a", tmp_path / "q", config="int8_default")
    found = metadata(tmp_path / "q")
    assert (found["base_model"], found["base_model_relation"]) == ("org/tiny", "quantized")
    assert "int8" in found["tags"]
    assert "values, signal to noise" in (tmp_path / "q" / "README.md").read_text()


def test_an_export_has_the_card_of_its_source_unless_it_is_quantized(source, tmp_path):
    api.convert(source, tmp_path / "a")
    api.export(tmp_path / "a", tmp_path / "plain")
    assert (tmp_path / "plain" / "README.md").read_text() == SOURCE
    api.quantize(tmp_path / "a", tmp_path / "q", config="int8_default")
    api.export(tmp_path / "q", tmp_path / "served")
    api.convert(source, tmp_path / "in-one-pass", target="huggingface", quantize="int8_default")
    for out in (tmp_path / "served", tmp_path / "in-one-pass"):
        found = metadata(out)
        assert KEPT.items() <= found.items()
        assert found["tags"] == ["compressed-tensors", "vllm", "tpuconv", "int8"]
        assert (out / "README.source.md").read_text() == SOURCE
        assert api.verify(out).passed
        api.convert(out, tmp_path / "again")
        assert (tmp_path / "again" / "README.source.md").read_text() == (out / "README.md").read_text()
        shutil.rmtree(tmp_path / "again")


@pytest.mark.parametrize(
    "card", ["", "no metadata", "---\nlicense: [", "---\n- a list\n---\n", "---\nlicense: {a: b}\n---\n", "---\n\xff"]
)
def test_a_card_without_metadata_that_can_be_read_gives_none(card, source, tmp_path):
    (source / "README.md").write_bytes(card.encode("latin-1"))
    api.convert(source, tmp_path / "a")
    assert "license" not in metadata(tmp_path / "a")


def test_commands_that_serve_are_of_a_shell() -> None:
    """A folder may have spaces and quotes."""
    folder = "my model's"
    assert shlex.split(serve_commands("qwen3", folder, 3)[0]) == ["vllm", "serve", folder]
    (command,) = serve_commands("eagle3", folder, 5)
    assert json.loads(shlex.split(command)[-1]) == {"method": "eagle3", "model": folder, "num_speculative_tokens": 5}
