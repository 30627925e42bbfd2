"""Progress on stderr: a bar or a spinner on a terminal, elsewhere a line every half a minute."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import click

from tpuconv.commands.console import console, say, styled
from tpuconv.commands.flags import with_flags
from tpuconv.commands.process import KEPT, is_interruption
from tpuconv.memory import peak_memory
from tpuconv.progress import Listener, Progress
from tpuconv.text import format_size, plain

QUIET_SECONDS = 30
"""The time between two lines if stderr is not a terminal."""
QUIET = "tpuconv.quiet"
"""The key of a command's context that says that it shows no progress."""
FULL_WIDTH = 80
"""Columns of a terminal below which the memory is left out: the bar would take two lines."""


def be_quiet(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Notes that no progress is shown, if -q stands before the command or after it."""
    ctx.meta[QUIET] = value or ctx.meta.get(QUIET, False)


@contextmanager
def shown(as_json: bool) -> Iterator[Listener]:
    """Yields a listener that shows progress while the block runs; with `as_json`, and for a command with -q, only
    messages."""
    context = click.get_current_context(silent=True)
    if as_json or (context is not None and context.meta.get(QUIET)):
        yield _messages
    elif sys.stderr.isatty():
        with ExitStack() as stack:
            yield _Terminal(stack)
    else:
        with _Lines() as listener:
            yield listener


@contextmanager
def resumable(as_json: bool) -> Iterator[Listener]:
    """`shown` for work that a rerun continues: a user who interrupts it once it began is told so."""
    began = False
    with shown(as_json) as show:

        def listen(progress: Progress) -> None:
            nonlocal began
            began = True
            show(progress)

        try:
            yield listen
        except BaseException as e:
            if began and is_interruption(e):
                e.add_note(KEPT)
            raise


def _messages(progress: Progress) -> None:
    if progress.message:
        say(plain(with_flags(progress.message)), err=True)


class _Terminal:
    """A bar with rate, time left and memory where there is a total; a spinner where there is none; nothing for an empty
    stage."""

    def __init__(self, stack: ExitStack):
        self._stack, self._stage, self._spins = stack, "", False
        self._bar: Any = None
        self._task = 0

    def __call__(self, progress: Progress) -> None:
        if progress.message:
            self._end()
            _messages(progress)
        elif progress.total:
            self._draw(progress)
        elif progress.stage != self._stage or not self._spins:
            self._end()
            self._stage, self._spins = progress.stage, True
            if progress.stage:
                self._stack.enter_context(console(err=True).status(styled(progress.stage)))

    def _draw(self, progress: Progress) -> None:
        if self._bar is None or progress.stage != self._stage:
            self._end()
            self._bar, self._stage = self._stack.enter_context(_bar()), progress.stage
            self._task = self._bar.add_task(plain(progress.stage), total=None)
        self._bar.update(self._task, completed=progress.done, total=progress.total)

    def _end(self) -> None:
        self._stack.close()
        self._bar, self._spins = None, False


def _bar() -> Any:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar
    from rich.text import Text

    class Memory(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(f"memory {format_size(peak_memory())}", style="dim")

    on = console(err=True)
    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        *([Memory()] if on.width >= FULL_WIDTH else []),
    ]
    return Bar(*columns, console=on)


class _Lines:
    """A line of the last progress every QUIET_SECONDS, for logs."""

    def __init__(self) -> None:
        self._last, self._began, self._done = Progress(""), time.monotonic(), threading.Event()

    def __enter__(self) -> Listener:
        threading.Thread(target=self._write, daemon=True).start()
        return self._listen

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def _listen(self, progress: Progress) -> None:
        _messages(progress)
        self._last = progress

    def _write(self) -> None:
        while not self._done.wait(QUIET_SECONDS):
            last, seconds = self._last, time.monotonic() - self._began
            if last.stage:
                share = f" {100 * last.done / last.total:.0f}%" if last.total else ""
                say(f"{plain(last.stage)}{share}, {seconds:.0f} s", err=True)
