"""The flags of options. The library names an option as Python spells it, `mesh=` or `encoding="keep"`; here, and only
here, it becomes `--mesh` and `--encoding keep`."""

import re
from ast import literal_eval
from collections.abc import Mapping
from typing import Any

FLAGS: Mapping[str, str] = {
    "gates": "--gate",
    "recipe": "--out-config",
    "topologies": "--topology",
    "address": "--ray",
    "count": "--process-count",
}
"""The flags that are not spelled as their options are."""

WORDS: Mapping[str, str] = {
    "part=": "--process-count, --distributed and --ray",
    "ProcessPart()": "--process-index and --process-count",
    "ProcessPart(I, N)": "--process-index I --process-count N",
    "find_part()": "--distributed",
    "on_ray()": "--ray",
    "to_json()": "--json",
    "images=[FILE]": "--image FILE",
    "sounds=[FILE]": "--sound FILE",
}
"""Flags in place of other words of the Python interface."""

_WORD = re.compile("`(?:(" + "|".join(map(re.escape, WORDS)) + r")|(\w+)=([^`]*))`")


def flag_of(name: str) -> str:
    """Returns the flag of an option."""
    return FLAGS.get(name, f"--{name.replace('_', '-')}")


def with_flags(text: str) -> str:
    """Returns a text of the library with flags in place of the options that it names."""
    return _WORD.sub(lambda found: WORDS[found[1]] if found[1] else _given(flag_of(found[2]), found[3]), text)


def _given(flag: str, value: str) -> str:
    """Returns a flag with a value, which Python spells so. What is no literal, such as SRC, stays as it is."""
    try:
        parsed: Any = literal_eval(value)
    except (SyntaxError, ValueError):
        return f"{flag} {value}".rstrip()
    if parsed is True:
        return flag
    if isinstance(parsed, dict):
        parsed = [f"{name}={bound}" for name, bound in parsed.items()]
    return " ".join(f"{flag} {each}" for each in (parsed if isinstance(parsed, list | tuple) else [parsed]))
