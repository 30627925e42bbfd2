"""Reads values of config.json by the types of a dataclass's fields."""

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from tpuconv.errors import ConfigError
from tpuconv.jsonfile import short

MOST_IN_A_LIST = 4096
"""The largest length of a list, which has one entry for each layer."""


def hints_of(cls: type) -> Mapping[str, Any]:
    """Returns the types of a dataclass's fields, by their names."""
    return _hints(cls)


@cache
def _hints(cls: Any) -> Mapping[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def checked_values(read: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of the keys that have a type in `hints`, lists as tuples, those in lists too.

    Raises:
        ConfigError: a value has another type, or a list is too long.
    """
    given = {key: hint for key, hint in hints.items() if key in read}
    wrong = [
        f"{key}={short(read[key])} is not of type {_type_name(hint)}"
        for key, hint in given.items()
        if not has_type(read[key], hint)
    ]
    wrong += [
        f"{key} has {len(read[key])} entries, more than {MOST_IN_A_LIST}"
        for key in given
        if isinstance(read[key], list) and len(read[key]) > MOST_IN_A_LIST
    ]
    if wrong:
        raise ConfigError(
            "config.json has values of the wrong type",
            details=wrong,
            hint="write them in these types; a key that is left out has the default of transformers",
        )
    return {key: _hashable(read[key]) for key in given}


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def has_type(value: Any, hint: Any) -> bool:
    """Returns whether a value of JSON is of a type."""
    if get_origin(hint) in (UnionType, Union):
        return any(has_type(value, alternative) for alternative in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, list | tuple) and all(has_type(part, get_args(hint)[0]) for part in value)
    if hint is float:  # JSON may write a float as 1000000; NaN and infinity compare false
        return type(value) in (int, float) and -1e300 < value < 1e300
    return value is None if hint is NoneType else type(value) is hint


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)


def object_of(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns the object that a parsed config.json, or an object in it, has under a key; an empty one for none.

    Raises:
        ConfigError: the value is no object.
    """
    found = raw.get(key) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"config.json: {key}={short(found)} is not an object")
    return dict(found)
