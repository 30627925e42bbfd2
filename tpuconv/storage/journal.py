"""The journal of a conversion: what is done so far. A killed conversion resumes from it, and the output appears
complete or not at all.

The work folder `.<OUT>.tpuconv` lies beside OUT. Each state of the work is a name on the disk:

    tpuconv.work      the lock, and the mark that the folder is ours; nothing is removed from a folder without it
    plan.done         the work has begun; holds the fingerprint and the facts of its plan
    UNIT.done         a part of the work is done, and flushed to the disk
    calibrated/       what the calibration of a quantization found, before the first byte of out/ is written
    out/              what becomes OUT; it holds the file STAGED, which no finished output has
    complete.done     out/ is complete and flushed; holds the identity of its manifest
    old/              the output that is replaced, if the system cannot swap two folders
    left-N/           files of a removed folder that others have open, where the file system keeps them
    tried/            empty folders, on which the renames of publishing are tried before the work begins

An entry is sealed as a manifest is, and holds its own name. An entry that was changed is an error, since its contents
go into the output.

Publishing goes from one state to the next, each step a single system call. A run continues from the state that it
finds:

    complete.done, out/ with STAGED       -> out/ becomes OUT, by a rename (also over an empty folder) or a swap with
                                             the old output
    complete.done, OUT with STAGED        -> the file STAGED in OUT is removed
    complete.done, no STAGED              -> the work folder is removed, plan.done first and complete.done last
    no plan.done, or out/ without STAGED  -> nothing can be resumed: the folder is cleared
"""

import json
import os
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Protocol

from tpuconv.errors import OutputError, TpuconvError, UsageError
from tpuconv.jsonfile import check, parse, read_bytes
from tpuconv.location import Location
from tpuconv.storage import disk, locks, sealed
from tpuconv.storage.mounts import check_place, file_system_of
from tpuconv.storage.refusals import exists_already, unfinished
from tpuconv.storage.sealed import STAGED
from tpuconv.storage.sinks import FolderSink, Sink

WORK = "tpuconv.work"
MARK = b"work folder of tpuconv\n"

CALIBRATED = "calibrated"
"""The folder with what a calibration found, and the beginning of the names of its entries. They can be resumed."""

HELD_OPEN = "left-"
"""How the names begin of what is left of removed folders whose files are open; the next run removes it."""
TRIED = "tried"
"""The folder in which renames are tried."""

MAX_ENTRY_BYTES = 1 << 30
ENTRY_KEY = "entry"
"""Key under which an entry holds its own name."""
ENTRY_SCHEMAS: Mapping[str, Any] = {
    "plan": {"fingerprint": str, "facts": dict},
    "complete": {"fingerprint": str, "identity": str},
}
"""Of the journal's own entries. The schemas of other parts are given by those who record them."""


class State(Enum):
    """What a run finds: nothing, a part of its work, a complete but unpublished output, its published output, or other
    processes of the same plan at work."""

    NEW = "new"
    BEGUN = "begun"
    COMPLETE = "complete"
    PUBLISHED = "published"
    JOINED = "joined"


class JournalEntries(ABC):
    """The entries of a journal, wherever they are kept."""

    entry_schemas: ClassVar[Mapping[str, Any]] = ENTRY_SCHEMAS

    @property
    @abstractmethod
    def work(self) -> Location:
        """The folder of the entries, beside the output."""

    def done(self, part: str, schema: Any = dict) -> dict[str, Any] | None:
        """The recorded results of a part of the work.

        Args:
            part: the name of the part.
            schema: what the results must look like; see `tpuconv.jsonfile.check`.

        Returns:
            The results, or None if the part is not done.

        Raises:
            OutputError: the entry cannot be read, or was changed.
        """
        path = self.work / f"{part}.done"
        if not self._is_recorded(part):
            return None
        try:
            data = read_bytes(path, MAX_ENTRY_BYTES, OutputError)
            facts: dict[str, Any] = check(parse(data, str(path), OutputError), {ENTRY_KEY: str}, str(path), OutputError)
            if facts[ENTRY_KEY] != part or sealed.seal_of(data) is None:
                raise OutputError(f"{path} was changed, or is of another version of tpuconv")
            return dict(check(facts, self.entry_schemas.get(part, schema), str(path), OutputError))
        except OutputError as e:
            raise OutputError(e.message, hint=f"move {self.work} away, and run again to begin anew") from None

    def record(self, part: str, facts: Mapping[str, Any]) -> None:
        """Marks a part as done, with its results. What it wrote must be durable already."""
        self._write_entry(f"{part}.done", sealed.seal({ENTRY_KEY: part, **facts}))

    @abstractmethod
    def _is_recorded(self, part: str) -> bool:
        """Whether there is an entry for a part."""

    @abstractmethod
    def _write_entry(self, name: str, data: bytes) -> None:
        """Writes or replaces an entry."""

    @abstractmethod
    def forget(self, parts: list[str]) -> None:
        """Marks parts as not done."""


