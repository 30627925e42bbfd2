"""Downloads files of the Hub by byte ranges, so that a broken connection is resumed, and counts the bytes."""

import errno
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tpuconv.sources.hub_errors import is_offline, is_unreachable

RETRIES = 5  # failures in a row that bring nothing
BACKOFF_SECONDS = 1.0  # before the first retry, then twice that and so on
TICK_SECONDS = 0.1  # between two reports of progress

DownloadProgress = Callable[[int, int], None]


def chunks_of(url: str, position: int, end: int, stopped: threading.Event) -> Iterator[bytes]:
    """Yields the bytes of a file from `position` to `end`. If the connection breaks, it is resumed there.

    Raises:
        Stopped: `stopped` was set.
        Exception: the client's, if the Hub refuses or cannot be reached after RETRIES attempts.
    """
    from huggingface_hub import constants, hf_raise_for_status
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    from tpuconv.private import http_stream_backoff

    failures = 0
    while position < end:
        headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={position}-{end - 1}"}
        try:
            with http_stream_backoff(
                "GET",
                url,
                headers=headers,
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                retry_on_exceptions=(),
                retry_on_status_codes=(408, 429),  # those say when to come back, and the client heeds it
            ) as response:
                hf_raise_for_status(response)
                skip = position if response.status_code == 200 else 0  # a proxy may ignore the range and send it all
                for received in response.iter_bytes():
                    wanted, skip = received[skip:], max(skip - len(received), 0)
                    if chunk := wanted[: end - position]:
                        position += len(chunk)
                        failures = 0
                        yield chunk
                    if position == end:
                        return
            raise TimeoutError(f"{url} ended {end - position} bytes early")
        except Exception as error:
            if not is_unreachable(error) or is_offline(error):
                raise
            failures += 1
            if failures > RETRIES:
                raise
            if stopped.wait(BACKOFF_SECONDS * 2 ** (failures - 1)):
                raise Stopped from None


def lock(fd: int) -> bool:
    """Locks an open file, and says whether it is locked. On a file system without locks everybody gets it: two writers
    then write the same bytes to the same places."""
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True


class Stopped(Exception):
    """Another file failed, or the user interrupted the download."""


class Meter:
    """Counts the bytes of all files of a download, and reports them a few times a second."""

    def __init__(self, progress: DownloadProgress | None):
        self.stopped = threading.Event()
        self._progress = progress
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._done: dict[str, int] = {}
        self._next = 0.0

    def expect(self, name: str, size: int) -> None:
        """Adds a file of a known size."""
        self._sizes[name] = size

    def set(self, name: str, done: int) -> None:
        """Sets how many bytes of a file are there. Raises Stopped if the download is to stop."""
        self.check()
        with self._lock:
            self._done[name] = min(done, self._sizes.get(name, 0))
            if self._progress and time.monotonic() >= self._next:
                self._progress(sum(self._done.values()), sum(self._sizes.values()))
                self._next = time.monotonic() + TICK_SECONDS

    def add(self, name: str, n: float) -> None:
        """Adds bytes to a file."""
        self.set(name, self._done.get(name, 0) + int(n))

    def complete(self, name: str) -> None:
        """Marks a file as complete."""
        self.set(name, self._sizes.get(name, 0))

    def finish(self) -> None:
        """Reports that all is there."""
        if self._progress:
            self._progress(sum(self._sizes.values()), sum(self._sizes.values()))

    def check(self) -> None:
        """Raises Stopped if the download is to stop."""
        if self.stopped.is_set():
            raise Stopped

    def bar(self, name: str) -> Any:
        """A class that the client takes for a progress bar. It draws nothing and reports to this meter."""
        meter = self

        class Bar:
            def __init__(self, *_: object, initial: int = 0, **__: object):
                meter.set(name, initial)

            def __enter__(self) -> "Bar":
                return self

            def __exit__(self, *_: object) -> None: ...

            def update(self, n: float | None = 1) -> None:
                meter.add(name, n or 0)

            def update_transfer(self, n: float | None = 1) -> None:
                meter.check()

            def set_postfix_str(self, *_: object, **__: object) -> None: ...

            set_transfer_postfix_str = set_postfix_str

            def close(self) -> None: ...

        return Bar
