"""`tpuconv doctor`."""

import sys

import click

from tpuconv.commands import options
from tpuconv.commands.console import Table, console, print_json, styled
from tpuconv.commands.params import LocationParam
from tpuconv.commands.progress import shown
from tpuconv.errors import ResourceError
from tpuconv.location import Location
from tpuconv.progress import Progress

STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


@options.command(
    "doctor",
    "tpuconv doctor",
    "tpuconv doctor /data --offline",
    "tpuconv doctor gs://bucket/models",
)
@click.argument("folder", required=False, default=".", type=LocationParam(exists=True, file_okay=False))
@click.option("--offline", is_flag=True, help="Do not contact the Hub.")
@options.as_json
def doctor(folder: Location, offline: bool, as_json: bool) -> None:
    """Check the versions, devices, memory and disk of this machine. FOLDER, by default the current folder, names the
    disk. For the URL of a bucket, check that the bucket can be written, and with whose credentials.

    Exit code 8: something is missing or does not work.
    """
    from tpuconv.doctor import examine

    with shown(as_json) as progress:
        progress(Progress("examining this machine"))
        found = examine(folder, network=not offline)
    if as_json:
        print_json(found.to_json())
    else:
        table = Table("this machine", ("", "status", "found", "what to do"))
        for item in found.items:
            table.add_row(item.name, styled((item.status, STYLES[item.status])), item.found, item.advice)
        console().print(table)
    if found.status == "fail":
        sys.exit(ResourceError.exit_code)
