"""Writes text, JSON and tables to a terminal. Foreign text (names, paths, messages) is made `plain` here and is never
markup. Options that texts of the library name are shown as flags."""

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import click

from tpuconv import text as texts
from tpuconv.commands.flags import with_flags
from tpuconv.text import plain

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

PLAIN_WIDTH = 180  # columns of tables that go to a file or a pipe
COPIED = " " * 5
"""The beginning of a command in a hint, which a user copies."""
EXPLANATIONS = ("message", "details", "hint", "reason", "warning", "notes", "rounded", "summary", "advice")
"""The keys of JSON whose texts may name options."""
NAME_WIDTH = 24  # to which names are broken before a column is left out
WORDS_OF_SENTENCE = re.compile(r"\S+ ?")
PIECES_OF_NAME = re.compile(r"(?:\{[^{}]*\}|[^.,/])+[.,/]?|[.,/]")
"""The pieces of a name that a table keeps in one line: a line ends at a dot, comma or slash, but not within the braces
of a pattern."""


def say(text: str, nl: bool = True, err: bool = False) -> None:
    """Writes text as it is: foreign text in it must be `plain`."""
    click.echo(text, file=sys.stderr if err else sys.stdout, nl=nl)


def say_error(kind: str, text: str) -> None:
    """Writes an error, whose text must be `plain`, to stderr. For a terminal lines are broken between words; what
    follows of a line is indented. A line that begins with `COPIED` stays as it is."""
    shown = f"{kind}: {text}"
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        lines = shown.split("\n")
        shown = "\n".join(line if line.startswith(COPIED) else _between_words(line, width) for line in lines)
    say(click.style(kind, fg="red", bold=True) + shown.removeprefix(kind), err=True)


def _between_words(line: str, width: int) -> str:
    begin = " " * (len(line) - len(line.lstrip(" ")) + 2)
    return textwrap.fill(line, width, subsequent_indent=begin, break_long_words=False, break_on_hyphens=False)


def print_json(value: Mapping[str, Any]) -> None:
    """Writes one JSON object, in ASCII if stdout's encoding is not UTF."""
    unicode = (sys.stdout.encoding or "").lower().replace("_", "-").startswith("utf")
    say(texts.json(_worded(value), ascii_only=not unicode))


def _worded(value: Any, explains: bool = False) -> Any:
    """Returns a value for JSON with flags in its explanations."""
    if isinstance(value, Mapping):
        return {key: _worded(each, key in EXPLANATIONS) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_worded(each, explains) for each in value]
    return with_flags(value) if explains and isinstance(value, str) else value


