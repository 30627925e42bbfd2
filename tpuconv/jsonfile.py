"""Strict reading of JSON files. A file that is not a regular file or is too large, ambiguous JSON, and values of a
wrong type are errors, which name the file and the key.

    SCHEMA = {"format": int, "arrays": Each({"shape": [Size], "dtype": str, "axes": Optional(str)})}
    facts = check(parse(read_bytes(path, MIB, ConfigError), str(path), ConfigError), SCHEMA, str(path), ConfigError)
"""

import codecs
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

from tpuconv import buckets
from tpuconv.errors import TpuconvError, no_descriptors
from tpuconv.location import BucketPath, Location

MIB = 1 << 20
MAX_BYTES = 32 * MIB
"""The largest size of configuration files."""
MAX_DIGITS = 100
"""The largest number of digits of an integer. Python's time to parse one grows with its square."""
BYTE_ORDER_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""How a text begins that an editor saved in another way than JSON files are."""


# -- bytes ------------------------------------------------------------------------------------------------------------


@contextmanager
def opened(path: Path, error: type[TpuconvError], *, hint: str | None = None) -> Iterator[tuple[int, os.stat_result]]:
    """Yields a context with a regular file, open for reading: its descriptor and its status. An OSError within the
    context is raised as `error` with the file's name.

    Raises:
        error: the file is missing (with `hint`), not a regular file, or not readable.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # so that a FIFO without a writer does not block
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise error(f"{path} is not a regular file but {_kind(status.st_mode)}")
            yield fd, status
        finally:
            os.close(fd)
    except FileNotFoundError:
        link = ": it is a link to a missing file" if path.is_symlink() else ""
        raise error(f"{path} is missing{link}", hint=hint) from None
    except OSError as e:
        raise no_descriptors(path, e) or error(f"{path} cannot be read: {e.strerror or e}") from e


def read_bytes(path: Location, limit: int, error: type[TpuconvError], *, hint: str | None = None) -> bytes:
    """Returns the content of a regular file, or of an object, of at most `limit` bytes.

    Raises:
        error: the file is missing (with `hint`), not a regular file, not readable or too large, or it is a Git LFS
            pointer or a web page.
    """
    if "\0" in str(path):
        raise error(f"{str(path)!r} is not a file name")
    if isinstance(path, BucketPath):
        return _read_object(path, limit, error, hint)
    with opened(path, error, hint=hint) as (fd, status):
        if status.st_size > limit:
            raise error(f"{path} has {status.st_size} bytes, the limit is {limit}")
        blocks, left = [], limit
        while left >= 0 and (block := os.read(fd, MIB)):  # os.read(fd, limit) would allocate `limit` bytes
            blocks.append(block)
            left -= len(block)
    if left < 0:  # it grew after fstat
        raise error(f"{path} has more than {limit} bytes")
    data = b"".join(blocks)
    refuse_placeholder(path, data, error)
    return data


def _read_object(path: BucketPath, limit: int, error: type[TpuconvError], hint: str | None) -> bytes:
    found = buckets.facts(path)
    if found is None:
        raise error(f"{path} is missing", hint=hint)
    if found.size > limit:
        raise error(f"{path} has {found.size} bytes, the limit is {limit}")
    data = bytes(buckets.read(path))
    refuse_placeholder(path, data, error)
    return data


LFS_POINTER = b"version https://git-lfs"
"""The first bytes of a pointer of Git LFS."""
LFS_ADVICE = "run `git lfs pull`, or give the Hub id"


def refuse_placeholder(path: Location, start: bytes, error: type[TpuconvError]) -> None:
    """Checks by the first bytes of a file that it is the file itself.

    Raises:
        error: something else was stored instead: a Git LFS pointer or a web page.
    """
    if start.startswith(LFS_POINTER):
        raise error(f"{path} is a Git LFS pointer, not the file itself", hint=LFS_ADVICE)
    if start[:1000].lstrip()[:1] == b"<":
        raise error(
            f"{path} is a web page, not the file itself",
            hint="download it again, logged in: a login or error page was stored in its place",
        )


_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "a device")


# -- values -----------------------------------------------------------------------------------------------------------


