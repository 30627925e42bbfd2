"""JSON files, read strictly: a file that is no regular file or too large, a text that is ambiguous, a value of another
type are errors that name the file and the key.

    SCHEMA = {"format": int, "arrays": Each({"shape": [Size], "dtype": str, "axes": Optional(str)})}
    facts = check(parse(read_bytes(path, MIB, ConfigError), str(path), ConfigError), SCHEMA, str(path), ConfigError)
"""

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from tpuconv.errors import TpuconvError

MIB = 1 << 20
MAX_BYTES = 32 * MIB
"""Of files that people write, and programs for them."""
MAX_DIGITS = 100
"""Of an integer. Python needs time that grows with the square of their number."""


# -- bytes ------------------------------------------------------------------------------------------------------------


@contextmanager
def opened(path: Path, error: type[TpuconvError], *, hint: str | None = None) -> Iterator[tuple[int, os.stat_result]]:
    """A regular file, open to be read, and its status. Errors of the system are given with the file's name, also those
    of what is done with it.

    Raises:
        error: the file is missing (with `hint`), no regular file, or not readable.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO without a writer must not hang us
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise error(f"{path} is no regular file, but {_kind(status.st_mode)}")
            yield fd, status
        finally:
            os.close(fd)
    except FileNotFoundError:
        link = ": it is a link to a file that is not there" if path.is_symlink() else ""
        raise error(f"{path} is missing{link}", hint=hint) from None
    except OSError as e:
        raise error(f"{path} cannot be read: {e.strerror or e}") from None


def read_bytes(path: Path, limit: int, error: type[TpuconvError], *, hint: str | None = None) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises:
        error: see `opened`; or the file is too large, or has something else in its place: a Git LFS pointer or a web
            page.
    """
    if "\0" in str(path):
        raise error(f"{str(path)!r} is no name of a file")
    with opened(path, error, hint=hint) as (fd, status):
        if status.st_size > limit:
            raise error(f"{path} has {status.st_size} bytes, more than the {limit} that it may have")
        blocks, left = [], limit
        while left >= 0 and (block := os.read(fd, MIB)):  # a read of `limit` bytes would reserve as much memory
            blocks.append(block)
            left -= len(block)
    if left < 0:  # it grew
        raise error(f"{path} has more than the {limit} bytes that it may have")
    data = b"".join(blocks)
    if what := stand_in(data):
        raise error(f"{path} is {what}")
    return data


def stand_in(start: bytes) -> str | None:
    """What stands in the place of a file that begins like this; None where it may be the file itself."""
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself: run `git lfs pull`, or give the Hub id"
    if start[:1000].lstrip()[:1] == b"<":
        return "a web page, not the file itself: the download was answered by a login or error page"
    return None


_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "a device")


# -- values -----------------------------------------------------------------------------------------------------------


def parse(data: bytes, what: str, error: type[TpuconvError], *, constants: bool = True) -> Any:
    """The value of a JSON text in UTF-8. Without `constants` numbers are finite. `-0` is a float, as no integer is.

    Raises:
        error: the text, which is called `what`, is no JSON, or ambiguous: an object has a key twice.
    """
    try:
        text = data.decode()
        value = json.loads(
            text,
            object_pairs_hook=_no_duplicates,
            parse_int=_integer,
            parse_float=None if constants else _finite,
            parse_constant=None if constants else _finite,
        )
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(value, ensure_ascii=False).encode()  # raises where one half of a pair stands alone
    except RecursionError:
        raise error(f"{what} is no valid JSON: it is nested too deep") from None
    except ValueError as e:
        raise error(f"{what} is no valid JSON: {e}") from None
    return value


def short(value: Any, letters: int = 80) -> str:
    """A value as errors show it, cut where it is long."""
    text = repr(value[:letters] if isinstance(value, str | list | tuple) else value)
    return text if len(text) <= letters else f"{text[: letters - 3]}..."


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"'{twice}' stands twice")
    return out


def _integer(text: str) -> int | float:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return -0.0 if text == "-0" else int(text)


def _finite(text: str) -> float:
    if not isfinite(value := float(text)):
        raise ValueError(f"{text[:80]} is no finite number")
    return value


# -- types ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Optional:
    """Of a key: it may be absent."""

    schema: Any


@dataclass(frozen=True)
class Each:
    """An object with any keys, each of whose values fits."""

    schema: Any


@dataclass(frozen=True)
class Exactly:
    """An object that has no keys but these."""

    keys: Mapping[str, Any]


@dataclass(frozen=True)
class OneOf:
    """One of these values."""

    values: tuple[Any, ...]

    def __init__(self, *values: Any):
        object.__setattr__(self, "values", values)


