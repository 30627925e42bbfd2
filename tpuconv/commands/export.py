"""`tpuconv export`."""

from pathlib import Path

import click

from tpuconv import api
from tpuconv.commands import options
from tpuconv.commands.console import print_json, show
from tpuconv.commands.convert import already_there
from tpuconv.commands.params import File
from tpuconv.commands.progress import resumable
from tpuconv.sizes import format_size


@options.command(
    "export",
    "Write a checkpoint as safetensors.",
    "tpuconv export Qwen3-8B-orbax Qwen3-8B-again",
    "tpuconv export Qwen3-8B-orbax-int8_default Qwen3-8B-w8a8",
)
@click.argument("ckpt", type=File())
@click.argument("out", type=File())
@options.writes_output
@options.as_json
def export(ckpt: Path, out: Path, overwrite: bool, check: bool, as_json: bool) -> None:
    """Write the checkpoint CKPT to the folder OUT as safetensors, under the names that its tensors had.

    Tensors that were neither cast nor dequantized come back bit for bit. Quantized parameters are written in the
    formats of compressed-tensors, which vLLM, SGLang and transformers load. OUT appears complete or not at all.
    """
    with resumable(as_json) as progress:
        done = api.export(ckpt, out, overwrite=overwrite, check=check, progress=progress)
    if as_json:
        print_json(done.to_json())
    elif done.already_there:
        show((str(out), "bold"), f" is already there, of this checkpoint: {already_there(check)}.")
    else:
        show(
            (str(out), "bold"),
            f": {done.family}, {format_size(done.bytes)} in {done.files} {'files' if done.files > 1 else 'file'}, "
            f"{done.seconds:.1f} s ({format_size(done.bytes / max(done.seconds, 1e-9))}/s)",
        )
