"""The process of a command: standard streams, signals, the exit code and the message of an error."""

import errno
import gc
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.machinery import ExtensionFileLoader
from types import FrameType
from typing import IO, Any, NoReturn, TextIO, cast

import click

from tpuconv import libtpu
from tpuconv.commands.argument_errors import usage_error
from tpuconv.commands.console import print_json, say, say_error
from tpuconv.commands.flags import with_flags
from tpuconv.commands.params import shortened
from tpuconv.errors import ResourceError, TpuconvError, UsageError, no_descriptors
from tpuconv.extras import EXTRAS, install_command
from tpuconv.memory import address_space_limit
from tpuconv.text import format_size, plain

EXIT_CODES: Mapping[int, int] = {signal.SIGINT: 130, signal.SIGTERM: 143}
KEPT = "What is done is kept: the same command continues from there."
"""The note of an interruption of work that a rerun continues."""
STUCK_SECONDS = 3
"""The longest delay of the handler after a signal."""
SHOWN_CURSOR = "\x1b[?25h"
"""The sequence that makes a terminal show the cursor, which a bar hides."""
GC_THRESHOLD = 50_000
"""Objects between two collections of garbage. Imports, tracing and plans make many objects that stay. With Python's
default of 700 the collector takes a third of the time of a plan with 145,000 tensors. What holds much memory in cycles
of references, as modules of nnx do, is collected where it is let go."""


def run(command: Callable[[], Any]) -> None:
    """Runs a click command (called without arguments) as this process, and exits."""
    for descriptor in range(3):  # if one is closed, the first file to be opened would be taken for it
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a release may have hundreds of shards, and all stay open
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    streams, hook = (sys.stdout, sys.stderr), sys.unraisablehook
    sys.stdout, sys.stderr = cast(TextIO, Stream(sys.stdout, "stdout")), cast(TextIO, Stream(sys.stderr, None))
    gc.set_threshold(GC_THRESHOLD)
    libtpu.hide_without_tpu()
    _signals.clear()
    sys.unraisablehook = _dropped
    for number in EXIT_CODES:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as for a job in the background
            signal.signal(number, _interrupt)
    try:
        with _stuck_work_ended():
            _run(command)
    except _Interrupted:  # while an error was shown
        os._exit(EXIT_CODES[_signals[0]])
    finally:
        sys.stdout, sys.stderr = streams
        sys.unraisablehook = hook


def _run(command: Callable[[], Any]) -> None:
    as_json, verbose = "--json" in sys.argv, any(a in ("-v", "--verbose") for a in sys.argv)
    try:
        code = command()
        sys.stdout.flush()
        sys.stderr.flush()
        # All is closed and on the disk. The interpreter would now take apart jax and numba, object by object: 0.4 s.
        os._exit(code if isinstance(code, int) else 0)
    except (Exception, KeyboardInterrupt) as e:
        # Click makes an Abort of a KeyboardInterrupt, and of an EOFError.
        cause = e.__cause__ if isinstance(e, click.Abort) and e.__cause__ else e
        if is_interruption(cause):  # work that a signal interrupts may fail in its own way
            kept = [KEPT] if KEPT in getattr(cause, "__notes__", ()) else []  # jax adds notes of its own
            say("\n" + " ".join(["Interrupted.", *kept]), err=True)
            with suppress(ResourceError):  # what was written until now, if it can be
                sys.stdout.flush()
                sys.stderr.flush()
            # XLA's threads may still compute: it crashes if the interpreter is taken apart meanwhile.
            os._exit(EXIT_CODES[_signals[0] if _signals else signal.SIGINT])
        if isinstance(e, click.exceptions.NoArgsIsHelpError):
            e.show(sys.stderr)
            sys.exit(2)
        error = _known(cause)
        if verbose and not isinstance(e, click.ClickException):
            say(plain("".join(traceback.format_exception(cause)), "\n"), err=True)
        fail(error, as_json)


class Stream:
    """stdout or stderr that takes any character, escaped if the encoding lacks it. Once nobody reads the output
    (`| head`, a closed stderr) it is dropped, and the work goes on; `unread` tells. If a stream with a `name` cannot be
    written for another reason, such as a full disk, that is a ResourceError."""

    def __init__(self, stream: IO[Any] | None, name: str | None):
        self.stream: IO[Any] = stream or open(os.devnull, "w")  # noqa: SIM115  (it was closed before we began)
        self.name, self.unread = name, False

    @property
    def buffer(self) -> "Stream":
        """The stream for bytes: click writes bytes if the encoding is ASCII."""
        return Stream(cast(TextIO, self.stream).buffer, self.name)

    def write(self, text: str | bytes) -> int:
        if not text:  # so click tries whether a stream takes text or bytes
            return 0 if isinstance(text, str) else self.stream.write(text)
        if isinstance(text, str):
            encoding = self.stream.encoding or "utf-8"  # type: ignore[attr-defined]
            text = text.encode(encoding, "backslashreplace").decode(encoding)
        with self._checked():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._checked():
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    @contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            self.unread = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())  # for what is still in the buffer, too
            if self.name and not isinstance(e, BrokenPipeError):
                raise ResourceError(f"{self.name} cannot be written: {e.strerror}") from e


@contextmanager
def all_processes(distributed: bool) -> Iterator[None]:
    """If `distributed`, work on the devices of all processes of a cluster. Only process 0 writes to stdout."""
    if not distributed:
        yield
        return
    from tpuconv.api.models import join_processes, leave_processes

    if join_processes().index:
        sys.stdout = cast(TextIO, Stream(None, None))
    yield
    sys.stdout.flush()
    leave_processes()  # the first process serves the others until all are done


