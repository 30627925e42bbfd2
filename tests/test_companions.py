"""The files of a source beside its weights: each is copied, or left out with a reason."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers.buckets import ROOT, in_memory
from helpers.checkpoints import qwen3_config, random_checkpoint
from helpers.commands import tpuconv
from helpers.hub_server import HubServer
from tpuconv import api, buckets
from tpuconv.errors import OutputError, SourceError, TpuconvError
from tpuconv.location import to_location
from tpuconv.sources.companions import AN_ADAPTER, OTHER_FOLDER, OTHER_WEIGHTS, UNKNOWN
from tpuconv.sources.source import open_source

COPIED = (
    *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("video_preprocessor_config.json", "chat_template.json", "chat_template.jinja", "normalizer.json", "vocab.json"),
    *("additional_chat_templates/tool_use.jinja", "tokenizer.model.v3", "spiece.model", "tekken.json", "source.spm"),
    *("LICENSE", "NOTICE.txt", "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
    *("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "query/0_Dense/config.json"),
)
MODULES = ["", "1_Pooling", "2_Dense/", "query/0_Dense"]
LEFT_OUT = {
    "consolidated.safetensors": OTHER_WEIGHTS,
    "pytorch_model.bin.index.json": OTHER_WEIGHTS,
    "adapter_config.json": AN_ADAPTER,
    "adapter_model.safetensors": AN_ADAPTER,
    "trainer_state.json": "the state of a trainer",
    "optimizer.pt": "the state of a trainer",
    "training_args.bin": "the state of a trainer",
    "random_states_0.pkl": "the state of a trainer",
    "value_head.safetensors": "the state of a trainer",
    "pytorch_model.bin": "weights in a format that is not read",
    "2_Dense/pytorch_model.bin": "weights in a format that is not read",
    "model-Q4.gguf": "weights in a format that is not read",
    "modeling_own.py": "code, which is never run",
    "tpuconv.json": "written by tpuconv",
    "layouts.json": "written by tpuconv",
    "picture.png": UNKNOWN,
    ".gitattributes": "of git",
    "onnx/": OTHER_FOLDER,
    "checkpoint-40/": OTHER_FOLDER,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "hf"
    random_checkpoint(folder, qwen3_config(), "float32")
    for name in [*COPIED, *LEFT_OUT]:
        path = folder / (f"{name}deep/config.json" if name.endswith("/") else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".safetensors"):
            save_file({"linear.weight": np.ones((2, 2), np.float32)}, path)
        elif name != "config.json":
            path.write_text(json.dumps([{"path": x} for x in MODULES] if name == "modules.json" else {"file": name}))
    return folder


def test_every_file_is_copied_or_left_out_with_a_reason(source: Path, tmp_path: Path) -> None:
    done = api.convert(source, tmp_path / "out")
    assert {each.name: each.reason for each in done.left_out} == LEFT_OUT
    assert api.plan(source).to_json()["left_out"] == [each._asdict() for each in done.left_out]
    api.export(tmp_path / "out", tmp_path / "back")
    for out in ("out", "back"):
        check_copied(source, tmp_path / out)
    (tmp_path / "out/1_Pooling/config.json").write_text("{}")
    assert api.verify(tmp_path / "out", update=True).updated == ["1_Pooling/config.json"]
    text = tpuconv("convert", source, tmp_path / "plan", "--dry-run").stdout
    assert all(name in text for name in ("adapter_config.json", "onnx/", "modeling_own.py", "--adapter"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("layouts.json", '{"mine": 1}', "is not a valid file of layouts"),
        ("quantization.html", "<p>mine", "was not made by tpuconv"),
    ],
)
def test_files_of_others_with_names_of_ours_never_become_ours(name, text, message, source, tmp_path):
    """`verify --update` would hand them to `--overwrite`, which deletes what the manifest lists."""
    out = tmp_path / "out"
    api.convert(source, out)
    (out / name).write_text(text)
    with pytest.raises(TpuconvError, match=message) as error:
        api.verify(out, update=True)
    assert "move it away" in error.value.hint
    with pytest.raises(OutputError):
        api.convert(source, out, dtype="float32", overwrite=True)
    assert (out / name).read_text() == text


def check_copied(source: Path, out: Path) -> None:
    for name in COPIED:
        assert (out / name).read_bytes() == (source / name).read_bytes(), name
    assert not any((out / name).exists() for name in LEFT_OUT if name != "tpuconv.json")
    api.verify(out).check()


@pytest.mark.slow
def test_every_kind_of_output_has_them(source: Path, tmp_path: Path) -> None:
    api.convert(source, tmp_path / "out")
    api.quantize(tmp_path / "out", tmp_path / "int8", config="int8_weight_only")
    api.convert(source, tmp_path / "direct", target="huggingface")
    api.convert(source, tmp_path / "maxtext", target="maxtext")
    for out in ("int8", "direct", "maxtext"):
        check_copied(source, tmp_path / out)


def test_an_adapter_in_the_folder_is_named_unless_it_is_merged(source: Path) -> None:
    (source / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1, "lora_alpha": 1}')
    config = json.loads((source / "config.json").read_text())
    rows, columns = config["num_attention_heads"] * config["head_dim"], config["hidden_size"]
    pair = {"A": np.ones((1, columns), np.float32), "B": np.ones((rows, 1), np.float32)}
    names = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    save_file({names.format(x): values for x, values in pair.items()}, source / "adapter_model.safetensors")
    assert AN_ADAPTER in {each.reason for each in api.plan(source).plan.left_out}
    assert AN_ADAPTER not in {each.reason for each in api.plan(source, adapter=[f"{source}"]).plan.left_out}


def test_the_same_from_the_hub_and_from_a_bucket(
    source: Path, serve_hub: Callable[..., HubServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(source / "query")
    (source / "modules.json").write_text(json.dumps([{"path": x} for x in MODULES[:3]]))
    local = open_source(source)
    serve_hub({"org/model": source})
    done = api.convert("org/model", tmp_path / "out")
    assert set(done.left_out) == set(local.left_out)
    api.verify(tmp_path / "out").check()
    assert all((tmp_path / "out" / name).exists() for name in local.companions)
    in_memory(monkeypatch)
    url = to_location(f"{ROOT}/model")
    for path in source.rglob("*"):
        if path.is_file():
            buckets.put_object(url / path.relative_to(source).as_posix(), path.read_bytes())
    away = open_source(url)
    assert away.companions == local.companions
    assert {each.name for each in away.left_out} == {each.name.rstrip("/") for each in local.left_out}


def test_links_and_names_that_are_no_text_are_left_out(source: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/config.json").write_text("{}")
    shutil.rmtree(source / "1_Pooling")
    (source / "1_Pooling").symlink_to(tmp_path / "elsewhere")
    (source / os.fsdecode(b"\xff.json")).write_text("{}")
    left_out = {each.name: each.reason for each in open_source(source).left_out}
    assert left_out["1_Pooling/"] == UNKNOWN
    assert left_out[r"\udcff.json"] == "its name is no text"
    api.convert(source, tmp_path / "out")
    api.verify(tmp_path / "out").check()
    (source / "2_Dense/config.json").unlink()
    (source / "2_Dense/config.json").symlink_to(tmp_path / "elsewhere/config.json")
    with pytest.raises(SourceError, match="is a link out of its folder"):
        open_source(source)


@pytest.mark.parametrize("path", ["../x", "a/../../x", "a//b", "."])
def test_modules_in_folders_outside_are_refused(path: str, source: Path) -> None:
    (source / "modules.json").write_text(json.dumps([{"path": path}]))
    with pytest.raises(SourceError, match="no folder inside"):
        open_source(source)


def test_a_folder_of_a_module_that_cannot_be_read_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root reads every folder: the system call is refused for it here."""
    listed = os.scandir

    def refused(path: Any) -> Any:
        if Path(path).name == "0_Dense":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(SourceError, match="0_Dense cannot be read: Permission denied"):
        api.convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
