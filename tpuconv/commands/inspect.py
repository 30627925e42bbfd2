"""`tpuconv inspect`."""

from collections.abc import Sequence
from typing import Any

import click

from tpuconv import api
from tpuconv.commands import options
from tpuconv.commands.console import Table, console, print_json, show
from tpuconv.commands.convert import show_runs
from tpuconv.commands.params import Name
from tpuconv.commands.progress import shown
from tpuconv.text import format_count, format_size


@options.command(
    "inspect",
    "tpuconv inspect Qwen3-8B-orbax",
    "tpuconv inspect Qwen3-8B-orbax --mesh data=2,tensor=4",
    "tpuconv inspect deepseek-ai/DeepSeek-R1 --json",
    "tpuconv inspect runs/sft --config Qwen/Qwen3-8B",
    "tpuconv inspect Qwen3-8B-orbax --html weights.html --beside Qwen3-8B-orbax-int4_weight_only",
)
@click.argument("path", type=Name())
@options.of(api.inspect)
@options.as_json
def inspect(path: str, as_json: bool, **given: Any) -> None:
    """Show the tensors of PATH by pattern: a safetensors folder or file, a Hub id, or a checkpoint of tpuconv; with
    --config a checkpoint, a step or a run of a trainer. With --mesh show how the mesh shards the checkpoint.

    --html writes a page with the minimum, maximum, mean, standard deviation, zeros and histogram of each tensor. All
    weights are read, in bounded memory. With --beside the page begins with the parameters of the two checkpoints that
    differ most."""
    with shown(as_json) as progress:
        found = api.inspect(path, progress=progress, **given)
    if as_json:
        print_json(found.to_json())
        return
    ours, mesh = found.format != "safetensors", found.mesh
    extra = (*(["axes"] if ours else []), "shape", "dtype", "bytes", *(["sharded by", "per device"] if mesh else []))
    table = Table(
        path,
        ("tensor", "count", *extra),
        right=("count", "bytes", "per device"),
        optional=("axes", "count", "dtype", "bytes", *(("shape",) if found.mesh else ())),
    )
    for facts in found.patterns:
        others = f" and {facts['other_kinds']} other kinds" if facts["other_kinds"] else ""
        table.add_row(
            facts["pattern"],
            str(facts["count"]),
            *([facts["axes"]] if ours else []),
            " ".join(map(str, facts["shape"])) + others,
            facts["dtype"],
            format_size(facts["bytes"]),
            *([_mesh_axes(facts["partition"]), format_size(facts["device_bytes"])] if mesh else []),
        )
    console().print(table)
    for facts in found.patterns if mesh else ():
        if facts["undivided"]:
            sizes = ", ".join(f"{letter} of {size}" for letter, size in facts["undivided"].items())
            show(f"  {facts['pattern']}: {sizes} is not a multiple of the mesh, and is replicated")
    per_device = f", {format_size(found.device_bytes)} per device" if found.device_bytes is not None else ""
    show(f"{format_count(found.tensors, 'tensor')}, {format_size(found.bytes)}{per_device}")
    show_runs(found.runs)
    if found.html is not None:
        show(f"written: {found.html}")


def _mesh_axes(partition: Sequence[Any]) -> str:
    """Returns the mesh axes that shard each axis of an array; a dot for an axis that is not sharded."""
    return " ".join("·" if part is None else part if isinstance(part, str) else "*".join(part) for part in partition)
