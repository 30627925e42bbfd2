"""Places as machines have them: mount points, layers of containers, file systems without locks or without renames. What
cannot work is found before the first byte is written, and leaves nothing behind."""

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.attacks import made
from helpers.attacks.counts import count
from helpers.attacks.simulated import contents
from helpers.times import HANG
from tpuconv import api
from tpuconv.convert.plan.types import Options
from tpuconv.errors import OutputError, ResourceError, UsageError
from tpuconv.hosts import ProcessPart
from tpuconv.sources import workspace
from tpuconv.storage import disk
from tpuconv.storage.journal import Journal
from tpuconv.storage.shared_journal import SharedJournal


def can_mount() -> bool:
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


needs_mounts = pytest.mark.skipif(not can_mount(), reason="mounts need the rights of root")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.source(tmp_path_factory.mktemp("source") / "src")


def in_mounts(base: Path, script: str, code: int = 0) -> str:
    """Runs a script of a shell in a name space of mounts of its own. Returns stderr."""
    tpuconv = f'tpuconv() {{ "{sys.executable}" -m tpuconv "$@"; }}'
    words = ["unshare", "-m", "sh", "-e", "-c", f"{tpuconv}\n{script}"]
    done = subprocess.run(words, cwd=base, capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == code, done.stderr
    return done.stderr


MOUNTED = {
    "another disk": "mount -t tmpfs none out",
    "a folder of the same disk": "mkdir volume; mount --bind volume out",
    "a read-only volume": "mount -t tmpfs -o ro none out",
    "a folder in it": "mkdir out/params; mount -t tmpfs none out/params",
}


@needs_mounts
@pytest.mark.parametrize("overwrite", ["", pytest.param("--overwrite", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mounted", MOUNTED)
def test_an_output_that_is_a_mount_point(mounted, overwrite, source, tmp_path):
    (tmp_path / "out").mkdir()
    script = f"{MOUNTED[mounted]}\ntpuconv convert {source} out {overwrite}"
    error = in_mounts(tmp_path, script, UsageError.exit_code)
    assert "mount point" in error
    assert f"{tmp_path}/out/NAME" in error
    assert not list(tmp_path.glob(".*"))
    count("mount points", mounted)


@needs_mounts
def test_an_output_in_a_mount_point(source, tmp_path):
    """As the hint has it; and a finished output that is mounted somewhere is found there again."""
    (tmp_path / "out").mkdir()
    (tmp_path / "again").mkdir()
    convert = f"tpuconv convert {source}"
    in_mounts(
        tmp_path,
        f"mount -t tmpfs none out; {convert} out/model; {convert} out/model --overwrite; tpuconv verify out/model\n"
        f"mount --bind -o ro out/model again; {convert} again; cp -r out/model kept",
    )
    made.convert(source, tmp_path / "right")
    assert contents(tmp_path / "kept") == contents(tmp_path / "right")
    count("mount points", "OUT in one")


LAYERS = """mount -t tmpfs none over; mkdir over/up over/work
mount -t overlay none layers -o lowerdir=low,upperdir=over/up,workdir=over/work"""


@needs_mounts
@pytest.mark.slow
def test_an_output_in_a_lower_layer(source, tmp_path):
    for name in ("low", "over", "layers", "old"):
        (tmp_path / name).mkdir()
    made.convert(source, tmp_path / "low" / "out")
    (tmp_path / "low" / "empty").mkdir()
    before = contents(tmp_path / "low")
    convert = f"tpuconv convert {source}"
    error = in_mounts(
        tmp_path, f"{LAYERS}; {convert} layers/out --dtype float32 --overwrite; ls -a layers", UsageError.exit_code
    )
    assert "in a lower layer of an overlay file system" in error
    in_mounts(
        tmp_path,
        f"{LAYERS}; {convert} layers/out; {convert} layers/empty; {convert} layers/new\n"
        f"{convert} layers/new --dtype float32 --overwrite; tpuconv verify layers/new; tpuconv verify layers/empty\n"
        f"test -z \"$(ls -A layers | grep '^[.]')\"; cp -r layers/empty right",
    )
    assert contents(tmp_path / "right") == contents(tmp_path / "low" / "out")
    assert contents(tmp_path / "low") == before
    count("lower layers", "an output")


@needs_mounts
@pytest.mark.parametrize("state", ["begun", "complete"])
def test_work_in_a_lower_layer(state, source, tmp_path, monkeypatch):
    """What a killed run left in an image cannot be renamed: it is made again."""
    for name in ("low", "over", "layers"):
        (tmp_path / name).mkdir()
    if state == "begun":
        monkeypatch.setattr("tpuconv.convert.run.conversion.ConversionWork.write_rest", _killed)
    else:
        monkeypatch.setattr(disk, "rename", _killed_at_out)
    with pytest.raises(KeyboardInterrupt):
        made.convert(source, tmp_path / "low" / "out")
    monkeypatch.undo()
    assert not (tmp_path / "low" / "out").exists()
    assert (tmp_path / "low" / ".out.tpuconv" / "complete.done").exists() == (state == "complete")
    in_mounts(
        tmp_path,
        f"{LAYERS}; tpuconv convert {source} layers/out; tpuconv verify layers/out\n"
        'test -z "$(ls -A layers | grep "^[.]")"; cp -r layers/out kept',
    )
    made.convert(source, tmp_path / "right")
    assert contents(tmp_path / "kept") == contents(tmp_path / "right")
    count("lower layers", f"work that had {state}")


def _killed(*_: Any) -> None:
    raise KeyboardInterrupt


_rename = disk.rename


def _killed_at_out(path: Path, target: Path) -> None:
    if target.name == "out":
        raise KeyboardInterrupt
    _rename(path, target)


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_current_folder(overwrite, source, tmp_path, monkeypatch):
    """A shell would stay in the folder that was replaced."""
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    for out in (".", "../here"):
        with pytest.raises(UsageError, match="is the current folder, or holds it") as info:
            api.convert(source, out, overwrite=overwrite)
        assert f"{tmp_path}/here/NAME" in str(info.value.hint)
    assert api.convert(source, "below").published
    monkeypatch.chdir(tmp_path / "here" / "below")
    assert api.convert(source, ".").already_there
    assert sorted(path.name for path in tmp_path.rglob("*") if path.name.startswith(".")) == []


def test_an_empty_folder_counts_as_none(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    made.convert(source, tmp_path / "right")
    for out in (tmp_path / "out", tmp_path / "link"):
        made.convert(source, out)
        assert contents(out) == contents(tmp_path / "right")
    assert (tmp_path / "link").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"out", "target", "link", "right"}


REFUSED = [(call, code) for call in ("rename", "exchange") for code in (errno.EXDEV, errno.EPERM, errno.EBUSY)]


@pytest.mark.parametrize(("call", "code"), [*REFUSED, ("rename", errno.ENOSYS)])
def test_a_file_system_that_does_not_rename_folders(call, code, source, tmp_path, monkeypatch):
    """It is tried before a tensor is read."""

    def refuse(path: Path, *to: Any) -> None:
        if Path(path).is_dir():
            raise OSError(code, os.strerror(code))
        os.rename(path, *to)

    if call == "exchange":
        monkeypatch.setattr(disk, "_renameat2", refuse)
    else:
        monkeypatch.setattr(disk, "os", _Renames(refuse))
    monkeypatch.setattr("tpuconv.convert.run.conversion.ConversionWork.do", _killed)
    with pytest.raises(ResourceError) as info:
        made.convert(source, tmp_path / "out")
    assert info.value.hint
    assert not list(tmp_path.iterdir())
    count("file systems", "without renames of folders")


class _Renames:
    """The module `os` with another `rename`."""

    def __init__(self, rename: Any):
        self.rename = rename

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


# -- locks ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP])
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(fd: int, how: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)
    yield
    count("file systems", "without locks")


def test_a_file_system_without_locks(no_locks, source, tmp_path):
    """Every lock is refused by the same error, which names the file system; nothing is left."""
    kind = "on a file system without locks"
    with pytest.raises(ResourceError, match=kind) as info:
        made.convert(source, tmp_path / "out")
    assert "-o flock" in str(info.value.hint)
    with pytest.raises(ResourceError, match=kind), SharedJournal(tmp_path / "out", "x", None, (), ProcessPart(0, 2)):
        pass
    with pytest.raises(ResourceError, match=kind):
        workspace.claim(tmp_path, "work")
    assert not list(tmp_path.iterdir())


def test_a_lock_that_fails_is_not_in_use(tmp_path, monkeypatch):
    """An error of the disk is an error, and no reason to look for another folder."""

    def fail(fd: int, how: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(ResourceError, match="Input/output error"):
        workspace.claim(tmp_path, "work")
    with pytest.raises(ResourceError, match="Input/output error"), Journal(tmp_path / "out", "x"):
        pass


def test_an_entry_that_the_disk_cannot_read_is_no_altered_one(tmp_path, monkeypatch):
    """The disk fails, and the work that is done stays: nothing has to be moved away."""
    real = os.open

    def fail(path: object, *args: int, **kwargs: int) -> int:
        if str(path).endswith("part.done"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *args, **kwargs)  # type: ignore[arg-type]

    with Journal(tmp_path / "out", "x") as journal:
        journal.record("part", {"n": 1})
        monkeypatch.setattr(os, "open", fail)
        with pytest.raises(ResourceError, match="cannot be read: Input/output error"):
            journal.done("part")
        monkeypatch.undo()
        assert journal.done("part", {"n": int})


def test_what_is_in_use_is_left_alone(tmp_path):
    first, second = workspace.claim(tmp_path, "work"), workspace.claim(tmp_path, "work")
    assert [root.name for root, _ in (first, second)] == ["work", "work-1"]
    for root, lock in (first, second):
        workspace.release(root, lock)
    assert not list(tmp_path.iterdir())
    with (
        Journal(tmp_path / "out", "x"),
        pytest.raises(OutputError, match="another process"),
        Journal(tmp_path / "out", "x"),
    ):
        pass


# -- file systems that rename a file which is removed while it is open ------------------------------------------------


class Renaming:
    """Stands in for `os`: as NFS and FUSE do it, a file that is removed while it is open gets another name in its
    folder, and loses that when it is closed, or, as with FUSE, some time later. `others` are files that other programs
    have open."""

    def __init__(self, prefix: str, later: float):
        self.prefix, self.later = prefix, later
        self.hidden: dict[Path, tuple[int, int]] = {}
        self.closed: dict[Path, float] = {}
        self.others: set[tuple[int, int]] = set()
        self.renamed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _open(self) -> set[tuple[int, int]]:
        found = set(self.others)
        for fd in os.listdir("/proc/self/fd"):
            try:
                status = os.stat(f"/proc/self/fd/{fd}")
            except OSError:
                continue
            found.add((status.st_dev, status.st_ino))
        return found

    def sweep(self) -> None:
        opened = self._open()
        for path, key in list(self.hidden.items()):
            if key not in opened:
                closed = self.closed.setdefault(path, time.monotonic())
                if time.monotonic() >= closed + self.later:
                    path.unlink(missing_ok=True)
                    del self.hidden[path]

    def unlink(self, path: Path) -> None:
        self.sweep()
        if path in self.hidden:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        status = os.lstat(path)
        if (status.st_dev, status.st_ino) not in self._open():
            os.unlink(path)
            return
        self.renamed += 1
        target = path.with_name(f"{self.prefix}{self.renamed:08d}")
        os.rename(path, target)
        self.hidden[target] = (status.st_dev, status.st_ino)

    def rename(self, path: Path, target: Path) -> None:
        """Names below a folder move with it."""
        os.rename(path, target)
        moved = {p: target / p.relative_to(path) for p in self.hidden if p.is_relative_to(path)}
        for old, new in moved.items():
            self.hidden[new] = self.hidden.pop(old)

    def rmdir(self, path: Path) -> None:
        self.sweep()
        os.rmdir(path)

    def listdir(self, path: Path) -> list[str]:
        self.sweep()
        return os.listdir(path)


FORMS = [("NFS", ".nfs", 0.0), ("FUSE", ".fuse_hidden", 0.2)]


@pytest.mark.parametrize(("system", "prefix", "later"), FORMS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_open_files_that_are_renamed(system, prefix, later, overwrite, source, tmp_path, monkeypatch):
    """The lock is open while the work folder is removed: nothing of it stays."""
    made.convert(source, tmp_path / "right")
    work = tmp_path / "work"
    if overwrite:
        made.convert(source, work / "out", Options(dtype="float32"))
    monkeypatch.setattr(disk, "os", it := Renaming(prefix, later))
    made.convert(source, work / "out", overwrite=overwrite)
    assert it.renamed
    assert [path.name for path in work.iterdir()] == ["out"]
    assert contents(work / "out") == contents(tmp_path / "right")
    root, lock = workspace.claim(work, "claimed")
    workspace.release(root, lock)
    assert [path.name for path in work.iterdir()] == ["out"]
    count("file systems that rename open files", f"{system}: the lock is open")


@pytest.mark.parametrize(("system", "prefix", "later"), [pytest.param(*FORMS[0], marks=pytest.mark.slow), FORMS[1]])
def test_an_old_output_that_a_server_has_open(system, prefix, later, source, tmp_path, monkeypatch):
    """It is replaced, and what stays of the old one until the server closes it is removed by the next run."""
    work = tmp_path / "work"
    made.convert(source, work / "out", Options(dtype="float32"))
    monkeypatch.setattr(disk, "LEFTOVER_SECONDS", 0.5)
    monkeypatch.setattr(disk, "os", it := Renaming(prefix, later))
    shard = next(path for path in (work / "out/params").rglob("c*") if path.is_file())
    it.others.add((shard.stat().st_dev, shard.stat().st_ino))
    made.convert(source, work / "out", overwrite=True)
    made.convert(source, tmp_path / "right")
    assert contents(work / "out") == contents(tmp_path / "right")
    left = {path.name for path in (work / ".out.tpuconv").rglob("*") if path.is_file()}
    assert left == {"tpuconv.work", *(path.name for path in it.hidden if path.is_relative_to(work))}
    made.convert(source, work / "out", Options(dtype="float32"), overwrite=True)  # meanwhile
    it.others.clear()
    it.sweep()
    time.sleep(later)
    made.convert(source, work / "out", overwrite=True)
    assert [path.name for path in work.iterdir()] == ["out"]
    count("file systems that rename open files", f"{system}: an old output is open")
