"""Killed, interrupted or failed at any system call that changes the disk, a command that publishes loses nothing.

At each moment the output is absent, old and complete, or new and complete, and the same command again ends in the last,
to the byte, with nothing left over.

Every call is tried, of every command, with and without an old output: by a disk that stops there (see `simulated`).
"""

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers.attacks.counts import count
from helpers.attacks.made import folder_in_memory
from helpers.attacks.simulated import Crash, Disk, contents, copy_tree, simulated
from helpers.checkpoints import qwen3_config, random_checkpoint
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.checkpoint.reader import open_checkpoint
from tpuconv.convert.export import export as exporter
from tpuconv.convert.export import files as export_files
from tpuconv.convert.export.array_source import released_config
from tpuconv.convert.plan import sizes
from tpuconv.convert.plan.coverage import make_plan
from tpuconv.convert.plan.types import Options
from tpuconv.convert.run.conversion import run
from tpuconv.convert.run.sizing import Limits
from tpuconv.errors import TpuconvError
from tpuconv.models.registry import find_family, get_family
from tpuconv.sources.source import open_source
from tpuconv.storage import disk
from tpuconv.storage.sealed import STAGED

LIMITS = Limits(jobs=1, max_memory=2**30)
ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)

Command = Callable[[Path, bool], None]
"""Writes an output, with or without --overwrite."""


@dataclass(frozen=True)
class Commands:
    """The commands that publish, by name, and another output that each may replace."""

    run: dict[str, Command]
    old: dict[str, Path]


def _run(plan, out: Path, overwrite: bool) -> None:
    for _ in run(plan, out, LIMITS, overwrite=overwrite):
        pass


def _convert(folder: Path, options: Options) -> Command:
    def command(out: Path, overwrite: bool) -> None:
        source = open_source(folder)
        family = find_family(source.config)
        plan = make_plan(source, family.name, family.table, family.config.from_hf(source.config), options)
        _run(plan, out, overwrite)

    return command


def _for_target(folder: Path, target: str, **options: Any) -> Command:
    def command(out: Path, overwrite: bool) -> None:
        api.convert(folder, out, target=target, overwrite=overwrite, jobs=1, **options)

    return command


def _quantized(source, family, table, rules) -> Command:
    from tpuconv.quantize.apply import quantization

    config = family.config.from_hf(source.config)
    plain = make_plan(source, family.name, table, config, Options())
    plan = make_plan(source, family.name, table, config, Options(), quantization(plain, family, config, rules))
    return lambda out, overwrite: _run(plan, out, overwrite)


def _export(ckpt: Path) -> Command:
    def command(out: Path, overwrite: bool) -> None:
        manifest = read_manifest(ckpt)
        family = get_family(manifest.family)
        config = family.config.from_hf(released_config(manifest))
        for _ in exporter.export_checkpoint(manifest, family.table, config, out, overwrite=overwrite):
            pass

    return command


def _saved(ckpt: Path) -> Command:
    import tpuconv
    from tpuconv import persist

    model = tpuconv.load(ckpt)

    def command(out: Path, overwrite: bool) -> None:
        for _ in persist.save(model, out, ckpt, LIMITS, overwrite=overwrite):
            pass

    return command


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: what a flush brings is simulated."""
    with folder_in_memory() as path:
        yield path


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> Iterator[Commands]:
    from tpuconv.quantize.config import find_config

    base = tmp_path_factory.mktemp("commands")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "CHUNK_BYTES", 1500)
        patch.setattr(sizes, "SLAB_BYTES", 6000)
        patch.setattr(sizes, "UNIT_BYTES", 12_000)
        patch.setattr(export_files, "SHARD_BYTES", 6000)
        config = qwen3_config(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, head_dim=8)
        new, other = (random_checkpoint(base / name, config | {"rms_norm_eps": eps}) for name, eps in NEW_AND_OLD)
        (new / "tokenizer.json").write_text("{}")
        (base / "int4.yaml").write_text(INT4_RULES)
        source, rules = open_source(new), find_config("int8_weight_only")
        family = find_family(source.config)
        convert, ckpt = _convert(new, Options()), base / "ckpt"
        convert(ckpt, False)
        checkpoint = open_checkpoint(ckpt)
        commands = {
            "convert": convert,
            "quantize": _quantized(checkpoint, family, checkpoint.table(), rules),
            "convert --quantize": _quantized(source, family, family.table, rules),
            "export": _export(ckpt),
            "save": _saved(ckpt),
            "convert --target maxtext": _for_target(new, "maxtext"),
            "convert --target huggingface": _for_target(new, "huggingface"),
            "convert --scheme awq": _for_target(new, "huggingface", quantize=base / "int4.yaml", scheme="awq"),
        }
        old = base / "old"
        _convert(other, Options())(old / "convert", False)
        _export(old / "convert")(old / "export", False)
        yield Commands(commands, {name: old / ("export" if name == "export" else "convert") for name in commands})


INT4_RULES = "qwix: {rules: [{module_path: 'layers/.*', weight_qtype: int4, tile_size: 8}]}"
NEW_AND_OLD = (("new", 1e-6), ("other", 1e-5))
NAMES = (
    *("convert", "quantize", "convert --quantize", "export", "save"),
    *("convert --target maxtext", "convert --target huggingface", "convert --scheme awq"),
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
    return [at for at in range(n) if every or at >= n - 40 or at % 9 == 0]


FORMS = [
    pytest.param(name, overwrite, every, id=f"{name}{' --overwrite' * overwrite}{' at every call' * every}",
                 marks=[pytest.mark.slow] * every)
    for every in (False, True)
    for name in NAMES
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
