"""The journal of a conversion: what is done so far. A killed conversion resumes from it, and the output appears
complete or not at all.

The work folder `.<OUT>.tpuconv` lies beside OUT. Each state of the work is a name on the disk:

    tpuconv.work      the lock, and the mark that the folder is ours; nothing is removed from a folder without it
    names.done        the names of all files that the plan may write into out/: no others are removed there
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

A file in the work folder that is neither of the journal nor of the plan is of others: it stays, and the command says
so.
"""

import json
import os
import re
import stat
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from tpuconv.errors import OutputError, TpuconvError, UsageError, shorten
from tpuconv.names import MANIFEST
from tpuconv.storage import disk, locks, sealed
from tpuconv.storage.entries import ENTRY_KEY, RunJournal, State
from tpuconv.storage.mounts import check_place, file_system_of
from tpuconv.storage.ownership import ContentsOf, files_in, is_known, listed_files, names_of, remove_known, unknown
from tpuconv.storage.places import work_folder
from tpuconv.storage.refusals import WORK, check_not_nested, exists_already, unfinished
from tpuconv.storage.sealed import STAGED
from tpuconv.storage.sinks import FolderSink

MARK = b"work folder of tpuconv\n"

CALIBRATED = "calibrated"
"""The folder with what a calibration found, and the beginning of the names of its entries. They can be resumed."""

HELD_OPEN = "left-"
"""The beginnings of the names of removed folders whose files are still open; the next run removes them."""
TRIED = "tried"
"""The folder in which renames are tried."""
LONGEST_NAME = "/".join("_" * 100 for _ in range(3))
"""As long as the longest path of a file in a work folder."""
LAST = (WORK, "names.done", "complete.done")
"""The file that is removed at the end: without it nobody knows which other files are ours."""
_OF_JOURNAL = re.compile(
    rf"{re.escape(WORK)}|[^/]+\.done(-\d+)?({re.escape(disk.PARTIAL)})?|process-\d+"
    rf"|{CALIBRATED}/(.+\.(qvalues|scales|zero_points|values|moments-[01])|(states|exact|input|distilled)-\d+)"
    r"|source(-\d+)?/(lock|[0-9a-f]{32}/([^/]+\.safetensors(\.wide)?(\.part(/.*)?)?|\d{5}/\d{6}[^/]*))"
)
"""The files of a work folder besides the files in out/ and old/: entries, locks, what a calibration left, and the
files of a source that is fetched (of an older release, segments of them)."""


