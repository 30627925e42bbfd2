"""Every error that tpuconv raises on purpose, each with the exit code that the command line gives it.

Exit codes: 0 done, 1 a bug of ours, 2 usage, 3 a verification gate failed, 4 source corrupt or unsafe, 5 unsupported
architecture or unmapped tensors, 6 config invalid, 7 authentication or network, 8 disk or memory, 9 output exists, is
locked or belongs to another plan, 10 output corrupt, 130 and 143 interrupted and resumable.
"""

from collections.abc import Sequence

MAX_LETTERS = 4000
"""Of a message or a detail: what a file holds may be of any length."""


def _cut(text: str) -> str:
    return text if len(text) <= MAX_LETTERS else f"{text[: MAX_LETTERS - 3]}..."


class TpuconvError(Exception):
    """What went wrong and where, the facts that show it (`details`, one a line), and what to do next (`hint`)."""

    exit_code = 1

    def __init__(self, message: str, *, details: Sequence[str] = (), hint: str | None = None):
        super().__init__(message)
        self.message = _cut(message)
        self.details = tuple(map(_cut, details))
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.message, *(f"  {detail}" for detail in self.details)]
        return "\n".join(lines + [f"  -> {self.hint}"] if self.hint else lines)


class UsageError(TpuconvError):
    """The command or the call asks for something that cannot be: a missing path, options that exclude each other."""

    exit_code = 2


class GateError(TpuconvError):
    """A verification ran to its end and its figures lie outside a gate."""

    exit_code = 3


class SourceError(TpuconvError):
    """The source checkpoint is corrupt, incomplete or unsafe to read."""

    exit_code = 4


class UnsupportedConfig(TpuconvError):
    """No family implements this architecture, or the family does not implement what its config asks for."""

    exit_code = 5


class MappingError(TpuconvError):
    """The source's tensors and the family's table do not cover each other, name by name and shape by shape."""

    exit_code = 5


class ConfigError(TpuconvError):
    """config.json is missing, is no JSON object, or holds values that contradict each other."""

    exit_code = 6


class HubError(TpuconvError):
    """The Hub refused, does not know the repository, or cannot be reached."""

    exit_code = 7


class ResourceError(TpuconvError):
    """The disk or the memory budget is too small."""

    exit_code = 8


class OutputError(TpuconvError):
    """The output exists already, is being written by another process, or belongs to another plan."""

    exit_code = 9


class CorruptOutput(TpuconvError):
    """A converted checkpoint does not hold what its manifest says."""

    exit_code = 10


def shorten(lines: Sequence[str], limit: int = 20) -> list[str]:
    """The first lines of a long list, and how many there are more."""
    more = len(lines) - limit
    return [*lines[:limit], f"... and {more} more"] if more > 0 else list(lines)


def root_cause(error: BaseException) -> str:
    """The first line of what an exception goes back to, without the description of the array that TensorStore adds."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).partition("\n")[0].partition(" [tensorstore_spec=")[0]


class LayoutError(ValueError):
    """A layout of a table is malformed, or a tensor does not fit it. A bug in a table, never in a checkpoint."""