def console(err: bool = False) -> "Console":
    """Returns the console that draws everything. A string has no markup in it and is made `plain`."""
    from rich.console import Console
    from rich.text import Text

    class PlainConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            own = {name: options[name] for name in ("style", "justify", "overflow") if name in options}
            return Text(plain(text), **own)

    if err:
        return PlainConsole(stderr=True)
    return PlainConsole(width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def show(*parts: str | tuple[str, str]) -> None:
    """Writes a line to stdout, in parts: a string, or a pair of a string and its style. For a terminal it is broken
    between words."""
    console().print(styled(*parts), soft_wrap=not sys.stdout.isatty())


def styled(*parts: str | tuple[str, str]) -> "Text":
    """Foreign text with styles: a string, or a pair of a string and its style."""
    from rich.text import Text

    pairs = ((part, "") if isinstance(part, str) else part for part in parts)
    return Text.assemble(*((plain(with_flags(text)), style) for text, style in pairs))


def lines(items: Iterable[str]) -> "Text":
    """Foreign strings, each on a line of its own."""
    from rich.text import Text

    return Text("\n".join(plain(with_flags(item)) for item in items))


@dataclass
class Table:
    """A table that fits its console: names are broken at dots, and sentences between words; then the columns in
    `optional` are left out: first those without text, then the others in this order, which a line names. A word or
    number is broken only if the narrowest table without them is still too wide.

    Attributes:
        title: a line above it.
        columns: their headings.
        right: the headings of columns with numbers.
        optional: headings of columns that may be left out, if there are any of these names, the first one first.
    """

    title: str
    columns: Sequence[str]
    right: Sequence[str] = ()
    optional: Sequence[str] = ()
    rows: list[list["Text"]] = field(default_factory=list)

    def add_row(self, *cells: "str | Text") -> None:
        """Adds a row: for each column a string without markup, or text with styles."""
        self.rows.append([styled(cell) if isinstance(cell, str) else cell for cell in cells])

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich import box
        from rich.table import Table
        from rich.text import Text

        shown, left_out = self._fitting(options.max_width)
        widths = self._broken_widths(shown, options.max_width)
        title = plain(with_flags(self.title))
        table = Table(
            title=title,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            min_width=min(len(title) + 2, 100, options.max_width),  # the title would be broken to the table's width
        )
        for name in shown:
            justify: Literal["left", "right"] = "right" if name in self.right else "left"
            table.add_column(name, justify=justify, overflow="fold", max_width=widths[name])
        for row in self.rows:
            cells = (row[self.columns.index(name)] for name in shown)
            table.add_row(*(_broken(cell, widths[name]) for name, cell in zip(shown, cells, strict=True)))
        yield table
        if left_out:
            yield Text(f"  not shown at this width: {', '.join(left_out)} (--json has all)", style="dim")

    def _fitting(self, width: int) -> tuple[list[str], list[str]]:
        """Returns the columns that are shown, and those that are left out."""
        shown, left_out = list(self.columns), []
        for name in sorted((name for name in self.optional if name in self.columns), key=self._has_text):
            if self._width(shown, NAME_WIDTH) <= width:
                break
            shown.remove(name)
            left_out += [name] * self._has_text(name)
        return shown, left_out

    def _has_text(self, name: str) -> bool:
        return any(row[self.columns.index(name)] for row in self.rows)

    def _width(self, shown: Sequence[str], most: int) -> int:
        """Columns of the terminal that these take if cells with dots are broken to `most`."""
        return _framed(min(self._natural(name), max(most, self._least(name))) for name in shown)

    def _natural(self, name: str) -> int:
        at = self.columns.index(name)
        return max([len(name), *(line.cell_len for row in self.rows for line in row[at].split())])

    def _least(self, name: str) -> int:
        """Returns the width of a column's longest piece. A number has none; text with styles has words."""
        from rich.cells import cell_len

        at, words = self.columns.index(name), name.split()
        for line in (line for row in self.rows for line in row[at].split()):
            if name in self.right:
                words.append(line.plain)
            else:
                words += line.plain.split() if line.spans else _pieces(line.plain)
        return max(cell_len(word.rstrip()) for word in words)

    def _broken_widths(self, shown: Sequence[str], width: int) -> dict[str, int]:
        """Returns the width of each column; the widest columns are narrowed, to their longest words if that is
        enough."""
        widths = {name: self._natural(name) for name in shown}
        for least in ({name: self._least(name) for name in shown}, dict.fromkeys(shown, 4)):
            while _framed(widths.values()) > width:
                wide = [name for name in shown if widths[name] > least[name]]
                if not wide:
                    break
                widths[max(wide, key=lambda name: widths[name])] -= 1
        return widths


def _framed(widths: Iterable[int]) -> int:
    """Returns the width of a table with columns of these widths: padding, a space between columns, and edges."""
    return sum(width + 3 for width in widths) + 1


def _broken(cell: "Text", width: int) -> "Text":
    """Returns the cell with lines longer than `width` broken after dots, commas and spaces; text with styles stays."""
    from rich.text import Text

    if cell.spans or all(line.cell_len <= width for line in cell.split()):
        return cell
    return Text("\n".join(piece for line in cell.plain.split("\n") for piece in _folded(line, width)))


def _pieces(text: str) -> list[str]:
    """Returns the pieces of a sentence or name that stay in one line; spaces belong to the piece before them."""
    return (WORDS_OF_SENTENCE if " " in text.strip() else PIECES_OF_NAME).findall(text)


def _folded(text: str, width: int) -> Iterator[str]:
    line = ""
    for piece in _pieces(text):
        if line and len(line) + len(piece.rstrip()) > width:
            yield line.rstrip()
            line = ""
        line += piece
        while len(line.rstrip()) > width:  # a single piece
            at = max(line.rfind(mark, 0, width) for mark in ".,/_") + 1 or width
            yield line[:at]
            line = line[at:]
    yield line.rstrip()
