"""Killed, interrupted or failed at any system call that changes the disk, a command that publishes loses nothing.

At each moment the output is absent, old and complete, or new and complete, and the same command again ends in the last,
to the byte, with nothing left over.

Every call is tried, of every command, with and without an old output: by a disk that stops there (see `simulated`).
"""

import errno
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.attacks.counts import count
from helpers.attacks.made import folder_in_memory
from helpers.attacks.publishers import PUBLISHERS, Command, publishers, small
from helpers.attacks.simulated import Crash, Disk, contents, copy_tree, simulated
from helpers.checkpoints import qwen3_config, random_checkpoint
from tpuconv.errors import TpuconvError
from tpuconv.storage import disk
from tpuconv.storage.sealed import STAGED

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)


@dataclass(frozen=True)
class Commands:
    """The commands that publish, by name, and another output that each may replace."""

    run: dict[str, Command]
    old: dict[str, Path]


NEW_AND_OLD = (("new", 1e-6), ("other", 1e-5))


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: what a flush brings is simulated."""
    with folder_in_memory() as path:
        yield path


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> Iterator[Commands]:
    base = tmp_path_factory.mktemp("commands")
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        config = qwen3_config(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, head_dim=8)
        new, other = (random_checkpoint(base / name, config | {"rms_norm_eps": eps}) for name, eps in NEW_AND_OLD)
        (new / "tokenizer.json").write_text("{}")
        found = publishers(base, new, other)
        for name in ("convert", "export"):
            found.old[name](base / "old" / name, False)
        yield Commands(
            found.run, {name: base / "old" / ("export" if name == "export" else "convert") for name in found.run}
        )


class Trial:
    """One command in a folder of its own, with an old output there or none."""

    def __init__(self, commands: Commands, name: str, overwrite: bool, base: Path):
        self.command, self.overwrite, self.name = commands.run[name], overwrite, name
        self.base, self.folder = base, base / "work"
        self.out = self.folder / "out"
        (base / "before").mkdir()
        if overwrite:
            copy_tree(commands.old[name], base / "before" / "out")
        self.old = contents(base / "before" / "out") if overwrite else None
        self.reset()
        with simulated() as whole:
            self.run()
        self.calls, self.log = whole.calls, whole.log
        self.new = contents(self.out)
        assert self.new != self.old
        assert os.listdir(self.folder) == ["out"]

    def reset(self) -> None:
        copy_tree(self.base / "before", self.folder)

    def run(self) -> None:
        self.command(self.out, self.overwrite)

    def check_and_finish(self, at: str, may_be_absent: bool = False) -> None:
        """What the interrupted run left is one of the three states, and the same command again ends in the new one."""
        if os.path.lexists(self.out):
            left = contents(self.out)
            left.pop(STAGED, None)
            assert left in (self.old, self.new), at
        else:
            assert may_be_absent or not self.overwrite, at
        with simulated():
            self.run()
        assert contents(self.out) == self.new, at
        assert os.listdir(self.folder) == ["out"], at
        count("interrupted and finished", self.name)


def moments(n: int, every: bool) -> list[int]:
    """All of them, or the last 40, which publish, and some of the others."""
    return [at for at in range(n) if every or at >= n - 40 or at % 27 == 0]


FORMS = [
    pytest.param(name, overwrite, every, id=f"{name}{' --overwrite' * overwrite}{' at every call' * every}",
                 marks=[pytest.mark.slow] * every)
    for every in (False, True)
    for name in PUBLISHERS
    for overwrite in (False, True)
    if every or (name, overwrite) in (("convert", True), ("export", False), ("save", True))
]  # fmt: skip


@pytest.mark.parametrize(("name", "overwrite", "every"), FORMS)
def test_killed(name, overwrite, every, commands, tmp_path):
    trial = Trial(commands, name, overwrite, tmp_path)
    for at in moments(len(trial.calls), every):
        trial.reset()
        with simulated(at) as it:
            trial.run()
        assert it.is_dead
        trial.check_and_finish(f"killed before {trial.calls[at]}")


@pytest.mark.parametrize(("name", "overwrite", "every"), FORMS)
def test_without_power(name, overwrite, every, commands, tmp_path):
    """Of what was not flushed nothing is left, or some of it."""
    trial = Trial(commands, name, overwrite, tmp_path)
    logs = len(trial.log)
    for at in moments(logs + 1, every):
        crash = Crash(tmp_path / "before", trial.folder, trial.log[:at])
        for rng in (None, random.Random(at), random.Random(-at - 1)):
            copy_tree(tmp_path / "before", trial.folder)
            shutil.rmtree(trial.folder)
            crash.lay_out(trial.folder, rng)
            trial.check_and_finish(f"no power after {trial.log[at - 1][:3] if at else 'nothing'}, {rng}")


@pytest.mark.parametrize(("name", "overwrite", "every"), FORMS)
def test_interrupted(name, overwrite, every, commands, tmp_path):
    trial = Trial(commands, name, overwrite, tmp_path)
    for at in moments(len(trial.calls), every):
        trial.reset()
        with simulated(at, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            trial.run()
        trial.check_and_finish(f"interrupted before {trial.calls[at]}")


@pytest.mark.parametrize(("name", "overwrite", "every"), FORMS)
def test_failed(name, overwrite, every, commands, tmp_path):
    """A full, failing or read-only disk is exit code 8, at whichever call."""
    trial = Trial(commands, name, overwrite, tmp_path)
    for at in moments(len(trial.calls), every):
        code = ERRORS[at % len(ERRORS)]
        trial.reset()
        with simulated(at, lambda code=code: OSError(code, os.strerror(code))), pytest.raises(TpuconvError) as info:
            trial.run()
        assert info.value.exit_code == 8, f"{os.strerror(code)} at {trial.calls[at]}: {info.value}"
        assert str(tmp_path) in info.value.message
        trial.check_and_finish(f"{os.strerror(code)} at {trial.calls[at]}")


def test_killed_where_folders_cannot_be_swapped(commands, tmp_path, monkeypatch):
    """Then the old output is set aside for a moment, in which it is absent."""
    monkeypatch.setattr(disk, "NO_EXCHANGE", (errno.ENOSYS,))

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "not implemented")

    monkeypatch.setattr(Disk, "exchange", lambda self, *paths: refuse())
    trial = Trial(commands, "convert", True, tmp_path)
    for at in range(len(trial.calls) - 40, len(trial.calls)):
        trial.reset()
        with simulated(at):
            trial.run()
        trial.check_and_finish(f"killed before {trial.calls[at]}", may_be_absent=True)


@pytest.mark.slow
def test_killed_where_out_is_an_empty_folder(commands, tmp_path):
    """It is replaced by a rename, and stays or is complete, after a kill and without power."""
    trial = Trial(commands, "convert", False, tmp_path)
    for folder in (tmp_path / "before" / "out", trial.out):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    trial.old = contents(trial.out)
    with simulated() as whole:
        trial.run()
    assert contents(trial.out) == trial.new
    for at in range(len(whole.calls) - 30, len(whole.calls)):
        trial.reset()
        with simulated(at):
            trial.run()
        trial.check_and_finish(f"killed before {whole.calls[at]}")
        crash = Crash(tmp_path / "before", trial.folder, whole.log[:at])
        copy_tree(tmp_path / "before", trial.folder)
        shutil.rmtree(trial.folder)
        crash.lay_out(trial.folder, random.Random(at))
        trial.check_and_finish(f"no power before {whole.calls[at]}")
