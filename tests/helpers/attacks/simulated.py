"""A disk that stops: the package's writes go through it, and end before any chosen one, as a kill or a power failure
would end them.

`Disk` stands in for the module `os` in `tpuconv.storage.disk`, the only file that changes the disk. It counts the calls
that do, can stop for good before one of them (a kill: what was done stays), or raise an error or an interrupt at one of
them, and keeps a log, from which `Crash` builds what a power failure may leave: of the changes since the last flush any
that could have reached the disk.
"""

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tpuconv.storage import disk


class Killed(BaseException):
    """The process is gone: nothing that it does afterwards reaches the disk."""


class Disk:
    """Stands in for `os`. Before the call with the number `at` (the first is 0) it stops; with an `error` that is
    raised once instead. `calls` are the names and paths of those that were made."""

    def __init__(self, at: int | None = None, error: Callable[[], BaseException] | None = None):
        self.at, self.error = at, error
        self.calls: list[tuple[str, str]] = []
        self.log: list[tuple[Any, ...]] = []
        self.is_dead = False
        self._lock = threading.RLock()
        self._paths: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _before(self, name: str, path: Any) -> None:
        if self.is_dead:
            raise Killed
        if len(self.calls) == self.at:
            if self.error is None:
                self.is_dead = True
                raise Killed
            self.at = None
            raise self.error()
        self.calls.append((name, str(path)))

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        with self._lock:
            changes = flags & (os.O_CREAT | os.O_TRUNC)
            is_new = bool(changes) and not os.path.lexists(path)
            if changes:
                self._before("open", path)
            elif self.is_dead:
                raise Killed
            fd = os.open(path, flags, mode)
            self._paths[fd] = str(path)
            if is_new:
                self.log.append(("create", str(path)))
            elif flags & os.O_TRUNC:
                self.log.append(("truncate", str(path), 0))
            return fd

    def write(self, fd: int, data: Any) -> int:
        with self._lock:
            self._before("write", self._paths[fd])
            at = os.lseek(fd, 0, os.SEEK_CUR)
            n = os.write(fd, data)
            self.log.append(("write", self._paths[fd], at, bytes(data[:n])))
            return n

    def fsync(self, fd: int) -> None:
        with self._lock:
            self._before("fsync", self._paths[fd])  # and no more: what a flush brings is told by the log
            self.log.append(("sync", self._paths[fd]))

    def close(self, fd: int) -> None:
        os.close(fd)

    def mkdir(self, path: Any, mode: int = 0o777) -> None:
        self._change("mkdir", path)

    def unlink(self, path: Any) -> None:
        self._change("unlink", path)

    def rmdir(self, path: Any) -> None:
        self._change("rmdir", path)

    def rename(self, path: Any, target: Any) -> None:
        self._change("rename", path, target)

    def _change(self, name: str, *paths: Any) -> None:
        with self._lock:
            self._before(name, paths[0])
            getattr(os, name)(*paths)
            self.log.append((name, *map(str, paths)))

    def exchange(self, path: Path, other: Path) -> None:
        with self._lock:
            self._before("exchange", path)
            _renameat2(path, other)
            self.log.append(("exchange", str(path), str(other)))


_renameat2 = disk._renameat2


@contextmanager
def simulated(at: int | None = None, error: Callable[[], BaseException] | None = None) -> Iterator[Disk]:
    """Within it the package writes to a `Disk`; a kill ends it quietly."""
    it = Disk(at, error)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "os", it)
        patch.setattr(disk, "_renameat2", it.exchange)
        with suppress(Killed):
            yield it


# -- what a power failure leaves --------------------------------------------------------------------------------------


@dataclass
class File:
    """`durable` is what a flush made sure of."""

    data: bytearray
    durable: bytes


@dataclass
class Folder:
    entries: dict[str, Any] = field(default_factory=dict)


@dataclass
class Change:
    """One change of names: which names in which folders, and what it does to a tree of folders."""

    names: set[tuple[int, str]]
    folders: list[int]
    apply: Callable[[Callable[[Folder], dict[str, Any]]], None]
    is_durable: bool = False


