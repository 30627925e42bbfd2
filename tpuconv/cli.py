"""The command line: the only place that prints, draws progress and exits. It imports what a command needs when it
runs."""

import errno
import gc
import math
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

import click

from tpuconv import text as texts
from tpuconv.errors import GateError, ResourceError, TpuconvError, UsageError
from tpuconv.sizes import format_size
from tpuconv.text import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tpuconv.convert.plan.types import Plan
    from tpuconv.quantize.config import QuantConfig
    from tpuconv.quantize.report import Report

PLAIN_WIDTH = 180  # of tables that go to a file or a pipe
MOST_TOKENS, MOST_SEQUENCES = 1 << 24, 1 << 20  # more than any model has and any machine holds
ADDRESS_SPACE, ADDRESS_SPACE_PER_CPU = 450_000_000, 50_000_000  # to import numpy and numba
JAX_ADDRESS_SPACE, JAX_ADDRESS_SPACE_PER_CPU = 2_500_000_000, 250_000_000
EXIT_CODES: Mapping[int, int] = {signal.SIGINT: 130, signal.SIGTERM: 143}


# -- what all commands share ------------------------------------------------------------------------------------------


class Commands(click.Group):
    """Names the nearest command for one that does not exist."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            near = get_close_matches(name, self.list_commands(ctx), 1)
            ctx.fail(f"no such command '{name}'." + (f" Did you mean '{near[0]}'?" if near else ""))
        return super().resolve_command(ctx, args)


class Example(click.Command):
    """A command whose help ends with examples, one a line. It takes -v, which `main` looks for, as the group does."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(["-v", "--verbose"], is_flag=True, expose_value=False, help="Show the traceback of an error.")
        )
        self.examples = examples

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write_text(example)


class Size(click.ParamType[int]):
    """Bytes: 8GB, 500MB, 16GiB."""

    name = "size"
    units: Mapping[str, int] = {
        "": 1,
        "k": 10**3,
        "m": 10**6,
        "g": 10**9,
        "t": 10**12,
        "ki": 2**10,
        "mi": 2**20,
        "gi": 2**30,
        "ti": 2**40,
    }

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip().lower().removesuffix("b")
        number = text.rstrip("kmgti")
        try:
            size = int(float(number) * self.units[text[len(number) :]])
        except (KeyError, ValueError, OverflowError):
            size = 0
        if size < 1:
            self.fail(f"'{value}' is no size; write 8GB or 500MB", param, ctx)
        return size


class Layers(click.ParamType[range]):
    """A range of layers, first and last: 0-3."""

    name = "A-B"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> range:
        first, dash, last = str(value).partition("-")
        low, high = _whole_number(first), _whole_number(last if dash else first)
        if low is None or high is None or high < low:
            self.fail(f"'{_shortened(value)}' is no range of layers; write 0-3", param, ctx)
        return range(low, high + 1)


class Numbers(click.ParamType[tuple[int, ...]]):
    """Positive numbers: 1,8,64."""

    name = "N,..."

    def __init__(self, most: int):
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        numbers = [number for part in str(value).split(",") if (number := _whole_number(part.strip()))]
        if len(numbers) != str(value).count(",") + 1:
            self.fail(f"'{_shortened(value)}' is no list of positive numbers; write 1,8", param, ctx)
        if max(numbers) > self.most:
            self.fail(f"{max(numbers)} is more than {self.most}", param, ctx)
        return tuple(numbers)


class Number(click.FloatRange):
    """A finite number in a range. NaN is neither below nor above a bound, so that click's own range has it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number", param, ctx)
        return float(number)


class File(click.Path):
    """The path of a file or a folder, which need not be there unless `exists` is given."""

    def __init__(self, **kwargs: Any):
        super().__init__(path_type=Path, **kwargs)

    def convert(self, value: "str | os.PathLike[str]", param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if problem := _path_problem(value):
            self.fail(problem, param, ctx)
        return super().convert(value, param, ctx)


class Name(click.ParamType[str]):
    """A path, or the name of something else: a Hub id, a config of this package."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if problem := _path_problem(value):
            self.fail(problem, param, ctx)
        return str(value)


class Prompt(click.ParamType[str]):
    """Text for a model."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:  # bytes that the locale's encoding does not have stand in an argument as surrogates
            return os.fsencode(value).decode() if texts.has_surrogates(value) else str(value)
        except UnicodeError:
            self.fail(f"'{_shortened(value)}' is no text in UTF-8", param, ctx)


def _whole_number(text: str) -> int | None:
    """None where it is none, or has so many digits that it is a mistake."""
    return int(text) if text.isdecimal() and len(text) < 20 else None


def _shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:60]}... ({len(text):,} characters)"


def _path_problem(path: "str | os.PathLike[str]") -> str | None:
    """Why the system can have no file of this name; None where it can."""
    if not os.fspath(path):
        return "the path is empty"
    try:
        os.lstat(path)
    except ValueError as e:  # a NUL, or a character that the encoding of names does not have
        return f"'{_shortened(path)}' cannot be a path: {e}"
    except OSError as e:
        if e.errno == errno.ENAMETOOLONG:
            return f"'{_shortened(path)}' cannot be a path: {e.strerror}"
    return None


JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")

OVERWRITE = click.option(
    "--overwrite", is_flag=True, help="Replace OUT, made by tpuconv, which stays complete until the new one is."
)
CHECK = click.option(
    "--check",
    is_flag=True,
    help="Where OUT is there already, read all of it; else only its files' sizes are looked at.",
)

CACHE_DTYPE = click.option(
    "--cache-dtype",
    type=click.Choice(["auto", "int8"]),
    default="auto",
    show_default=True,
    help="Of keys and values: int8 with a scale for each head and token takes half the memory of bfloat16.",
)


def main() -> None:
    """The entry point of the command `tpuconv`."""
    for descriptor in range(3):  # else the first files to be opened would be taken for stdout and stderr
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = cast(TextIO, _Stream(sys.stdout, "stdout")), cast(TextIO, _Stream(sys.stderr, None))
    _signals.clear()
    for number in EXIT_CODES:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as for a job in the background
            signal.signal(number, _interrupt)
    try:
        _main()
    finally:
        sys.stdout, sys.stderr = streams


def _main() -> None:
    as_json, verbose = "--json" in sys.argv, any(a in ("-v", "--verbose") for a in sys.argv)
    try:
        code = tpuconv.main(standalone_mode=False)
        sys.stdout.flush()
        sys.stderr.flush()
        # All is closed and on the disk. The interpreter would now take apart jax and numba, object by object: 0.4 s.
        os._exit(code if isinstance(code, int) else 0)
    except (Exception, KeyboardInterrupt) as e:
        # Click makes an Abort of a KeyboardInterrupt, and of an EOFError.
        cause = e.__cause__ if isinstance(e, click.Abort) and e.__cause__ else e
        if _signals or isinstance(cause, KeyboardInterrupt):  # what a signal interrupts may fail in its own way
            _say("\n" + " ".join(["Interrupted.", *getattr(cause, "__notes__", ())]), err=True)
            sys.exit(EXIT_CODES[_signals[0] if _signals else signal.SIGINT])
        if isinstance(e, click.exceptions.NoArgsIsHelpError):
            e.show(sys.stderr)
            sys.exit(2)
        error = _known(cause)
        if verbose and not isinstance(e, click.ClickException):
            _say(plain("".join(traceback.format_exception(cause)), "\n"), err=True)
        _fail(error, as_json)


class _Stream:
    """stdout or stderr, which take any character, by its escape where the encoding lacks it. Once nobody reads what is
    written (`| head`, a closed stderr) it is dropped, and the work goes on; `unread` tells. What has a `name` must not
    be lost for another reason, such as a full disk: that is a ResourceError."""

    def __init__(self, stream: IO[Any] | None, name: str | None):
        self.stream: IO[Any] = stream or open(os.devnull, "w")  # noqa: SIM115  (it was closed before we began)
        self.name, self.unread = name, False

    @property
    def buffer(self) -> "_Stream":
        """What takes bytes, as click writes them where the encoding is ASCII."""
        return _Stream(cast(TextIO, self.stream).buffer, self.name)

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


_signals: list[int] = []
"""Those that came."""


class _Interrupted(KeyboardInterrupt):
    """Of a class of its own: by a plain one that was raised within `exec` the interpreter would end with SIGINT,
    whatever the exit code."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    """For SIGINT and SIGTERM: the work stops. While a module in C is imported it cannot: some make an ImportError of an
    exception then, others end the process. So a timer asks again a little later. What else makes another exception of
    this one does not matter: `main` looks at what came."""
    if number != signal.SIGALRM:
        _signals.append(number)
    while frame is not None:
        loads = frame.f_code.co_name in ("create_module", "exec_module")
        if loads and isinstance(frame.f_locals.get("self"), ExtensionFileLoader):
            signal.signal(signal.SIGALRM, _interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            return
        frame = frame.f_back
    raise _Interrupted


def _known(error: BaseException) -> TpuconvError:
    """The error as one of ours, with an exit code. What it cannot be is a bug."""
    if isinstance(error, TpuconvError):
        return error
    if isinstance(error, click.ClickException):
        return UsageError(error.format_message(), hint=_help_hint(error))
    first, *others = str(error).splitlines() or [""]
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UsageError(f"'{_shortened(error.filename)}' cannot be a path: {error.strerror}")
    exhausted = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") and "RESOURCE_EXHAUSTED" in first
    if isinstance(error, MemoryError) or exhausted or first == "can't start new thread":
        return ResourceError(
            f"there is too little memory: {first or 'an allocation failed'}",
            hint="give --max-memory where the command has it, close other programs, or raise the limit (ulimit -v)",
        )
    hint = "this is a bug of tpuconv: please report it with the output of the same command with -v"
    return TpuconvError(f"{type(error).__name__}: {first}", details=others, hint=hint)


@contextmanager
def _kept() -> Iterator[None]:
    """Around work that a rerun goes on with: who interrupts it is told so."""
    try:
        yield
    except BaseException as e:
        if _signals or isinstance(e, KeyboardInterrupt):
            e.add_note("What is done is kept: the same command goes on from there.")
        raise


def _help_hint(error: click.ClickException) -> str:
    ctx = getattr(error, "ctx", None)
    return f"see `{ctx.command_path} --help`" if ctx else "see `tpuconv --help`"


def _fail(error: TpuconvError, as_json: bool, known: Mapping[str, Any] | None = None) -> None:
    """Ends with the error; in JSON it stands beside what is `known` all the same."""
    if as_json:
        facts = {"type": type(error).__name__, "message": error.message, "details": error.details, "hint": error.hint}
        _print_json({**(known or {}), "error": {**facts, "exit_code": error.exit_code}})
    name = click.style(type(error).__name__, fg="red", bold=True)
    hint = error.hint and plain(error.hint, "\n")  # it may end with a line to be copied
    shown = TpuconvError(plain(error.message), details=[*map(plain, error.details)], hint=hint)
    _say(f"{name}: {shown}", err=True)
    sys.exit(error.exit_code)


def _print_json(value: Mapping[str, Any]) -> None:
    unicode = (sys.stdout.encoding or "").lower().replace("_", "-").startswith("utf")
    _say(texts.json(value, ascii_only=not unicode))


def _say(text: str, nl: bool = True, err: bool = False) -> None:
    """Writes text as it is: what of it is foreign must be `plain`."""
    click.echo(text, file=sys.stderr if err else sys.stdout, nl=nl)


def _console(err: bool = False) -> "Console":
    """The one through which all is drawn. A string has no markup in it, and is made `plain` wherever it stands: in a
    line, a table, a title. Styles are those of `_styled`, lines of a cell those of `_lines`."""
    from rich.console import Console
    from rich.text import Text

    class PlainConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            own = {name: options[name] for name in ("style", "justify", "overflow") if name in options}
            return Text(plain(text), **own)

    if err:
        return PlainConsole(stderr=True)
    return PlainConsole(width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def _styled(*parts: str | tuple[str, str]) -> "Text":
    """Foreign text with styles: a string, or a pair of a string and its style."""
    from rich.text import Text

    pairs = ((part, "") if isinstance(part, str) else part for part in parts)
    return Text.assemble(*((plain(text), style) for text, style in pairs))


def _lines(items: Iterable[str]) -> "Text":
    """Foreign strings, each in a line of its own."""
    from rich.text import Text

    return Text("\n".join(map(plain, items)))


def _table(title: str, *columns: str, right: Iterable[str] = ()) -> "Table":
    from rich import box
    from rich.table import Table

    # Wide enough for its title, which would be broken to the table's width.
    title = plain(title)
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, min_width=min(len(title) + 2, 100)
    )
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _peak_memory() -> int:
    """Bytes of this process in memory at most so far. Linux's getrusage would count those of the parent before exec."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def _plain_path(folder: Path) -> Iterator[Path]:
    """The folder by a path that TensorStore and tokenizers take: in UTF-8 and without a backslash. Where its own is
    none, it is that of its descriptor."""
    path = str(folder.absolute())
    if not texts.has_surrogates(path) and "\\" not in path:
        yield folder
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _check_address_space(more: int = 0) -> None:
    """Raises ResourceError where a limit of this process (`ulimit -v`) is too small for jax and `more` bytes: its
    libraries end the process when a thread or an allocation is refused. The most that a command took on two
    processors is 2.6 GB, most of it addresses without memory: libraries, stacks, pools of threads."""
    _check_limit(JAX_ADDRESS_SPACE + JAX_ADDRESS_SPACE_PER_CPU * len(os.sched_getaffinity(0)) + more)


