"""`tpuconv doctor`."""

import sys
from pathlib import Path

import click

from tpuconv.commands import options
from tpuconv.commands.console import Table, console, print_json, styled
from tpuconv.commands.params import File
from tpuconv.commands.progress import shown
from tpuconv.errors import ResourceError
from tpuconv.progress import Progress

STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


@options.command(
    "doctor",
    "Check this machine: versions, devices, disk, access to the Hub.",
    "tpuconv doctor",
    "tpuconv doctor /data --offline",
)
@click.argument("folder", required=False, default=".", type=File(exists=True, file_okay=False))
@click.option("--offline", is_flag=True, help="Do not ask the Hub.")
@options.as_json
def doctor(folder: Path, offline: bool, as_json: bool) -> None:
    """Check what tpuconv needs of this machine, and the disk of FOLDER, the current folder by default.

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
