"""Text for people: sizes and counts in words, and untrusted text with escapes.

Names, configs, paths and arguments may contain terminal control codes, bidirectional controls, bytes that are not
UTF-8, and markup. What is returned shows such characters as escapes and can be encoded as UTF-8.
"""

import json as jsonlib
import re
from collections.abc import Collection, Sequence
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Any

_UNSAFE = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # control codes
    "\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f"
    # ^ invisible characters, and those that reorder text: bidirectional controls, line separators, tags
    "\ud800-\udfff"  # lone surrogates: bytes of a name that are not UTF-8, or half a pair in JSON
    "]"
)

_MARKDOWN = re.compile(r"[\\`*_{}\[\]<>()#|!&~$]|:(?=//)")


def plain(text: str, keep: str = "") -> str:
    r"""Returns the text with unsafe characters as escapes (`\x1b`, `\u202e`, `\udc80`), for a terminal or a log.
    Newline and tab are escaped too; `keep` lists characters that are not."""
    return _UNSAFE.sub(lambda match: match[0] if match[0] in keep else _escaped(match[0]), text)


def has_surrogates(text: str) -> bool:
    """Returns whether the text has lone surrogates: undecodable bytes, or half a pair. Such text has no UTF-8."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def markdown(text: str) -> str:
    """Returns the text escaped for a line of Markdown: nothing in it is markup or HTML."""
    return _MARKDOWN.sub(lambda match: f"\\{match[0]}", plain(text))


def code(text: str) -> str:
    """Returns the text as a code span of Markdown, enclosed in more backticks than it has in a row."""
    text = plain(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    # Markdown strips a space from both ends of a span. Add one if the text begins or ends with a space or a backtick.
    pad = " " if not text or text[0] in "` " or text[-1] in "` " else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def html(text: str) -> str:
    """Returns the text escaped for an element or a quoted attribute of HTML."""
    return escape(plain(text))


def json(value: Any, *, ascii_only: bool = False) -> str:
    """Returns a value as indented JSON (RFC 8259). Unsafe characters, and with `ascii_only` all that are not ASCII, are
    written as `\\uXXXX`. NaN and infinity are written as null, since JSON does not have them."""
    value = jsonlib.loads(jsonlib.dumps(value), parse_constant=lambda _: None)
    text = jsonlib.dumps(value, indent=1, ensure_ascii=ascii_only)
    # In strings `dumps` has escaped control characters: a newline here is one between values.
    return _UNSAFE.sub(lambda match: match[0] if match[0] == "\n" else jsonlib.dumps(match[0])[1:-1], text)


def format_size(nbytes: float) -> str:
    """Formats a size in the unit that fits, with three digits: `999 B`, `1.5 kB`, `688 GB`."""
    if nbytes < 0:
        return f"-{format_size(-nbytes)}"
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        nbytes /= 1000
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
    return f"{format_rate(nbytes / 1000, 3)} TB"


def format_count(number: int, noun: str) -> str:
    """Formats a number with a noun: `1 tensor`, `2 tensors`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def some(names: Sequence[str], most: int) -> str:
    """Lists the first names, and the number of the others: `a, b and 3 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def format_rate(value: float, digits: int) -> str:
    """Formats a number with so many significant digits below 1000, and as an integer from 1000 on: `32.4`, `8,080`;
    never `8.08e+03`."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.{digits}g}"


MOST_SHOWN = 60
"""The most characters of a value that `OneLine` shows."""


class OneLine:
    """The representation of a dataclass in a notebook: one line. Of a long value it shows how many items it has, or
    its class."""

    def __repr__(self) -> str:
        """Returns the name of the class, with the fields that have values."""
        values = ((each.name, getattr(self, each.name)) for each in fields(self))  # type: ignore[arg-type]
        shown = ", ".join(f"{name}={_shortly(value)}" for name, value in values if value not in (None, (), [], {}))
        return f"{type(self).__name__}({shown})"


def _shortly(value: Any) -> str:
    if isinstance(value, Path):
        return repr(str(value))
    if isinstance(value, Collection) and not isinstance(value, str):
        return text if len(text := repr(value)) <= MOST_SHOWN else f"<{format_count(len(value), 'item')}>"
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"<{type(value).__name__}>"
