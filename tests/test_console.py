"""What a terminal shows: tables fit it, names are broken at dots, foreign text is no markup."""

import io

import pytest
from rich.console import Console

from tpuconv.commands.console import Table, styled

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


@pytest.mark.parametrize("name", ["[old]/m", "a[/b]", "[red]x"])
def test_markup_in_a_name_is_text(name):
    assert name in drawn(60, name)
