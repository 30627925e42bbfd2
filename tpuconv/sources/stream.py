"""Reading a source that is elsewhere, on the Hub or in a bucket: each byte is fetched once, in the order of the source,
hashed, used and dropped.

Threads fetch segments ahead of the work, as far as the planned room allows. A read waits until its bytes are there.
"""

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from tpuconv.errors import SourceError
from tpuconv.location import Location
from tpuconv.sources.damaged import DamagedDownload
from tpuconv.sources.download import Stopped, end_threads
from tpuconv.sources.headers import TensorInfo
from tpuconv.sources.reader import Reader, box_runs
from tpuconv.sources.remote import RemoteFile
from tpuconv.sources.schedule import CONNECTIONS, FetchSchedule, ReadStep, Segment
from tpuconv.sources.shard import SourceShard
from tpuconv.sources.workspace import PART, WIDE, Workspace, ranges_text
from tpuconv.storage import disk
from tpuconv.storage.hashes import BLOCK, HASHES

WAIT_SECONDS = 0.2
"""The time between two checks whether the work was cancelled."""


class DamagedStream(DamagedDownload):
    """The fetched bytes of a file do not match the hash that the Hub promises. They were dropped already."""

    def __init__(self, name: str, folder: Path, *details: str):
        super().__init__(Path(name), [folder], *details)
        self.hint = "it was damaged on the way; run again, only it is fetched anew"

    def remove(self) -> None:
        """Nothing is left to delete."""


class _Proof:
    """The hash of a file, as far as its segments came."""

    def __init__(self, kind: str, segments: Sequence[Segment]):
        self.segments, self.digest, self.hashed = segments, HASHES[kind](), 0
        self.lock = threading.Lock()
        self.result: str | None = None


