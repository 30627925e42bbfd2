"""The journal of several processes that write one output on a shared disk, each its part.

They meet in the work folder of `tpuconv.storage.journal`. What is special are its locks, all of `flock`, which a
killed process loses:

    tpuconv.work, exclusive   one process prepares the work, or publishes the output; or it writes alone
    tpuconv.work, shared      some processes do their parts
    process-I                 one process is number I

The first process prepares the work, then shares it. Whoever finds that all parts are recorded, and gets the exclusive
lock, publishes. Nobody leads, and nobody waits for a part of another process.

The file process-I is also the sign that process I was here. Where a cluster starts all processes at the same time, one
that finds no sign of another for some minutes is on a disk that the hosts do not share.
"""

import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tpuconv.errors import OutputError
from tpuconv.hosts import ProcessPart
from tpuconv.jsonfile import Size
from tpuconv.storage import disk, locks
from tpuconv.storage.entries import State
from tpuconv.storage.journal import MARK, Journal
from tpuconv.storage.ownership import ContentsOf, listed_files
from tpuconv.storage.refusals import WORK

PROCESSES = "processes"
"""The entry with the count of processes."""
MEETING_SECONDS = 300.0
"""The longest time that another process may begin after this one."""
MEETING_POLL_SECONDS = 1.0
PROCESSES_SCHEMA = {"count": Size}


class PartRunning(OutputError):
    """Another process does this part."""


class SharedJournal(Journal):
    """The work folder of one output of several processes; see `Journal` for the other arguments.

    Args:
        part: which process this is.
    """

    def __init__(
        self,
        out: Path,
        fingerprint: str,
        facts: Mapping[str, Any] | None,
        names: Collection[str],
        part: ProcessPart,
        *,
        overwrite: bool = False,
        contents_of: ContentsOf = listed_files,
    ):
        super().__init__(out, fingerprint, facts, names, overwrite=overwrite, contents_of=contents_of)
        self.part = part
        self._is_alone = False
        self._index_lock = -1
        self._has_met = part.count == 1 or not part.starts_with_others
        self._deadline = time.monotonic() + MEETING_SECONDS

    def _take(self, lock: int) -> None:
        if locks.lock(lock, self.folder / WORK):
            self._is_alone = True
            super()._take(lock)
        else:
            self._join(lock)

    def _join(self, lock: int) -> None:
        """Takes part in the work of other processes. Takes nothing if there is none any more: the caller tries again.
        A process that prepares, publishes or writes alone is waited for."""
        locks.lock(lock, self.folder / WORK, shared=True, wait=True)
        if not locks.same_file(lock, self.folder / WORK) or os.pread(lock, len(MARK) + 1, 0) != MARK:
            return
        began, others = self.done("plan"), self.done(PROCESSES, PROCESSES_SCHEMA)
        if began is None or others is None or not self._is_staged() or self.done("complete") is not None:
            return
        if began["fingerprint"] != self.fingerprint or others["count"] != self.part.count:
            what = "has another plan" if began["fingerprint"] != self.fingerprint else "has another count"
            raise OutputError(
                f"{self.out} is being written by {others['count']} processes, and {self.part} {what}",
                hint="wait for them, or choose another OUT",
            )
        self._is_alone = False
        self._number(lock)
        self._lock = lock

    def _number(self, lock: int) -> None:
        """Makes this the only process with its index, as long as the work folder is locked by `lock`."""
        path = self.folder / f"process-{self.part.index}"
        own = disk.open_lock(path)
        if not locks.lock(own, path):
            os.close(own)
            raise PartRunning(
                f"{self.part} is running already, and writes to {self.out}",
                hint="give each process its own index, or wait for that one",
            )
        self._index_lock = own

    def begin(self) -> State:
        """See `Journal`. An output of this plan is left as it is, even with `overwrite`: another process of this run
        may have published it."""
        if not self._is_alone:
            return State.JOINED
        is_begun = any(self.done(entry) is not None for entry in ("complete", "plan"))
        state = State.PUBLISHED if not is_begun and self.is_published() else super().begin()
        if state in (State.NEW, State.BEGUN):
            self.record(PROCESSES, {"count": self.part.count})
        return state

    def _write_entry(self, name: str, data: bytes) -> None:
        """Writes to a file of this process first: two neighbours may record the hash of one shard at the same time."""
        partial = self.folder / f"{name}-{self.part.index}{disk.PARTIAL}"
        with self._writing:
            disk.write_file(partial, data)
            disk.rename(partial, self.folder / name)
            disk.sync(self.folder)
        self._look_for_others()

    def _look_for_others(self) -> bool:
        """Returns True if another process was here.

        Raises:
            OutputError: none came in time.
        """
        own = f"process-{self.part.index}"
        names = [] if self._has_met or not self.folder.is_dir() else disk.entries(self.folder)
        self._has_met = self._has_met or not names or any(n.startswith("process-") and n != own for n in names)
        if not self._has_met and time.monotonic() > self._deadline:
            raise OutputError(
                f"{self.part}: no other process appeared in {self.folder} within {MEETING_SECONDS / 60:.0f} minutes; "
                f"{self.out.parent} is probably not on a disk that all hosts share",
                hint="name an OUT in a bucket, or on a disk that all hosts mount; if the other processes start later, "
                "give `ProcessPart()` instead of `find_part()`",
            )
        return self._has_met

    def share(self) -> None:
        if not self._is_alone:
            return
        self._number(self._lock)
        # The exclusive lock goes first, and another process may take it.
        locks.lock(self._lock, self.folder / WORK, shared=True, wait=True)
        self._is_alone = False
        if not self._is_current_work():
            raise OutputError(f"another process has begun to write to {self.out}", hint="run again")

    def gather(self, parts: Collection[str]) -> bool:
        """See `RunJournal`."""
        if not self.part.publishes:
            return False
        if not self._has_all(parts):
            while not self._look_for_others():
                time.sleep(MEETING_POLL_SECONDS)
            return False
        # On some shared disks two processes that keep this lock while they wait for the other one wait for ever.
        locks.unlock(self._lock)
        locks.lock(self._lock, self.folder / WORK, wait=True)
        self._is_alone = True
        return self._is_current_work() and self._has_all(parts)

    def _has_all(self, parts: Collection[str]) -> bool:
        # A list: some shared disks remember for a while that a single name was missing.
        names = set(disk.entries(self.folder)) if self.folder.is_dir() else set()
        return all(f"{part}.done" in names for part in parts)

    def _is_current_work(self) -> bool:
        if not locks.same_file(self._lock, self.folder / WORK):
            return False
        began = self.done("plan")
        return began is not None and began["fingerprint"] == self.fingerprint and self._is_staged()

    def __exit__(self, *raised: object) -> None:
        """Lets the next process begin; the last one removes the work folder if nothing in it can be resumed."""
        try:
            locks.unlock(self._lock)
            if locks.lock(self._lock, self.folder / WORK):
                super().__exit__(*raised)
            else:
                os.close(self._lock)
                self._lock = -1
        finally:
            if self._index_lock >= 0:
                os.close(self._index_lock)
                self._index_lock = -1