def _check_limit(need: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < need:
        raise ResourceError(
            f"this process may have {format_size(limit)} of addresses, and the command needs {format_size(need)}",
            hint=f"raise the limit: `ulimit -v {-(-need // 1024)}`, or `ulimit -v unlimited`",
        )


@contextmanager
def _progress(what: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar with rate, time left and memory, on the terminal; nothing where there is none. Call it with done and
    total."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.text import Text

    class Memory(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(f"memory {format_size(_peak_memory())}", style="dim")

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        Memory(),
    )
    with Progress(*columns, console=_console(err=True)) as bar:
        task = bar.add_task(plain(what), total=None, visible=False)  # a local source is not downloaded
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


def _awaited(items: Iterable[Any], what: str, quiet: bool) -> Iterator[Any]:
    """The items, with a sign of life on the terminal while each is awaited."""
    waiting, none = iter(items), object()
    while True:
        with _sign_of_life(what, quiet):
            item = next(waiting, none)
        if item is none:
            return
        yield item


@contextmanager
def _sign_of_life(what: str, quiet: bool) -> Iterator[None]:
    if quiet or not sys.stderr.isatty():
        yield
        return
    with _console(err=True).status(_styled(what)):
        yield


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="tpuconv")
@click.option("-v", "--verbose", is_flag=True, help="Show the traceback of an error.")
def tpuconv(verbose: bool) -> None:
    """Hugging Face checkpoints to sharded Orbax checkpoints for JAX: convert them, and prove that nothing was lost."""
    # With less the libraries fail to load, each in its own way: OpenBLAS sends this process a SIGINT.
    _check_limit(ADDRESS_SPACE + ADDRESS_SPACE_PER_CPU * len(os.sched_getaffinity(0)))


# -- convert ----------------------------------------------------------------------------------------------------------


@tpuconv.command(
    cls=Example,
    examples=(
        "tpuconv convert Qwen/Qwen3-8B",
        "tpuconv convert ./my-checkpoint /data/my-model --dtype bfloat16",
        "tpuconv convert deepseek-ai/DeepSeek-R1 --quantize int8_default",
        "tpuconv convert deepseek-ai/DeepSeek-R1 --encoding keep",
        "tpuconv convert meta-llama/Llama-3.3-70B-Instruct --dry-run",
    ),
)
@click.argument("src", type=Name())
@click.argument("out", required=False, type=File())
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float32"]),
    default="auto",
    show_default=True,
    help="Of the parameters; auto keeps the source's.",
)
@click.option(
    "--encoding",
    type=click.Choice(["dequantize", "keep"]),
    default="dequantize",
    show_default=True,
    help="What becomes of FP8, INT8, INT4 and FP4 values: bfloat16, or codes and scales as they are.",
)
@click.option(
    "--quantize", type=Name(), metavar="CONFIG", help="Quantize on the way, as `tpuconv quantize --config` does."
)
@click.option("--scan-layers", is_flag=True, help="Stack the layers in one array each, for jax.lax.scan.")
@click.option("--layers", type=Layers(), help="Convert only these layers, first and last: a trial.")
@click.option("--include-mtp", is_flag=True, help="Convert the layers that predict further tokens (DeepSeek), too.")
@click.option("--revision", help="Branch, tag or commit of a Hub repository.")
@click.option(
    "--allow-config",
    metavar="KEY",
    multiple=True,
    help="Convert as if this key of config.json, which is not supported, were not there; may be repeated.",
)
@click.option("--allow-nonfinite", is_flag=True, help="Convert NaN and infinite values, and scales of 0, as they are.")
@OVERWRITE
@CHECK
@click.option("--max-memory", type=Size(), help="Budget, such as 8GB.  [default: 60% of the machine's]")
@click.option("--jobs", type=click.IntRange(min=1), help="Threads.  [default: one more than processors]")
@click.option("--dry-run", is_flag=True, help="Stop after the plan and show it; weights are not even downloaded.")
@JSON
def convert(
    src: str,
    out: Path | None,
    dtype: str,
    encoding: str,
    quantize: str | None,
    scan_layers: bool,
    layers: range | None,
    include_mtp: bool,
    revision: str | None,
    allow_nonfinite: bool,
    allow_config: tuple[str, ...],
    overwrite: bool,
    check: bool,
    max_memory: int | None,
    jobs: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Convert SRC, a Hub id or a folder with safetensors, to an Orbax checkpoint in OUT (./<name>-orbax by default).

    OUT appears whole or not at all. Interrupted, the same command goes on where it was.
    """
    from tpuconv.convert.plan.types import Options
    from tpuconv.convert.sizing import Limits
    from tpuconv.models.registry import find_family
    from tpuconv.sources.damaged import DamagedDownload
    from tpuconv.sources.hub import resolve
    from tpuconv.sources.source import open_source

    _either_kept_or_quantized(encoding == "keep", quantize)
    rules = _rules(quantize)
    limits = Limits.of_this_machine(jobs, max_memory)
    options = Options(dtype, scan_layers, layers, include_mtp, encoding, allow_nonfinite, allow_config)

    def attempt() -> None:
        with _kept(), _progress("downloading", as_json) as show:
            resolved = resolve(src, revision=revision, weights=not dry_run, progress=show)
        with resolved:
            source = open_source(resolved.folder, repo=resolved.repo, commit=resolved.commit, sha256=resolved.sha256)
            family = find_family(source.config)
            plan = _plan(source, family, family.table, options, rules, runs=not dry_run)
            if dry_run:
                _show_plan(plan, limits, as_json)
                return
            to = out or Path(f"{plan.source.name}-{rules.name if rules else 'orbax'}")
            _run(plan, to, limits, overwrite, check, as_json, "converting")

    fetched_again: set[tuple[Path, ...]] = set()
    while True:
        try:
            return attempt()
        except DamagedDownload as e:
            if tuple(e.files) in fetched_again:
                raise
            e.remove()
            fetched_again.add(tuple(e.files))
            _say(plain(f"{e.message}: it is downloaded again."), err=True)


def _either_kept_or_quantized(keep: bool, quantize: str | None) -> None:
    if keep and quantize:
        raise UsageError(
            "--encoding keep and --quantize exclude each other: what is kept is not quantized again",
            hint="give one of them",
        )


def _rules(config: str | None) -> "QuantConfig | None":
    from tpuconv.quantize.config import find_config

    return find_config(config) if config else None


def _plan(source: Any, family: Any, table: Any, options: Any, rules: "QuantConfig | None", *, runs: bool) -> "Plan":
    from tpuconv.convert.plan.coverage import make_plan
    from tpuconv.convert.run import read_ahead

    report = family.check_config(source.config, options.allow_config, source.tensors)
    config, ignored = report.config, report.ignored
    plan = make_plan(source, family.name, table, config, options, ignored_config=ignored)
    if rules is None or plan.faults:
        return plan
    _check_address_space()
    with _uncollected():
        from tpuconv.quantize.apply import quantization

        if runs:  # not before the modules are read: they come in small pieces from the same disk
            read_ahead(plan)
        how = quantization(plan, family, config, rules)
    return make_plan(source, family.name, table, config, options, how, ignored)


@contextmanager
def _uncollected() -> Iterator[None]:
    """For imports and tracing: both make many objects that stay, through which the collector of garbage would look
    again and again. It does not look at them later either."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _run(plan: "Plan", out: Path, limits: Any, overwrite: bool, check: bool, as_json: bool, what: str) -> None:
    """Runs a plan with a bar, and says what came out."""
    from tpuconv.convert.run import run
    from tpuconv.sources.source import VERIFIED
    from tpuconv.storage.sealed import read_sealed

    began, resumed = time.monotonic(), 0
    with _kept(), _progress(what, as_json) as show:
        for at in run(plan, out, limits, overwrite=overwrite):
            show(at.done, at.total)
            resumed = at.resumed or resumed
    seconds = time.monotonic() - began
    was_there = resumed == plan.source_bytes
    if check and was_there:
        _check_all(out, as_json)
    verified = read_sealed(out).raw["source"].get("verified")
    facts = {
        "out": str(out),
        "family": plan.family,
        "source_verified": verified == VERIFIED,
        "arrays": len(plan.arrays),
        "parameters": plan.parameters,
        "output_bytes": plan.output_bytes,
        "resumed_bytes": resumed,
        "seconds": round(seconds, 3),
        "peak_memory_bytes": _peak_memory(),
        "skipped": [vars(skip) for skip in plan.skipped],
        "ignored_config": [key.to_json() for key in plan.ignored_config],
    }
    report = _report(out) if plan.quantization else None
    if as_json:
        _print_json(facts | ({"quantization": report.to_json()} if report else {}))
        return
    console = _console()
    if was_there:
        looked = "every checksum holds" if check else "all files in their sizes (--check reads them)"
        console.print(
            _styled((str(out), "bold"), f" is already there, of this source and options: {looked}."), soft_wrap=True
        )
    else:
        rate = (plan.source_bytes - resumed) / seconds
        facts_line = (
            f": {plan.family}, {plan.parameters:,} parameters in {len(plan.arrays)} arrays, "
            f"{format_size(plan.output_bytes)} in {seconds:.1f} s ({format_size(rate)}/s), "
            f"peak memory {format_size(_peak_memory())}"
            + (f", {format_size(resumed)} from an earlier run" if resumed else "")
        )
        console.print(_styled((str(out), "bold"), facts_line), soft_wrap=True)
    _print_skipped(console, plan)
    if verified != VERIFIED:
        console.print(f"  source {verified or 'unverified'}", soft_wrap=True)
    if report:
        _print_report(console, report, out)


def _show_plan(plan: "Plan", limits: Any, as_json: bool) -> None:
    """Shows a plan, and what is wrong with it after that."""
    from tpuconv.convert.sizing import jobs, peak_memory
    from tpuconv.names import collapse

    memory = peak_memory(plan, jobs(plan, limits))
    if as_json:
        try:
            plan.check()
        except TpuconvError as error:
            _fail(error, as_json, plan.to_json(memory))
        _print_json(plan.to_json(memory))
        return
    table = _table(
        f"{plan.source.name}: {plan.family}", "source", "parameter", "axes", "shape", "dtype", "bytes", right=["bytes"]
    )
    for pattern, names in collapse(plan.arrays).items():
        arrays = [plan.arrays[name] for name in names]
        sources = collapse(source for array in arrays for source in array.sources)
        first = arrays[0]
        shape = " ".join(map(str, first.shape))
        table.add_row(
            _lines(sources), pattern, first.axes, shape, first.dtype.name, format_size(sum(a.nbytes for a in arrays))
        )
    console = _console()
    console.print(table)
    _print_skipped(console, plan)
    console.print(
        f"{len(plan.source.tensors)} tensors, {format_size(plan.source.nbytes)} -> {len(plan.arrays)} arrays, "
        f"{format_size(plan.output_bytes)}; {plan.parameters:,} parameters; peak memory {format_size(memory)}",
        soft_wrap=True,
    )
    plan.check()


def _print_skipped(console: "Console", plan: "Plan") -> None:
    """A line for each reason, with the first patterns or keys of config.json that it covers."""
    for about in dict.fromkeys((key.reason, key.warning) for key in plan.ignored_config):
        keys = [key.key[:100] for key in plan.ignored_config if (key.reason, key.warning) == about]
        shown = ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
        warning = f"  warning: {about[1]}" if about[1] else ""
        console.print(f"  ignored in config.json: {shown}: {about[0]}{warning}", soft_wrap=True)
    for reason in dict.fromkeys(skip.reason for skip in plan.skipped):
        own = [skip for skip in plan.skipped if skip.reason == reason]
        shown = ", ".join(skip.pattern for skip in own[:2]) + (f" and {len(own) - 2} more" if len(own) > 2 else "")
        count = sum(skip.count for skip in own)
        console.print(f"  not converted: {count} tensors, {reason}: {shown}", soft_wrap=True)


# -- quantize ---------------------------------------------------------------------------------------------------------


@tpuconv.command(
    cls=Example,
    examples=(
        "tpuconv quantize --config int8_default.yaml",
        "tpuconv quantize Qwen3-8B-orbax --config int4_weight_only --explain",
        "tpuconv quantize Qwen3-8B-orbax /data/Qwen3-8B-mine --config ./mine.yaml",
        "tpuconv quantize Qwen3-8B-orbax --sensitivity",
        "tpuconv quantize Qwen3-8B-orbax --target-bits 5.5",
        "tpuconv quantize --list",
    ),
)
@click.argument("ckpt", required=False, type=File())
@click.argument("out", required=False, type=File())
@click.option(
    "--config", type=Name(), metavar="NAME", help="A config of this package (see --list), or the path of a file."
)
@click.option("--list", "as_list", is_flag=True, help="List the configs of this package.")
@click.option("--explain", is_flag=True, help="Show what would become of every parameter, and stop.")
@click.option("--sensitivity", is_flag=True, help="Measure what rounding each group of parameters costs, and stop.")
@click.option(
    "--target-bits",
    type=Number(min=0, min_open=True),
    help="Write the config that loses least at so many bits a weight, and stop.",
)
@click.option(
    "--out-config",
    type=File(),
    default="recipe.yaml",
    show_default=True,
    help="Where --target-bits writes.",
)
@click.option("--prompts", type=File(exists=True, dir_okay=False), help="To measure on: a prompt a line.")
@click.option("--dry-run", is_flag=True, help="Stop after the plan and show it.")
@OVERWRITE
@CHECK
@click.option("--max-memory", type=Size(), help="Budget, such as 8GB.  [default: 60% of the machine's]")
@click.option("--jobs", type=click.IntRange(min=1), help="Threads.  [default: one more than processors]")
@JSON
def quantize(
    ckpt: Path | None,
    out: Path | None,
    config: str | None,
    as_list: bool,
    explain: bool,
    sensitivity: bool,
    target_bits: float | None,
    out_config: Path,
    prompts: Path | None,
    dry_run: bool,
    overwrite: bool,
    check: bool,
    max_memory: int | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Quantize the checkpoint CKPT by Qwix rules to OUT (<CKPT>-<config>, beside it, by default).

    CKPT is the newest checkpoint in the current folder that is not quantized, by default. OUT appears whole or not at
    all; interrupted, the same command goes on where it was. It holds the arrays that Qwix would make of the whole
    model, bit for bit, and a report, quantization.html.

    With --sensitivity or --target-bits nothing is quantized: the model runs on prompts, in float32, to find out what
    each group of its parameters in int8 or int4 costs it.
    """
    from tpuconv.checkpoint.reader import open_checkpoint
    from tpuconv.convert.plan.types import Options
    from tpuconv.convert.sizing import Limits
    from tpuconv.models.registry import get_family

    if as_list:
        _list_configs(as_json)
        return
    measuring = sensitivity or target_bits is not None
    _goes_with("--sensitivity or --target-bits", measuring, "prompts")
    _goes_with("--target-bits", target_bits is not None, "out_config")
    if measuring and (config or out):
        raise UsageError(
            "--sensitivity and --target-bits measure, and quantize nothing",
            hint="leave OUT and --config out; then quantize with `--config recipe.yaml`",
        )
    _goes_with("--config", not measuring, "explain", "dry_run", "check", "max_memory", "jobs")
    rules = _rules(config)
    if rules is None and not measuring:
        raise UsageError("--config is missing", hint="`tpuconv quantize --list` shows what there is")
    chosen = ckpt or _newest_checkpoint(quantized=False)
    if ckpt is None and not as_json:
        doing = "Measuring" if measuring else "Quantizing"
        _console().print(_styled(f"{doing} ", (str(chosen), "bold"), ", the newest checkpoint here."), soft_wrap=True)
    if rules is None:
        _measure(chosen, target_bits, out_config, prompts, overwrite, as_json)
        return
    source = open_checkpoint(chosen)
    limits = Limits.of_this_machine(jobs, max_memory)
    own = source.manifest
    options = Options(
        scan_layers=own.scan_layers,
        layers=own.layer_range,
        include_mtp=own.include_mtp,
        allow_config=own.allow_config,
    )
    family = get_family(source.manifest.family)
    plan = _plan(source, family, source.table(), options, rules, runs=not (explain or dry_run))
    plan.check()
    if explain:
        _explain(plan, rules, as_json)
    elif dry_run:
        _show_plan(plan, limits, as_json)
    else:
        _run(
            plan,
            out or chosen.with_name(f"{chosen.name}-{rules.name}"),
            limits,
            overwrite,
            check,
            as_json,
            "quantizing",
        )


def _list_configs(as_json: bool) -> None:
    from tpuconv.quantize.config import config_names, find_config

    configs = [find_config(name) for name in config_names()]
    if as_json:
        _print_json({"configs": [config.to_json() | {"bits_per_weight": config.bits} for config in configs]})
        return
    table = _table("quantization configs", "name", "bits a weight", "what", right=["bits a weight"])
    for config in configs:
        table.add_row(config.name, " and ".join(f"{bits:g}" for bits in config.bits), config.summary)
    console = _console()
    console.print(table)
    console.print("  bits of quantized weights, their share of the scales included, in bfloat16", soft_wrap=True)


def _explain(plan: "Plan", rules: "QuantConfig", as_json: bool) -> None:
    """What becomes of every parameter."""
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(stack.names[0] for b in plan.bindings for stack in b.dst):
        arrays = [plan.arrays[part] for part in plan.stored_names(name)]
        encoder: Any = plan.encoders.get(name)
        how = encoder.to_json() if encoder else None
        rows.append(
            {
                "parameter": name,
                "line": rules.rules[how["rule"]].line if how else None,
                "qtype": how["qtype"] if how else None,
                "axes": arrays[0].axes,
                "shape": list(arrays[0].shape),
                "tiles": how["tiles"] if how else None,
                "bits": how["bits"] if how else 8 * arrays[0].dtype.itemsize,
                "bytes_before": plan.source.tensors[name].nbytes if name in plan.source.tensors else None,
                "bytes": sum(array.nbytes for array in arrays),
            }
        )
    if as_json:
        _print_json({"config": rules.to_json(), "parameters": rows})
        return
    from tpuconv.names import collapse

    by_name = {row["parameter"]: row for row in rows}
    table = _table(
        f"{plan.source.name} by {rules.name}",
        "parameter", "line", "type", "axes", "shape", "one scale for", "bits", "before", "after",
        right=["line", "bits", "before", "after"],
    )  # fmt: skip
    for pattern, names in collapse(by_name).items():
        for row, own in _alike([by_name[name] for name in names]):
            own_pattern = pattern if len(own) == len(names) else next(iter(collapse(own)))
            table.add_row(
                own_pattern,
                str(row["line"] or "-"),
                row["qtype"] or "as it is",
                row["axes"],
                " ".join(map(str, row["shape"])),
                " ".join(map(str, row["tiles"])) if row["tiles"] else "",
                f"{row['bits']:.4g}",
                format_size(sum(by_name[name]["bytes_before"] for name in own)),
                format_size(sum(by_name[name]["bytes"] for name in own)),
            )
    console = _console()
    console.print(table)
    total = sum(row["bytes_before"] for row in rows)
    console.print(
        f"{format_size(total)} -> {format_size(plan.output_bytes)}; line: of the rule in {rules.name}; on the disk a "
        "4-bit value takes a byte, on TPU half of one",
        soft_wrap=True,
    )


def _alike(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], list[str]]]:
    """The rows that differ in nothing but the parameter's name, with the names."""
    groups: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    for row in rows:
        key = str({name: value for name, value in row.items() if name != "parameter"})
        groups.setdefault(key, (row, []))[1].append(row["parameter"])
    return list(groups.values())


def _measure(
    ckpt: Path, target: float | None, out: Path, prompt_file: Path | None, overwrite: bool, as_json: bool
) -> None:
    """What each group costs; with a target the recipe too."""
    from dataclasses import replace
    from importlib.metadata import version

    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.quantize.recipe import search as recipe
    from tpuconv.quantize.recipe.groups import find_choices
    from tpuconv.quantize.recipe.measure import DTYPE, Probe

    manifest = read_manifest(ckpt)
    choices = find_choices(manifest)
    if target is not None:
        recipe.check_free(out, overwrite)
        choices.model.check(target)
    ids = _prompt_ids(manifest, manifest.folder, prompt_file)
    groups = []
    with _progress("measuring", as_json) as show:
        probe = Probe(_load(manifest.folder, DTYPE), choices, ids)
        total = sum(group.options[0].bits for group in choices.model.groups) // 8
        for group in probe.each():
            groups.append(group)
            show(sum(group.options[0].bits for group in groups) // 8, total)
    tokens = sum(map(len, ids))
    facts: dict[str, Any] = {
        "checkpoint": str(ckpt),
        "dtype": DTYPE,
        "prompts": len(ids),
        "tokens": tokens,
        "groups": [group.to_json() for group in sorted(groups, key=lambda group: -group.worst)],
    }
    options: list[Any] = []
    if target is not None:
        model = replace(choices.model, groups=tuple(groups))
        options = recipe.choose(model, target)
        predicted, measured = sum(option.kl for option in options), probe.together(options)
        origin = manifest.raw["source"]
        made = (
            f"Made by tpuconv {version('tpuconv')}: quantize --target-bits {target:g}",
            f"Of {origin['name']} at {origin['commit'] or 'no commit'}",
            f"On {len(ids)} prompts, {tokens} tokens, {f'of {prompt_file}' if prompt_file else 'the default ones'}",
            f"KL(unquantized || quantized) in nats a token: {predicted:.3g} by the sum of the groups below, each "
            f"quantized by itself; {measured:.3g} measured, in {DTYPE}",
        )
        recipe.write(recipe.to_yaml(model, options, made), out, overwrite)
        facts["recipe"] = {
            "out": str(out),
            "target_bits": target,
            "bits_per_weight": round(model.bits(options), 4),
            "predicted_kl": predicted,
            "measured_kl": measured,
            "chosen": {group.pattern: option.qtype for group, option in zip(groups, options, strict=True)},
        }
    if as_json:
        _print_json(facts)
        return
    console = _console()
    console.print(_sensitivity_table(f"{ckpt}, {len(ids)} prompts, {tokens} tokens", groups, options))
    console.print("  KL(unquantized || this group quantized), nats a token, worst first", soft_wrap=True)
    if target is not None:
        console.print(
            _styled(
                (str(out), "bold"),
                f": {model.bits(options):.2f} bits a weight; KL {measured:.3g} measured, {predicted:.3g} by the sum of "
                f"its groups. Next: tpuconv quantize {ckpt} --config {out}",
            ),
            soft_wrap=True,
        )


def _sensitivity_table(title: str, groups: Sequence[Any], options: Sequence[Any]) -> "Table":
    numbers = ("weights", "int8", "KL", "int4", "KL ")
    columns = ("group", "weights", "int8", "KL", "int4", "KL ", *(["chosen"] if options else []))
    table = _table(title, *columns, right=numbers)
    chosen = options or [None] * len(groups)
    for group, option in sorted(zip(groups, chosen, strict=True), key=lambda pair: -pair[0].worst):
        cells = [cell for o in group.options[1:] for cell in (f"{o.bits / group.count:.2f} bits", f"{o.kl:.2e}")]
        table.add_row(group.pattern, f"{group.count:,}", *cells, *([str(option)] if option else []))
    return table


def _report(out: Path) -> "Report":
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.quantize.report import report

    return report(read_manifest(out).raw)


def _print_report(console: "Console", report: "Report", out: Path) -> None:
    from tpuconv.convert.plan.types import REPORT
    from tpuconv.quantize.report import kinds

    table = _table(
        f"{report.config}: {report.weight_bits:.2f} bits a weight",
        "parameters", "count", "type", "bits", "worst dB", "mean dB", "clipped",
        right=["count", "bits", "worst dB", "mean dB", "clipped"],
    )  # fmt: skip
    for kind in kinds(report.rows):
        worst = kind.worst
        clipped = f"{100 * max(row.clipped for row in kind.rows):.3g}%"
        figures = (f"{worst.bits:.2f}", f"{worst.snr_db:.1f}", f"{kind.mean_db:.1f}", clipped)
        source = ", ".join(dict.fromkeys(row.source for row in kind.rows if row.source))
        qtype = f"{worst.qtype}, {source}" if source else worst.qtype
        table.add_row(kind.pattern, str(len(kind.rows)), qtype, *figures)
    console.print(table)
    console.print(f"dB: signal to noise, worst first; plots in {out / REPORT}", soft_wrap=True)


# -- export -----------------------------------------------------------------------------------------------------------


@tpuconv.command(
    cls=Example,
    examples=("tpuconv export Qwen3-8B-orbax Qwen3-8B-again", "tpuconv export DeepSeek-R1-orbax /data/DeepSeek-R1"),
)
@click.argument("ckpt", type=File())
@click.argument("out", type=File())
@OVERWRITE
@CHECK
@JSON
def export(ckpt: Path, out: Path, overwrite: bool, check: bool, as_json: bool) -> None:
    """Write the checkpoint CKPT to the folder OUT as safetensors, under the names that it had.

    What was neither cast nor dequantized comes back byte for byte; codes and scales do where they were kept. OUT
    appears whole or not at all.
    """
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.convert import export as exporter
    from tpuconv.models.registry import get_family

    manifest = read_manifest(ckpt)
    family = get_family(manifest.family)
    config = family.read_config(exporter.released_config(manifest), manifest.allow_config)
    began, total, was_there = time.monotonic(), 0, False
    with _kept(), _progress("exporting", as_json) as show:
        for at in exporter.export(manifest, family.table, config, out, overwrite=overwrite):
            show(at.done, at.total)
            total, was_there = at.total, at.resumed == at.total
    if check and was_there:
        _check_all(out, as_json)
    seconds = time.monotonic() - began
    files = len(list(out.glob("*.safetensors")))
    facts = {"out": str(out), "family": family.name, "files": files, "bytes": total, "seconds": round(seconds, 3)}
    if as_json:
        _print_json(facts | {"peak_memory_bytes": _peak_memory()})
        return
    if was_there:
        looked = "every checksum holds" if check else "all files in their sizes (--check reads them)"
        _console().print(
            _styled((str(out), "bold"), f" is already there, of this checkpoint: {looked}."), soft_wrap=True
        )
        return
    _console().print(
        _styled(
            (str(out), "bold"),
            f": {family.name}, {format_size(total)} in {files} {'files' if files > 1 else 'file'}, "
            f"{seconds:.1f} s ({format_size(total / max(seconds, 1e-9))}/s)",
        ),
        soft_wrap=True,
    )


# -- verify -----------------------------------------------------------------------------------------------------------


@tpuconv.command(
    cls=Example,
    examples=(
        "tpuconv verify",
        "tpuconv verify Qwen3-8B-orbax --compare-hf",
        "tpuconv verify Qwen3-8B-orbax --compare-hf --dtype float32 --prompts prompts.txt",
        "tpuconv verify meta-llama/Llama-3.3-70B-Instruct --topology v5e:4x4 --batch 8 --context 2048",
        "tpuconv verify Qwen/Qwen3-32B --topology v5e,v6e,v5p",
        "tpuconv verify deepseek-ai/DeepSeek-R1 --topology v6e:8x8 --encoding keep",
        "tpuconv verify Llama-3.3-70B-orbax --compare-hf --layerwise",
        "tpuconv verify Qwen3-8B-orbax --benchmark --batch 1,8 --prompt-length 128 --new-tokens 64",
    ),
)
@click.argument("ckpt", required=False, type=Name())
@click.option("--compare-hf", is_flag=True, help="Compare the model's logits with those of transformers on the source.")
@click.option("--layerwise", is_flag=True, help="Compare a layer at a time: no model is in memory whole.")
@click.option(
    "--source", type=Name(), help="The source checkpoint, where it is not any more where it was converted from."
)
@click.option("--prompts", type=File(exists=True, dir_okay=False), help="A file with a prompt a line.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float32"]),
    default="auto",
    show_default=True,
    help="To compute in; float32 compares the mathematics alone.",
)
@click.option(
    "--topology",
    "topologies",
    multiple=True,
    help="Ask the TPU compiler whether the model fits this slice, as v5e:4x4; v5e: which is the smallest.",
)
@click.option(
    "--context", type=click.IntRange(1, MOST_TOKENS), default=2048, show_default=True, help="Tokens of a sequence."
)
@click.option(
    "--mesh",
    help="How the slice, or with --compare-hf the devices here, are divided, as tensor=8,expert=2.  [default: fewest "
    "collectives on a slice, one device here]",
)
@click.option("--write-layouts", is_flag=True, help="Write how arrays should lie in memory there, for `load`, in CKPT.")
@click.option(
    "--quantize", type=Name(), metavar="CONFIG", help="Ask for the model as `tpuconv quantize --config` would make it."
)
@click.option(
    "--encoding",
    type=click.Choice(["dequantize", "keep"]),
    default="dequantize",
    show_default=True,
    help="Ask for FP8, INT8, INT4 and FP4 values of a source in bfloat16, or as `tpuconv convert --encoding keep` has "
    "them.",
)
@click.option("--benchmark", is_flag=True, help="Time prefill and decoding on the devices here.")
@CACHE_DTYPE
@click.option(
    "--batch", type=Numbers(MOST_SEQUENCES), default="1", show_default=True, help="Sequences at once; a list: 1,8."
)
@click.option(
    "--prompt-length", type=Numbers(MOST_TOKENS), default="128", show_default=True, help="Tokens of a prompt; a list."
)
@click.option(
    "--new-tokens", type=Numbers(MOST_TOKENS), default="64", show_default=True, help="Tokens for each prompt; a list."
)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Runs; medians are shown.")
@click.option("--markdown", is_flag=True, help="Print the benchmark as a Markdown table.")
@click.option(
    "--update",
    is_flag=True,
    help="Take config.json, tokenizer and cards into the manifest as they are now, then check.",
)
@JSON
def verify(
    ckpt: str | None,
    compare_hf: bool,
    layerwise: bool,
    source: str | None,
    prompts: Path | None,
    dtype: str,
    topologies: tuple[str, ...],
    context: int,
    mesh: str | None,
    write_layouts: bool,
    quantize: str | None,
    encoding: str,
    benchmark: bool,
    cache_dtype: str,
    batch: tuple[int, ...],
    prompt_length: tuple[int, ...],
    new_tokens: tuple[int, ...],
    repeats: int,
    markdown: bool,
    update: bool,
    as_json: bool,
) -> None:
    """Check every array and file of CKPT against its checksum, with --compare-hf its model against the original, with
    --benchmark how fast it is, or with --topology which TPUs it fits.

    CKPT is the newest checkpoint in the current folder by default. With --topology it may also be a source, a Hub id, a
    folder or a config.json: no weights are read and no TPU is needed. Exit code 3: a gate of the comparison failed, or
    the model does not fit; 10: the checkpoint is damaged.
    """
    from tpuconv.checkpoint.manifest import read_manifest

    _goes_with("--compare-hf", compare_hf, "layerwise", "source", "prompts")
    _goes_with("--topology", bool(topologies), "context", "write_layouts", "quantize", "encoding")
    _goes_with("--topology or --compare-hf", compare_hf or bool(topologies), "mesh")
    _goes_with("--benchmark", benchmark, "prompt_length", "new_tokens", "repeats", "markdown")
    _goes_with("--benchmark or --topology", benchmark or bool(topologies), "batch", "cache_dtype")
    if compare_hf + benchmark + bool(topologies) > 1:
        raise UsageError("--compare-hf, --benchmark and --topology exclude each other", hint="run one after the other")
    if update and (compare_hf or benchmark or topologies):
        raise UsageError("--update goes with no other check", hint="run one after the other")
    if layerwise and mesh:
        raise UsageError("--layerwise runs on one device", hint="leave --mesh out")
    from tpuconv.sharding import parse_mesh
    from tpuconv.verify.topology import request as tpu

    sizes = parse_mesh(mesh) if mesh else None
    if topologies:
        if len(batch) > 1:
            raise UsageError("--topology takes one --batch", hint="ask for one after the other")
        src = ckpt or str(_newest_checkpoint())
        question = tpu.CompileRequest(
            **_described(src, quantize, encoding == "keep", dtype, write_layouts),
            batch=batch[0],
            context=context,
            mesh=sizes,
            cache_dtype=_cache_dtype(cache_dtype),
        )
        _verify_topology(src, question, tpu.parse_topologies(topologies), write_layouts, as_json)
        return
    wanted: Sequence[Any] = ()
    if benchmark:
        from tpuconv.verify.benchmark import shapes

        wanted = shapes(batch, prompt_length, new_tokens)
    chosen = _chosen_checkpoint(Path(ckpt) if ckpt else None, "Verifying", quiet=as_json or markdown)
    if not (compare_hf or benchmark):
        _verify_folder(chosen, update, as_json)
        return
    manifest = read_manifest(chosen)
    if compare_hf:
        _verify_logits(manifest, source, prompts, dtype, sizes, layerwise, as_json)
    else:
        _benchmark(manifest, dtype, _cache_dtype(cache_dtype), wanted, repeats, as_json, markdown)


def _goes_with(option: str, given: bool, *others: str) -> None:
    """Raises UsageError if one of the other options is given without `option`."""
    ctx = click.get_current_context()
    for name in others:
        if not given and ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise UsageError(f"--{name.replace('_', '-')} goes with {option}")


def _chosen_checkpoint(ckpt: Path | None, doing: str, quiet: bool) -> Path:
    chosen = ckpt or _newest_checkpoint()
    if ckpt is None and not quiet:
        _console().print(_styled(f"{doing} ", (str(chosen), "bold"), ", the newest checkpoint here."), soft_wrap=True)
    return chosen


def _newest_checkpoint(*, quantized: bool | None = None) -> Path:
    """The newest in the current folder; of quantized ones or of the others where it matters."""
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.names import MANIFEST
    from tpuconv.storage.sealed import CHECKPOINT, kind_of

    found = [path for path in Path().glob(f"*/{MANIFEST}") if kind_of(path.parent) in (CHECKPOINT, None)]
    found.sort(key=lambda path: path.stat().st_mtime_ns)
    if quantized is not None:
        found = [path for path in found if (read_manifest(path.parent).quantization is not None) == quantized]
    if not found:
        raise UsageError(
            "there is no checkpoint in the current folder", hint="make one with `tpuconv convert SRC`, or name it"
        )
    return found[-1].parent


def _verify_folder(folder: Path, update: bool, as_json: bool) -> None:
    """Checks all of an output of ours; with `update` takes files into its manifest first."""
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.errors import CorruptOutput
    from tpuconv.verify import checksums as weights

    changed = weights.update(read_manifest(folder)) if update else []
    if changed and not as_json:
        _console().print(_styled("taken into the manifest: ", ", ".join(changed)), soft_wrap=True)
    began = time.monotonic()
    checked, arrays = _check(folder, as_json)
    done = sum(each.nbytes for each in checked)
    faults = [each for each in checked if each.fault]
    seconds = time.monotonic() - began
    if as_json:
        _print_json(
            {
                "passed": not faults,
                "checkpoint": str(folder),
                "arrays": arrays,
                "files": len(checked) - arrays,
                "bytes": done,
                "faults": [{"name": each.name, "fault": each.fault} for each in faults],
                **({"updated": changed} if update else {}),
            }
        )
    if faults and not as_json:
        raise _damage(folder, faults)
    if faults:
        sys.exit(CorruptOutput.exit_code)
    if not as_json:
        counted = f"{arrays} arrays, " if arrays else ""
        counted += f"{len(checked) - arrays} files, {format_size(done)}, every checksum holds"
        rate = format_size(done / max(seconds, 1e-9))
        _console().print(_styled(("whole", "green"), f": {counted} ({rate}/s)"))


def _check_all(folder: Path, as_json: bool) -> None:
    """Reads all of an output that was there already; an error if something is wrong."""
    checked, _ = _check(folder, as_json)
    if faults := [each for each in checked if each.fault]:
        raise _damage(folder, faults)


def _check(folder: Path, as_json: bool) -> tuple[list[Any], int]:
    """What was checked, and how many of it are arrays."""
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.storage.sealed import SAFETENSORS, kind_of, read_sealed
    from tpuconv.verify import checksums as weights

    if kind_of(folder) == SAFETENSORS:
        sealed = read_sealed(folder)
        checks, arrays, total = weights.check_export(folder, sealed), 0, sum(f["bytes"] for f in sealed.files.values())
    else:
        manifest = read_manifest(folder)
        checks, arrays, total = weights.check(manifest), len(manifest.arrays), int(manifest.raw["bytes"])
    checked, done = [], 0
    with _progress("checking", as_json) as show:
        for each in checks:
            checked.append(each)
            done += each.nbytes
            show(min(done, total), total)
    return checked, arrays


def _damage(folder: Path, faults: Sequence[Any]) -> TpuconvError:
    from tpuconv.errors import CorruptOutput, shorten

    return CorruptOutput(
        f"{len(faults)} {'faults' if len(faults) > 1 else 'fault'} in {folder}",
        details=shorten([f"{each.name} {each.fault}" for each in faults]),
        hint="convert the checkpoint again, with --overwrite; of a file that was changed on purpose "
        "`tpuconv verify --update` takes the change into the manifest",
    )


def _verify_logits(
    manifest: Any,
    source: str | None,
    prompt_file: Path | None,
    dtype: str,
    mesh: Mapping[str, int] | None,
    layerwise: bool,
    as_json: bool,
) -> None:
    from dataclasses import replace

    from tpuconv.sources.hub import resolve
    from tpuconv.sources.source import changed_shards
    from tpuconv.verify import logits
    from tpuconv.verify.layerwise import compare_layers

    _check_address_space()
    devices = logits.device_mesh(mesh) if mesh else None
    origin = manifest.raw["source"]
    with _kept(), _progress("downloading", as_json) as show:
        resolved = resolve(
            source or origin["repo"] or origin["folder"], revision=None if source else origin["commit"], progress=show
        )
    parts: list[Any] = []
    with resolved, _plain_path(resolved.folder) as source_folder, _plain_path(manifest.folder) as path:
        with _sign_of_life("comparing the source with that of the conversion", as_json):
            changed = changed_shards(resolved.folder, origin["shards"])
        if not as_json:
            _console().print(_source_line(changed), soft_wrap=True)
        ids = _prompt_ids(manifest, resolved.folder, prompt_file)
        own = manifest.dtype if dtype == "auto" else dtype
        if layerwise:
            show_part = (lambda part: None) if as_json else _show_part
            own_manifest = replace(manifest, folder=path)
            parts, hf, ours = compare_layers(own_manifest, source_folder, ids, own, show_part)
        else:
            with _sign_of_life("running transformers", as_json):
                hf = logits.reference_logits(source_folder, ids, own)
    if not layerwise:
        with _sign_of_life("running the converted model", as_json), _plain_path(manifest.folder) as path:
            ours = logits.model_logits(path, ids, own, devices)
    gates = manifest.quantization["gates"] if manifest.is_rounded else logits.DTYPE_GATES[own]
    result = logits.compare(ids, hf, ours, own, gates)
    departing = [part for part in parts if part.departs]
    failures = [f"{departing[0].name} is the first to depart"] if departing else []
    failures += result.failures()
    if as_json:
        facts = {"checkpoint": str(manifest.folder), "source": str(source or origin["name"]), **result.to_json()}
        facts["source_changed"] = None if changed is None else bool(changed)
        if mesh:
            facts["mesh"] = dict(mesh)
        if layerwise:
            facts["layers"] = [part.to_json() for part in parts]
            facts["first_departing"] = departing[0].name if departing else None
        _print_json(facts | {"passed": False if failures else result.passed, "failures": failures})
    else:
        _console().print(_comparison_table(result, str(manifest.folder)))
        if result.passed is None:
            _console().print(
                "no gates set: the config of this quantization has `gates: none`, so that nothing is passed or failed",
                soft_wrap=True,
            )
    if failures:
        what = "quantized" if manifest.is_rounded else "converted"
        error = GateError(
            f"the {what} model does not compute what the original does",
            details=failures,
            hint="the source changed since the conversion: convert it again" if changed else None,
        )
        if as_json:
            sys.exit(error.exit_code)
        raise error


def _source_line(changed: Sequence[str] | None) -> str:
    """Whether the source is still what was converted."""
    from tpuconv.errors import shorten

    if changed is None:
        return "source: the files are others than at the conversion, and no hash of them is known: perhaps it changed"
    if not changed:
        return "source: unchanged since the conversion"
    return f"source: changed since the conversion: {', '.join(shorten(changed, 5))}"


def _prompt_ids(manifest: Any, tokenizer_folder: Path, prompt_file: Path | None) -> list[list[int]]:
    from tpuconv.verify.logits import tokenize

    vocab = next(a.shape[0] for a in manifest.arrays.values() if a.axes.startswith("V"))
    with _plain_path(tokenizer_folder) as path:
        return tokenize(path, _prompts(prompt_file) if prompt_file else [], vocab)


def _prompts(file: Path) -> list[str]:
    try:
        prompts = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as e:
        raise UsageError(f"{file} is no text in UTF-8: {e.reason} at byte {e.start}", hint="save it as UTF-8") from e
    except OSError as e:
        raise UsageError(f"{file} cannot be read: {e.strerror}") from e
    if not prompts:
        raise UsageError(f"{file} holds no prompt", hint="write a prompt a line, or leave --prompts out")
    return prompts


def _show_part(part: Any) -> None:
    verdict: list[Any] = [("departs", "red"), f": the gate is {part.gate:g}"] if part.departs else []
    figures = f"{part.name:>10}  by itself {part.own:8.2g}  gathered {part.error:8.2g}  "
    _console().print(_styled(figures, *verdict))


def _comparison_table(result: Any, name: str) -> "Table":
    table = _table(
        f"{name} against transformers, {result.dtype}, {result.prompts} prompts, {result.tokens} tokens",
        "figure", "value", "gate", right=["value"],
    )  # fmt: skip
    rows = (
        ("largest difference of logits", f"{result.max_abs_difference:.3g}", None),
        ("mean difference of logits", f"{result.mean_abs_difference:.3g}", None),
        ("largest logit", f"{result.max_abs_logit:.4g}", None),
        ("largest difference / largest logit", f"{result.relative_difference:.2g}", "relative_difference"),
        ("mean KL divergence (nats)", f"{result.mean_kl:.3g}", "mean_kl"),
        ("99.9th percentile of KL", f"{result.p999_kl:.3g}", None),
        ("same most likely token", f"{100 * result.top1:.2f}%", None),
        (f"the same, of {result.decided} without a tie of two", f"{100 * result.top1_decided:.2f}%", "top1"),
        ("perplexity, transformers", f"{result.perplexity_hf:.5g}", None),
        ("perplexity, JAX", f"{result.perplexity_jax:.5g}", None),
    )
    failed = {line.split()[0] for line in result.failures()}
    for figure, value, gate in rows:
        bound = result.gates.get(gate) if gate else None
        text = (
            ""
            if bound is None
            else _styled(("failed", "red"), f": {bound:g}")
            if gate in failed
            else _styled(("holds", "green"), f": {bound:g}")
        )
        table.add_row(figure, value, text)
    return table


def _described(src: str, quantize: str | None, keep: bool, dtype: str, as_stored: bool) -> dict[str, Any]:
    """The config, the quantization and the dtype of a source or a checkpoint, without its weights. `as_stored` asks for
    a whole checkpoint, and for nothing that it does not hold; `keep` for the codes and scales of a source."""
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.models.common.config import without_keys
    from tpuconv.names import MANIFEST
    from tpuconv.sources.hub import fetch_config
    from tpuconv.verify.topology import request as tpu

    quantization: Any = None
    checkpoint, own = None, "bfloat16"
    allowed: tuple[str, ...] = ()
    _either_kept_or_quantized(keep, quantize)
    if (Path(src) / MANIFEST).is_file():
        if keep:
            raise UsageError(f"{src} is converted already, and taken as it is stored", hint="leave --encoding out")
        manifest = read_manifest(Path(src))
        quantization, own, allowed = manifest.quantization, manifest.dtype, manifest.allow_config
        checkpoint = str(manifest.folder.absolute()) if quantize is None else None
        if as_stored:
            manifest.check_whole()
    if as_stored and not checkpoint:
        raise UsageError(
            f"--write-layouts writes into a checkpoint: {src} is " + ("still to be quantized" if quantize else "none"),
            hint="make one first, with `tpuconv quantize` or `tpuconv convert`",
        )
    if quantize:
        if quantization:
            raise UsageError(f"{src} is quantized already, by {quantization['name']}", hint="leave --quantize out")
        rules = _rules(quantize)
        quantization = rules.to_json() if rules else None
    config = without_keys(fetch_config(src), allowed)
    if keep:
        quantization = tpu.as_released(src, config)
    facts = {"config": config, "quantize": quantization, "checkpoint": checkpoint}
    return facts | {"dtype": own if dtype == "auto" else dtype}


def _verify_topology(
    src: str, question: Any, groups: Sequence[Sequence[Any]], write_layouts: bool, as_json: bool
) -> None:
    from tpuconv.checkpoint import device_layouts as layouts
    from tpuconv.verify.topology import request as tpu

    _check_address_space()
    answers = []
    for answer in _awaited(tpu.ask(question, groups), "compiling", as_json):
        answers.append(answer)
        if not as_json:
            _console().print(_answer_line(answer), soft_wrap=True)
    fitting = [answer for answer in answers if answer.fits]
    smallest = min(fitting, key=lambda answer: answer.devices, default=None)
    written = None
    for answer in fitting if write_layouts else ():
        written = layouts.write_layouts(Path(src), answer.device, answer.mesh, answer.layouts)
    if as_json:
        asked = {"source": src, "batch": question.batch, "context": question.context, "dtype": question.dtype}
        asked["cache_dtype"] = question.cache_dtype or question.dtype
        asked["quantization"] = question.quantize and question.quantize["name"]
        found = {"fits": bool(fitting), "smallest": smallest and smallest.topology, "layouts": written and str(written)}
        _print_json({**asked, **found, "slices": [answer.to_json() for answer in answers]})
    else:
        for table in _answer_tables(src, question, answers):
            if table.row_count:
                _console().print(table)
        if written:
            names = ", ".join(answer.topology for answer in fitting)
            _console().print(_styled(f"layouts for {names}: ", (str(written), "bold")), soft_wrap=True)
    if not fitting:
        error = GateError(
            f"{src} does not fit at batch {question.batch} and context {question.context}",
            details=[f"{answer.topology}: {answer.why}" for answer in answers],
            hint=tpu.advice(question, answers[-1]),
        )
        if as_json:
            sys.exit(error.exit_code)
        raise error


def _cache_dtype(chosen: str) -> str | None:
    """None for that of the model."""
    return None if chosen == "auto" else chosen


def _answer_line(answer: Any) -> "Text":
    from tpuconv.sharding import format_mesh

    return _styled((answer.verdict(), "green" if answer.fits else "red"), f" (mesh {format_mesh(answer.mesh)})")


def _answer_tables(src: str, question: Any, answers: Sequence[Any]) -> "Iterator[Table]":
    from tpuconv.verify.topology.request import ESTIMATE_ERROR

    kind = question.quantize["name"] if question.quantize else question.dtype
    kind += f", cache {question.cache_dtype}" if question.cache_dtype else ""
    kinds = ("weights", "cache", "temporaries", "code", "peak", "available", "headroom")
    table = _table(
        f"{src}, batch {question.batch}, context {question.context}, {kind}: memory of a device",
        "slice", *kinds, right=kinds,
    )  # fmt: skip
    for answer in answers:
        table.add_row(answer.topology, *(format_size(getattr(answer.memory, kind)) for kind in kinds))
    yield table
    columns = ("compiled in", "HBM read", "written", "floor", "estimate")
    table = _table(
        f"a step; estimates are experimental: {ESTIMATE_ERROR}",
        "slice", "program", *columns, right=columns,
    )  # fmt: skip
    for answer in answers:
        for program in answer.programs:
            table.add_row(
                answer.topology,
                f"{program.name}, {program.tokens} tokens" if program.tokens > 1 else program.name,
                f"{program.compile_seconds:.0f} s",
                format_size(program.hbm_read),
                format_size(program.hbm_written),
                _floor(program),
                f"{1e3 * program.estimate:.2f} ms",
            )
    yield table
    table = _table(
        "what a step does; products: as multiplied (as stored)", "slice", "program", "kind", "count and bytes"
    )
    for answer in answers:
        for program in answer.programs:
            does = {
                "collectives": [f"{c['count']} {c['op']}, {format_size(c['bytes'])}" for c in program.collectives],
                "products": [f"{p['count']} {p['multiplied']} ({p['stored']})" for p in program.products],
                "large copies": [
                    f"{c['count']} of {c['source'][-60:]}, {format_size(c['bytes'])}" for c in program.copies[:5]
                ],
            }
            for kind, lines in does.items():
                if lines:
                    table.add_row(answer.topology, program.name, kind, _lines(lines))
    yield table


def _floor(program: Any) -> str:
    least, most = 1e3 * program.expected_floor, 1e3 * program.floor
    return f"{most:.2f} ms" if least > 0.99 * most else f"{least:.2f} ms (all experts {most:.2f})"


def _benchmark(
    manifest: Any,
    dtype: str,
    cache_dtype: str | None,
    wanted: Sequence[Any],
    repeats: int,
    as_json: bool,
    as_markdown: bool,
) -> None:
    from tpuconv.models.tokenizer import has_tokenizer, load_tokenizer
    from tpuconv.verify import benchmark as decode

    own = manifest.dtype if dtype == "auto" else dtype
    with _plain_path(manifest.folder) as path:
        tokenizer = load_tokenizer(path) if has_tokenizer(path) else None
    spoken = tokenizer(decode.PROMPT)["input_ids"] if tokenizer else []
    machine = decode.machine()
    with _sign_of_life("loading", as_json):  # and none while times are taken
        model = _load(manifest.folder, own)
    timings = list(decode.measure(model, wanted, repeats, machine.limits, spoken, cache_dtype))
    text = decode.PROMPT + tokenizer.decode(timings[0].new_ids, skip_special_tokens=True) if tokenizer else None
    origin = manifest.raw["source"]
    if as_json:
        _print_json(
            {
                "checkpoint": str(manifest.folder),
                "source": origin["name"],
                "commit": origin["commit"],
                "dtype": own,
                "cache_dtype": cache_dtype or own,
                "repeats": repeats,
                **machine.to_json(),
                "text": text,
                "timings": [timing.to_json() for timing in timings],
            }
        )
        return
    columns: dict[str, Callable[[Any], str]] = {
        "batch": lambda t: f"{t.shape.batch}",
        "prompt": lambda t: f"{t.shape.prompt_length}",
        "new": lambda t: f"{t.shape.new_tokens}",
        "first token": lambda t: f"{1000 * t.first_token_seconds:.4g} ms",
        "of the peak": lambda t: f"{100 * t.peak_share:.0f}%",
        "step": lambda t: f"{1000 * t.step_seconds:.4g} ms",
        "tokens/s each": lambda t: f"{t.per_sequence:.4g}",
        "tokens/s in all": lambda t: f"{t.in_all:.4g}",
        "of the bandwidth": lambda t: f"{100 * t.bandwidth_share:.0f}%",
        "memory": lambda t: format_size(t.peak_memory_bytes or t.memory_bytes),
        "compiled in": lambda t: f"{t.compile_seconds:.1f} s",
    }
    rows = [[cell(timing) for cell in columns.values()] for timing in timings]
    limits = machine.limits
    types = f"{own}, cache {cache_dtype}" if cache_dtype else own
    title = f"{manifest.folder.name}, {types}, {machine.devices} x {machine.device}, median of {repeats}"
    footer = (
        f"limits {'measured here' if limits.measured else 'of the chip'}: {format_size(limits.bandwidth)}/s, "
        f"{limits.peak / 1e12:.3g} TFLOP/s; {', '.join(f'{k} {v}' for k, v in machine.versions.items())}; "
        f"{origin['name']} at {origin['commit'] or 'no commit'}"
    )
    if as_markdown:
        lines = [columns, ["---"] * len(columns), *rows]
        table_lines = (f"| {' | '.join(line)} |" for line in lines)
        _say("\n".join([texts.markdown(title), "", *table_lines, "", texts.markdown(footer)]))
        return
    table = _table(title, *columns, right=columns)
    for row in rows:
        table.add_row(*row)
    console = _console()
    console.print(table)
    console.print(footer, soft_wrap=True)
    if text is not None:
        _say("\nGreedy: " + plain(text, "\n\t"))


def _load(folder: Path, dtype: str | None = None) -> Any:
    """The model on all devices here: the weights are divided where there are several."""
    _check_address_space(sum(path.stat().st_size for path in folder.glob("params/*/*")))
    from tpuconv.restore import default_mesh, load

    with _plain_path(folder) as path:
        return load(path, dtype, default_mesh(path))


# -- generate ---------------------------------------------------------------------------------------------------------


@tpuconv.command(
    cls=Example,
    examples=(
        'tpuconv generate --prompt "Once upon a time"',
        'tpuconv generate Qwen3-8B-orbax --chat --system "Be brief." --prompt "What is a TPU?"',
        'tpuconv generate Qwen3-8B-orbax --prompt "def fibonacci(n):" --temperature 0.7 --top-p 0.9 --seed 1',
    ),
)
@click.argument("ckpt", required=False, type=File())
@click.option(
    "--prompt",
    "prompts",
    type=Prompt(),
    multiple=True,
    help="The text to continue; - reads it from standard input. May be repeated: all are continued in one batch.",
)
@click.option("--prompt-file", type=File(exists=True, dir_okay=False), help="A file with one prompt per line.")
@click.option("--chat", is_flag=True, help="Write each prompt as a user's message, by the model's chat template.")
@click.option("--system", type=Prompt(), help="The system message of the chat.")
@click.option("--stop", type=Prompt(), multiple=True, help="End a text before this string; may be repeated.")
@click.option(
    "--max-new-tokens", type=click.IntRange(1, MOST_TOKENS), default=128, show_default=True, help="Stop after these."
)
@click.option(
    "--temperature", type=Number(min=0, max=1000), default=0.0, show_default=True, help="0 takes the most likely token."
)
@click.option(
    "--top-p",
    type=Number(min=0, max=1, min_open=True),
    default=1.0,
    show_default=True,
    help="The fewest tokens of this probability.",
)
@click.option("--top-k", type=click.IntRange(min=1), help="Only the k most likely tokens.")
@click.option(
    "--seed",
    type=click.IntRange(-(1 << 63), (1 << 63) - 1),
    metavar="INTEGER",
    default=0,
    help="The same seed gives the same text.  [default: 0]",
)
@CACHE_DTYPE
@JSON
def generate(
    ckpt: Path | None,
    prompts: tuple[str, ...],
    prompt_file: Path | None,
    chat: bool,
    system: str | None,
    stop: tuple[str, ...],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int | None,
    seed: int,
    cache_dtype: str,
    as_json: bool,
) -> None:
    """Continue prompts with the model of CKPT, the newest checkpoint in the current folder by default."""
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.models.tokenizer import end_tokens, load_tokenizer

    texts_in = _generation_prompts(prompts, prompt_file)
    manifest = read_manifest(_chosen_checkpoint(ckpt, "Generating with", quiet=as_json))
    folder = manifest.folder
    _check_address_space()
    with _plain_path(folder) as path:
        tokenizer, ends = load_tokenizer(path), end_tokens(path)
    from tpuconv.models.generate import Sampling
    from tpuconv.models.text_generator import TextGenerator

    sampling = Sampling(temperature, top_k, top_p)
    writer = TextGenerator(_load(folder), tokenizer, ends, sampling, _cache_dtype(cache_dtype))
    manifest.check_current()  # of which the tokenizer was read
    if writer.has_chat_template and not chat and not as_json:
        _say("The model has a chat template: --chat writes the prompt as it was trained to read it.", err=True)
    options: dict[str, Any] = {"chat": chat, "system": system, "stop": stop, "seed": seed}
    streams = not as_json and len(texts_in) == 1
    if streams and not chat:
        _say(plain(texts_in[0], "\n\t"), nl=False)
    times = [time.monotonic()]
    outputs: list[Any] = []
    for new, completions in writer.stream(texts_in, max_new_tokens, **options):
        times.append(time.monotonic())
        outputs = completions
        if streams:
            _say(plain(new[0], "\n\t"), nl=False)
        if getattr(sys.stdout, "unread", False):  # `| head`
            return
    seconds = {"first_token_seconds": times[1] - times[0], "seconds": times[-1] - times[0]}
    if as_json and len(outputs) == 1:
        _print_json({"checkpoint": str(folder), **outputs[0].to_json(), **seconds})
    elif as_json:
        _print_json({"checkpoint": str(folder), "outputs": [output.to_json() for output in outputs], **seconds})
    elif streams:
        _say("")
    else:
        shown = (plain(("" if chat else output.prompt) + output.text, "\n\t") for output in outputs)
        _say("\n\n".join(shown))


def _generation_prompts(prompts: Sequence[str], file: Path | None) -> list[str]:
    """The prompts of the options, "-" read from stdin."""
    if list(prompts).count("-") > 1:
        raise UsageError("standard input is one prompt: --prompt - can be given once")
    out = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts] + (_prompts(file) if file else [])
    if not out:
        raise UsageError(
            "there is no prompt", hint="give --prompt TEXT, --prompt - for standard input, or --prompt-file"
        )
    return out


