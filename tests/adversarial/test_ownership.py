"""What belongs to others is not touched, on a disk: files in an output and in its work folder, files of ours that their
owner rewrote, outputs in outputs, sources in outputs. All is as it was after the refusal, which names it."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.attacks import made
from helpers.attacks.counts import count
from helpers.attacks.simulated import contents, copy_tree
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import OutputError, UsageError
from tpuconv.storage import disk
from tpuconv.storage.journal import Journal
from tpuconv.storage.sealed import STAGED

Made = tuple[Path, Path]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Two sources, of which each may replace the output of the other one."""
    base = tmp_path_factory.mktemp("sources")
    return made.source(base / "new"), made.source(base / "old", 1, rms_norm_eps=1e-5)


@pytest.fixture
def out(sources: Made, tmp_path: Path) -> Path:
    made.convert(sources[1], tmp_path / "out")
    return tmp_path / "out"


def put(path: Path, data: bytes = b"mine") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def refused(act: Callable[[], object], base: Path, *names: str, code: int = 9) -> None:
    before = contents(base)
    with pytest.raises((OutputError, UsageError)) as info:
        act()
    assert info.value.exit_code == code
    assert all(name in str(info.value) for name in names), info.value
    assert contents(base) == before
    count("what belongs to others", "refused by name")


INSIDE = [
    *("notes.txt", "params/notes.txt", "params/3/state/c.0", "params/layers.0.attn.q.kernel/c.7.7.7", "hf/config.json"),
    *(".tpuconv-staged.txt", "params/.hidden", "other/tpuconv.json"),
]


@pytest.mark.parametrize("name", INSIDE)
def test_files_of_others_in_an_output(name, sources, out):
    put(out / name)
    refused(lambda: made.convert(sources[0], out, overwrite=True), out.parent, name)
    os.remove(out / name)
    for folder in sorted({(out / name).parent, (out / name).parent.parent} - {out}, reverse=True):
        if folder.is_relative_to(out) and not os.listdir(folder):
            folder.rmdir()
    made.convert(sources[0], out, overwrite=True)


def test_folders_and_links_of_others_in_an_output(sources, out, tmp_path):
    (out / "params" / "empty").mkdir()
    refused(lambda: made.convert(sources[0], out, overwrite=True), tmp_path, "params/empty/")
    (out / "params" / "empty").rmdir()
    (out / "params" / "link").symlink_to(tmp_path)
    refused(lambda: made.convert(sources[0], out, overwrite=True), tmp_path, "params/link")


@pytest.mark.parametrize("which", ["README.md", "config.json", "a shard", "of another size"])
def test_a_file_that_its_owner_rewrote(which, sources, out):
    shard = str(next(out.glob("params/*/c.*")).relative_to(out))
    name = which if which.endswith(("md", "json")) else shard
    data = (out / name).read_bytes()
    status = os.stat(out / name)
    put(out / name, data + b"1" if which == "of another size" else data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(out / name, ns=(status.st_atime_ns, status.st_mtime_ns))  # the time of the change nobody can set
    refused(lambda: made.convert(sources[0], out, overwrite=True), out.parent, name, "was changed since tpuconv wrote")
    put(out / name, data)
    made.convert(sources[0], out, overwrite=True)


def test_a_copied_output_is_still_ours(sources, out, tmp_path):
    """Its files are newer than the manifest, in any order: they are read."""
    shutil.copytree(out, tmp_path / "copy")
    made.convert(sources[0], tmp_path / "copy", overwrite=True)


def test_an_empty_mark_proves_nothing(sources, tmp_path):
    put(tmp_path / "out" / STAGED, b"")
    put(tmp_path / "out" / "thesis.tex")
    for overwrite in (False, True):
        refused(lambda o=overwrite: made.convert(sources[0], tmp_path / "out", overwrite=o), tmp_path, "thesis.tex")


@pytest.mark.parametrize("name", ["thesis.tex", "out/thesis.tex", "old/thesis.tex", "out/params/mine/c.0", "source/x"])
@pytest.mark.parametrize("same", [True, False])
def test_files_of_others_in_a_work_folder(name, same, sources, tmp_path, monkeypatch):
    """Of work that is resumed, and of work that another plan drops."""
    out, work = tmp_path / "out", tmp_path / ".out.tpuconv"

    def stopped(self: Journal) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "publish", stopped)
        with pytest.raises(KeyboardInterrupt):
            made.convert(sources[0], out)
    put(work / name)
    refused(lambda: made.convert(sources[not same], out, overwrite=not same), tmp_path, name)
    os.remove(work / name)
    if not os.listdir((work / name).parent):
        (work / name).parent.rmdir()
    made.convert(sources[not same], out, overwrite=not same)
    assert os.listdir(tmp_path) == ["out"]


def test_files_that_come_while_an_output_is_replaced_stay(sources, out, monkeypatch):
    """Between the last look and the swap: they are in the work folder then, and the command says so."""
    exchange = disk.exchange

    def late(path: Path, other: Path) -> bool:
        if other == out:
            put(out / "params/late.txt")
        return exchange(path, other)

    monkeypatch.setattr(disk, "exchange", late)
    with pytest.raises(OutputError, match=r"out/params/late\.txt"):
        made.convert(sources[0], out, overwrite=True)
    assert (out.parent / ".out.tpuconv/out/params/late.txt").read_bytes() == b"mine"
    assert api.verify(out).passed
    assert made.plan_of(sources[0]).fingerprint == read_manifest(out).raw["fingerprint"]


def test_outputs_in_outputs(sources, out, tmp_path):
    refused(lambda: made.convert(sources[0], out / "inner"), tmp_path, "lies in another output of tpuconv", str(out))
    plan = made.plan_of(sources[0])
    with Journal(tmp_path / "models", plan.fingerprint, plan.facts) as journal:
        journal.begin()
        refused(lambda: made.convert(sources[0], tmp_path / "models/llama"), tmp_path, "which another process writes")
    copy_tree(out, tmp_path / "models" / "llama")
    for overwrite in (False, True):
        refused(lambda o=overwrite: made.convert(sources[0], tmp_path / "models", overwrite=o), tmp_path, "llama/")


def test_a_source_in_an_output(sources, out):
    copy_tree(sources[0], out / "params" / "hf")
    refused(lambda: made.convert(out / "params/hf", out, overwrite=True), out.parent, "holds the source", code=2)
    refused(lambda: api.quantize(out, out.parent, config="int8_weight_only", overwrite=True), out.parent, code=2)


def test_a_name_of_a_work_folder(sources, tmp_path):
    refused(lambda: made.convert(sources[0], tmp_path / ".x.tpuconv"), tmp_path, "the name of a folder", code=2)
