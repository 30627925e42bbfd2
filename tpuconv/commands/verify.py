"""`tpuconv verify`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tpuconv import api
from tpuconv.commands import options
from tpuconv.commands.benchmark import show_benchmark
from tpuconv.commands.console import Table, console, print_json, show, styled
from tpuconv.commands.convert import show_runs
from tpuconv.commands.inputs import chosen_checkpoint, read_prompts
from tpuconv.commands.process import all_processes
from tpuconv.commands.progress import shown
from tpuconv.commands.statistics import StatisticRow, divergence_rows, relative_row, verdict
from tpuconv.errors import CorruptOutput, GateError, UsageError, shorten
from tpuconv.location import Location
from tpuconv.memory import check_address_space_for_jax
from tpuconv.text import format_count, format_size

if TYPE_CHECKING:
    from tpuconv.verify.layerwise import LayerError
    from tpuconv.verify.logits import LogitStatistics
    from tpuconv.verify.vectors import VectorStatistics


@options.command(
    "verify",
    "tpuconv verify",
    "tpuconv verify Qwen3-8B-orbax --compare-hf",
    "tpuconv verify Qwen3-8B-orbax --compare-hf --prompts prompts.txt",
    "tpuconv verify Llama-3.3-70B-orbax --compare-hf --layerwise",
    "tpuconv verify runs/sft --compare-hf --config Qwen/Qwen3-8B",
    "tpuconv verify Qwen3-8B-orbax --server http://localhost:8000",
    "tpuconv verify Qwen3-8B-orbax --benchmark",
)
@options.src_or_ckpt
@click.option("--compare-hf", is_flag=True, help="Compare the outputs of the model with transformers on the source.")
@options.of(api.compare)
@click.option("--server", metavar="URL", help="Compare the log-probabilities of prompts by a running vLLM or SGLang.")
@options.of(api.compare_server)
@click.option("--benchmark", is_flag=True, help="After the checks, run `tpuconv benchmark` with its default sizes.")
@options.of(api.verify, key={"type": options.FILE})
@options.on_all_processes
@options.as_json
def verify(
    src: str | None,
    compare_hf: bool,
    layerwise: bool,
    source: str | None,
    adapter: tuple[str, ...],
    prompts: Path | None,
    dtype: str,
    mesh: dict[str, int] | None,
    config: str | None,
    server: str | None,
    served: str | None,
    benchmark: bool,
    update: bool,
    key: Path | None,
    distributed: bool,
    as_json: bool,
) -> None:
    """Check every array and file of a checkpoint or an export against its checksum; with --compare-hf, compare its
    model with the original; with --server, compare a server with it.

    --compare-hf runs both models on eight short prompts, or on the prompts of --prompts. A model with sliding
    windows, chunks or an indexer also runs on one longer prompt for each of their lengths, of up to 8,256 tokens; the
    last 128 logits are compared. It takes a release too, which is loaded without a conversion; with --config a
    checkpoint, a step or a run of a trainer, which is compared with its export, not with the weights of SRC.

    --server asks a running server for the log-probabilities of the same prompts. Its --dtype is the one that the
    server computes in, by default the checkpoint's; the model computes in float32 too, which shows how much
    rounding changes.

    SRC_OR_CKPT defaults to the newest checkpoint in the current folder. Exit code 3: a gate of the comparison failed;
    10: the checkpoint is damaged.
    """
    options.require_mode("--compare-hf", compare_hf, "layerwise", "source", "adapter")
    options.require_mode(
        "--compare-hf or --server", compare_hf or server is not None, "prompts", "dtype", "mesh", "config"
    )
    options.require_mode("--server", server is not None, "served")
    if server is not None and (compare_hf or update or distributed):
        raise UsageError("--server excludes --compare-hf, --update and --distributed", hint="run one after the other")
    if distributed and (layerwise or not (compare_hf or benchmark)):
        raise UsageError(
            "--distributed is for work on devices: --compare-hf and --benchmark, without --layerwise",
            hint="leave it out, and run the command once",
        )
    if key and (compare_hf or update or server is not None):
        raise UsageError("--key is for a check of all files", hint="leave --compare-hf, --server and --update out")
    if update and compare_hf:
        raise UsageError("--update and --compare-hf exclude each other", hint="run one after the other")

    def given() -> dict[str, Any]:
        return {"prompts": read_prompts(prompts), "dtype": dtype, "mesh": mesh, "config": config}

    with all_processes(distributed):
        chosen = src or chosen_checkpoint(None, "Verifying", quiet=as_json)
        if server is not None:
            facts, failed = _compare_server(chosen, as_json, server=server, served=served, **given())
        elif compare_hf:
            facts, failed = _compare(chosen, as_json, source=source, adapter=adapter, layerwise=layerwise, **given())
        else:
            facts, failed = _check(chosen, update, key, as_json)
        if benchmark and not failed:
            check_address_space_for_jax()
            with shown(as_json) as progress:
                timed = api.benchmark(chosen, config=config, progress=progress)
            if not as_json:
                show_benchmark(timed)
            facts["benchmark"] = timed.to_json()
        if as_json:
            print_json(facts)
    if failed:
        sys.exit(failed)


def _check(folder: str | Location, update: bool, key: Path | None, as_json: bool) -> tuple[dict[str, object], int]:
    with shown(as_json) as progress:
        found = api.verify(folder, update=update, key=key, progress=progress)
    if not as_json:
        if found.updated:
            show("recorded in the manifest: ", ", ".join(found.updated))
        found.check()
        counted = f"{format_count(found.arrays, 'array')}, " if found.arrays else ""
        show(
            ("complete", "green"),
            f": {counted}{format_count(found.files, 'file')}, {format_size(found.bytes)}, all checksums match "
            f"({format_size(found.bytes / max(found.seconds, 1e-9))}/s)",
            ", as the owner of the key signed them" if key else "",
        )
    return found.to_json(), 0 if found.passed else CorruptOutput.exit_code


def _compare(folder: str | Location, as_json: bool, **asked: Any) -> tuple[dict[str, object], int]:
    check_address_space_for_jax()
    with shown(as_json) as progress:
        found = api.compare(
            folder,
            on_source=(lambda name, changed: None) if as_json or asked["source"] else _show_source,
            on_layer=(lambda layer: None) if as_json else _show_layer,
            progress=progress,
            **asked,
        )
    if not as_json:
        console().print(_comparison_table(found))
        show_runs(found.runs)
        found.check()
        _show_verdict(found)
    return found.to_json(), GateError.exit_code if found.failures else 0


def _compare_server(folder: str | Location, as_json: bool, **asked: Any) -> tuple[dict[str, object], int]:
    check_address_space_for_jax()
    with shown(as_json) as progress:
        found = api.compare_server(folder, progress=progress, **asked)
    result = found.statistics
    if not as_json:
        table = Table(
            f"{found.program} at {found.url} ({found.model}) against {found.checkpoint}, {_compared(result)}",
            ("statistic", "value", "gate"),
            right=("value",),
        )
        holds = ("failed", "red") if result.failures else ("holds", "green")
        table.add_row("mean KL divergence (nats)", f"{result.mean_kl:.3g}", styled(holds, f": {result.gate:.3g}"))
        table.add_row(f"mean KL of another rounding, in {result.dtype}", f"{result.rounding_kl:.3g}", "")
        table.add_row("99.9th percentile of KL", f"{result.p999_kl:.3g}", "")
        table.add_row("largest difference of log-probabilities", f"{result.max_difference:.3g}", "")
        table.add_row("same most likely token", f"{100 * result.top1:.2f}%", "")
        table.add_row("the same, of tokens without a tie", f"{100 * result.top1_decided:.2f}%", "")
        table.add_row("perplexity of these prompts, server", f"{result.perplexity_server:.5g}", "")
        table.add_row("perplexity of these prompts, JAX", f"{result.perplexity:.5g}", "")
        console().print(table)
        show_runs(found.runs)
        for name, place in (("first that differs", result.first), ("largest KL", result.worst)):
            if place is not None:
                show(
                    f"  {name}: prompt {place.prompt}, position {place.position}: token {place.token}, by the server "
                    f"{place.server_token}; KL {place.kl:.3g}"
                )
        found.check()
        show(("passed", "green"), f": {found.program} serves the model of {found.checkpoint}")
    return found.to_json(), GateError.exit_code if result.failures else 0


def _compared(result: Any) -> str:
    """Returns the numbers of prompts and tokens."""
    return f"{format_count(result.prompts, 'prompt')}, {format_count(result.tokens, 'token')}"


def _show_verdict(found: "api.Comparison") -> None:
    """Shows the verdict, and the prompt with the largest divergence."""
    from tpuconv.verify.vectors import VectorStatistics

    result = found.statistics
    compared = _compared(result)
    if isinstance(result, VectorStatistics):
        worst = f"relative error of the {result.returns} {result.relative_error:.3g}"
        no_gates = "no gates set: the gates of quantization configs are for logits, so nothing passed or failed; "
    else:
        worst = f"largest mean KL: prompt {result.worst_prompt}, {result.worst_prompt_kl:.3g}"
        no_gates = (
            "no gates set: the quantization config has `gates: none`, clips so much that no bound tells right models "
            "from wrong ones, or is not part of an export, so nothing passed or failed; "
        )
    if found.passed is None:
        show(no_gates, worst)
    else:
        what = "is close enough to the original" if found.rounded else "gives the same outputs as the original"
        show(("passed", "green"), f": the model {what} on {compared}; {worst}")
    for sight in found.sights:
        of = {"vision": "images", "audio": "sounds"}[sight.part]
        outputs = sight.outputs
        text = (
            f"relative error of the {outputs.returns} {outputs.relative_error:.3g}"
            if isinstance(outputs, VectorStatistics)
            else f"mean KL {outputs.mean_kl:.3g}, same most likely token {100 * outputs.top1:.2f}%"
        )
        show(f"  with {sight.items} {of}: error of the features {sight.features:.2g} (gate {sight.gate:g}), {text}")
    for part, why in found.unseen.items():
        show(f"  {part}: ", ("not compared", "yellow"), f"; {why}")
    for horizon in found.horizons:
        where = f"  beyond {horizon.tokens:,} tokens, the length of a window, chunk or indexer: "
        show(where, *([("not compared", "yellow"), f"; {horizon.why_not}"] if horizon.why_not else ["compared"]))


def _show_source(name: str, changed: Sequence[str] | None) -> None:
    """Shows the source, and whether it has changed since the conversion."""
    if changed is None:
        state = "other files than the conversion read, and their hashes are unknown: it may have changed"
    elif not changed:
        state = "unchanged since the conversion"
    else:
        state = f"changed since the conversion: {', '.join(shorten(changed, 5))}"
    show(f"source: {name}, {state}")


def _show_layer(layer: "LayerError") -> None:
    verdict: list[tuple[str, str] | str] = []
    if layer.diverges:
        verdict = [("diverges", "red"), f": the gate is {layer.gate:g}"]
    show(f"{layer.name:>10}  alone {layer.own_error:8.2g}  accumulated {layer.error:8.2g}  ", *verdict)


def _comparison_table(found: "api.Comparison") -> Table:
    from tpuconv.verify.vectors import VectorStatistics

    result = found.statistics
    table = Table(
        f"{found.checkpoint} against transformers, {result.dtype}, {_compared(result)}",
        ("statistic", "value", "gate"),
        right=("value",),
    )
    for statistic, value, gate in _vector_rows(result) if isinstance(result, VectorStatistics) else _logit_rows(result):
        table.add_row(statistic, value, verdict(result, gate))
    return table


def _vector_rows(result: "VectorStatistics") -> tuple[StatisticRow, ...]:
    return (
        (f"largest difference of {result.returns}", f"{result.max_abs_difference:.3g}", ""),
        (f"mean difference of {result.returns}", f"{result.mean_abs_difference:.3g}", ""),
        ("largest number", f"{result.max_abs:.4g}", ""),
        ("length of the difference / length", f"{result.relative_error:.2g}", "relative_error"),
        (f"smallest cosine of {result.vectors} vectors", f"{result.least_cosine:.6f}", ""),
    )


def _logit_rows(result: "LogitStatistics") -> tuple[StatisticRow, ...]:
    return (
        ("largest difference of logits", f"{result.max_abs_difference:.3g}", ""),
        ("mean difference of logits", f"{result.mean_abs_difference:.3g}", ""),
        ("largest logit", f"{result.max_abs_logit:.4g}", ""),
        relative_row(result),
        *divergence_rows(result),
        ("perplexity of these prompts, transformers", f"{result.perplexity_reference:.5g}", ""),
        ("perplexity of these prompts, JAX", f"{result.perplexity:.5g}", ""),
    )
