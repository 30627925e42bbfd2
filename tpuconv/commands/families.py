"""`tpuconv families`."""

from typing import TYPE_CHECKING, Any

import click

from tpuconv.commands import options
from tpuconv.commands.console import Table, console, lines, print_json, show

if TYPE_CHECKING:
    from tpuconv.models.registry import Family


@options.command(
    "families", "List the model families that can be converted.", "tpuconv families", "tpuconv families llama --table"
)
@click.argument("name", required=False)
@click.option("--table", "as_table", is_flag=True, help="Show the mapping of every tensor.")
@options.as_json
def families(name: str | None, as_table: bool, as_json: bool) -> None:
    """List the model families that can be converted, or show one of them and its table."""
    from tpuconv.models.registry import family_names, get_family

    chosen = [get_family(each) for each in ([name] if name else family_names())]
    if as_json:
        print_json({"families": [_to_json(family) for family in chosen]})
    elif as_table:
        for family in chosen:
            _show_table(family)
    else:
        table = Table("families", ("name", "architectures", "converts"), optional=("architectures",))
        for family in chosen:
            table.add_row(family.name, lines(family.architectures), family.summary)
        console().print(table)


def _to_json(family: "Family") -> dict[str, Any]:
    rows = [
        {"hf": list(row.hf_names), "jax": list(row.jax_names), "layout": row.layout, "when": row.when}
        for row in family.table
    ]
    ignored = dict(family.table.ignore)
    return {"name": family.name, "architectures": list(family.architectures), "rows": rows, "ignored": ignored}


def _show_table(family: "Family") -> None:
    from tpuconv.layout import LETTERS

    table = Table(family.name, ("Hugging Face", "JAX", "layout", "when"), optional=("when",))
    for row in family.table:
        table.add_row(lines(row.hf_names), lines(row.jax_names), row.layout, row.when or "")
    console().print(table)
    for pattern, why in family.table.ignore.items():
        show(f"  not converted: {pattern}: {why}")
    for copy, original in family.table.copies.items():
        show(f"  not converted: {copy}, where it is a copy of {original}")
    for other in family.variants:
        show(f"  other releases have other names: {other.rows[0].hf_names[0]} ({other.variant.strip()})")
    used = {letter for row in family.table for letter in row.layout if letter.isalpha()} | {"L"}
    show("  " + "; ".join(f"{letter} {what}" for letter, what in LETTERS.items() if letter in used))
