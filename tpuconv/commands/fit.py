"""`tpuconv fit`."""

import sys
from typing import TYPE_CHECKING, Any

from tpuconv import api
from tpuconv.commands import options
from tpuconv.commands.console import Table, console, lines, print_json, show
from tpuconv.commands.inputs import chosen_checkpoint
from tpuconv.commands.progress import shown
from tpuconv.errors import GateError
from tpuconv.memory import check_address_space_for_jax
from tpuconv.text import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpuconv.verify.topology.request import FitReport, Program


@options.command(
    "fit",
    "tpuconv fit meta-llama/Llama-3.3-70B-Instruct --topology v5e:4x4 --batch 8 --context 2048",
    "tpuconv fit Qwen/Qwen3-32B --topology v5e --topology v6e,v5p",
    "tpuconv fit deepseek-ai/DeepSeek-R1 --topology v6e:8x8 --encoding keep",
    "tpuconv fit Qwen3-8B-orbax --topology v5e:2x2 --write-layouts",
)
@options.src_or_ckpt
@options.of(api.fit)
@options.as_json
def fit(src: str | None, topologies: tuple[str, ...], as_json: bool, **request: Any) -> None:
    """Ask the TPU compiler whether SRC_OR_CKPT fits a slice, and how fast it may decode there.

    SRC_OR_CKPT is a checkpoint of ours, a Hub id, a folder or a config.json; it defaults to the newest checkpoint in
    the current folder. No weights are read and no TPU is needed. Exit code 3: the model does not fit.
    """
    chosen = src or str(chosen_checkpoint(None, "Fitting", quiet=as_json, own=True))
    check_address_space_for_jax()
    with shown(as_json) as progress:
        found = api.fit(
            chosen,
            topologies,
            on_report=(lambda report: None) if as_json else _show_report,
            progress=progress,
            **request,
        )
    if as_json:
        print_json(found.to_json())
        sys.exit(0 if found.passed else GateError.exit_code)
    for table in tables(found):
        if table.rows:
            console().print(table)
    if found.positions < found.request.context:
        show(f"  the model has {found.positions:,} positions, fewer than the context that was compiled")
    if found.layouts:
        show(f"layouts for {', '.join(r.topology for r in found.fitting)}: ", (str(found.layouts), "bold"))
    found.check()


def _show_report(report: "FitReport") -> None:
    from tpuconv.notation.sharding import format_mesh

    show((report.verdict(), "green" if report.fits else "red"), f" (mesh {format_mesh(report.mesh)})")


def tables(found: "api.Fit") -> "Iterator[Table]":
    """Yields three tables: the memory of a device, the time of a step, and the operations of a step."""
    from tpuconv.verify.topology.request import ESTIMATE_ERROR

    request = found.request
    kind = request.quantize["name"] if request.quantize else request.dtype
    kind += f", cache {request.cache_dtype}" if request.cache_dtype else ""
    kinds = ("weights", "cache", "temporaries", "code", "peak", "available", "headroom")
    table = Table(
        f"{found.source}, batch {request.batch}, context {request.context}, {kind}: memory of a device",
        ("slice", *kinds),
        right=kinds,
        optional=("code", "temporaries", "available", "cache"),
    )
    for report in found.reports:
        table.add_row(report.topology, *(format_size(getattr(report.memory, kind)) for kind in kinds))
    yield table
    columns = ("compiled in", "HBM read", "written", "floor", "estimate")
    table = Table(
        f"a step; estimates are experimental: {ESTIMATE_ERROR}",
        ("slice", "program", *columns),
        right=columns,
        optional=("compiled in", "written", "floor", "HBM read"),
    )
    for report in found.reports:
        for program in report.programs:
            table.add_row(
                report.topology,
                f"{program.name}, {program.tokens} tokens" if program.tokens > 1 else program.name,
                f"{program.compile_seconds:.0f} s",
                format_size(program.hbm_read),
                format_size(program.hbm_written),
                _floor(program),
                f"{1e3 * program.estimate:.2f} ms",
            )
    yield table
    table = Table(
        "operations of a step; products: type of the multiplication (type in memory)",
        ("slice", "program", "kind", "count and bytes"),
    )
    for report in found.reports:
        for program in report.programs:
            does = {
                "collectives": [f"{c['count']} {c['op']}, {format_size(c['bytes'])}" for c in program.collectives],
                "products": [f"{p['count']} {p['multiplied']} ({p['stored']})" for p in program.products],
                "large copies": [
                    f"{c['count']} of {c['source'][-60:]}, {format_size(c['bytes'])}" for c in program.copies[:5]
                ],
            }
            for kind, described in does.items():
                if described:
                    table.add_row(report.topology, program.name, kind, lines(described))
    yield table


def _floor(program: "Program") -> str:
    least, most = 1e3 * program.expected_floor, 1e3 * program.floor
    return f"{most:.2f} ms" if least > 0.99 * most else f"{least:.2f} ms (all experts {most:.2f})"
