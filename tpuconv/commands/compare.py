"""`tpuconv compare`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tpuconv import api
from tpuconv.commands import options
from tpuconv.commands.console import Table, console, print_json, show
from tpuconv.commands.convert import show_runs
from tpuconv.commands.inputs import read_prompts
from tpuconv.commands.params import Name
from tpuconv.commands.progress import shown
from tpuconv.commands.statistics import divergence_rows, relative_row, verdict
from tpuconv.errors import GateError, UsageError
from tpuconv.memory import check_address_space_for_jax
from tpuconv.names import collapse

if TYPE_CHECKING:
    from tpuconv.verify.tasks import TaskScore

MOST_ROWS = 8
"""Patterns of parameters that the table shows."""


@options.command(
    "compare",
    "tpuconv compare Qwen3-8B-orbax Qwen3-8B-orbax-int4_weight_only",
    "tpuconv compare Qwen/Qwen3-8B Qwen3-8B-orbax-int4_weight_only --text wiki.txt --length 2048 --stride 512",
    "tpuconv compare Qwen3-8B-orbax Qwen3-8B-orbax --cache-dtype int8 --gate mean_kl=0.001",
    "tpuconv compare Qwen3-8B-orbax Qwen3-8B-orbax-int4_weight_only --tasks arc_easy,gsm8k --task-limit 200",
    "tpuconv compare Qwen/Qwen3-8B runs/sft --config Qwen/Qwen3-8B --text wiki.txt",
)
@click.argument("reference", type=Name())
@click.argument("ckpt", type=Name())
@options.of(api.compare_checkpoints)
@options.as_json
def compare(
    reference: str,
    ckpt: str,
    prompts: Path | None,
    text: Path | None,
    tasks: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Run the models REFERENCE and CKPT on the same tokens, and compare their parameters.

    Each is a checkpoint, an export or a release: a folder, a bucket or a Hub id; with --config also a checkpoint, a
    step or a run of a trainer, one of them or both. Divergences are KL(REFERENCE || CKPT).
    One model is in memory at a time, and transformers is not needed. With --cache-dtype the model of CKPT reads keys
    and values from a cache of this dtype, as in decoding.

    Exit code 3: a gate failed. The gates come from the quantization config of CKPT; an unquantized CKPT has the gates
    of `verify --compare-hf`. --gate replaces them.
    """
    if text and prompts:
        raise UsageError("--text and --prompts exclude each other")
    options.require_mode("--text", text is not None, "length", "stride")
    options.require_mode("--tasks", tasks is not None, "task_folder", "task_limit", "chat_template")
    check_address_space_for_jax()
    with shown(as_json) as progress:
        found = api.compare_checkpoints(
            reference,
            ckpt,
            prompts=read_prompts(prompts),
            text=text,
            tasks=[name for name in (tasks or "").split(",") if name],
            progress=progress,
            **given,
        )
    if as_json:
        print_json(found.to_json())
    else:
        console().print(_logits_table(found))
        console().print(_tensors_table(found))
        show_runs(found.runs)
        found.check()
        show(("passed", "green"), ": every gate holds") if found.passed else show(
            "no gates set: nothing passed or failed"
        )
    if found.passed is False:
        sys.exit(GateError.exit_code)


def _logits_table(found: "api.CheckpointComparison") -> Table:
    result = found.statistics
    text = f"{found.text} in windows of {found.length} and strides of {found.stride}" if found.text else "prompts"
    cache = f", cache in {found.cache_dtype}" if found.cache_dtype else ""
    table = Table(
        f"{found.reference} and {found.checkpoint}, {result.dtype}{cache}, {text}, {result.tokens} predictions",
        ("statistic", "reference", "compared", "gate"),
        right=("reference", "compared"),
        optional=("gate",),
    )
    table.add_row("perplexity", f"{result.perplexity_reference:.5g}", f"{result.perplexity:.5g}", "")
    for name, value, gate in (*divergence_rows(result), relative_row(result)):
        table.add_row(name, "", value, verdict(result, gate))
    for task in found.tasks:
        before, after = map(_score, (task.reference, task.checkpoint))
        table.add_row(f"{task.reference.task}: {task.reference.metric}", before, after, "")
    return table


def _score(score: "TaskScore") -> str:
    error = "" if score.stderr is None else f" ± {score.stderr:.2g}"
    return f"{score.value:.4g}{error}"


def _tensors_table(found: "api.CheckpointComparison") -> Table:
    by_name = {tensor.name: tensor for tensor in found.tensors}
    patterns = [(pattern, [by_name[name] for name in names]) for pattern, names in collapse(sorted(by_name)).items()]
    patterns.sort(key=lambda item: min(tensor.snr_db for tensor in item[1]))
    equal = sum(tensor.largest == 0 for tensor in found.tensors)
    table = Table(
        f"{len(found.tensors)} parameters, {equal} of them equal",
        ("parameters", "count", "worst", "SNR dB", "largest difference"),
        right=("count", "SNR dB", "largest difference"),
        optional=("count", "worst"),
    )
    for pattern, tensors in patterns[:MOST_ROWS]:
        worst = min(tensors, key=lambda tensor: tensor.snr_db)
        largest = max(tensor.largest for tensor in tensors)
        table.add_row(pattern, str(len(tensors)), worst.name, f"{worst.snr_db:.1f}", f"{largest:.3g}")
    return table
