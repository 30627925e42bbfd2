"""Files of weights that are elsewhere, on the Hub or in a bucket, and are fetched whole."""

import os
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tpuconv import buckets
from tpuconv.bucket_errors import ConditionLost
from tpuconv.errors import BucketError
from tpuconv.location import BucketPath
from tpuconv.sources import download
from tpuconv.sources.download import Meter, fetch_file, in_threads
from tpuconv.sources.hub_errors import Stopped, client_errors
from tpuconv.sources.shard import check_object, shard_changed

RANGE_BYTES = 64 << 20
"""The part of an object that one request brings: a connection to a bucket is slower than a disk."""
CONNECTIONS = 4
STREAM_BYTES = 1 << 20


class RemoteFile(Protocol):
    """A file that is fetched whole."""

    def fetch(self, folder: Path, meter: Meter) -> Path:
        """Returns the path of the file, fetched to a folder that exists and is empty. A connection that breaks is
        resumed where it broke.

        Raises:
            HubError, BucketError: the server refuses, or cannot be reached after some attempts.
            SourceError: the file is gone, or changed.
            ResourceError: the folder cannot be written.
            Stopped: the meter was stopped.
        """

    def check_unchanged(self) -> None:
        """Raises SourceError if the file is gone, or changed."""

    def planned_start(self) -> bytes:
        """Returns the first bytes of the file as the plan saw them, up to the end of the header. Empty if the version
        of the file says that they are the same."""


@dataclass(frozen=True)
class HubShard:
    """A file of the Hub at a commit, which never changes. Its client fetches it.

    Args:
        repo, revision: for messages.
        commit, name: which file.
        header: a file that begins with the header that was fetched before.
    """

    repo: str
    revision: str
    commit: str
    name: str
    header: Path

    def fetch(self, folder: Path, meter: Meter) -> Path:
        """See `RemoteFile`."""
        with client_errors(self.repo, self.revision, folder):
            return fetch_file(self.repo, self.name, self.commit, meter, folder)

    def check_unchanged(self) -> None:
        """See `RemoteFile`: it is the version of the commit."""

    def planned_start(self) -> bytes:
        """See `RemoteFile`."""
        with self.header.open("rb") as file:
            length = file.read(8)
            return length + file.read(int.from_bytes(length, "little"))


@dataclass(frozen=True)
class ObjectShard:
    """An object in a bucket, in the version that has this stamp; see `tpuconv.sources.shard.object_stamp`."""

    path: BucketPath
    stamp: str

    def fetch(self, folder: Path, meter: Meter) -> Path:
        """See `RemoteFile`. Several connections bring parts of the object."""
        from tpuconv.storage import disk  # with it numpy comes

        found = check_object(self.path, self.stamp)
        target = folder / self.path.name
        with disk.writing(target), open(target, "wb") as out:
            ranges = [(first, min(first + RANGE_BYTES, found.size)) for first in range(0, found.size, RANGE_BYTES)]

            def fetch_range(span: tuple[int, int]) -> None:
                position = span[0]
                for chunk in self._chunks(*span, found.version, meter.stopped):
                    meter.check()
                    os.pwrite(out.fileno(), chunk, position)
                    position += len(chunk)

            with closing(in_threads(fetch_range, ranges, CONNECTIONS, threading.Event())) as done:
                for start, stop in done:
                    meter.add(self.path.name, stop - start)
        return target

    def _chunks(
        self, start: int, stop: int, version: buckets.Version, stopped: threading.Event
    ) -> Iterator[bytes | memoryview]:
        """Yields the bytes [start, stop). obstore repeats requests; here only those are that break within the body."""
        position, failures = start, 0
        while position < stop:
            before = position
            try:
                for chunk in buckets.stream(self.path, STREAM_BYTES, (position, stop), version):
                    position += len(chunk)
                    yield chunk
                if position < stop:
                    raise BucketError(
                        f"{self.path} ended {stop - position} bytes early", hint="run the same command again to resume"
                    )
            except (FileNotFoundError, ConditionLost):
                raise shard_changed(self.path) from None
            except BucketError:
                failures = 0 if position > before else failures + 1
                if failures > download.RETRIES or (failures and position == start):
                    raise
                if stopped.wait(download.BACKOFF_SECONDS * 2**failures):
                    raise Stopped from None

    def check_unchanged(self) -> None:
        """See `RemoteFile`."""
        check_object(self.path, self.stamp)

    def planned_start(self) -> bytes:
        """See `RemoteFile`."""
        return b""
