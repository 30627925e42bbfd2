"""A run that only publishes what an earlier one made says so, and does not take it for an output that was there."""

import os
from functools import partial
from pathlib import Path

import pytest

from helpers.attacks import made
from helpers.attacks.simulated import contents
from helpers.buckets import ROOT, Killed, in_memory, objects
from helpers.commands import tpuconv
from tpuconv import api
from tpuconv.api import made as running
from tpuconv.convert.run.engine import WORKING, RunProgress
from tpuconv.errors import OutputError, ResourceError, UsageError
from tpuconv.progress import Progress
from tpuconv.storage import disk
from tpuconv.storage.claim import Claim
from tpuconv.storage.journal import Journal
from tpuconv.storage.sealed import STAGED

OPTIONS = {
    "converted": {},
    "as safetensors": {"target": "huggingface"},
    "exported": {},
    "resharded": {"mesh": {"tensor": 2}},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.source(tmp_path_factory.mktemp("source") / "src", shards=2)


@pytest.fixture(scope="module")
def ckpt(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ckpt") / "ckpt"
    api.convert(source, out)
    return out


@pytest.fixture(params=OPTIONS)
def run(request, source, ckpt):
    """The call that makes an output of one kind."""
    command = {"exported": api.export, "resharded": api.reshard}.get(request.param, api.convert)
    src = source if command is api.convert else ckpt
    return lambda out, **more: command(src, out, **OPTIONS[request.param], **more)


def check_resumed(done, nbytes):
    assert done.published
    assert not done.already_there
    assert done.resumed_bytes == nbytes


def interrupted(*_):
    raise KeyboardInterrupt


def test_a_run_that_goes_on_says_once_what_is_done():
    reports = [RunProgress(done, 400, resumed, WORKING) for done, resumed in ((100, 100), (250, 100), (400, 100))]
    shown: list[Progress] = []
    assert [*running._shown(reports, "converting", shown.append)] == reports
    assert [each.message for each in shown if each.message] == ["resuming: 100 B of 400 B are done"]
    assert [each.done for each in shown if not each.message] == [100, 250, 400]


@pytest.mark.parametrize("at", ["before", "complete", "renamed"])
def test_on_a_disk(at, run, tmp_path, monkeypatch):
    first, out = run(tmp_path / "first"), tmp_path / "out"
    assert not first.already_there
    assert first.resumed_bytes == 0
    with monkeypatch.context() as patched:
        if at == "before":
            patched.setattr(Journal, "publish", interrupted)
        elif at == "complete":
            patched.setattr(disk, "rename", lambda old, new: os.rename(old, new) if new != out else interrupted())
        else:
            patched.setattr(Journal, "_end_publication", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(out)
    assert (out / STAGED).exists() == (at == "renamed")
    done = run(out)
    nbytes = first.source_bytes if isinstance(first, api.Conversion) else first.bytes
    check_resumed(done, nbytes)
    assert contents(out) == contents(tmp_path / "first")
    again = run(out, check=True)
    assert again.already_there
    assert again.resumed_bytes == nbytes
    assert again.to_json()["already_there"]


def test_in_a_bucket(run, monkeypatch):
    """Killed at each fifth request from the last part to the last mark."""
    with monkeypatch.context() as patched:
        log = in_memory(patched).log
        first = run(f"{ROOT}/out")
        wanted = objects(f"{ROOT}/out")
    nbytes = first.source_bytes if isinstance(first, api.Conversion) else first.bytes
    begin = max(n for n, name in enumerate(log) if name.endswith(".done") and name.startswith("put")) - 1
    for at in range(begin, log.index("copy out/tpuconv.json") + 1, 5):
        with monkeypatch.context() as patched:
            bucket = in_memory(patched)
            bucket.at = at
            with pytest.raises(Killed):
                run(f"{ROOT}/out")
            bucket.at = None
            for read in (api.verify, api.inspect):
                with pytest.raises(UsageError, match=r"out is not finished: the work on it is in .*/out\.tpuconv"):
                    read(f"{ROOT}/out")
            patched.setattr(Claim, "is_dead", lambda *_: True)
            check_resumed(run(f"{ROOT}/out"), nbytes)
            assert objects(f"{ROOT}/out") == wanted
            assert run(f"{ROOT}/out").already_there


FORMS = {
    "converted": "a checkpoint",
    "as safetensors": "safetensors",
    "exported": "safetensors",
    "resharded": "a checkpoint that is sharded for a mesh",
}


@pytest.mark.parametrize("there", ["converted", "exported", "resharded"])
def test_an_output_of_another_form_is_called_that(there, request, run, source, ckpt, tmp_path, monkeypatch):
    """Its other facts are not compared: all of them differ, and some only seem to be equal."""
    form, others = FORMS[request.node.callspec.params["run"]], FORMS[there]
    if form == others:
        return
    make = {"exported": partial(api.export, ckpt), "resharded": partial(api.reshard, ckpt, mesh={"tensor": 2})}
    make_there = make.get(there, partial(api.convert, source))
    make_there(tmp_path / "out")
    with pytest.raises(OutputError, match="exists already") as info:
        run(tmp_path / "out")
    assert info.value.details == (f"output: made as {others}, now {form}",)
    monkeypatch.setattr(Journal, "publish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_there(tmp_path / "killed")
    with pytest.raises(OutputError, match="unfinished") as info:
        run(tmp_path / "killed")
    assert info.value.details == (f"output: began as {others}, now {form}",)


def test_the_commands_say_it(source, tmp_path, monkeypatch):
    for command, *args in (("convert", source, tmp_path / "out"), ("export", tmp_path / "out", tmp_path / "hf")):
        with monkeypatch.context() as patched:
            patched.setattr(Journal, "publish", interrupted)
            with pytest.raises(KeyboardInterrupt):
                getattr(api, command)(*args)
        said = tpuconv(command, *args).stdout
        assert " from an earlier run" in said
        assert "/s)" not in said
        assert "exists already" in tpuconv(command, *args).stdout


def test_an_output_that_is_there_is_found_where_nothing_may_be_written(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    run(out)

    def refuse(path: Path) -> None:
        raise ResourceError(f"{path} cannot be written")

    monkeypatch.setattr(disk, "make_folder", refuse)
    assert run(out).already_there
    for changes in ({"overwrite": True}, {}):
        (out / STAGED).touch()  # of a publication that was not finished
        with pytest.raises(ResourceError, match="cannot be written"):
            run(out, **changes)