# -- inspect, families ------------------------------------------------------------------------------------------------


@tpuconv.command(
    cls=Example,
    examples=(
        "tpuconv inspect Qwen3-8B-orbax",
        "tpuconv inspect Qwen3-8B-orbax --mesh data=2,tensor=4",
        "tpuconv inspect deepseek-ai/DeepSeek-R1 --json",
    ),
)
@click.argument("path", type=Name())
@click.option("--mesh", help="Show how a checkpoint of ours is divided over devices, such as data=2,tensor=4.")
@JSON
def inspect(path: str, mesh: str | None, as_json: bool) -> None:
    """Show the tensors of PATH by pattern: a safetensors folder or file, a Hub id, or a checkpoint of ours."""
    from tpuconv.names import MANIFEST, collapse
    from tpuconv.sharding import parse_mesh
    from tpuconv.storage.sealed import SAFETENSORS, kind_of

    sizes = parse_mesh(mesh) if mesh else {}
    ours = (Path(path) / MANIFEST).is_file() and kind_of(Path(path)) != SAFETENSORS
    if mesh and not ours:
        raise UsageError(f"{path} is no checkpoint of ours: --mesh divides by its axes", hint="convert it first")
    tensors = _our_tensors(Path(path), sizes) if ours else _source_tensors(path)
    patterns = []
    for pattern, names in collapse(tensors).items():
        kinds = {(tensors[name]["dtype"], tuple(tensors[name]["shape"])) for name in names}
        (dtype, shape), more = sorted(kinds)[0], len(kinds) - 1
        facts = {"pattern": pattern, "count": len(names), "dtype": dtype, "shape": list(shape), "other_kinds": more}
        if "axes" in tensors[names[0]]:
            facts["axes"] = tensors[names[0]]["axes"]
        for key in ("bytes", *(["device_bytes"] if mesh else [])):
            facts[key] = sum(tensors[name][key] for name in names)
        if mesh:
            facts["partition"] = tensors[names[0]]["partition"]
        patterns.append(facts)
    total = sum(tensor["bytes"] for tensor in tensors.values())
    on_device = sum(tensor["device_bytes"] for tensor in tensors.values()) if mesh else 0
    if as_json:
        kind = "tpuconv" if ours else "safetensors"
        divided = {"mesh": sizes, "device_bytes": on_device} if mesh else {}
        _print_json({"format": kind, "tensors": len(tensors), "bytes": total, **divided, "patterns": patterns})
        return
    axes_column, mesh_columns = ["axes"] if ours else [], ["divided by", "of a device"] if mesh else []
    columns = ("tensor", "count", *axes_column, "shape", "dtype", "bytes", *mesh_columns)
    table = _table(path, *columns, right=["count", "bytes", "of a device"])
    for facts in patterns:
        others = f" and {facts['other_kinds']} other kinds" if facts["other_kinds"] else ""
        extent = " ".join(map(str, facts["shape"])) + others
        axes = [facts["axes"]] if ours else []
        own = [_spelt(facts["partition"]), format_size(facts["device_bytes"])] if mesh else []
        table.add_row(
            facts["pattern"], str(facts["count"]), *axes, extent, facts["dtype"], format_size(facts["bytes"]), *own
        )
    console = _console()
    console.print(table)
    console.print(
        f"{len(tensors)} tensors, {format_size(total)}" + (f", {format_size(on_device)} on a device" if mesh else "")
    )


