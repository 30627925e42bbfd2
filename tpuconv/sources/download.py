"""Downloads files of the Hub by byte ranges, so that a broken connection is resumed, and counts the bytes."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tpuconv.errors import HubError
from tpuconv.sources.hub_errors import is_offline, is_unreachable

RETRIES = 5  # failures in a row that bring nothing
BACKOFF_SECONDS = 1.0  # before the first retry, then twice that and so on
TICK_SECONDS = 0.1  # between two reports of progress

Work = TypeVar("Work")
DownloadProgress = Callable[[int, int], None]


class Link:
    """The address that serves a file of the Hub: the signed one that the Hub redirects to. It is asked for once, and
    again when it expired or a request to it failed."""

    def __init__(self, url: str):
        self.url = url
        self._address: str | None = None
        self._lock = threading.Lock()

    def address(self) -> tuple[str, bool]:
        """Returns the address, and whether it was requested before this call. Raises the client's errors."""
        from huggingface_hub import get_hf_file_metadata

        with self._lock:
            is_known = self._address is not None
            if self._address is None:
                self._address = get_hf_file_metadata(self.url).location
            return self._address, is_known

    def forget(self, address: str) -> None:
        """Asks for another address the next time."""
        with self._lock:
            if self._address == address:
                self._address = None

    def has_token(self, address: str) -> bool:
        """Returns True if an address belongs to the Hub itself. Other hosts never see the token."""
        return urlsplit(address)[:2] == urlsplit(self.url)[:2]


TOO_MANY_REQUESTS = 429
MOST_WAIT_SECONDS = 300.0  # the Hub's windows of rates have 5 minutes
EXPIRED = (401, 403, 404, 410)
"""The answers of servers to a signed address that has expired."""


RANGE_RETRIES = 2
"""The number of repeated requests for a part of a file if the whole file is sent: some caches send it once."""


class _RangeIgnored(Exception):
    """A server, or a proxy before it, sends all of a file where a part was asked for."""


def chunks_of(
    source: "str | Link", position: int, end: int, stopped: threading.Event, *, skips: bool = False
) -> Iterator[bytes]:
    """Yields the bytes of a file from `position` to `end`. If the connection breaks, it is resumed there.

    Args:
        source: the file's address at the Hub, which redirects each request, or its link.
        position, end: of the bytes.
        stopped: set to end the wait before a retry.
        skips: whether bytes before `position` may come too, to be dropped. Else each part of a file would bring all
            that is before it.

    Raises:
        Stopped: `stopped` was set.
        HubError: the server ignores ranges.
        Exception: the client's, if the Hub refuses or cannot be reached after RETRIES attempts.
    """
    from huggingface_hub import constants, hf_raise_for_status
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    from tpuconv.private import http_stream_backoff

    failures = ignored = 0
    link = source if isinstance(source, Link) else None
    while position < end:
        address, is_old = (source, False) if isinstance(source, str) else ("", False)
        try:
            if link is not None:
                address, is_old = link.address()
            own = build_hf_headers() if link is None or link.has_token(address) else build_hf_headers(token=False)
            headers = own | {"Accept-Encoding": "identity", "Range": f"bytes={position}-{end - 1}"}
            with http_stream_backoff(
                "GET",
                address,
                headers=headers,
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                retry_on_exceptions=(),
                retry_on_status_codes=(408, 429),  # those say when to come back, and the client heeds it
            ) as response:
                hf_raise_for_status(response)
                skip = position if response.status_code == 200 else 0  # the range was ignored, and all of it is sent
                if skip and not skips:
                    raise _RangeIgnored
                for received in response.iter_bytes():
                    wanted, skip = received[skip:], max(skip - len(received), 0)
                    if chunk := wanted[: end - position]:
                        position += len(chunk)
                        failures = 0
                        yield chunk
                    if position == end:
                        return
            raise TimeoutError(f"{link.url if link else address} ended {end - position} bytes early")
        except _RangeIgnored:
            ignored += 1
            if ignored > RANGE_RETRIES:
                raise _no_ranges(address) from None
            if stopped.wait(BACKOFF_SECONDS * ignored):
                raise Stopped from None
        except Exception as error:
            status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
            if link is not None:
                link.forget(address)
                if is_old and status in EXPIRED:
                    continue
            is_limited = status == TOO_MANY_REQUESTS and not address  # of the question for the address
            if not (is_limited or is_unreachable(error)) or is_offline(error):
                raise
            failures += 1
            if failures > RETRIES:
                raise
            if stopped.wait(max(BACKOFF_SECONDS * 2 ** (failures - 1), retry_after(error))):
                raise Stopped from None


def _no_ranges(address: str) -> HubError:
    host = urlsplit(address).netloc
    return HubError(
        f"{host} sends whole files where parts of them are asked for: a source cannot be streamed from there",
        hint="give `keep_source=True`, which downloads each file once; or reach the Hub without the proxy that does "
        "this",
    )


def retry_after(error: BaseException) -> float:
    """Returns the seconds that a server asks to wait before the next request, by a number or a date; 0 if it asks for
    none."""
    from huggingface_hub.errors import HfHubHTTPError

    headers = error.response.headers if isinstance(error, HfHubHTTPError) else {}
    said = headers.get("Retry-After", "").strip()
    if said.isdecimal():
        return min(float(said), MOST_WAIT_SECONDS)
    with suppress(ValueError, TypeError):
        until, now = parsedate_to_datetime(said), datetime.now(UTC)
        with suppress(ValueError, TypeError):  # the server's clock, if it says its time
            now = parsedate_to_datetime(headers.get("Date", ""))
        return min(max(0.0, (until - now).total_seconds()), MOST_WAIT_SECONDS)
    return 0.0


def lock_partial(fd: int, path: Path) -> bool:
    """Locks an open file of the Hub's cache, and returns whether it is locked. On a file system without locks everybody
    gets it: two writers then write the same bytes to the same places."""
    from tpuconv.storage import locks  # with it numpy comes

    try:
        return locks.lock(fd, path)
    except locks.NoLocks:
        return True


END_SECONDS = 1.0
"""The time that work which ends early waits for its threads. A thread that waits for a silent server is left behind,
and ends with the process."""


def end_threads(threads: Sequence[threading.Thread]) -> None:
    """Waits until threads that were told to stop have ended, but not for those in a silent connection."""
    deadline = time.monotonic() + END_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def in_threads(
    work: Callable[[Work], None], items: Iterable[Work], count: int, stopped: threading.Event
) -> Generator[Work, None, None]:
    """Calls `work` for each item, in `count` threads, and yields the items as they are done. After the first error, or
    if the caller ends, `stopped` is set and no other item is begun."""
    todo, done = deque(items), SimpleQueue[tuple[Work, BaseException | None]]()

    def run() -> None:
        while not stopped.is_set():
            try:
                item = todo.popleft()
            except IndexError:
                return
            error: BaseException | None = None
            try:
                work(item)
            except BaseException as e:
                error = e
            done.put((item, error))

    left = len(todo)
    # Not of a pool, whose threads the interpreter waits for when it ends.
    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(count, left))]
    for thread in threads:
        thread.start()
    try:
        for _ in range(left):
            item, error = done.get()
            if error is not None:
                raise error
            yield item
    except BaseException:
        stopped.set()
        end_threads(threads)
        raise


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
        """Returns a class that the client takes for a progress bar. It draws nothing and reports to this meter."""
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
