"""The command as a child process, and the faults that are injected into it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import forked
from helpers.limits import limited

COMMAND = [sys.executable, "-m", "tpuconv"]
LISTED = {0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 130, 143}
"""The exit codes that are documented, but for that of a bug."""


def tpuconv(
    *args: object,
    code: int | None = 0,
    patch: str = "",
    fresh: bool = False,
    command: Sequence[str] | None = None,
    limit: tuple[int, int] | None = None,
    cwd: Path | None = None,
    **options: Any,
) -> "subprocess.CompletedProcess[str]":
    """Runs the command in a process of its own, after the code `patch`, which replaces what a test is to control. With
    `fresh`, another command in front, a limit of the system (resource, value) or options of `subprocess.run` besides
    the folder it is a new interpreter. The exit code must be `code`, or any listed one where None, and no traceback is
    shown and nothing is called a bug."""
    words = list(map(str, args))
    if fresh or command or limit or options:
        own = [*COMMAND[:1], "-c", f"{patch}\nfrom tpuconv.cli import main\nmain()"] if patch else COMMAND
        done = subprocess.run(
            [*(limited(*limit) if limit else []), *(command or own), *words],
            capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, cwd=cwd, **options,
        )  # fmt: skip
    else:
        done = forked(words, cwd, patch)
    assert "Traceback" not in done.stderr, done.stderr
    assert "bug of tpuconv" not in done.stderr, done.stderr
    assert done.returncode in ({code} if code is not None else LISTED), (done.returncode, done.stdout + done.stderr)
    return done


@contextmanager
def started(*args: object, patch: str = "", **options: Any) -> "Iterator[subprocess.Popen[str]]":
    """The command, which goes on while the test does, in a new interpreter after the code `patch`; if it still runs at
    the end it is killed. Options as of `subprocess.Popen`."""
    begin = ["-c", f"{patch}\nfrom tpuconv.cli import main\nmain()"]
    with subprocess.Popen([sys.executable, *begin, *map(str, args)], text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


UNHURRIED = """
import time
from tpuconv.storage.journal import Journal
record = Journal.record
def unhurried(self, part, facts, files=()):
    record(self, part, facts, files)
    time.sleep(0.2)
Journal.record = unhurried
"""
"""Code with which a command waits after each entry of its journal, so that a test meets it at work on any machine."""


def halted_after(part: str, until: Path | None = None) -> str:
    """Code with which a command does nothing more once its journal has the entry of a part, so that it is met there and
    nowhere else; until a file exists."""
    return f"""
import os, time
from tpuconv.storage.journal import Journal
record = Journal.record
def halted(self, part, facts, files=()):
    record(self, part, facts, files)
    while part == {part!r} and not os.path.exists({str(until or "")!r}):
        time.sleep(0.02)
Journal.record = halted
"""


MEASURED = """
import atexit, sys, time
def tell():
    peak = open("/proc/self/status").read().split("VmHWM:")[1].split()[0]
    print("used", time.process_time(), int(peak) * 1024, file=sys.stderr)
atexit.register(tell)
"""


def used(done: "subprocess.CompletedProcess[str]") -> tuple[float, int]:
    """Seconds of processor time and bytes of memory that a command took which failed, after the code MEASURED."""
    _, seconds, memory = done.stderr.splitlines()[-1].split()
    return float(seconds), int(memory)


@cache
def idle_seconds() -> float:
    """Processor time of a command that finds nothing to convert: the interpreter's and its imports'. On a quiet machine
    a third of a second."""
    return min(used(tpuconv("convert", os.devnull, patch=MEASURED, fresh=True, code=None))[0] for _ in range(2))


def strace(what: str) -> list[str]:
    """The command under strace, which injects a fault: `fsync:error=EIO:when=3`."""
    return ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={what.partition(':')[0]}", "-e", f"inject={what}",
            *COMMAND]  # fmt: skip


def _why_no_strace() -> str | None:
    if shutil.which("strace") is None:
        return "strace is missing"
    done = subprocess.run(["strace", "-f", "-e", "inject=fsync:error=EIO", "true"], capture_output=True, check=False)
    return None if done.returncode == 0 else "strace cannot trace here"


needs_strace = pytest.mark.skipif(bool(_why_no_strace()), reason=_why_no_strace() or "")


@contextmanager
def small_disk(folder: Path, options: str = "size=20m") -> Iterator[Path]:
    """A disk in memory, mounted on a new folder; the test is skipped where one may not mount."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True, check=False
    ) if shutil.which("mount") and os.geteuid() == 0 else None  # fmt: skip
    if mounted is None or mounted.returncode:
        pytest.skip("a disk can only be mounted by root" if mounted is None else mounted.stderr.strip())
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)
