"""Reading a source that is elsewhere, on the Hub or in a bucket: each file is fetched once, in the order of the work,
proved, used and dropped.

Threads fetch files ahead of the work, as far as the planned room allows. A read waits until its file is there.
"""

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from tpuconv.errors import SourceError
from tpuconv.location import Location
from tpuconv.sources.damaged import DamagedDownload, hash_of
from tpuconv.sources.download import Meter, end_threads
from tpuconv.sources.headers import TensorInfo
from tpuconv.sources.hub_errors import Stopped
from tpuconv.sources.reader import Reader, SafetensorsReader, box_runs
from tpuconv.sources.remote import RemoteFile
from tpuconv.sources.schedule import AHEAD_FILES, FetchSchedule, ReadStep, Spans
from tpuconv.sources.shard import SourceShard, hash_stamp
from tpuconv.sources.workspace import PART, Workspace
from tpuconv.storage import disk

WAIT_SECONDS = 0.2
"""The time between two checks whether the work was cancelled."""
COPY_BYTES = 16 << 20


class DamagedFetch(DamagedDownload):
    """A fetched file is not the one that the Hub promises. It was dropped already."""

    def remove(self) -> None:
        """Nothing is left to delete."""


class StreamReader(Reader):
    """Reads tensors of files that are fetched meanwhile; see `Reader`. Files that are here are read by another reader.

    A file is read only after its size, its header and its hash, if one is promised, were compared. So whatever is made
    of it counts.

    Args:
        files: the files to fetch, by name.
        shards: all files of the source.
        here: the reader of the files that are here.
        identity: a text that tells the source from others.
        place: the workspace that the user wants.
        check_cancelled: raises an exception when the work must stop.
    """

    def __init__(
        self,
        files: Mapping[str, RemoteFile],
        shards: Sequence[SourceShard],
        here: Reader,
        identity: str,
        place: Path | None,
        check_cancelled: Callable[[], None] = lambda: None,
    ):
        self.files, self.here, self.identity, self.place = files, here, identity, place
        self._shards = {shard.name: shard for shard in shards}
        self._check_cancelled = check_cancelled
        self._changed = threading.Condition()
        self._meter = Meter(None)
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._workspace: Workspace | None = None

    # --- what is left to do --------------------------------------------------------------------------------------

    def begin(self, steps: Sequence[ReadStep], wide: Mapping[str, Spans], work: Location, reserved: int = 0) -> None:
        """See `Reader`."""
        beside = "; ".join(f"{name} {list(ranges)}" for name, ranges in sorted(wide.items()))
        self._workspace = Workspace(self.place, work, f"{self.identity} {beside}")
        self._opened = SafetensorsReader(self._workspace.folder, (), self._check_cancelled)
        self._hashes: dict[str, str] = {}
        self._steps: dict[str, list[str]] = {}
        sizes = {name: self._shards[name].size for name in self.files}
        self._schedule, self._wide = FetchSchedule(sizes, steps, wide), wide
        self._workspace.keep_only(self._schedule.order)
        self._workspace.check_room(self._schedule.peak_bytes + self._also_here(work, reserved))
        for name in self._schedule.order:
            self._meter.expect(name, sizes[name])
            for step in self._schedule.users[name] | self._schedule.wide_users[name]:
                self._steps.setdefault(step, []).append(name)
        self._there: set[str] = set()
        self._next = self._live = 0
        self._threads = [threading.Thread(target=self._fetch_all, daemon=True) for _ in range(AHEAD_FILES)]
        for thread in self._threads:
            thread.start()

    def _also_here(self, work: Location, reserved: int) -> int:
        """Returns the bytes that the output takes on the disk of the workspace."""
        assert self._workspace is not None
        if not isinstance(work, Path) or not work.is_dir():
            return 0
        return reserved if work.stat().st_dev == self._workspace.root.stat().st_dev else 0

    @property
    def fetching(self) -> tuple[int, int]:
        """See `Reader`."""
        return self._meter.totals

    def finish(self, step: str) -> None:
        """See `Reader`."""
        with self._changed:
            for name in self._steps.pop(step, ()):
                self._schedule.users[name].discard(step)
                self._schedule.wide_users[name].discard(step)
                self._release(name)
            self._changed.notify_all()

    def _release(self, name: str) -> None:
        """Drops what no step needs any more of a file that is there. The lock is held."""
        assert self._workspace is not None
        if name not in self._there:
            return
        path = self._workspace.path(name)
        if not self._schedule.users[name] and path.exists():
            self._opened.drop(name)
            disk.remove(path)
            self._live -= self._shards[name].size
        if not self._schedule.wide_users[name]:
            disk.remove(self._workspace.wide(name))

    # --- fetching --------------------------------------------------------------------------------------------------

    def _fetch_all(self) -> None:
        try:
            while (name := self._next_file()) is not None:
                self._fetch(name)
                self._arrived(name)
        except Stopped:
            return
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._meter.stopped.set()
                self._changed.notify_all()

    def _next_file(self) -> str | None:
        """Returns the next file to fetch, once there is room for it; None if there is none."""
        assert self._workspace is not None
        with self._changed:
            while not self._meter.stopped.is_set() and self._next < len(self._schedule.order):
                name = self._schedule.order[self._next]
                size = self._shards[name].size
                if not self._schedule.users[name] and self._workspace.wide(name).exists():
                    self._meter.complete(name)
                    self._next += 1
                    self._there.add(name)
                    self._changed.notify_all()
                elif self._live + size <= self._schedule.budget or not self._live:
                    self._next += 1
                    self._live += size
                    return name
                else:
                    self._changed.wait()
        return None

    def _fetch(self, name: str) -> None:
        """Fetches a file, unless an earlier run did, and proves it."""
        assert self._workspace is not None
        path, part, shard = self._workspace.path(name), self._workspace.part(name), self._shards[name]
        if path.exists():
            self._meter.complete(name)
            return
        self._workspace.remove_part(name)
        disk.make_folder(part)
        found = self.files[name].fetch(part, self._meter)
        if (size := found.stat().st_size) != shard.size:
            raise SourceError(f"{name}: {size} bytes came instead of {shard.size}", hint="run again")
        planned = self.files[name].planned_start()
        with found.open("rb") as file:
            if file.read(len(planned)) != planned:
                raise self._damaged(name, "header promised  that which was fetched before", "header found     another")
        self._hashes[name] = hash_of(found, shard.hash_name)
        if shard.sha256 is not None and self._hashes[name] != shard.sha256:
            raise self._damaged(name, f"sha256 promised  {shard.sha256}", f"sha256 found     {self._hashes[name]}")
        disk.rename(found, path)
        self._workspace.remove_part(name)

    def _arrived(self, name: str) -> None:
        assert self._workspace is not None
        path, wide = self._workspace.path(name), self._workspace.wide(name)
        if self._wide.get(name) and self._schedule.wide_users[name] and not wide.exists():
            part = wide.with_name(f"{wide.name}{PART}")
            with disk.writing(wide), open(path, "rb", buffering=0) as file, open(part, "wb", buffering=0) as out:
                for start, stop in self._wide[name]:
                    for first in range(start, stop, COPY_BYTES):
                        data = os.pread(file.fileno(), min(COPY_BYTES, stop - first), first)
                        os.pwrite(out.fileno(), data, first)
            disk.rename(part, wide)
        self._opened.add(replace(self._shards[name], stamp=hash_stamp(path.stat())))
        with self._changed:
            self._there.add(name)
            self._release(name)
            self._changed.notify_all()

    def _damaged(self, name: str, *details: str) -> DamagedFetch:
        assert self._workspace is not None
        self._workspace.remove_part(name)
        error = DamagedFetch(
            f"{name} is not the file that the Hub promises",
            details=details,
            hint="it was damaged on the way; run again, only it is fetched anew",
        )
        error.files = [self._workspace.part(name)]
        return error

    def _wait_for(self, name: str) -> None:
        """Waits until a file is there. Raises what went wrong meanwhile."""
        with self._changed:
            while name not in self._there:
                if self._error is not None:
                    raise self._error
                self._changed.wait(WAIT_SECONDS)
                self._check_cancelled()

    # --- reading ---------------------------------------------------------------------------------------------------

    def read(self, info: TensorInfo, start: int, out: memoryview) -> None:
        """See `Reader`."""
        if info.shard not in self.files:
            self.here.read(info, start, out)
            return
        self._wait_for(info.shard)
        if not self._read_wide(info.shard, info.offset + start, out):
            self._opened.read(info, start, out)

    def _read_wide(self, name: str, position: int, out: memoryview) -> bool:
        """Fills `out` from the wide part of a file, if its bytes are there. Returns whether it did."""
        assert self._workspace is not None
        end = position + len(out)
        if not any(start <= position and end <= stop for start, stop in self._wide.get(name, ())):
            return False
        with suppress(FileNotFoundError), open(self._workspace.wide(name), "rb", buffering=0) as file:
            while len(out):
                count = os.preadv(file.fileno(), [out], position)
                if not count:
                    return False
                out, position = out[count:], position + count
            return True
        return False

    def read_box(self, info: TensorInfo, box: Sequence[slice], out: np.ndarray) -> None:
        """See `Reader`."""
        for start, part in box_runs(info.shape, box, out):
            self.read(info, start, part)

    def hash_of(self, shard: str) -> str | None:
        """See `Reader`. Waits until a file is there."""
        if shard not in self.files:
            return self.here.hash_of(shard)
        assert self._workspace is not None
        self._wait_for(shard)
        if shard not in self._hashes:  # an earlier run fetched it
            known = self._shards[shard]
            self._hashes[shard] = known.sha256 or hash_of(self._workspace.path(shard), known.hash_name)
        return self._hashes[shard]

    def check_unchanged(self, shards: Collection[str] | None = None) -> None:
        """See `Reader`. Each file is of the version that was planned; at the end this asks for all files."""
        names = list(self._shards) if shards is None else shards
        self.here.check_unchanged([name for name in names if name not in self.files])
        for name in names if shards is None else ():
            if name in self.files:
                self.files[name].check_unchanged()

    def close(self) -> None:
        """See `Reader`. What was fetched and is still needed stays for the next run."""
        with self._changed:
            self._meter.stopped.set()
            self._changed.notify_all()
        end_threads(self._threads)
        if self._workspace is not None:
            self._opened.close()
            self._workspace.close()
            self._workspace = None
        self.here.close()
