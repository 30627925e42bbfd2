"""`tpuconv export`."""

from typing import Any

import click

from tpuconv import api
from tpuconv.commands import options
from tpuconv.commands.console import console, print_json, show
from tpuconv.commands.convert import already_there, in_files, show_skipped, speed, tensor_table
from tpuconv.commands.hub_outputs import OutputParam, local_place, pushed
from tpuconv.commands.params import LocationParam, known_checkpoints
from tpuconv.commands.progress import resumable
from tpuconv.location import Location
from tpuconv.text import format_size


@options.command(
    "export",
    "tpuconv export Qwen3-8B-orbax Qwen3-8B-again",
    "tpuconv export Qwen3-8B-orbax-int8_default Qwen3-8B-w8a8",
    "tpuconv export gemma-3-27b-orbax gemma-3-27b-again --with-skipped google/gemma-3-27b-it",
    "tpuconv export Qwen3-8B-orbax-int8_default hf://my-org/Qwen3-8B-w8a8",
    "tpuconv export runs/sft Qwen3-8B-tuned --config Qwen/Qwen3-8B",
)
@click.argument("ckpt", type=LocationParam(), shell_complete=known_checkpoints)
@click.argument("out", type=OutputParam())
@options.of(api.export)
@options.processes
@click.option("--dry-run", is_flag=True, help="Show the tensors that would be written, and stop.")
@options.as_json
def export(
    ckpt: Location,
    out: Location,
    dry_run: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Write the checkpoint CKPT to the folder OUT as safetensors, under the names of the source.

    Tensors that were neither cast nor dequantized come back bit for bit. Quantized parameters are written in the
    formats that vLLM, SGLang, tpu-inference and transformers load. OUT appears complete or not at all; it may be
    hf://ORG/NAME, as of `tpuconv convert`.

    With --config, CKPT is a checkpoint, a step or a run of a trainer, without a manifest of tpuconv; the latest step is
    taken.
    """
    export_model = options.on_processes(api.export, given)
    place, there = local_place(out, given, planned=dry_run)
    assert place is not None
    with resumable(as_json) as progress:
        if not dry_run:
            asked = options.asked_of(api.export, given)
            made = export_model(ckpt, place, progress=progress, elsewhere=there, **asked)
            done = pushed(out, made, there, progress)
        else:
            plan = api.plan_export(ckpt, progress=progress, **options.asked_of(api.plan_export, given))
    if dry_run:
        options.check_planned_place(ckpt, place)
        _show_plan(plan, as_json)
    else:
        _show_export(done, given["config"] is not None, given["check"], as_json)


def _show_plan(plan: "api.ExportPlan", as_json: bool) -> None:
    """Shows the tensors that would be written."""
    if as_json:
        print_json(plan.to_json())
        return
    console().print(tensor_table(f"{plan.ckpt.name}: {plan.family}", plan.files))
    show_skipped("not exported", plan.skipped)
    encoded = f"; encoded by {plan.encoding['quant_method']}" if plan.encoding else ""
    show(f"{in_files(plan.files)}, {format_size(plan.bytes)}{encoded}")


def _show_export(done: "api.Export", trained: bool, check: bool, as_json: bool) -> None:
    """Shows the output of an export; for a trainer's checkpoint also the target whose tree it has."""
    if as_json:
        print_json(done.to_json())
        return
    if not done.published:
        show(f"{done.part}: part done, {format_size(done.bytes)}; the last process publishes ", (str(done.out), "bold"))
    elif done.already_there:
        show((str(done.out), "bold"), f" exists already, from this checkpoint: {already_there(check)}.")
    else:
        show(
            (str(done.out), "bold"),
            f": {done.family}, {format_size(done.bytes)} in {done.files} {'files' if done.files > 1 else 'file'}, "
            f"{speed(done.bytes, done.resumed_bytes, done.seconds)}",
        )
    if trained:
        show(f"  read as {done.target}: {done.arrays}")
    show_skipped("not exported", done.skipped)
