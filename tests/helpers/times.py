"""Bounds on time that hold on any machine: processor time, compared with that of something else in the same test."""

import resource
import subprocess
import time
from collections.abc import Callable

HANG = 120.0
"""Seconds. What takes some milliseconds, or a second at most, takes this long only if it waits for ever."""


class ProcessorTime:
    """The processor time that a block takes, in seconds: of this process, or with `children` of those that it started
    and waited for."""

    def __init__(self, *, children: bool = False) -> None:
        self.children = children

    def now(self) -> float:
        if not self.children:
            return time.process_time()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)  # finer than the ticks of os.times
        return used.ru_utime + used.ru_stime

    def __enter__(self) -> "ProcessorTime":
        self.seconds = -self.now()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += self.now()


def wait_for(
    condition: Callable[[], bool], process: "subprocess.Popen[str] | subprocess.Popen[bytes] | None" = None
) -> None:
    """Waits until the condition holds; that it does not hold for long, or that the process which is to bring it about
    has ended without it, is a failure."""
    end = time.monotonic() + HANG
    while not condition():
        if process and process.poll() is not None:
            assert condition(), f"the process ended, with {process.returncode}, before what was waited for"
            return
        assert time.monotonic() < end, f"waited for {HANG:.0f} s"
        time.sleep(0.002)
