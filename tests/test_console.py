"""What a terminal shows: tables fit it, names are broken at dots, foreign text is no markup."""

import io

import click
import pytest
from rich.console import Console

from helpers.commands import EXAMPLE, forked
from tpuconv.commands import console as shown
from tpuconv.commands import progress
from tpuconv.commands.console import Table, styled
from tpuconv.commands.convert import skipped_lines
from tpuconv.convert.plan.types import Skip
from tpuconv.progress import Progress

NAMES = ("layers.{0...4}.attn.q.kernel", "layers.{0...4}.attn_norm.scale", "embed.embedding")


def drawn(width: int, *names: str) -> str:
    table = Table("a title", ("name", "axes", "count", "bytes"), right=("count", "bytes"), optional=("axes", "count"))
    for name in names:
        table.add_row(name, "D N H", "5", styled(("307 kB", "green")))
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text()


@pytest.mark.parametrize("width", [30, 45, 60, 100])
def test_a_table_fits_and_names_are_broken_at_dots(width):
    text = drawn(width, *NAMES)
    assert max(map(len, text.splitlines())) <= width
    pieces = {piece for name in NAMES for piece in name.replace(".", " ").split()}
    shown = [line.split()[0] for line in text.splitlines()[4:] if line.strip() and "not shown" not in line]
    assert {part for cell in shown for part in cell.strip(".").split(".")} >= pieces - {""}


def test_columns_are_left_out_in_their_order_and_named():
    assert "not shown" not in drawn(100, *NAMES)
    assert "not shown at this width: axes (--json has all)" in drawn(48, *NAMES)
    assert "not shown at this width: axes, count" in drawn(40, *NAMES)


def test_a_column_that_may_be_left_out_need_not_be_there():
    table = Table("a title", ("name", "bytes"), optional=("drafts", "bytes"))
    table.add_row("layers.0.attn.q.kernel", "307 kB")
    console = Console(width=24, file=io.StringIO(), record=True)
    console.print(table)
    assert "not shown at this width: bytes" in " ".join(console.export_text().split())


def test_a_column_without_text_is_left_out_first_and_not_named():
    table = Table("a title", ("name", "axes", "notes"), optional=("axes", "notes"))
    table.add_row("layers.0.attn.q.kernel", "D N H", "")
    console = Console(width=38, file=io.StringIO(), record=True)
    console.print(table)
    shown = console.export_text()
    assert "axes" in shown
    assert "notes" not in shown


STATISTICS = (
    ("mean KL divergence (nats)", "0.000345", styled(("holds", "green"), ": 0.001")),
    ("layers.{0...4}.attn_norm.scale", "1234.5678", styled(("failed", "red"), ": 0.01")),
)


@pytest.mark.parametrize("width", [44, 56, 70])
def test_words_numbers_and_patterns_are_not_broken(width):
    table = Table("a title", ("statistic", "compared with it", "gate"), right=("compared with it",))
    for row in STATISTICS:
        table.add_row(*row)
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(table)
    text = console.export_text()
    words = ["statistic", "compared", "divergence", "(nats)", "0.000345", "1234.5678", "holds:", "failed:", "{0...4}"]
    assert [word for word in words if word not in text] == []
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("name", ["[old]/m", "a[/b]", "[red]x"])
def test_markup_in_a_name_is_text(name):
    assert name in drawn(60, name)


@pytest.mark.parametrize(("width", "memory"), [(60, False), (80, True)])
def test_a_bar_takes_one_line(monkeypatch, capsys, width, memory):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(shown.sys.stderr, "isatty", lambda: True)
    with progress.shown(as_json=False) as listener:
        listener(Progress("quantizing", 10**9, 2 * 10**9))
    lines = [line for line in click.unstyle(capsys.readouterr().err).splitlines() if line.strip()]
    assert {line.split()[0] for line in lines} == {"quantizing"}
    assert ("memory" in lines[-1]) == memory


def test_an_error_is_broken_between_words_and_a_command_in_it_is_not(monkeypatch, capsys):
    monkeypatch.setattr(shown.sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    command = f"     rm '/a folder/of a name that is long/{'x' * 30}'"
    shown.say_error(
        "SourceError", f"what is wrong, in more words than fit\n  -> delete it and run again, or not:\n{command}"
    )
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == command
    assert lines[1:3] == ["  words than fit", "  -> delete it and run again, or not:"]
    assert all(len(line) <= 40 for line in lines[1:-1])


def test_quiet_commands_show_no_progress(tmp_path):
    patch = "import tpuconv.commands.progress as progress; progress.QUIET_SECONDS = 0"
    loud = forked(["convert", str(EXAMPLE), "loud"], tmp_path, patch)
    assert loud.returncode == 0
    assert loud.stderr
    for args in (["convert", str(EXAMPLE), "behind", "-q"], ["-q", "convert", str(EXAMPLE), "before"]):
        quiet = forked(args, tmp_path, patch)
        assert quiet.returncode == 0
        assert not quiet.stderr
        assert quiet.stdout.startswith(("behind: qwen3, ", "before: qwen3, "))


@pytest.mark.parametrize(
    ("count", "reason", "line"),
    [
        (1, "a copy of embed", "1 tensor, a copy of embed: name"),
        (2, "sees images", "2 tensors, sees images: name"),
        (1, "arrays with the number of a step", "1 array with the number of a step: name"),
        (3, "rows of padding", "3 rows of padding: name"),
    ],
)
def test_what_was_skipped_is_counted(count, reason, line):
    assert list(skipped_lines("not read", [Skip("name", count, reason)])) == [f"  not read: {line}"]