class StreamReader(Reader):
    """Reads tensors of files that are fetched meanwhile; see `Reader`. Files that are here are read by another reader.

    Args:
        files: that are fetched, by name.
        shards: all files of the source.
        here: the reader of the others.
        identity: of the source.
        place: the workspace that the user wants.
        check_cancelled: raises an exception when the work must stop.
        hashes: the files to be hashed; all if None. Of no use where only a part of one is fetched.
    """

    def __init__(
        self,
        files: Mapping[str, RemoteFile],
        shards: Sequence[SourceShard],
        here: Reader,
        identity: str,
        place: Path | None,
        check_cancelled: Callable[[], None] = lambda: None,
        *,
        hashes: Collection[str] | None = None,
    ):
        self.hashes = {shard.name for shard in shards} if hashes is None else set(hashes)
        self.files, self.here, self.identity, self.place = files, here, identity, place
        self._shards = {shard.name: shard for shard in shards}
        self._numbers = {shard.name: i for i, shard in enumerate(shards)}
        self._check_cancelled = check_cancelled
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._workspace: Workspace | None = None

    # --- what is left to do --------------------------------------------------------------------------------------

    def begin(
        self, steps: Sequence[ReadStep], wide: Mapping[str, list[tuple[int, int]]], work: Location, reserved: int = 0
    ) -> set[str]:
        """See `Reader`."""
        if self._workspace is None:
            beside = "; ".join(f"{name} {ranges_text(ranges)}" for name, ranges in sorted(wide.items()))
            self._workspace = Workspace(self.place, work, f"{self.identity} {beside}")
        sizes = {name: self._shards[name].size for name in self.files}
        schedule = FetchSchedule(sizes, steps, wide)
        self._there: set[int] = set()
        lost: set[str] = set()
        for segment in schedule.order:
            number = self._numbers[segment.file]
            main = self._workspace.has(number, segment)
            if main or not self._is_needed(segment):
                self._there.add(id(segment))
            elif self._is_unproved(segment.file, schedule):
                lost.add(segment.file)
        if lost:
            return lost
        kept = {self._workspace.path(self._numbers[s.file], s) for s in schedule.order if s.users or s.wide_users}
        self._workspace.keep_only(kept | {path.with_name(f"{path.name}{WIDE}") for path in kept})
        self._workspace.check_room(schedule.peak_bytes + self._also_here(work, reserved))
        self._schedule, self._next_number, self._live, self._bounded = schedule, 0, 0, True
        self._kept = {id(s) for s in schedule.order if self._workspace.has(self._numbers[s.file], s)}
        self._by_step: dict[str, list[Segment]] = {}
        for segment in schedule.order:
            for name in segment.users | segment.wide_users:
                self._by_step.setdefault(name, []).append(segment)
        self._proofs = {
            name: _Proof(self._shards[name].hash_name, [s for s in schedule.order if s.file == name])
            for name in schedule.proofs
            if name is not None
        }
        self._unproved = set(self._proofs)
        self._threads = [threading.Thread(target=self._fetch_all, daemon=True) for _ in range(CONNECTIONS)]
        for thread in self._threads:
            thread.start()
        return set()

    def _is_unproved(self, name: str, schedule: FetchSchedule) -> bool:
        """Returns True if a file that is fetched again has a promised hash, which no step checks."""
        return name in self.hashes and name not in schedule.proofs and self._shards[name].sha256 is not None

    def _is_needed(self, segment: Segment) -> bool:
        """Returns True if a segment must be on the disk, besides its wide part."""
        assert self._workspace is not None
        has_wide = self._workspace.has(self._numbers[segment.file], segment, wide=True)
        return bool(segment.users) or not has_wide

    def _also_here(self, work: Location, reserved: int) -> int:
        """Returns the bytes that the output takes on the disk of the workspace."""
        assert self._workspace is not None
        if not isinstance(work, Path) or not work.is_dir():
            return 0
        return reserved if work.stat().st_dev == self._workspace.root.stat().st_dev else 0

    def finish(self, step: str) -> None:
        """See `Reader`."""
        with self._changed:
            for segment in self._by_step.pop(step, ()):
                segment.users.discard(step)
                segment.wide_users.discard(step)
                self._release(segment)
            self._unproved -= {name for name in self._unproved if step == self._proof_step(name)}
            self._changed.notify_all()

    def _proof_step(self, name: str) -> str:
        return self._schedule.steps[self._schedule.proofs[name]].name

    def unproved(self, shards: Collection[str]) -> set[str]:
        """See `Reader`."""
        return self._unproved & set(shards)

    def unbound(self) -> None:
        """See `Reader`."""
        with self._changed:
            self._bounded = False
            self._changed.notify_all()

    def _release(self, segment: Segment) -> None:
        """Drops what no step needs any more. The lock is held."""
        assert self._workspace is not None
        number = self._numbers[segment.file]
        if not segment.users and id(segment) in self._kept and id(segment) in self._there:
            disk.remove(self._workspace.path(number, segment))
            self._kept.discard(id(segment))
            self._live -= segment.nbytes
        if segment.wide and not segment.wide_users:
            disk.remove(self._workspace.path(number, segment, wide=True))

    # --- fetching --------------------------------------------------------------------------------------------------

    def _fetch_all(self) -> None:
        try:
            while (segment := self._next_segment()) is not None:
                self._fetch(segment)
                self._arrived(segment)
        except Stopped:
            return
        except BaseException as error:
            self._fail(error)

    def _next_segment(self) -> Segment | None:
        """Returns the next segment to fetch, once there is room for it; None if there is none."""
        with self._changed:
            while not self._stopped.is_set() and self._next_number < len(self._schedule.order):
                segment = self._schedule.order[self._next_number]
                if id(segment) in self._there and id(segment) not in self._kept:  # its wide part is all that is needed
                    self._next_number += 1
                elif self._live + segment.nbytes <= self._schedule.budget or not self._live or not self._bounded:
                    self._next_number += 1
                    self._live += segment.nbytes
                    return segment
                else:
                    self._changed.wait()
        return None

    def _fetch(self, segment: Segment) -> None:
        assert self._workspace is not None
        if id(segment) in self._there:
            return
        number = self._numbers[segment.file]
        path = self._workspace.path(number, segment)
        part = path.with_name(f"{path.name}-{os.urandom(4).hex()}{PART}")
        disk.make_folder(path.parent)
        done = 0
        chunks = self.files[segment.file].chunks(segment.start, segment.stop, self._stopped)
        with disk.writing(path), open(part, "wb", buffering=0) as out:
            for chunk in chunks:
                if self._stopped.is_set():
                    raise Stopped
                out.write(chunk)
                done += len(chunk)
        if done != segment.nbytes:
            raise SourceError(f"{segment.file}: {done} bytes came instead of {segment.nbytes}", hint="run again")
        disk.rename(part, path)

    def _arrived(self, segment: Segment) -> None:
        assert self._workspace is not None
        number = self._numbers[segment.file]
        path = self._workspace.path(number, segment)
        self._check_header(segment, path)
        if segment.wide and segment.wide_users and not self._workspace.has(number, segment, wide=True):
            target = self._workspace.path(number, segment, wide=True)
            part = target.with_name(f"{target.name}{PART}")
            with disk.writing(target), open(path, "rb", buffering=0) as file, open(part, "wb") as out:
                for start, stop in segment.wide:
                    out.write(os.pread(file.fileno(), stop - start, start - segment.start))
            disk.rename(part, target)
        with self._changed:
            self._there.add(id(segment))
            self._kept.add(id(segment))
            if segment.file not in self._proofs:
                self._release(segment)
            self._changed.notify_all()
        self._hash(segment.file)

    def _check_header(self, segment: Segment, path: Path) -> None:
        """Raises DamagedStream if a file begins with another header than the plan was made from."""
        planned = self.files[segment.file].planned_start(segment.stop)[segment.start :]
        with path.open("rb") as file:
            found = file.read(len(planned)) if planned else b""
        if found != planned:
            raise self._damaged(
                segment.file, "header promised  that which was fetched before", "header found     another one"
            )

    def _damaged(self, name: str, *details: str) -> DamagedStream:
        assert self._workspace is not None
        number = self._numbers[name]
        self._workspace.remove_file(number)
        return DamagedStream(name, self._workspace.file_folder(number), *details)

    def _hash(self, name: str) -> None:
        """Hashes what is there of a file, in order, unless another thread does."""
        assert self._workspace is not None
        proof = self._proofs.get(name)
        if proof is None:
            return
        while proof.hashed < len(proof.segments) and id(proof.segments[proof.hashed]) in self._there:
            if not proof.lock.acquire(blocking=False):
                return
            try:
                while proof.hashed < len(proof.segments) and id(proof.segments[proof.hashed]) in self._there:
                    self._hash_segment(proof, proof.segments[proof.hashed])
                    proof.hashed += 1
            finally:
                proof.lock.release()
        with proof.lock:
            if proof.hashed < len(proof.segments) or proof.result is not None:
                return
            found, promised = str(proof.digest.hexdigest()), self._shards[name].sha256
            if promised is not None and found != promised:
                raise self._damaged(name, f"sha256 promised  {promised}", f"sha256 found     {found}")
            proof.result = found
        with self._changed:
            self._changed.notify_all()

    def _hash_segment(self, proof: _Proof, segment: Segment) -> None:
        assert self._workspace is not None
        buffer = memoryview(bytearray(BLOCK))
        with open(self._workspace.path(self._numbers[segment.file], segment), "rb", buffering=0) as file:
            while n := file.readinto(buffer):
                if self._stopped.is_set():
                    raise Stopped
                proof.digest.update(buffer[:n])

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._stopped.set()
            self._changed.notify_all()

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits, with the lock, until a condition holds. Raises what went wrong meanwhile."""
        while not condition():
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
        position = info.offset + start
        for segment in self._schedule.segments_of(info.shard, position, position + len(out)):
            first, stop = max(position, segment.start), min(position + len(out), segment.stop)
            with self._changed:
                self._wait_for(lambda segment=segment: id(segment) in self._there)  # type: ignore[misc]
            self._fill(segment, first, out[first - position : stop - position])

    def _fill(self, segment: Segment, position: int, out: memoryview) -> None:
        """Reads bytes of a segment from its wide part, if they are kept there, or from itself."""
        assert self._workspace is not None
        number = self._numbers[segment.file]
        place = segment.wide_place(position, position + len(out))
        ways: list[tuple[bool, int]] = [(False, position - segment.start)]
        ways = [(True, place), *ways] if place is not None else ways
        for wide, at in ways:
            if _filled(self._workspace.path(number, segment, wide=wide), at, out):
                return
        if self._error is not None:  # it was dropped since
            raise self._error
        raise SourceError(f"{self._workspace.path(number, segment)} was changed", hint="run again: it is fetched anew")

    def read_box(self, info: TensorInfo, box: Sequence[slice], out: np.ndarray) -> None:
        """See `Reader`."""
        for start, part in box_runs(info.shape, box, out):
            self.read(info, start, part)

    def hash_of(self, shard: str) -> str | None:
        """See `Reader`. Waits until all of a file has come."""
        if shard not in self.files:
            return self.here.hash_of(shard)
        if shard not in self._proofs:
            return None
        proof = self._proofs[shard]
        with self._changed:
            self._wait_for(lambda: proof.result is not None)
        return proof.result

    def check_unchanged(self, shards: Collection[str] | None = None) -> None:
        """See `Reader`. Each segment is of the version that was planned; at the end this asks for all files."""
        names: Collection[str] = self._shards if shards is None else shards
        self.here.check_unchanged([name for name in names if name not in self.files])
        for name in names if shards is None else ():
            if name in self.files:
                self.files[name].check_unchanged()

    def close(self) -> None:
        """See `Reader`. What was fetched and is still needed stays for the next run."""
        with self._changed:
            self._stopped.set()
            self._changed.notify_all()
        end_threads(self._threads)
        if self._workspace is not None:
            self._workspace.close()
            self._workspace = None
        self.here.close()


def _filled(path: Path, at: int, out: memoryview) -> bool:
    """Fills `out` from a place of a file on. Returns False if the file is not there, or ends before."""
    with suppress(FileNotFoundError), open(path, "rb", buffering=0) as file:
        while out:
            n = os.preadv(file.fileno(), [out], at)
            if not n:
                return False
            out, at = out[n:], at + n
        return True
    return False
