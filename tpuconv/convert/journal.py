"""The journal: what a conversion has done so far, so that a killed one goes on, and the output appears whole or not at
all.

Beside OUT, in `.<OUT>.tpuconv/`, lie a lock, the plan's fingerprint, an entry for every part of the work that is done
and on the disk, and `out/`, which becomes OUT by one rename (or, where an old OUT is replaced, by one exchange of the
two).
"""

import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpuconv.convert.store import sync, write_error
from tpuconv.errors import OutputError

MANIFEST = "tpuconv.json"


class Journal:
    """The work folder of one output. In a `with` it is locked: one converter per output."""

    def __init__(self, out: Path, fingerprint: str, *, overwrite: bool = False):
        self.out = out.absolute()
        self.fingerprint = fingerprint
        self.overwrite = overwrite
        self.folder = self.out.parent / f".{self.out.name}.tpuconv"
        self.staging = self.folder / "out"
        self._lock = -1

    def __enter__(self) -> "Journal":
        try:
            while self._lock < 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(lock)
                    raise OutputError(
                        f"{self.out} is being written by another process", hint="wait for it, or choose another OUT"
                    ) from None
                # Whoever held it may have finished and removed the folder: then this is the lock of nothing.
                if _same_file(lock, self.folder / "lock"):
                    self._lock = lock
                else:
                    os.close(lock)
        except OSError as e:
            raise OutputError(f"{self.folder} cannot be made: {e.strerror}", hint="choose another OUT") from None
        return self

    def __exit__(self, *_: object) -> None:
        if _same_file(self._lock, self.folder / "lock") and self._is_idle():
            self._remove()
        os.close(self._lock)
        self._lock = -1

    def begin(self) -> bool:
        """Prepares to work; False where nothing is left to do, because OUT is this plan's result already.

        Raises:
            OutputError: OUT exists and must not be replaced, or an unfinished conversion with other options lies here.
        """
        if self._is_published() and (not self.overwrite or (self.folder / "complete").exists()):
            self._remove()
            return False
        self._check_out()
        began = self._read("plan")
        if began is not None and began.get("fingerprint") != self.fingerprint:
            if not self.overwrite:
                raise OutputError(
                    f"an unfinished conversion to {self.out.name} lies in {self.folder}, with another source, other "
                    "options or another version of tpuconv",
                    hint="run it with what it began with to finish it, or give --overwrite to begin anew",
                )
            self._clear()
            began = None
        if began is None:
            self._clear()
            self.staging.mkdir()
            self.record("plan", {"fingerprint": self.fingerprint})
        return True

    def done(self, part: str) -> dict[str, Any] | None:
        """What was recorded of a part of the work; None where it is not done."""
        return self._read(part)

    def record(self, part: str, facts: Mapping[str, Any]) -> None:
        """Marks a part as done. Its results must be on the disk."""
        write_durably(self.folder / f"{part}.done", json.dumps(facts))

    def publish(self) -> None:
        """Makes the staging folder, which is whole, the output."""
        try:
            for root, _, files in os.walk(self.staging):
                for name in (*files, "."):
                    sync(Path(root, name))
            self.record("complete", {})
            if self.staging.exists():  # else a run that was killed here has renamed it
                if self.out.exists():
                    self._check_out()
                    _exchange(self.staging, self.out, self.folder / "old")
                else:
                    self.staging.rename(self.out)
            sync(self.out.parent)
        except OSError as e:
            raise write_error(self.out, e) from e
        self._remove()

    def _is_idle(self) -> bool:
        """Whether nothing lies here that a rerun could go on from, as after a refusal."""
        names = {entry.name for entry in self.folder.iterdir()}
        return names <= {"lock", "plan.done", "out"} and not ("out" in names and any(self.staging.iterdir()))

    def _is_published(self) -> bool:
        try:
            return bool(json.loads((self.out / MANIFEST).read_bytes()).get("fingerprint") == self.fingerprint)
        except (OSError, ValueError, AttributeError):
            return False

    def _check_out(self) -> None:
        if not self.out.exists():
            return
        if not self.overwrite:
            raise OutputError(
                f"{self.out} exists already", hint="choose another OUT, or give --overwrite to replace it"
            )
        if not self.out.is_dir() or (any(self.out.iterdir()) and not (self.out / MANIFEST).exists()):
            raise OutputError(
                f"{self.out} exists and was not made by tpuconv, so --overwrite leaves it alone",
                hint="choose another OUT",
            )

    def _read(self, part: str) -> dict[str, Any] | None:
        try:
            facts = json.loads((self.folder / f"{part}.done").read_bytes())
        except FileNotFoundError:
            return None
        return dict(facts)

    def _clear(self) -> None:
        for entry in self.folder.iterdir():
            if entry.name != "lock":
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def _remove(self) -> None:
        # The mark of completeness goes last: while it is there, a rerun knows that only this clean-up is missing.
        for entry in sorted(self.folder.iterdir(), key=lambda e: e.name in ("complete.done", "lock")):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        self.folder.rmdir()


def write_durably(path: Path, text: str) -> None:
    """Writes a file so that after a crash it is there whole or not at all."""
    try:
        partial = path.with_name(path.name + ".partial")
        with open(partial, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        sync(path.parent)
    except OSError as e:
        raise write_error(path, e) from e


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _exchange(new: Path, old: Path, aside: Path) -> None:
    """Swaps two folders in one step where the system can (Linux renameat2), else in two renames."""
    at_cwd, rename_exchange = -100, 2
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        if libc.renameat2(at_cwd, os.fsencode(new), at_cwd, os.fsencode(old), rename_exchange) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code))
    old.rename(aside)
    new.rename(old)
