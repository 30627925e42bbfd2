"""Writes docs/cli.md from the commands themselves: `python docs/make_cli.py`. A test keeps the file up to date."""

from pathlib import Path

import click

from tpuconv.cli import tpuconv
from tpuconv.commands.options import Command

INTRODUCTION = """# Commands

This page is generated from the commands by `python docs/make_cli.py`. `tpuconv COMMAND --help` shows the same.
Every command takes `--json` ([keys](json.md)) and `-v`, and ends with one of the [exit codes](exit-codes.md).

## Shell completion

| shell | add to its configuration file |
|---|---|
| bash | `eval "$(_TPUCONV_COMPLETE=bash_source tpuconv)"` in `~/.bashrc` |
| zsh | `eval "$(_TPUCONV_COMPLETE=zsh_source tpuconv)"` in `~/.zshrc` |
| fish | `_TPUCONV_COMPLETE=fish_source tpuconv \\| source` in `~/.config/fish/completions/tpuconv.fish` |
"""


def page() -> str:
    """The text of docs/cli.md."""
    return "\n".join([INTRODUCTION, *(_section(command) for command in tpuconv.commands.values())])


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


if __name__ == "__main__":
    Path(__file__).with_name("cli.md").write_text(page(), encoding="utf-8")
