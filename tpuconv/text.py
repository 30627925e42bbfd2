"""Foreign text made safe to show. Names, configs, paths and arguments come from others: they may hold control codes of
terminals, characters that reverse the order of those after them, bytes that are not UTF-8, and markup. Every function
returns text that shows such characters as escapes and can be encoded as UTF-8.
"""

import json as jsonlib
import re
from html import escape
from typing import Any

_UNSAFE = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # control codes
    "\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f"
    # ^ not seen, or changing the order of what is: bidirectional controls, separators of lines, tags
    "\ud800-\udfff"  # lone surrogates: bytes of a name that are not UTF-8, or a half of a pair in JSON
    "]"
)

_MARKDOWN = re.compile(r"[\\`*_{}\[\]<>()#|!&~$]|:(?=//)")


def plain(text: str, keep: str = "") -> str:
    r"""The text with unsafe characters as escapes (`\x1b`, `\u202e`, `\udc80`), for a terminal or a log. A newline and
    a tab are escaped too, unless `keep` holds them. Plain text stays as it is."""
    return _UNSAFE.sub(lambda match: match[0] if match[0] in keep else _escaped(match[0]), text)


def has_surrogates(text: str) -> bool:
    """Whether bytes that the locale's encoding does not have, or halves of pairs, stand in the text."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def markdown(text: str) -> str:
    """The text within a line of Markdown, where nothing of it is markup or HTML."""
    return _MARKDOWN.sub(lambda match: f"\\{match[0]}", plain(text))


def code(text: str) -> str:
    """The text as a code span of Markdown. Backticks in it are enclosed by more of them."""
    text = plain(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    # A space at either end is stripped by the reader of a span: where both ends have one, or a backtick, one is added.
    pad = " " if not text or text[0] in "` " or text[-1] in "` " else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def html(text: str) -> str:
    """The text within an element or a quoted attribute of HTML."""
    return escape(plain(text))


def json(value: Any, *, ascii_only: bool = False) -> str:
    """JSON (RFC 8259) over several lines. Unsafe characters, and others than ASCII where `ascii_only`, are written as
    `\\uXXXX`; NaN and infinity, which JSON does not have, as null."""
    value = jsonlib.loads(jsonlib.dumps(value), parse_constant=lambda _: None)
    text = jsonlib.dumps(value, indent=1, ensure_ascii=ascii_only)
    # Within strings `dumps` has escaped what is below a space: a newline here is one between values.
    return _UNSAFE.sub(lambda match: match[0] if match[0] == "\n" else jsonlib.dumps(match[0])[1:-1], text)