def _spelt(parts: Sequence[Any]) -> str:
    """A `PartitionSpec` in words: the mesh axes of each axis, a dot where it is whole."""
    return " ".join("·" if part is None else part if isinstance(part, str) else "*".join(part) for part in parts)


def _our_tensors(path: Path, mesh: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """The arrays of a checkpoint, and which part of each a device of the mesh has."""
    from math import prod

    from tpuconv.checkpoint.manifest import element_bytes, read_manifest
    from tpuconv.sharding import partition, shard_shape

    tensors = {}
    for name, a in read_manifest(path).arrays.items():
        parts, itemsize = partition(a.axes, a.shape, mesh), element_bytes(a.dtype)
        tensors[name] = {
            "dtype": a.dtype,
            "shape": a.shape,
            "axes": a.axes,
            "bytes": prod(a.shape) * itemsize,
            "partition": parts,
            "device_bytes": prod(shard_shape(a.shape, parts, mesh)) * itemsize,
        }
    return tensors


def _source_tensors(path: str) -> dict[str, dict[str, Any]]:
    from tpuconv.sources.hub import resolve
    from tpuconv.sources.source import open_source, read_header

    if path.endswith(".safetensors") and Path(path).is_file():
        infos = {info.name: info for info in read_header(Path(path))[2]}
    else:
        with resolve(path, weights=False) as resolved:
            infos = dict(open_source(resolved.folder, repo=resolved.repo).tensors)
    return {name: {"dtype": info.dtype, "shape": info.shape, "bytes": info.nbytes} for name, info in infos.items()}


@tpuconv.command(cls=Example, examples=("tpuconv families", "tpuconv families llama --table"))
@click.argument("name", required=False)
@click.option("--table", "as_table", is_flag=True, help="Show the mapping of every tensor.")
@JSON
def families(name: str | None, as_table: bool, as_json: bool) -> None:
    """List the families of models that can be converted, or show one and its table."""
    from tpuconv.models.registry import family_names, get_family

    chosen = [get_family(each) for each in ([name] if name else family_names())]
    if as_json:
        _print_json({"families": [_family_json(family) for family in chosen]})
        return
    console = _console()
    if not as_table:
        table = _table("families", "name", "architectures", "converts")
        for family in chosen:
            table.add_row(family.name, _lines(family.architectures), family.summary)
        console.print(table)
        return
    for family in chosen:
        _print_family_table(console, family)


def _family_json(family: Any) -> dict[str, Any]:
    rows = [
        {"hf": list(row.hf_names), "jax": list(row.jax_names), "layout": row.layout, "when": row.when}
        for row in family.table
    ]
    ignored = dict(family.table.ignore)
    return {"name": family.name, "architectures": list(family.architectures), "rows": rows, "ignored": ignored}


def _print_family_table(console: "Console", family: Any) -> None:
    from tpuconv.layout import LETTERS

    table = _table(family.name, "Hugging Face", "JAX", "layout", "when")
    for row in family.table:
        table.add_row(_lines(row.hf_names), _lines(row.jax_names), row.layout, row.when or "")
    console.print(table)
    for pattern, why in family.table.ignore.items():
        console.print(f"  not converted: {pattern}: {why}", soft_wrap=True)
    for copy, original in family.table.copies.items():
        console.print(f"  not converted: {copy}, where it is a copy of {original}", soft_wrap=True)
    used = {letter for row in family.table for letter in row.layout if letter.isalpha()} | {"L"}
    console.print(
        "  " + "; ".join(f"{letter} {what}" for letter, what in LETTERS.items() if letter in used), soft_wrap=True
    )
