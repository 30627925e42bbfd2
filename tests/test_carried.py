"""`export --with-skipped`: what a conversion skipped comes back from its source, which is proved to be the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tpuconv
from helpers.checkpoints import INDEX, read_tensors, write_checkpoint
from helpers.commands import tpuconv as tpuconv_command
from helpers.conversions import convert
from helpers.encoded import same_bits
from helpers.families import CASES, save
from tpuconv import api
from tpuconv.convert.export import files as export_files
from tpuconv.errors import SourceError, UsageError

WRAPPER = next(case for case in CASES if case.id == "gemma3-own-head")


def assert_all_came_back(source: Path, back: Path) -> None:
    have, want = read_tensors(back), read_tensors(source)
    assert have.keys() == want.keys()
    assert all(same_bits(x, want[name]) for name, x in have.items())


@pytest.fixture(scope="module")
def wrapper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wrapper with a vision tower, in three files, and `out`, its conversion."""
    folder = tmp_path_factory.mktemp("wrapper")
    save(WRAPPER, folder / "whole", "bfloat16")
    config = json.loads((folder / "whole" / "config.json").read_text())
    write_checkpoint(folder / "hf", config, read_tensors(folder / "whole"), shards=3)
    convert(folder / "hf", folder / "out")
    return folder


def test_the_complete_checkpoint_comes_back(wrapper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_files, "SHARD_BYTES", 20_000)
    done = api.export(wrapper / "out", tmp_path / "back", with_skipped=wrapper / "hf")
    assert_all_came_back(wrapper / "hf", tmp_path / "back")
    assert set(json.loads((tmp_path / "back" / INDEX).read_text())["weight_map"]) == set(read_tensors(wrapper / "hf"))
    assert done.bytes == sum(x.nbytes for x in read_tensors(wrapper / "hf").values())
    api.verify(tmp_path / "back").check()
    assert api.export(wrapper / "out", tmp_path / "back", with_skipped=wrapper / "hf").already_there


def test_a_text_model_alone_is_not_exported_as_a_whole_one(wrapper: Path, tmp_path: Path) -> None:
    """Its config.json describes a tower, for which transformers would fill in random numbers."""
    for call in (api.plan_export, lambda ckpt: api.export(ckpt, tmp_path / "back")):
        with pytest.raises(
            UsageError, match=r"contains only the text model, .*: \d+ tensors would be missing"
        ) as error:
            call(wrapper / "out")
        assert error.value.hint
        assert "`with_skipped=" in error.value.hint
        assert any("vision encoder" in line for line in error.value.details)
    assert not (tmp_path / "back").exists()


def test_what_safetensors_take_along_is_not_called_left_out(wrapper: Path, tmp_path: Path) -> None:
    done = api.convert(wrapper / "hf", tmp_path / "direct", target="huggingface")
    assert_all_came_back(wrapper / "hf", tmp_path / "direct")
    skipped = json.loads((wrapper / "out/tpuconv.json").read_text())["skipped"]
    assert (done.carried, list(done.skipped)) == (sum(skip["count"] for skip in skipped), [])
    plan = api.plan(wrapper / "hf", target="huggingface").to_json()
    assert (plan["carried"], plan["skipped"]) == (done.carried, [])
    text = tpuconv_command("convert", wrapper / "hf", tmp_path / "direct", "--target", "huggingface").stdout
    assert f"copied unchanged: {done.carried} tensors" in text
    assert "not converted" not in text


def test_another_source_is_refused(wrapper: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(wrapper / "hf", tmp_path / "copy"))  # other files, the same bytes
    api.export(wrapper / "out", tmp_path / "back", with_skipped=copy)
    assert_all_came_back(wrapper / "hf", tmp_path / "back")
    shard = copy / "model-00002-of-00003.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(SourceError, match=r"is not the source of .*: other weights") as error:
        api.export(wrapper / "out", tmp_path / "no", with_skipped=copy)
    assert list(error.value.details) == [shard.name]
    assert not (tmp_path / "no").exists()


def test_nothing_skipped(hf: Any, orbax: Any, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.id == "llama-plain")
    with pytest.raises(UsageError, match="skipped nothing"):
        api.export(orbax(case), tmp_path / "back", with_skipped=hf(case))


@pytest.mark.slow
def test_layers_that_predict_further_tokens(with_mtp: Path, tmp_path: Path) -> None:
    convert(with_mtp, tmp_path / "out")
    api.export(tmp_path / "out", tmp_path / "back", with_skipped=with_mtp)
    assert_all_came_back(with_mtp, tmp_path / "back")
    api.convert(with_mtp, tmp_path / "with", include_mtp=True)
    api.export(tmp_path / "with", tmp_path / "with-back", with_skipped=with_mtp)  # copies alone
    assert_all_came_back(with_mtp, tmp_path / "with-back")


@pytest.mark.slow
def test_a_quantized_export_names_the_modules_that_are_plain(wrapper: Path, tmp_path: Path) -> None:
    api.quantize(wrapper / "out", tmp_path / "int8", config="int8_weight_only")
    api.export(tmp_path / "int8", tmp_path / "w8", with_skipped=wrapper / "hf")
    skipped = {name: x for name, x in read_tensors(wrapper / "hf").items() if "vision" in name or "projector" in name}
    back = read_tensors(tmp_path / "w8")
    assert all(same_bits(back[name], x) for name, x in skipped.items())
    ignored = json.loads((tmp_path / "w8" / "config.json").read_text())["quantization_config"]["ignore"]
    matrices = {n.removesuffix(".weight") for n, x in skipped.items() if x.ndim == 2 and n.endswith(".weight")}
    assert matrices <= set(ignored)


@pytest.mark.slow
def test_a_copy_of_changed_weights_is_left_out(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.id == "qwen3-tied")
    save(case, tmp_path / "plain", "bfloat16")
    tensors = read_tensors(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    source = write_checkpoint(tmp_path / "hf", config, tensors)
    convert(source, tmp_path / "out")
    api.export(tmp_path / "out", tmp_path / "back", with_skipped=source)
    assert_all_came_back(source, tmp_path / "back")
    model = tpuconv.load(tmp_path / "out")
    model.embed.embedding[...] = np.asarray(model.embed.embedding[...]) * 2
    tpuconv.save(model, tmp_path / "saved", like=tmp_path / "out")
    with pytest.raises(UsageError, match="skipped nothing"):
        api.export(tmp_path / "saved", tmp_path / "saved-back", with_skipped=source)
