"""`tpuconv export`."""

import click

from tpuconv import api
from tpuconv.commands import options
from tpuconv.commands.console import print_json, show
from tpuconv.commands.convert import already_there
from tpuconv.commands.params import LocationParam, Name
from tpuconv.commands.progress import resumable
from tpuconv.location import Location
from tpuconv.sizes import format_size


@options.command(
    "export",
    "Write a checkpoint as safetensors.",
    "tpuconv export Qwen3-8B-orbax Qwen3-8B-again",
    "tpuconv export Qwen3-8B-orbax-int8_default Qwen3-8B-w8a8",
    "tpuconv export gemma-3-27b-orbax gemma-3-27b-again --with-skipped google/gemma-3-27b-it",
    "tpuconv export runs/sft Qwen3-8B-tuned --config Qwen/Qwen3-8B",
)
@click.argument("ckpt", type=LocationParam())
@click.argument("out", type=LocationParam())
@click.option(
    "--config",
    type=Name(),
    metavar="SRC",
    help="CKPT is what a trainer saved with Orbax, of the model SRC: a path or Hub id with config.json and tokenizer.",
)
@click.option(
    "--target",
    type=Name(),
    metavar="NAME",
    help="The program that a trainer's CKPT is of: maxtext, tunix, nnx, ...  [default: each is tried]",
)
@click.option(
    "--with-skipped",
    type=Name(),
    metavar="SRC",
    help="Add the tensors that the conversion skipped (towers, MTP layers), from its source: a path or Hub id.",
)
@options.scheme
@options.writes_output
@options.processes
@options.as_json
def export(
    ckpt: Location,
    out: Location,
    config: str | None,
    target: str | None,
    with_skipped: str | None,
    scheme: str | None,
    overwrite: bool,
    check: bool,
    distributed: bool,
    process_index: int | None,
    process_count: int | None,
    ray: str | None,
    as_json: bool,
) -> None:
    """Write the checkpoint CKPT to the folder OUT as safetensors, under the names that its tensors had.

    Tensors that were neither cast nor dequantized come back bit for bit. Quantized parameters are written in the
    formats that vLLM, SGLang, tpu-inference and transformers load. OUT appears complete or not at all.

    With --config, CKPT is a checkpoint, a step or a run of a trainer, without a manifest of tpuconv; the latest step is
    taken.
    """
    export_model = options.on_processes(api.export, ray, distributed, process_index, process_count)
    with resumable(as_json) as progress:
        done = export_model(
            ckpt,
            out,
            config=config,
            target=target,
            with_skipped=with_skipped,
            scheme=scheme,
            overwrite=overwrite,
            check=check,
            progress=progress,
        )
    if as_json:
        print_json(done.to_json())
    elif not done.published:
        show(f"{done.part}: part done, {format_size(done.bytes)}; the last process publishes ", (str(out), "bold"))
    elif done.already_there:
        show((str(out), "bold"), f" is already there, of this checkpoint: {already_there(check)}.")
    else:
        show(
            (str(out), "bold"),
            f": {done.family}, {format_size(done.bytes)} in {done.files} {'files' if done.files > 1 else 'file'}, "
            f"{done.seconds:.1f} s ({format_size(done.bytes / max(done.seconds, 1e-9))}/s)",
        )
    if config is not None and not as_json:
        show(f"  read as {done.target}: {done.arrays}")
        for reason in dict.fromkeys(skip.reason for skip in done.skipped):
            group = [skip for skip in done.skipped if skip.reason == reason]
            named = ", ".join(skip.pattern for skip in group[:2]) + (f" and {len(group) - 2} more" if group[2:] else "")
            show(f"  not exported: {sum(skip.count for skip in group)} {reason}: {named}")
