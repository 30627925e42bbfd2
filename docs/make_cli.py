"""Writes docs/cli.md from the commands, and the arguments in docs/api.md from the functions: `python docs/make_cli.py`.
A test keeps the files up to date."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tpuconv import api
from tpuconv.cli import tpuconv
from tpuconv.commands.group import SUMMARIES
from tpuconv.commands.options import Command
from tpuconv.options import options_of

ARGUMENTS = "## Arguments\n"
"""The heading in docs/api.md below which everything is generated."""

INTRODUCTION = """# Commands

This page is generated from the commands by `python docs/make_cli.py`. `tpuconv COMMAND --help` shows the same.
Every command takes `--json` ([keys](json.md)) and `-v`, and ends with one of the [exit codes](exit-codes.md).
CKPT defaults to the newest checkpoint in the current folder.

{commands}

## Shell completion

| shell | add to its configuration file |
|---|---|
| bash | `eval "$(_TPUCONV_COMPLETE=bash_source tpuconv)"` in `~/.bashrc` |
| zsh | `eval "$(_TPUCONV_COMPLETE=zsh_source tpuconv)"` in `~/.zshrc` |
| fish | `_TPUCONV_COMPLETE=fish_source tpuconv \\| source` in `~/.config/fish/completions/tpuconv.fish` |
"""


def page() -> str:
    """The text of docs/cli.md."""
    rows = [f"| [`{name}`](#{name}) | {summary} |" for name, summary in SUMMARIES.items()]
    introduction = INTRODUCTION.replace("{commands}", "\n".join(["| command | purpose |", "|---|---|", *rows]))
    return "\n".join([introduction, *(_section(tpuconv.command_of(name)) for name in SUMMARIES)])


def _section(command: click.Command) -> str:
    assert isinstance(command, Command)
    ctx = click.Context(command, info_name=f"tpuconv {command.name}", max_content_width=100)
    paragraphs = [" ".join(part.split()) for part in (command.help or "").split("\n\n")]
    options = [param for param in command.params if isinstance(param, click.Option)]
    rows = [record for option in options if (record := option.get_help_record(ctx))]
    table = [f"| `{_cell(names)}` | {_cell(meaning)} |" for names, meaning in rows]
    return "\n".join(
        [
            f"## {command.name}",
            "",
            f"`{' '.join([ctx.command_path, *command.collect_usage_pieces(ctx)])}`",
            "",
            *(line for paragraph in paragraphs for line in (paragraph.replace("<", "&lt;"), "")),
            "| option | meaning |",
            "|---|---|",
            *table,
            "",
            "```bash",
            *command.examples,
            "```",
            "",
        ]
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def api_page(text: str) -> str:
    """The text of docs/api.md with the arguments of today."""
    functions = [each for name in api.__all__ if hasattr(each := getattr(api, name), "request")]
    by_hand = text.partition(ARGUMENTS)[0]
    note = (
        "This section is generated from the functions by `python docs/make_cli.py`; `help(api.convert)` shows the same."
    )
    return "\n".join([by_hand + ARGUMENTS, note, "", *map(_arguments, functions)])


def _arguments(function: Callable[..., Any]) -> str:
    parameters = inspect.signature(function).parameters
    meanings = {each.name: known.meaning for each, known in options_of(function.request)}
    rows = [f"| `{name}` | {_default(each)} | {_cell(meanings[name])} |" for name, each in parameters.items()]
    table = ["| argument | default | meaning |", "|---|---|---|", *rows]
    return "\n".join([f"### api.{function.__name__}", "", *table, ""])


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty or callable(parameter.default):
        return ""
    return f"`{parameter.default!r}`".replace("'", '"')


if __name__ == "__main__":
    folder = Path(__file__).parent
    (folder / "cli.md").write_text(page(), encoding="utf-8")
    written = folder / "api.md"
    written.write_text(api_page(written.read_text(encoding="utf-8")), encoding="utf-8")
