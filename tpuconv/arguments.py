"""The values of arguments, by the types that their fields declare. Python checks no types: a value of another type
fails far from the call, or is taken for something else, `overwrite="no"` for True."""

import math
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field
from pathlib import Path
from types import GenericAlias
from typing import Any, get_args, get_origin

from tpuconv.errors import UsageError
from tpuconv.location import BucketPath, path_problem

_WRONG = object()
"""Stands for a value that is not of a type."""

_WANTED: Mapping[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path: a text or a pathlib.Path",
    Sequence: "a list",
    Mapping: "a dict",
    range: "a range, such as range(2)",
    Callable: "a function",
}
_SEVERAL = {"str": "texts", "int": "whole numbers", "float": "numbers", "Path": "paths"}
"""The items of a list, by the first of their types."""


def as_declared(field: "Field[Any]", value: Any, meaning: str, choices: Sequence[str] = ()) -> Any:
    """Returns the value of a field as its type says: numbers of numpy as Python numbers, an `os.PathLike` as text, `~`
    as the home folder unless there is a folder of this name, a single value as a tuple where there may be several.

    Raises:
        UsageError: it is of another type.
    """
    if value is field.default:
        return value
    kinds = _kinds(field.type)
    wanted = f"one of {', '.join(choices)}" if choices else _wanted(kinds[0])
    return given_as(
        *(field.name, value, *kinds),
        meaning=meaning,
        hint=f"give {wanted}" + ("" if field.default is MISSING else ", or leave it out"),
    )


def given_as(name: str, value: Any, *kinds: Any, meaning: str = "", hint: str = "") -> Any:
    """Returns the value of an argument as one of some types says, the first that it can be; see `as_declared`. The
    arguments after them are of the error.

    Raises:
        UsageError: it is of another type.
    """
    for kind in kinds:
        if (found := _converted(value, kind)) is not _WRONG:
            return found
    shown, hint = " ".join(reprlib.repr(value).split()), hint or f"give {_wanted(kinds[0])}"
    details = [meaning] if meaning else []
    if Path in kinds and isinstance(value, str | os.PathLike) and (problem := path_problem(value)):
        raise UsageError(f"{name} cannot be the path {shown}: {problem}", details=details, hint=hint)
    raise UsageError(f"{name} cannot be {shown}, of the type {type(value).__name__}", details=details, hint=hint)


def _kinds(declared: Any) -> Sequence[Any]:
    """Returns the types that a declared one stands for. A path is one of them, however it is given."""
    if isinstance(declared, str):
        inner = declared.removeprefix("Sequence[")
        return (declared if inner == declared else GenericAlias(Sequence, (inner.removesuffix("]"),)),)
    if get_origin(declared) in (Sequence, Mapping, Callable) or not (kinds := get_args(declared)):
        return (declared,)
    return (Path, *(kind for kind in kinds if kind not in (str, Path, BucketPath))) if Path in kinds else kinds


def _wanted(kind: Any) -> str:
    if isinstance(kind, str):
        return f"a {kind.removesuffix(' | None')}"
    if get_origin(kind) is Sequence:
        item = get_args(kind)[0]
        name = str(getattr(item, "__name__", item)).partition(" ")[0]
        return f"a list of {_SEVERAL[name]}" if name in _SEVERAL else "a list"
    kind = get_origin(kind) or kind
    return _WANTED.get(kind) or f"a {kind.__name__}"


def _converted(value: Any, kind: Any) -> Any:
    """Returns a value as one of a type; `_WRONG` if it is of another."""
    if kind is Any:
        return value
    if isinstance(kind, str):
        return value if _is_named(value, kind) else _WRONG
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # of numpy
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Sequence:
        return _several(value, inner[0])
    if origin is Mapping:
        return _by_name(value, *inner)
    if origin is Callable:
        return value if callable(value) else _WRONG
    if kind is Path:
        return _path(value)
    if kind is bool:
        return bool(value) if isinstance(value, int) and value in (0, 1) else _WRONG
    if kind in (int, float):
        return _number(value, kind)
    return value if isinstance(value, kind) else _WRONG


def _is_named(value: Any, declared: str) -> bool:
    """Returns True if a value is of a type that is written as text, since type checkers alone import it. Which values
    stand for a dtype is jax's to say."""
    names = {"DTypeLike", *(["Callable"] if callable(value) else []), *(kind.__name__ for kind in type(value).__mro__)}
    return not names.isdisjoint(re.findall(r"\w+", declared))


def _number(value: Any, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return _WRONG
    if kind is float or isinstance(value, int):
        return value
    return int(value) if value.is_integer() else _WRONG  # 8e9


def _path(value: Any) -> Any:
    if isinstance(value, BucketPath):
        return value
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or path_problem(path):
        return _WRONG
    if path.partition("/")[0] == "~" and not os.path.lexists("~"):
        path = os.path.expanduser(path)
    return Path(path) if isinstance(value, Path) else path


def _several(value: Any, kind: Any) -> Any:
    if value is None or isinstance(value, bytes | Mapping):
        return _WRONG
    several = (value,) if isinstance(value, str | os.PathLike) or not isinstance(value, Iterable) else value
    found = [_converted(os.fspath(each) if isinstance(each, os.PathLike) else each, kind) for each in several]
    return _WRONG if any(each is _WRONG for each in found) else tuple(found)


def _by_name(value: Any, name: Any, kind: Any) -> Any:
    if not isinstance(value, Mapping):
        return _WRONG
    if kind is Any:
        return value
    found = {_converted(key, name): _converted(each, kind) for key, each in value.items()}
    return _WRONG if any(each is _WRONG for each in (*found, *found.values())) else found
