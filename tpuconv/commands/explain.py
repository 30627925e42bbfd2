"""`tpuconv explain`."""

import click

from tpuconv import api
from tpuconv.commands import options
from tpuconv.commands.console import print_json, show


@options.command(
    "explain",
    "tpuconv explain TC0123",
    'tpuconv explain "config.json is missing"',
)
@click.argument("error", nargs=-1, required=True, metavar="ID_OR_MESSAGE")
@options.as_json
def explain(error: tuple[str, ...], as_json: bool) -> None:
    """Explain an error of tpuconv: what its class means, the next step, and the functions that raise it. Give the id,
    which the message begins with, or the message.

    docs/errors/ has all errors.
    """
    found = api.explain(" ".join(error))
    if as_json:
        print_json({**found.to_json(), "page": found.page})
        return
    exits = "" if found.exit_code is None else f", exit code {found.exit_code}"
    show((found.id, "bold"), f": {found.error}{exits}. {found.meaning}")
    for line in (found.message, *(f"-> {hint}" for hint in found.hints)):
        show(f"  {line}")
    for place in found.places:
        show((f"  raised by {place}", "dim"))
    show((f"  {found.page}", "dim"))