class RunJournal(Protocol):
    """What a run needs of a journal: `Journal` on a local disk, `BucketJournal` in a bucket."""

    @property
    def out(self) -> Location:
        """The output."""

    @property
    def work(self) -> Location:
        """The folder of the entries, beside the output."""

    @property
    def sink(self) -> Sink:
        """What takes the files of the output, once `begin` was called."""

    def __enter__(self) -> Any:
        """Makes this process the writer of the output."""

    def __exit__(self, *_: object) -> None:
        """Lets the next process begin; removes the work folder if nothing in it can be resumed."""

    def begin(self) -> State:
        """What exists already. Raises OutputError if `out` must not be replaced, or belongs to another plan."""

    def done(self, part: str, schema: Any = dict) -> dict[str, Any] | None:
        """The recorded results of a part; None if it is not done."""

    def record(self, part: str, facts: Mapping[str, Any]) -> None:
        """Marks a part as done."""

    def forget(self, parts: list[str]) -> None:
        """Marks parts as not done."""

    def share(self) -> None:
        """Lets other processes of the same plan do their parts, if this is one of several."""

    def gather(self, parts: Collection[str]) -> bool:
        """Whether this process is to publish the output: all parts are recorded, and other processes have stopped. Of a
        process that works alone."""

    def is_published(self) -> bool:
        """Whether `out` is a published output of this plan."""

    def publish(self) -> None:
        """Makes what was written the output. It must be complete and hold its manifest."""


