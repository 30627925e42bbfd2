"""`tpuconv reshard`."""

from math import prod
from typing import Any

import click

from tpuconv import api
from tpuconv.commands import options
from tpuconv.commands.console import Table, console, print_json, show
from tpuconv.commands.convert import already_there, show_skipped, speed
from tpuconv.commands.params import LocationParam, known_checkpoints
from tpuconv.commands.progress import resumable
from tpuconv.location import Location
from tpuconv.text import format_count, format_size


@options.command(
    "reshard",
    "tpuconv reshard Qwen3-8B-maxtext Qwen3-8B-fsdp64 --mesh fsdp=64",
    "tpuconv reshard Qwen3-8B-orbax Qwen3-8B-scanned --scan-layers",
    "tpuconv reshard Qwen3-8B-maxtext Qwen3-8B-pathways --pathways --mesh fsdp=64",
    "tpuconv reshard runs/sft Qwen3-8B-sft --config Qwen/Qwen3-8B --mesh tensor=8 --unscan-layers",
)
@click.argument("ckpt", type=LocationParam(), shell_complete=known_checkpoints)
@click.argument("out", type=LocationParam())
@options.of(api.reshard)
@options.processes
@click.option("--dry-run", is_flag=True, help="Show the chunks that would be written, and stop.")
@options.as_json
def reshard(ckpt: Location, out: Location, dry_run: bool, as_json: bool, **given: Any) -> None:
    """Write the checkpoint CKPT to OUT in the chunks that the devices of a mesh read, with its layers stacked or apart.

    Each device reads complete chunks and nothing else. Values stay as they are, bit for bit. OUT appears complete or
    not at all. After an interruption the same command continues.

    With --config, CKPT is a checkpoint, a step or a run of a trainer, without a manifest of tpuconv; the latest step is
    taken. OUT has its parameters, without the state of the optimizer.
    """
    reshard_checkpoint = options.on_processes(api.reshard, given)
    with resumable(as_json) as progress:
        if not dry_run:
            done = reshard_checkpoint(ckpt, out, progress=progress, **options.asked_of(api.reshard, given))
        else:
            plan = api.plan_reshard(ckpt, progress=progress, **options.asked_of(api.plan_reshard, given))
    if dry_run:
        options.check_planned_place(ckpt, out)
        _show_plan(ckpt, plan, as_json)
    else:
        _show_output(done, given["check"], as_json)


def _show_plan(ckpt: Location, plan: "api.ReshardingPlan", as_json: bool) -> None:
    """Shows the chunks and the files that would be written."""
    if as_json:
        print_json(plan.to_json())
        return
    columns = ("array", "count", "shape", "dtype", "chunks", "files")
    table = Table(f"{ckpt.name}: {plan.target}", columns, right=("count",), optional=("dtype", "count", "files"))
    for pattern, facts in plan.arrays.items():
        shapes = (" ".join(map(str, facts[key])) for key in ("chunks", "files"))
        table.add_row(pattern, str(facts["count"]), " ".join(map(str, facts["shape"])), facts["dtype"], *shapes)
    console().print(table)
    show_skipped("not written", plan.skipped)
    show(_sizes(plan))


def _show_output(done: "api.Resharding", check: bool, as_json: bool) -> None:
    """Shows the output of a resharding."""
    if as_json:
        print_json(done.to_json())
        return
    if not done.published:
        show(f"{done.part}: part done; the last process publishes ", (str(done.out), "bold"))
    elif done.already_there:
        show((str(done.out), "bold"), f" exists already, from this checkpoint: {already_there(check)}.")
    else:
        took = speed(done.bytes, done.resumed_bytes, done.seconds)
        show((str(done.out), "bold"), f": {_sizes(done)}, {took}")
    show_skipped("not written", done.skipped)


def _sizes(done: "api.ReshardingPlan") -> str:
    devices = prod(done.mesh.values())
    each = f", {format_size(done.device_bytes)} for each of {format_count(devices, 'device')}" if devices > 1 else ""
    return f"{done.target}, {format_size(done.bytes)}{each}{', stacked layers' if done.scan_layers else ''}"