class Crash:
    """What may be on the disk after the first calls of a log. `before` is the folder as it was, which is durable."""

    def __init__(self, before: Path, root: Path, log: list[tuple[Any, ...]]):
        self.root = str(root)
        self.top = self._read(before)
        self.start: dict[int, dict[str, Any]] = {}
        self._nodes: list[Any] = []  # all there ever were, so that no other gets the id of one
        self._remember(self.top)
        self.changes: list[Change] = []
        for entry in log:
            self._replay(*entry)

    def _read(self, path: Path) -> Any:
        if path.is_dir():
            return Folder({p.name: self._read(p) for p in path.iterdir()})
        data = path.read_bytes()
        return File(bytearray(data), data)

    def _remember(self, folder: Folder) -> None:
        self.start[id(folder)] = dict(folder.entries)
        self._nodes.append(folder)
        for node in folder.entries.values():
            if isinstance(node, Folder):
                self._remember(node)

    def _find(self, path: str) -> tuple[Folder, str]:
        node, parts = self.top, Path(path).relative_to(self.root).parts
        for part in parts[:-1]:
            node = node.entries[part]
        return node, parts[-1]

    def _node(self, path: str) -> Any:
        if path == self.root:
            return self.top
        folder, name = self._find(path)
        return folder.entries[name]

    def _replay(self, kind: str, path: str, *args: Any) -> None:
        if kind == "write":
            file, (at, data) = self._node(path), args
            file.data.extend(b"\0" * (at + len(data) - len(file.data)))
            file.data[at : at + len(data)] = data
        elif kind == "truncate":
            file = self._node(path)
            file.data[:] = file.data[: args[0]].ljust(args[0], b"\0")
        elif kind == "sync":
            node = self._node(path)
            if isinstance(node, File):
                node.durable = bytes(node.data)
            else:
                self._make_durable(id(node))
        elif kind in ("create", "mkdir"):
            folder, name = self._find(path)
            node = File(bytearray(), b"") if kind == "create" else Folder()
            self._keep(node)
            self._change([(folder, name)], lambda of: of(folder).__setitem__(name, node))
        elif kind in ("unlink", "rmdir"):
            folder, name = self._find(path)
            self._change([(folder, name)], lambda of: of(folder).pop(name, None))
        else:
            (folder, name), (other, target) = self._find(path), self._find(args[0])

            def move(of: Callable[[Folder], dict[str, Any]]) -> None:
                a, b = of(folder).pop(name), of(other).pop(target, None)
                of(other)[target] = a
                if kind == "exchange":
                    of(folder)[name] = b

            self._change([(folder, name), (other, target)], move)

    def _keep(self, node: Any) -> None:
        self._nodes.append(node)
        if isinstance(node, Folder):
            self.start[id(node)] = {}

    def _change(self, places: list[tuple[Folder, str]], apply: Any) -> None:
        apply(lambda folder: folder.entries)
        self.changes.append(Change({(id(f), n) for f, n in places}, [id(f) for f, _ in places], apply))

    def _make_durable(self, folder: int) -> None:
        """The changes in a folder, and those before them of the same names."""
        needed: set[tuple[int, str]] = set()
        for change in reversed(self.changes):
            if not change.is_durable and (folder in change.folders or change.names & needed):
                change.is_durable = True
                needed |= change.names

    def lay_out(self, target: Path, rng: random.Random | None) -> None:
        """Makes a folder of what was durable, and with `rng` of some of what was not: changes of names in an order that
        holds for each name, and contents of files."""
        kept = [change.is_durable or (rng is not None and rng.random() < 0.5) for change in self.changes]
        lost: set[tuple[int, str]] = set()
        entries = {folder: dict(names) for folder, names in self.start.items()}
        for change, keep in zip(self.changes, kept, strict=True):
            if keep and (change.is_durable or not change.names & lost):
                change.apply(lambda folder: entries[id(folder)])
            else:
                lost |= change.names
        self._write(self.top, target, entries, rng)

    def _write(self, folder: Folder, target: Path, entries: dict[int, dict[str, Any]], rng: Any) -> None:
        target.mkdir()
        for name, node in entries[id(folder)].items():
            if isinstance(node, Folder):
                self._write(node, target / name, entries, rng)
            else:
                is_new = rng is not None and rng.random() < 0.5
                (target / name).write_bytes(bytes(node.data) if is_new else node.durable)


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file in a folder with its bytes, and every empty folder."""
    out: dict[str, bytes | None] = {}
    for root, folders, files in os.walk(folder):
        for name in files:
            path = Path(root, name)
            out[str(path.relative_to(folder))] = path.read_bytes()
        if not folders and not files:
            out[str(Path(root).relative_to(folder))] = None
    return out


def copy_tree(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)