_signals: list[int] = []
"""Signals that arrived."""


class _Interrupted(KeyboardInterrupt):
    """An interruption. It has its own class: after a plain KeyboardInterrupt within `exec` the interpreter would end
    with SIGINT, whatever the exit code."""


LOCKING = frozenset(f"{name}.{step}" for name in ("Condition", "_AcquireFutures") for step in ("__enter__", "__exit__"))
"""Functions of the standard library that take or release locks of threads, by their qualified names: an exception in
one of them leaves a lock taken for ever, and the thread that needs it next would never end."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    """The handler of SIGINT and SIGTERM: the work stops. In three places it cannot: while an extension module is
    imported (some make an ImportError of an exception then, others end the process), in `LOCKING`, and in what the
    interpreter calls by itself, such as `__del__`, as it drops an exception there. So a timer asks again a little
    later. If other code makes another exception of this one, that does not matter: `run` looks at the signals that
    arrived."""
    if number != signal.SIGALRM:
        _signals.append(number)
    while frame is not None:
        code = frame.f_code
        loads = code.co_name in ("create_module", "exec_module")
        loads = loads and isinstance(frame.f_locals.get("self"), ExtensionFileLoader)
        if loads or code.co_qualname in LOCKING:
            _interrupt_later()
            return
        frame = frame.f_back
    raise _Interrupted


def _interrupt_later() -> None:
    signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.01)


def _dropped(dropped: Any) -> None:
    """The hook of the interpreter for an exception that it drops."""
    if isinstance(dropped.exc_value, _Interrupted):
        _interrupt_later()
    else:
        sys.__unraisablehook__(dropped)


@contextmanager
def _stuck_work_ended() -> Iterator[None]:
    """A thread ends the process where `_interrupt` is not called: the interpreter calls it in the main thread between
    two instructions, and XLA may compile or compute there for minutes within one. To what is on the disk that is a
    kill, after which the same command continues too."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # the number of each signal is written to it
    with suppress(RuntimeError):  # a limit allows no thread; then one waits until XLA is done
        threading.Thread(target=_end_if_stuck, args=(reader,), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)


def _end_if_stuck(reader: int) -> None:
    while number := os.read(reader, 1):
        if (code := EXIT_CODES.get(number[0])) is None:
            continue
        time.sleep(STUCK_SECONDS)
        if not _signals:
            say((SHOWN_CURSOR if sys.stderr.isatty() else "") + "\nInterrupted.", err=True)
            os._exit(code)
    os.close(reader)


def is_interruption(error: BaseException) -> bool:
    """Returns True if an error comes from a signal that asks this process to stop."""
    return bool(_signals) or isinstance(error, KeyboardInterrupt)


def fail(error: TpuconvError, as_json: bool, known: Mapping[str, Any] | None = None) -> NoReturn:
    """Ends the process with the error. The JSON contains the error and the `known` facts."""
    from tpuconv.explanations import explanation_of  # nothing that a command needs to start

    kind, found = type(error).__name__, explanation_of(error)
    if as_json:
        facts = {"type": kind, "id": found.id if found else None, "message": error.message, "details": error.details}
        print_json({**(known or {}), "error": {**facts, "hint": error.hint, "exit_code": error.exit_code}})
    hint = error.hint and plain(with_flags(error.hint), "\n")  # it may end with a line to be copied
    details = [plain(with_flags(detail)) for detail in error.details]
    shown = TpuconvError(plain(with_flags(error.message)), details=details, hint=hint)
    say_error(f"{kind}[{found.id}]" if found else kind, str(shown))
    sys.exit(error.exit_code)


def _known(error: BaseException) -> TpuconvError:
    """Converts an error to a TpuconvError with an exit code. Any other error is a bug."""
    if without_descriptors := _no_descriptors(error):
        return without_descriptors
    if isinstance(error, TpuconvError):
        return error
    if isinstance(error, click.ClickException):
        return usage_error(error)
    first, *others = str(error).splitlines() or [""]
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UsageError(f"'{shortened(error.filename)}' cannot be a path: {error.strerror}")
    exhausted = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") and "RESOURCE_EXHAUSTED" in first
    if isinstance(error, MemoryError) or exhausted or first == "can't start new thread":
        return ResourceError(
            f"there is too little memory: {first or 'an allocation failed'}",
            hint="give --max-memory where the command has it, close other programs, or raise the limit (ulimit -v)",
        )
    if isinstance(error, ModuleNotFoundError) and (name := str(error.name).partition(".")[0]) in EXTRAS:
        return UsageError(
            f"this needs the package {name}, which is not installed",
            hint=f"install it: {install_command(EXTRAS[name])}",
        )
    not_loaded = isinstance(error, ImportError) or (isinstance(error, OSError) and error.errno is None)
    if not_loaded and (limit := address_space_limit()):
        # the loader of shared libraries does not say that memory was refused
        return ResourceError(
            f"a library was not loaded; the address space of this process is limited to {format_size(limit)}",
            details=[first, *others],
            hint="raise the limit: `ulimit -v unlimited`",
        )
    hint = "this is a bug of tpuconv: please report it with the output of the same command with -v"
    return TpuconvError(f"unexpected {type(error).__name__}: {first}", details=others, hint=hint)


def _no_descriptors(error: BaseException) -> ResourceError | None:
    """Returns the error to show if the process could not open more files, even if another error wraps it."""
    cause: BaseException | None = error
    while cause is not None:
        if found := no_descriptors(getattr(cause, "filename", None) or "a file or connection", cause):
            return error if isinstance(error, ResourceError) else found
        cause = cause.__cause__ or cause.__context__
    return None