def parse(data: bytes, what: str, error: type[TpuconvError], *, constants: bool = True) -> Any:
    """Returns the value of a JSON text in UTF-8. `-0` becomes the float -0.0, since integers have no negative zero.

    Args:
        data: the text.
        what: its name for messages.
        error: the class of errors.
        constants: whether NaN and infinity are allowed.

    Raises:
        error: the text is not valid JSON, or an object has a key twice.
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
            json.dumps(value, ensure_ascii=False).encode()  # raises for lone surrogates
    except RecursionError:
        raise error(f"{what} is not valid JSON: it is nested too deeply") from None
    except ValueError as e:
        is_other = data.startswith(BYTE_ORDER_MARKS)
        hint = "save it in UTF-8, without a byte order mark" if is_other else None
        if isinstance(e, json.JSONDecodeError) and _is_near_json(text[: e.pos].rstrip(), text[e.pos :].lstrip()):
            hint = "JSON has no comments, and no comma before a closing bracket: remove them"
        raise error(f"{what} is not valid JSON: {e}", hint=hint) from None
    return value


def _is_near_json(before: str, after: str) -> bool:
    """Returns True if a fault between two parts of a text is a comment, or a comma before a closing bracket."""
    is_comma = before.endswith(",") or after.startswith(",")
    return after.startswith(("#", "//", "/*")) or (is_comma and after.lstrip(", \n\r\t").startswith(("}", "]")))


def short(value: Any, limit: int = 80) -> str:
    """Returns the repr of a value for messages, at most `limit` characters of it."""
    text = repr(value[:limit] if isinstance(value, str | list | tuple) else value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key '{twice}' appears twice")
    return out


def _integer(text: str) -> int | float:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return -0.0 if text == "-0" else int(text)


def _finite(text: str) -> float:
    if not isfinite(value := float(text)):
        raise ValueError(f"{text[:80]} is not a finite number")
    return value


# -- types ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Optional:
    """The schema of a key that may be absent."""

    schema: Any


@dataclass(frozen=True)
class Each:
    """An object with any keys, whose values all match the schema."""

    schema: Any


@dataclass(frozen=True)
class Exactly:
    """An object with these keys and no others."""

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
    """A number that is not less than `least`. If not `finite`, infinity and NaN are allowed too."""

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
    """Returns the value if it matches the schema.

    A schema is a type (`float` is any finite number), None, `Any`, a list `[T]`, an object `{"key": T}`, alternatives
    as a tuple or with `|`, or a class of this module. An object may have keys that its schema does not list.

    Raises:
        error: the value does not match. The message names `what`, the key (`arrays.norm.scale.shape[0]`), the expected
            and the actual value.
    """
    if fault := _fault(value, schema, ()):
        path, expected, actual = fault
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
        key = key if key.isprintable() and len(key) <= 200 else short(key)
        found = "and is absent" if actual is _ABSENT else f"not {short(actual)}"
        raise error(f"{what}: {key + ' ' if key else ''}must be {expected}, {found}")
    return value


_ABSENT = object()

_Fault = tuple[tuple[str | int, ...], str, Any]
"""The path to a value that does not match, what is expected, and the actual value."""


def _fault(value: Any, schema: Any, path: tuple[str | int, ...]) -> _Fault | None:
    match schema:
        case tuple() | UnionType():
            faults = [_fault(value, alternative, path) for alternative in _alternatives(schema)]
            if None in faults:
                return None
            deepest = max((fault for fault in faults if fault), key=lambda fault: len(fault[0]))
            alike = [fault[1] for fault in faults if fault and fault[0] == deepest[0]]
            return deepest[0], " or ".join(dict.fromkeys(alike)), deepest[2]
        case Optional():
            return _fault(value, schema.schema, path)
        case list():
            element = schema[0]
            inner: Any = ((i, item, element) for i, item in enumerate(value)) if isinstance(value, list) else None
        case Each():
            inner = ((key, item, schema.schema) for key, item in value.items()) if isinstance(value, dict) else None
        case dict() | Exactly():
            keys: Mapping[str, Any] = schema if isinstance(schema, dict) else schema.keys
            inner = _members(value, keys, isinstance(schema, Exactly)) if isinstance(value, dict) else None
        case _:
            return None if _matches(value, schema) else (path, _description(schema), value)
    if inner is None:
        return path, _description(schema), value
    return next((fault for key, item, schema in inner if (fault := _fault(item, schema, (*path, key)))), None)


def _members(value: Mapping[str, Any], keys: Mapping[str, Any], exactly: bool) -> Iterator[tuple[str, Any, Any]]:
    """Yields each key with its value and its schema. If `exactly`, unknown keys get a schema that nothing matches."""
    for key, schema in keys.items():
        if key in value or not isinstance(schema, Optional):
            yield key, value.get(key, _ABSENT), schema
    if exactly:
        yield from ((key, value[key], OneOf()) for key in value if key not in keys)


def _alternatives(schema: Any) -> tuple[Any, ...]:
    return schema if isinstance(schema, tuple) else get_args(schema)


def _matches(value: Any, schema: Any) -> bool:
    if schema is Any:
        return value is not _ABSENT
    if isinstance(schema, OneOf):
        return any(type(value) is type(allowed) and value == allowed for allowed in schema.values)
    if isinstance(schema, Range):
        return type(value) is int and schema.least <= value <= schema.most
    if isinstance(schema, AtLeast):
        is_number = _matches(value, float) if schema.finite else type(value) in (int, float)
        return is_number and not value < schema.least
    if isinstance(value, bool):  # a subclass of int in Python
        return schema is bool
    return isinstance(value, _TYPES[schema][0]) and (not isinstance(value, float) or -1e300 < value < 1e300)


def _description(schema: Any) -> str:
    match schema:
        case tuple() | UnionType():
            return " or ".join(map(_description, _alternatives(schema)))
        case OneOf():
            return " or ".join(map(repr, schema.values)) or "absent: the key is unknown"
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