class Journal(JournalEntries):
    """The work folder of one output. It is locked within a `with`: one writer per output.

    Args:
        out: the output. If it is a link, its target is written or replaced.
        fingerprint: equal for two plans that write the same.
        facts: what the fingerprint is made of, by name, to say in an error how two plans differ.
        overwrite: replace an existing output of ours, or unfinished work of another plan.
    """

    def __init__(self, out: Path, fingerprint: str, facts: Mapping[str, Any] | None = None, *, overwrite: bool = False):
        try:
            self.out = Path(os.path.realpath(out)) if out.is_symlink() else Path(os.path.abspath(out))
            if self.out.is_symlink():
                raise UsageError(f"{out} is a link that leads to itself", hint="choose another OUT")
        except OSError as e:
            raise disk.write_error(out, e) from None
        self.fingerprint = fingerprint
        self.facts = json.loads(json.dumps(facts or {}))
        self.overwrite = overwrite
        self.folder = self.out.parent / f".{self.out.name}.tpuconv"
        self.staging = self.folder / "out"
        self.sink = FolderSink(self.staging)
        self._old = self.folder / "old"
        self._lock = -1
        self._writing = threading.Lock()

    def __enter__(self) -> "Journal":
        if self.overwrite or not self.is_published():
            check_place(self.out)
        while self._lock < 0:
            self._check_folder()
            disk.make_folder(self.folder)
            try:
                lock = disk.open_lock(self.folder / WORK)
            except TpuconvError:
                if os.path.lexists(self.folder):
                    raise
                continue  # whoever had it has just removed it
            try:
                self._take(lock)
            except locks.NoLocks:
                if disk.entries(self.folder) == [WORK] and not os.fstat(lock).st_size:
                    disk.remove(self.folder / WORK)
                    disk.remove_empty(self.folder)
                raise
            finally:
                if self._lock != lock:
                    os.close(lock)
        return self

    def _check_folder(self) -> None:
        """Raises OutputError if the work folder was not made by tpuconv."""
        with disk.writing(self.folder):
            try:
                mode = os.lstat(self.folder).st_mode
            except FileNotFoundError:
                return
            names = _names_in(self.folder) if stat.S_ISDIR(mode) else None
        if names and WORK not in names:
            raise self._not_ours(f"it holds {', '.join(sorted(names)[:5])}")
        if names is None:
            raise self._not_ours("it is a link" if stat.S_ISLNK(mode) else "it is not a folder")

    def _take(self, lock: int) -> None:
        if not locks.lock(lock, self.folder / WORK):
            raise OutputError(
                f"{self.out} is being written by another process", hint="wait for it, or choose another OUT"
            )
        # Whoever held it may have finished and removed the folder: then the locked file has no name any more.
        if not locks.same_file(lock, self.folder / WORK):
            return
        with disk.writing(self.folder):
            mark = os.pread(lock, len(MARK) + 1, 0)
            if mark != MARK:
                if not MARK.startswith(mark) or _names_in(self.folder) != [WORK]:
                    raise self._not_ours(f"its {WORK} was not written by tpuconv")
                disk.write_file(self.folder / WORK, MARK)
                disk.sync(self.folder)
                disk.sync(self.folder.parent)
        self._lock = lock

    def _not_ours(self, why: str) -> OutputError:
        return OutputError(
            f"{self.folder}, the work folder of {self.out.name}, was not made by this version of tpuconv",
            details=[why],
            hint="move it away, or choose another OUT",
        )

    def __exit__(self, *_: object) -> None:
        is_over = False
        try:
            if self._is_idle():
                self.discard()
                if is_over := disk.entries(self.folder) == [WORK]:  # else the mark stays: others have files of it open
                    disk.remove(self.folder / WORK)
        finally:
            os.close(self._lock)
            self._lock = -1
        if is_over:  # some file systems keep a removed file, under another name, until it is closed
            disk.remove_empty(self.folder)

    def begin(self) -> State:
        """Prepares the work folder.

        Returns:
            What exists already. A published output of this plan is left as it is.

        Raises:
            OutputError: OUT exists and must not be replaced, or there is unfinished work of another plan.
        """
        complete = self.done("complete")
        if complete is not None and not self._is_staged():
            ended = self._end_publication(complete)
            if ended and complete["fingerprint"] == self.fingerprint:
                return State.PUBLISHED
            complete = None
        if complete is not None and complete["fingerprint"] == self.fingerprint and self._is_movable(self.staging):
            self._check_out()
            return State.COMPLETE
        if not self.overwrite and self.is_published():
            return State.PUBLISHED
        self._check_out()
        began = self.done("plan")
        if began is not None and began["fingerprint"] != self.fingerprint:
            if not self.overwrite:
                raise unfinished(self.out, self.work, began, self.facts)
            began = None
        if began is not None and self._is_staged() and self._is_movable(self.staging):
            return State.BEGUN
        self.discard()
        disk.try_moves(self.folder / TRIED)
        disk.make_folder(self.staging)
        disk.write_file(self.staging / STAGED, b"")
        disk.sync(self.staging)
        self.record("plan", {"fingerprint": self.fingerprint, "facts": self.facts})
        return State.NEW

    @property
    def work(self) -> Path:
        return self.folder

    def _is_recorded(self, part: str) -> bool:
        return os.path.lexists(self.folder / f"{part}.done")

    def _write_entry(self, name: str, data: bytes) -> None:
        with self._writing:  # two threads may record the hash of one file
            disk.replace_file(self.folder / name, data)

    def forget(self, parts: list[str]) -> None:
        for part in parts:
            disk.remove(self.folder / f"{part}.done")
        disk.sync(self.folder)

    def publish(self) -> None:
        """Makes the staging folder the output. It must be complete and hold its manifest."""
        complete = self.done("complete")
        if complete is None:
            disk.sync_all(self.staging)
            complete = {"fingerprint": self.fingerprint, "identity": sealed.read_sealed(self.staging).identity}
            self.record("complete", complete)
        if os.path.lexists(self.out) and not _is_empty(self.out):
            self._check_out()
            disk.remove(self.out / STAGED)  # left by a publication whose work folder was removed
            disk.sync(self.out)
            if not disk.exchange(self.staging, self.out):
                disk.rename(self.out, self._old)
                disk.rename(self.staging, self.out)
        else:
            disk.rename(self.staging, self.out)
        disk.sync(self.folder)
        disk.sync(self.out.parent)
        self._end_publication(complete)

    def _end_publication(self, complete: Mapping[str, Any]) -> bool:
        """Removes what is left after the swap. Returns False if OUT is not what was published: it was moved or replaced
        since."""
        ended: bool = sealed.identity(self.out) == complete["identity"]
        if ended:
            disk.remove(self.out / STAGED)
            disk.sync(self.out)
        self.discard()
        return ended

    def _is_staged(self) -> bool:
        return (self.staging / STAGED).exists()

    def _is_idle(self) -> bool:
        """Whether nothing here can be resumed, as after an error before the work began."""
        if not locks.same_file(self._lock, self.folder / WORK):
            return False
        names = disk.entries(self.folder)
        if "complete.done" in names:
            return False
        if "plan.done" not in names or not self._is_staged():
            return True
        if any(name.startswith(f"{CALIBRATED}-") for name in names):
            return False
        return disk.entries(self.staging) == [STAGED]

    def share(self) -> None:
        """See `RunJournal`."""

    def gather(self, parts: Collection[str]) -> bool:
        """See `RunJournal`."""
        return True

    def is_published(self) -> bool:
        """See `RunJournal`."""
        try:
            return bool(sealed.read_sealed(self.out).raw.get("fingerprint") == self.fingerprint)
        except TpuconvError:
            return False

    def _check_out(self) -> None:
        with disk.writing(self.out):
            if not os.path.lexists(self.out) or _is_empty(self.out):
                return
            if error := exists_already(self.out, self.facts, overwrite=self.overwrite):
                raise error
        if not self._is_movable(self.out):
            raise UsageError(
                f"{self.out} cannot be replaced: it is in a lower layer of an overlay file system (a container's "
                "image)",
                hint="choose another OUT, or remove this one first",
            )

    def _is_movable(self, folder: Path) -> bool:
        """Whether the file system renames a folder that is there already."""
        if "overlay" not in file_system_of(folder):
            return True
        full = self.folder / TRIED
        disk.make_folder(full / "from")
        try:
            return disk.is_movable(folder, full)
        finally:
            disk.remove(full)

    def discard(self) -> None:
        """Removes the work, in an order in which no later run resumes a part of it. An old output that was set aside is
        put back first."""
        if self._old.exists() and not os.path.lexists(self.out):
            disk.rename(self._old, self.out)
            disk.sync(self.out.parent)
        disk.remove(self.folder / "plan.done")
        disk.sync(self.folder)
        for name in sorted(disk.entries(self.folder), key=lambda name: (name == "complete.done", name)):
            if name != WORK:
                disk.remove(self.folder / name)
                self._set_aside(name)

    def _set_aside(self, name: str) -> None:
        """Gives what could not be removed, since others have files of it open, a name that no output gets."""
        if name.startswith(HELD_OPEN) or not os.path.lexists(self.folder / name):
            return
        taken = disk.entries(self.folder)
        number = next(i for i in count() if f"{HELD_OPEN}{i}" not in taken)
        disk.rename(self.folder / name, self.folder / f"{HELD_OPEN}{number}")


def _names_in(folder: Path) -> list[str]:
    """The names in a work folder, without those of removed files that are still open."""
    return [name for name in os.listdir(folder) if not disk.is_leftover(folder / name)]


def _is_empty(folder: Path) -> bool:
    """Whether it is an empty folder, which a rename replaces as if it were not there."""
    return folder.is_dir() and not folder.is_symlink() and not disk.entries(folder)
