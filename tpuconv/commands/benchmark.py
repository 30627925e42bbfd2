"""`tpuconv benchmark`."""

from collections.abc import Callable
from typing import Any

import click

from tpuconv import api, text
from tpuconv.commands import options
from tpuconv.commands.console import Table, console, print_json, say, show
from tpuconv.commands.convert import show_runs
from tpuconv.commands.inputs import chosen_checkpoint
from tpuconv.commands.process import all_processes
from tpuconv.commands.progress import shown
from tpuconv.memory import check_address_space_for_jax
from tpuconv.text import format_rate, format_size

DRAFTS, ACCEPTED = "tokens a step", "accepted"
COLUMNS: dict[str, Callable[[Any], str]] = {
    "batch": lambda t: f"{t.workload.batch}",
    "prompt": lambda t: f"{t.workload.prompt_length}",
    "new": lambda t: f"{t.workload.new_tokens}",
    "first token": lambda t: f"{1000 * t.first_token_seconds:.4g} ms",
    "of the peak": lambda t: f"{100 * t.peak_share:.0f}%",
    "step": lambda t: f"{1000 * t.step_seconds:.4g} ms",
    DRAFTS: lambda t: f"{t.tokens_per_step:.2f}",
    ACCEPTED: lambda t: f"{100 * t.accepted_share:.0f}%",
    "tokens/s each": lambda t: format_rate(t.tokens_per_second_per_sequence, 4),
    "tokens/s in all": lambda t: format_rate(t.tokens_per_second, 4),
    "of the bandwidth": lambda t: f"{100 * t.bandwidth_share:.0f}%",
    "memory": lambda t: format_size(t.peak_memory_bytes or t.memory_bytes),
    "compiled in": lambda t: f"{t.compile_seconds:.1f} s",
}


@options.command(
    "benchmark",
    "tpuconv benchmark",
    "tpuconv benchmark Qwen3-8B-orbax --batch 1,8 --prompt-length 128 --new-tokens 64",
    "tpuconv benchmark Qwen3-8B-orbax --cache-dtype int8 --markdown",
    "tpuconv benchmark Qwen3-8B-orbax --speculate Qwen3-8B-eagle3-orbax",
    "tpuconv benchmark runs/sft --config Qwen/Qwen3-8B",
)
@options.src_or_ckpt
@options.of(api.benchmark)
@click.option("--markdown", is_flag=True, help="Print a Markdown table.")
@options.on_all_processes
@options.as_json
def benchmark(src: str | None, markdown: bool, distributed: bool, as_json: bool, **sizes: Any) -> None:
    """Time prefill and decoding of a release or a checkpoint on the devices of this machine; with --distributed, on the
    devices of all processes.

    The default is the newest checkpoint in the current folder.
    """
    with all_processes(distributed):
        chosen = src or chosen_checkpoint(None, "Benchmarking", quiet=as_json or markdown, own=True)
        check_address_space_for_jax()
        with shown(as_json or markdown) as progress:
            found = api.benchmark(chosen, progress=progress, **sizes)
        if as_json:
            print_json(found.to_json())
        elif markdown:
            _say_markdown(found)
        else:
            show_benchmark(found)


def show_benchmark(found: "api.Benchmark") -> None:
    """Shows the timings, the limits of the machine, and the generated text."""
    columns = _columns(found)
    table = Table(
        _title(found),
        tuple(columns),
        right=tuple(columns),
        optional=(DRAFTS, ACCEPTED, "compiled in", "memory", "of the peak", "tokens/s each", "new", "prompt"),
    )
    for timing in found.timings:
        table.add_row(*(cell(timing) for cell in columns.values()))
    console().print(table)
    show(_footer(found))
    show_runs(found.runs)
    if found.text is not None:
        say("\na prompt and its greedy continuation: " + text.plain(found.text, "\n\t"))


def _say_markdown(found: "api.Benchmark") -> None:
    columns = _columns(found)
    rows = [list(columns), ["---"] * len(columns)]
    rows += [[cell(timing) for cell in columns.values()] for timing in found.timings]
    lines = (f"| {' | '.join(row)} |" for row in rows)
    say("\n".join([text.markdown(_title(found)), "", *lines, "", text.markdown(_footer(found))]))


def _columns(found: "api.Benchmark") -> dict[str, Callable[[Any], str]]:
    """Returns the columns; tokens a step and the share of accepted drafts only if tokens are drafted."""
    drafts = any(timing.accepted_share is not None for timing in found.timings)
    return {name: cell for name, cell in COLUMNS.items() if drafts or name not in (DRAFTS, ACCEPTED)}


def _title(found: "api.Benchmark") -> str:
    types = f"{found.dtype}, cache {found.cache_dtype}" if found.cache_dtype else found.dtype
    machine = found.machine
    return f"{found.checkpoint.name}, {types}, {machine.devices} x {machine.device}, median of {found.repeats}"


def _footer(found: "api.Benchmark") -> str:
    machine, limits = found.machine, found.machine.limits
    return (
        f"limits {'measured here' if limits.measured else 'of the chip'}: {format_size(limits.bandwidth)}/s, "
        f"{limits.peak / 1e12:.3g} TFLOP/s; {', '.join(f'{k} {v}' for k, v in machine.versions.items())}; "
        f"{found.source}{f' at {found.commit}' if found.commit else ''}"
    )
