"""The errors that tpuconv raises, each with its exit code on the command line.

Exit codes: 0 done, 1 a bug of ours, 2 usage, 3 a verification gate failed, 4 source corrupt or unsafe, 5 unsupported
architecture or unmapped tensors, 6 config invalid, 7 authentication or network, 8 disk or memory, 9 output exists, is
locked or belongs to another plan, 10 output corrupt, 130 and 143 interrupted and resumable.
"""

import errno
from collections.abc import Sequence

MAX_CHARACTERS = 4000
"""The largest length of a message or a detail, since text from files may be of any length."""


MAX_AT_END = 1000
"""How many of them are its end, which has the reason behind a path."""


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[: MAX_CHARACTERS - MAX_AT_END - 3]}...{text[-MAX_AT_END:]}"


class TpuconvError(Exception):
    """An error with a message (what went wrong, and where), details (one line each) and a hint (what to do next)."""

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
    """An argument or option is wrong: a missing path, options that exclude each other."""

    exit_code = 2


class GateError(TpuconvError):
    """A verification is complete, and a statistic is outside its gate."""

    exit_code = 3


class SourceError(TpuconvError):
    """The source checkpoint is corrupt, incomplete or unsafe to read."""

    exit_code = 4


class PushedCheckpoint(SourceError):
    """A repository on the Hub holds a checkpoint of tpuconv, not a release."""


class UnsupportedConfig(TpuconvError):
    """No family supports the architecture, or the family does not implement a key or value of config.json."""

    exit_code = 5


class MappingError(TpuconvError):
    """Names or shapes of the source's tensors do not match the family's table."""

    exit_code = 5


class ConfigError(TpuconvError):
    """config.json is missing or malformed, or has values that contradict each other."""

    exit_code = 6


class HubError(TpuconvError):
    """The Hub refused access, has no such repository, or cannot be reached."""

    exit_code = 7


class BucketError(TpuconvError):
    """A bucket refuses access, does not exist, or cannot be reached."""

    exit_code = 7


class AccessRefused(BucketError):
    """A bucket refuses access to an object."""


class ServerError(TpuconvError):
    """A server of models cannot be reached, or does not answer as expected."""

    exit_code = 7


class ResourceError(TpuconvError):
    """The disk or the memory budget is too small."""

    exit_code = 8


class OutputError(TpuconvError):
    """The output exists already, is being written by another process, or belongs to another plan."""

    exit_code = 9


class CorruptOutput(TpuconvError):
    """A converted checkpoint does not match its manifest."""

    exit_code = 10


def no_descriptors(what: object, error: BaseException) -> ResourceError | None:
    """Returns the error to raise for a file that could not be opened because too many are open; None for other
    errors."""
    if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    return ResourceError(
        f"{what} cannot be opened: {error.strerror}",
        hint="raise the limit of open files (`ulimit -n 4096`, or more), or close other programs",
    )


def shorten(lines: Sequence[str], limit: int = 20) -> list[str]:
    """Returns the first `limit` lines of a list, followed by a line with the number of the others."""
    more = len(lines) - limit
    return [*lines[:limit], f"... and {more} more"] if more > 0 else list(lines)


def root_cause(error: BaseException) -> str:
    """Returns the first line of an exception's root cause, without the array specification that TensorStore appends;
    all lines if the first ends in a colon."""
    while error.__cause__ is not None:
        error = error.__cause__
    first = str(error).partition("\n")[0].partition(" [tensorstore_spec=")[0]
    return " ".join(str(error).split()) if first.rstrip().endswith(":") else first


class LayoutError(ValueError):
    """A layout is malformed, or a tensor does not have its shape. It is a bug in a family's table, not an error in a
    checkpoint."""