class Journal(RunJournal):
    """The work folder of one output. It is locked within a `with`: one writer per output.

    Args:
        out: the output. If it is a link, its target is written or replaced.
        fingerprint: equal for two plans that write the same.
        facts: what the fingerprint is made of, by name, to say in an error how two plans differ.
        names: of all files that the output may hold.
        overwrite: replace an existing output of ours, or unfinished work of another plan.
        contents_of: reads what the manifest of an existing output lists.
    """

    out: Path
    sink: FolderSink

    def __init__(
        self,
        out: Path,
        fingerprint: str,
        facts: Mapping[str, Any] | None = None,
        names: Collection[str] = (),
        *,
        overwrite: bool = False,
        contents_of: ContentsOf = listed_files,
    ):
        try:
            self.out = _as_the_system_reads(out)
            if self.out.is_symlink():
                raise UsageError(f"{out} is a link that leads to itself", hint="choose another OUT")
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                os.lstat(Path(str(work_folder(self.out)), LONGEST_NAME))
        except OSError as e:
            raise disk.write_error(out, e) from None
        self.fingerprint = fingerprint
        self.facts = json.loads(json.dumps(facts or {}))
        self.names, self.overwrite, self.contents_of = frozenset(names), overwrite, contents_of
        self.folder = Path(str(work_folder(self.out)))
        self.staging = self.folder / "out"
        self.sink = FolderSink(self.staging)
        self._old = self.folder / "old"
        self._lock = -1
        self._writing = threading.Lock()

    def __enter__(self) -> "Journal":
        check_not_nested(self.out)
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
                names = _names_in(self.folder) if stat.S_ISDIR(mode) else None
            except FileNotFoundError:
                return
        if names and WORK not in names:
            raise self._not_ours(f"it holds {', '.join(sorted(names)[:5])}")
        if names is None:
            raise self._not_ours("it is a link" if stat.S_ISLNK(mode) else "it is not a folder")

    def _take(self, lock: int) -> None:
        if not locks.lock(lock, self.folder / WORK):
            raise OutputError(
                f"{self.out} is being written by another process or thread", hint="wait for it, or choose another OUT"
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
        self._check_work()
        complete = self.done("complete")
        if complete is not None and not self._is_staged():
            has_begun = os.path.lexists(self.out / STAGED)  # readers refuse it
            ended = self._end_publication(complete)
            if ended and complete["fingerprint"] == self.fingerprint:
                return State.FINISHED if has_begun else State.PUBLISHED
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
            self._record_names(self.names)
            return State.BEGUN
        self.discard()
        self._record_names(self.names)
        disk.try_moves(self.folder / TRIED)
        disk.make_folder(self.staging)
        disk.write_file(self.staging / STAGED, b"")
        disk.sync(self.staging)
        self.record("plan", {"fingerprint": self.fingerprint, "facts": self.facts})
        return State.NEW

    def _record_names(self, names: Collection[str]) -> None:
        """Records names that are ours in the work folder, before files have them there. A source may have other files
        beside its weights than when the work began."""
        known = self._planned_names()
        if not known.issuperset(names):
            self.record("names", {"names": sorted(known.union(names))})

    def _planned_names(self) -> set[str]:
        return set((self.done("names") or {"names": ()})["names"])

    @property
    def work(self) -> Path:
        return self.folder

    def _is_recorded(self, part: str) -> bool:
        return os.path.lexists(self.folder / f"{part}.done")

    def record(self, part: str, facts: Mapping[str, Any], files: Collection[str] = ()) -> None:
        self._write_entry(f"{part}.done", sealed.seal({ENTRY_KEY: part, **facts}))

    def _write_entry(self, name: str, data: bytes) -> None:
        """Writes or replaces an entry."""
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
            self._keep_listed()
            disk.sync_all(self.staging)
            complete = {"fingerprint": self.fingerprint, "identity": sealed.read_sealed(self.staging).identity}
            self.record("complete", complete)
        if os.path.lexists(self.out) and not _is_empty(self.out):
            self._check_out()
            # When the replaced output is removed, its manifest may be gone before the last of its files and folders.
            self._record_names(names_of(self.out, self.contents_of))
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

    def _keep_listed(self) -> None:
        """Removes from the staging folder what its manifest does not list: files of an earlier run, which the source
        does not have any more."""
        planned, listed = is_known({STAGED, *self._planned_names()}), names_of(self.staging, self.contents_of)
        others = unknown(files_in(self.staging), listed)
        if foreign := [name for name in {*listed, *others} if not planned(name)]:
            raise self._holds_others(foreign)
        remove_known(self.staging, set(others).__contains__)

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
        """Returns True if nothing can be resumed, as after an error before the work began."""
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

    def is_over(self) -> bool:
        """See `RunJournal`."""
        return self.is_published() and not any(map(os.path.lexists, (self.folder, self.out / STAGED)))

    def _check_out(self) -> None:
        with disk.writing(self.out):
            if not os.path.lexists(self.out) or _is_empty(self.out):
                return
            if error := exists_already(self.out, self.facts, self.contents_of, overwrite=self.overwrite):
                raise error
        if not self._is_movable(self.out):
            raise UsageError(
                f"{self.out} cannot be replaced: it is in a lower layer of an overlay file system (a container's "
                "image)",
                hint="choose another OUT, or remove this one first",
            )

    def _is_movable(self, folder: Path) -> bool:
        """Returns True if the file system can rename an existing folder."""
        if "overlay" not in file_system_of(folder):
            return True
        full = self.folder / TRIED
        disk.make_folder(full / "from")
        try:
            return disk.is_movable(folder, full)
        finally:
            disk.remove_folders(full)

    def discard(self) -> None:
        """Removes the work, in an order in which no later run resumes a part of it. An old output that was set aside is
        put back first.

        Raises:
            OutputError: files of others are left in the work folder.
        """
        if self._old.exists() and not os.path.lexists(self.out):
            disk.rename(self._old, self.out)
            disk.sync(self.out.parent)
        disk.remove(self.folder / "plan.done")
        disk.sync(self.folder)
        left = {
            f"{folder.name}/{name}" for folder in self._outputs for name in remove_known(folder, self._is_in(folder))
        }
        left |= {*remove_known(self.folder, lambda name: name not in LAST and self._is_of_journal(name))} - {*LAST}
        if left:
            raise self._holds_others(left)
        disk.sync(self.folder)  # without power no file may be back whose name nobody knows any more
        for name in LAST[1:]:
            disk.remove(self.folder / name)
        for name in disk.entries(self.folder):
            self._set_aside(name)

    def _set_aside(self, name: str) -> None:
        """Gives what could not be removed, since others have files of it open, a name that no output gets."""
        if name == WORK or name.startswith(HELD_OPEN):
            return
        taken = disk.entries(self.folder)
        number = next(i for i in count() if f"{HELD_OPEN}{i}" not in taken)
        disk.rename(self.folder / name, self.folder / f"{HELD_OPEN}{number}")

    def _check_work(self) -> None:
        """Raises OutputError if the work folder holds files of others."""
        with disk.writing(self.folder):
            left = {name for name in files_in(self.folder) if not self._is_of_journal(name)}
            for folder in self._outputs:
                inside = files_in(folder) if folder.is_dir() and not folder.is_symlink() else ()
                left -= {f"{folder.name}/{name}" for name in inside if self._is_in(folder)(name)}
        if left:
            raise self._holds_others(left)

    def _is_of_journal(self, name: str) -> bool:
        """Returns True if a file is ours, or a folder is empty. A folder with only removed files that are still open
        counts as empty."""
        return name.endswith("/") or bool(_OF_JOURNAL.fullmatch(name))

    @property
    def _outputs(self) -> tuple[Path, Path]:
        return self.staging, self._old

    def _is_in(self, folder: Path) -> Callable[[str], bool]:
        """Returns True if a file belongs to the replaced or the unfinished output in a folder: by the names that were
        recorded for both, and by its manifest as long as that is there."""
        listed = names_of(folder, self.contents_of) if (folder / MANIFEST).exists() else ()
        return is_known({STAGED, *self._planned_names(), *listed})

    def _holds_others(self, names: Collection[str]) -> OutputError:
        return OutputError(
            f"{self.folder}, the work folder of {self.out.name}, holds files that tpuconv did not write",
            details=shorten(sorted(names)),
            hint="move them away, and run again",
        )


def _names_in(folder: Path) -> list[str]:
    """Returns the names in a work folder, without the names of removed files that are still open."""
    return [name for name in os.listdir(folder) if not disk.is_leftover(folder / name)]


def _is_empty(folder: Path) -> bool:
    """Returns True for an empty folder, which a rename replaces as if it did not exist."""
    return folder.is_dir() and not folder.is_symlink() and not disk.entries(folder)


def _as_the_system_reads(out: Path) -> Path:
    """Returns the absolute path of an OUT: of what it links to, and with `..` after a link as the system follows it.

    Raises:
        UsageError: `..` comes after a folder that does not exist.
    """
    ups = [number for number, part in enumerate(out.parts, 1) if part == ".."]
    if ups and not os.path.lexists(Path(*out.parts[: ups[-1]])):
        raise UsageError(f"{out} leads through a folder that does not exist", hint="write OUT without `..`")
    return Path(os.path.realpath(out) if ups or out.is_symlink() else os.path.abspath(out))