@dataclass(frozen=True)
class Range:
    """An integer from `least` to `most`, both included."""

    least: int
    most: int = (1 << 63) - 1


@dataclass(frozen=True)
class AtLeast:
    """A number that is not less; unless it must be `finite`, also infinity or NaN."""

    least: float
    finite: bool = True


Size = Range(0)
"""A number of elements or bytes."""

_TYPES: Mapping[Any, tuple[type | tuple[type, ...], str]] = {
    int: (int, "an integer"),
    float: ((int, float), "a number"),
    str: (str, "a text"),
    bool: (bool, "true or false"),
    dict: (dict, "an object"),
    list: (list, "a list"),
    None: (type(None), "null"),
    type(None): (type(None), "null"),
}


def check(value: Any, schema: Any, what: str, error: type[TpuconvError]) -> Any:
    """The value, if it fits the schema: a type (a `float` is any finite number), None, `Any`, a list `[T]`, an object
    `{"key": T}`, one of several as a tuple or by `|`, or a marker of this module. Keys that an object does not list are
    allowed in it.

    Raises:
        error: it does not fit. The message names the file `what`, the key (`arrays.norm.scale.shape[0]`), what is
            expected and what is there.
    """
    if fault := _fault(value, schema, ()):
        path, expected, there = fault
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
        key = key if key.isprintable() and len(key) <= 200 else short(key)
        found = "and is absent" if there is _ABSENT else f"not {short(there)}"
        raise error(f"{what}: {key + ' ' if key else ''}must be {expected}, {found}")
    return value


_ABSENT = object()

_Fault = tuple[tuple[str | int, ...], str, Any]
"""Where a value does not fit, what is expected there, and what is there."""


def _fault(value: Any, schema: Any, path: tuple[str | int, ...]) -> _Fault | None:
    match schema:
        case tuple() | UnionType():
            faults = [_fault(value, arm, path) for arm in _arms(schema)]
            if None in faults:
                return None
            deepest = max((fault for fault in faults if fault), key=lambda fault: len(fault[0]))
            alike = [fault[1] for fault in faults if fault and fault[0] == deepest[0]]
            return deepest[0], " or ".join(dict.fromkeys(alike)), deepest[2]
        case Optional():
            return _fault(value, schema.schema, path)
        case list():
            own = schema[0]
            inner: Any = ((i, item, own) for i, item in enumerate(value)) if isinstance(value, list) else None
        case Each():
            inner = ((key, item, schema.schema) for key, item in value.items()) if isinstance(value, dict) else None
        case dict() | Exactly():
            keys: Mapping[str, Any] = schema if isinstance(schema, dict) else schema.keys
            inner = _members(value, keys, isinstance(schema, Exactly)) if isinstance(value, dict) else None
        case _:
            return None if _is(value, schema) else (path, _spelt(schema), value)
    if inner is None:
        return path, _spelt(schema), value
    return next((fault for key, item, own in inner if (fault := _fault(item, own, (*path, key)))), None)


def _members(value: Mapping[str, Any], keys: Mapping[str, Any], exactly: bool) -> Iterator[tuple[str, Any, Any]]:
    """Each key with its value and its schema; of keys that are not known a schema that nothing fits."""
    for key, own in keys.items():
        if key in value or not isinstance(own, Optional):
            yield key, value.get(key, _ABSENT), own
    if exactly:
        yield from ((key, value[key], OneOf()) for key in value if key not in keys)


def _arms(schema: Any) -> tuple[Any, ...]:
    return schema if isinstance(schema, tuple) else get_args(schema)


def _is(value: Any, schema: Any) -> bool:
    if schema is Any:
        return value is not _ABSENT
    if isinstance(schema, OneOf):
        return any(type(value) is type(own) and value == own for own in schema.values)
    if isinstance(schema, Range):
        return type(value) is int and schema.least <= value <= schema.most
    if isinstance(schema, AtLeast):
        is_number = _is(value, float) if schema.finite else type(value) in (int, float)
        return is_number and not value < schema.least
    if isinstance(value, bool):  # which Python counts among integers
        return schema is bool
    return isinstance(value, _TYPES[schema][0]) and (not isinstance(value, float) or -1e300 < value < 1e300)


def _spelt(schema: Any) -> str:
    match schema:
        case tuple() | UnionType():
            return " or ".join(map(_spelt, _arms(schema)))
        case OneOf():
            return " or ".join(map(repr, schema.values)) or "absent, as it is no known key"
        case Range():
            return f"an integer from {schema.least} to {schema.most}"
        case AtLeast():
            return f"a number of at least {schema.least:g}"
        case list():
            return "a list"
        case dict() | Each() | Exactly():
            return "an object"
        case _:
            return "anything" if schema is Any else _TYPES[schema][1]
