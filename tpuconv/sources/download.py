"""Downloads files of the Hub by its client, and counts the bytes."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from tpuconv.progress import TICK_SECONDS
from tpuconv.sources.hub_errors import Stopped, cause_of, is_offline, is_unreachable

RETRIES = 5  # failures in a row
BACKOFF_SECONDS = 1.0  # before the first retry, then twice that and so on

Entry = TypeVar("Entry")
DownloadProgress = Callable[[int, int], None]


END_SECONDS = 1.0
"""The time that work which ends early waits for its threads. A thread that waits for a silent server is left behind,
and ends with the process."""


def end_threads(threads: Sequence[threading.Thread]) -> None:
    """Waits until threads that were told to stop have ended, but not for those in a silent connection."""
    deadline = time.monotonic() + END_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def in_threads(
    work: Callable[[Entry], None], items: Iterable[Entry], count: int, stopped: threading.Event
) -> Generator[Entry, None, None]:
    """Calls `work` for each item, in `count` threads, and yields the items as they are done. After the first error, or
    if the caller ends, `stopped` is set and no other item is begun."""
    todo, done = deque(items), SimpleQueue[tuple[Entry, BaseException | None]]()

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

    @property
    def totals(self) -> tuple[int, int]:
        """The bytes that are there, and the bytes of all files."""
        with self._lock:
            return sum(self._done.values()), sum(self._sizes.values())

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


def fetch_file(repo: str, name: str, commit: str, meter: Meter, folder: Path | None = None) -> Path:
    """Returns the path of a file of the Hub, fetched by the client to a folder, or to its cache if there is none. The
    client resumes a connection that breaks, and uses Xet where the Hub has it; here a server that is down is asked
    again.

    Raises:
        Stopped: the meter was stopped.
        Exception: the client's, if the Hub refuses or cannot be reached.
    """
    from huggingface_hub import hf_hub_download

    def fetch() -> Path:
        return Path(hf_hub_download(repo, name, revision=commit, local_dir=folder, tqdm_class=meter.bar(name)))

    return _patiently(fetch, meter.stopped)


def first_bytes(url: str, nbytes: int, stopped: threading.Event) -> bytes:
    """Returns the first bytes of a file of the Hub, also from a server that sends all of it.

    Raises:
        Stopped: `stopped` was set.
        Exception: the client's, if the Hub refuses or cannot be reached.
    """
    from huggingface_hub import constants, hf_raise_for_status
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    from tpuconv.private import http_stream_backoff

    headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes=0-{nbytes - 1}"}
    options: Any = {"timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT, "retry_on_exceptions": ()}

    def fetch() -> bytes:
        found = bytearray()
        with http_stream_backoff("GET", url, headers=headers, retry_on_status_codes=(408, 429), **options) as response:
            hf_raise_for_status(response)
            for chunk in response.iter_bytes():
                found += chunk
                if stopped.is_set():
                    raise Stopped
                if len(found) >= nbytes:
                    return bytes(found[:nbytes])
        raise TimeoutError(f"{url} ended {nbytes - len(found)} bytes early")

    return _patiently(fetch, stopped)


Fetched = TypeVar("Fetched")


def _patiently(fetch: Callable[[], Fetched], stopped: threading.Event) -> Fetched:
    """Returns what a function fetches, which is called again while the server does not answer or is down."""
    for failures in count():
        try:
            return fetch()
        except Stopped:
            raise
        except Exception as error:
            cause = cause_of(error)
            if failures == RETRIES or is_offline(cause) or not is_unreachable(cause):
                raise
            if stopped.wait(BACKOFF_SECONDS * 2**failures):
                raise Stopped from None
    raise AssertionError
