"""Files of weights that are elsewhere, on the Hub or in a bucket: their bytes, by ranges and with retries."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tpuconv import buckets
from tpuconv.errors import BucketError, SourceError
from tpuconv.location import BucketPath
from tpuconv.sources import download
from tpuconv.sources.download import Link, Stopped, chunks_of
from tpuconv.sources.hub_errors import client_errors
from tpuconv.sources.shard import object_stamp

CHANGED_HINT = "wait until nothing writes to the source, then run again"
CHUNK_BYTES_OF_STREAMS = 1 << 20


class RemoteFile(Protocol):
    """A file that is fetched by ranges."""

    def chunks(self, start: int, stop: int, stopped: threading.Event) -> Iterator[bytes | memoryview]:
        """Yields the bytes [start, stop). A connection that breaks is resumed where it broke.

        Raises:
            HubError, BucketError: the server refuses, or cannot be reached after some attempts.
            SourceError: the file is gone, or changed.
            Stopped: `stopped` was set while it waited.
        """

    def check_unchanged(self) -> None:
        """Raises SourceError if the file is gone, or changed."""

    def planned_start(self, stop: int) -> bytes:
        """Returns the first bytes of the file as the plan saw them, up to `stop` or the end of the header. Empty if the
        version of the file says that they are the same."""


class HubShard:
    """A file of the Hub at a commit, which never changes.

    Args:
        repo, revision: for messages.
        url: where the Hub serves it.
        header: a file that begins with the header that was fetched before.
    """

    def __init__(self, repo: str, revision: str, url: str, header: Path):
        self.repo, self.revision, self.link, self.header = repo, revision, Link(url), header

    def chunks(self, start: int, stop: int, stopped: threading.Event) -> Iterator[bytes | memoryview]:
        """See `RemoteFile`."""
        with client_errors(self.repo, self.revision):
            yield from chunks_of(self.link, start, stop, stopped)

    def check_unchanged(self) -> None:
        """See `RemoteFile`: it is the version of the commit."""

    def planned_start(self, stop: int) -> bytes:
        """See `RemoteFile`."""
        with self.header.open("rb") as file:
            length = file.read(8)
            return (length + file.read(int.from_bytes(length, "little")))[:stop]


@dataclass(frozen=True)
class ObjectShard:
    """An object in a bucket, in the version that has this stamp; see `tpuconv.sources.shard.object_stamp`."""

    path: BucketPath
    stamp: str

    def chunks(self, start: int, stop: int, stopped: threading.Event) -> Iterator[bytes | memoryview]:
        """See `RemoteFile`. obstore repeats requests; here only those are that break within the body."""
        version = self._version()
        position, failures = start, 0
        while position < stop:
            before = position
            try:
                for chunk in buckets.stream(self.path, CHUNK_BYTES_OF_STREAMS, (position, stop), version):
                    position += len(chunk)
                    yield chunk
                if position < stop:
                    raise BucketError(
                        f"{self.path} ended {stop - position} bytes early", hint="run the same command again to resume"
                    )
            except (FileNotFoundError, buckets.ConditionLost):
                raise self._changed() from None
            except BucketError:
                failures = 0 if position > before else failures + 1
                if failures > download.RETRIES or (failures and position == start):
                    raise
                if stopped.wait(download.BACKOFF_SECONDS * 2**failures):
                    raise Stopped from None

    def check_unchanged(self) -> None:
        """See `RemoteFile`."""
        self._version()

    def planned_start(self, stop: int) -> bytes:
        """See `RemoteFile`."""
        return b""

    def _version(self) -> buckets.Version:
        found = buckets.facts(self.path)
        if found is None:
            raise SourceError(f"{self.path} is missing now", hint=CHANGED_HINT)
        if object_stamp(found) != self.stamp:
            raise self._changed()
        return found.version

    def _changed(self) -> SourceError:
        return SourceError(f"{self.path} changed while it was converted", hint=CHANGED_HINT)
