"""`tpuconv convert`, and the output of a conversion and of its plan."""

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tpuconv import api
from tpuconv.commands import options
from tpuconv.commands.console import Table, console, lines, print_json, say, show
from tpuconv.commands.hub_outputs import OutputParam, local_place, pushed
from tpuconv.commands.params import Name
from tpuconv.commands.process import fail
from tpuconv.commands.progress import resumable
from tpuconv.errors import TpuconvError, UsageError
from tpuconv.location import BucketPath, Location
from tpuconv.memory import check_address_space_for_jax
from tpuconv.text import format_count, format_size, plain, some

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tpuconv.convert.export.files import FileTensor
    from tpuconv.convert.export.trained import TrainedRun
    from tpuconv.convert.plan.types import Skip
    from tpuconv.models.common.ignored import IgnoredKey
    from tpuconv.quantize.report import Report
    from tpuconv.sources.adapter import Adapter
    from tpuconv.sources.companions import LeftOut


@options.command(
    "convert",
    "tpuconv convert Qwen/Qwen3-8B",
    "tpuconv convert ./my-checkpoint /data/my-model --dtype bfloat16",
    "tpuconv convert deepseek-ai/DeepSeek-R1 --quantize int8_default",
    "tpuconv convert deepseek-ai/DeepSeek-R1 --encoding keep",
    "tpuconv convert Qwen/Qwen3-8B --target maxtext --scan-layers",
    "tpuconv convert Qwen/Qwen3-8B gs://bucket/qwen3-8b",
    "tpuconv convert Qwen/Qwen3-8B hf://my-org/Qwen3-8B-orbax",
    "tpuconv convert meta-llama/Llama-3.3-70B-Instruct --dry-run",
)
@click.argument("src", type=Name())
@click.argument("out", required=False, type=OutputParam())
@options.of(api.convert)
@options.processes
@click.option("--dry-run", is_flag=True, help="Show the plan and stop; no weights are downloaded.")
@options.as_json
def convert(
    src: str,
    out: Location | None,
    dry_run: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Convert SRC, a Hub id or a folder with safetensors, to an Orbax checkpoint in OUT (./<name>-orbax by default).
    With --target, convert it for another program: `tpuconv families --target NAME` lists the supported families.
    OUT then defaults to ./<name>-<target>, or ./<name>-<target>-<config> with --quantize.

    OUT appears complete or not at all. After an interruption the same command continues. A source on the Hub or in a
    bucket is fetched during the conversion, and no copy of it stays; --dry-run shows the disk space that it needs.

    OUT may be hf://ORG/NAME: the output is made in a folder beside the Hub's cache, or in --workspace, and pushed as
    `tpuconv push` does. Then its local files are removed. If the repository holds this output already, nothing is made;
    --overwrite and --check make and push it again.

    With --distributed, or --process-index and --process-count, several processes convert one model together.
    """
    _check_order(src, out)
    convert_model = options.on_processes(api.convert, given)
    place, there = local_place(out, given, planned=dry_run)
    if given["quantize"]:
        check_address_space_for_jax()
    with resumable(as_json) as progress:
        if not dry_run:
            asked = options.asked_of(api.convert, given)
            made = convert_model(src, place, progress=progress, elsewhere=there, **asked)
            done = pushed(out, made, there, progress)
        else:
            plan = api.plan(src, progress=progress, **options.asked_of(api.plan, given))
    if dry_run:
        if place is not None:
            options.check_planned_place(plan.plan.source.folder, place)
        show_plan(plan, as_json, place)
    else:
        show_conversion(done, given["check"], as_json)


def _check_order(src: str, out: Location | None) -> None:
    """Raises UsageError if OUT holds a model and SRC is no folder: the arguments are swapped."""
    if (
        not isinstance(out, Path)
        or re.fullmatch(r"[\w-][\w.-]*/[\w.-]+|\w+://.*", src)
        or Path(src).expanduser().is_dir()
    ):
        return
    if (out / "config.json").is_file() and any(out.glob("*.safetensors")):
        raise UsageError(
            f"there is no folder {src}, and OUT, {out}, holds a model",
            hint=f"SRC is the first argument: `tpuconv convert {out} {src}`",
        )


def show_conversion(done: "api.Conversion", check: bool, as_json: bool) -> None:
    """Shows the output of a conversion. With `check`, an output that existed already was compared with its
    checksums."""
    if as_json:
        print_json(done.to_json())
        return
    if not done.published:
        show(
            f"{done.part}: part done, {format_size(done.part_bytes)} of {format_size(done.source_bytes)}; the last "
            "process publishes ",
            (str(done.out), "bold"),
        )
        return
    if done.already_there:
        show((str(done.out), "bold"), f" exists already, from this source and these options: {already_there(check)}.")
    else:
        show(
            (str(done.out), "bold"),
            f": {done.family}, {done.parameters:,} parameters in {done.arrays} arrays, "
            f"{format_size(done.output_bytes)} in {speed(done.source_bytes, done.resumed_bytes, done.seconds)}, "
            f"peak memory {format_size(done.peak_memory_bytes)}",
        )
    _show_adapters(done.adapters)
    _show_ignored(done.ignored_config)
    _show_left_out(done.left_out)
    _show_carried(done.carried)
    show_skipped("not converted", done.skipped)
    if done.source_state and not done.source_verified:
        show(f"  source {done.source_state}")
    for sentence in filter(None, (done.rounded, done.differs)):
        show(f"  {sentence}")
    if done.quantization:
        show_report(done.quantization, done.out)
    if done.serve:
        show("serve it by vLLM, or on a TPU:")
        for command in done.serve:
            say(f"  {plain(command)}")


def speed(nbytes: int, resumed: int, seconds: float) -> str:
    """Describes the time of a run, the bytes that it made in a second, and the bytes of an earlier run."""
    rate = f" ({format_size((nbytes - resumed) / max(seconds, 1e-9))}/s)" if nbytes > resumed else ""
    return f"{seconds:.1f} s{rate}" + (f", {format_size(resumed)} from an earlier run" if resumed else "")


def already_there(check: bool) -> str:
    """Describes the state of an output that existed before the command."""
    return "all checksums match" if check else "all file sizes match (--check reads the files)"


def show_plan(plan: "api.ConversionPlan", as_json: bool, out: Location | None) -> None:
    """Shows the plan, and the free space on the disk of OUT; of a plan with faults the faults, without sizes."""
    if as_json:
        try:
            plan.check()
        except TpuconvError as error:
            fail(error, as_json, plan.to_json())
        print_json(plan.to_json())
        return
    arrays, source = plan.plan.arrays, plan.plan.source
    title = f"{source.name}: {plan.plan.family}"
    if not plan.plan.faults:
        console().print(tensor_table(title, plan.files) if plan.files else _arrays_of(title, plan))
    _show_adapters(plan.plan.options.adapters)
    _show_ignored(plan.plan.ignored_config)
    _show_left_out(plan.plan.left_out)
    skipped, carried = plan.split_skipped
    _show_carried(carried)
    show_skipped("not converted", skipped)
    for note in plan.notes:
        show(f"  {note}")
    if plan.calibration:
        show(f"  {plan.calibration}")
        if plan.calibration.warning:
            show("  ", ("warning", "yellow"), f": {plan.calibration.warning}")
    plan.check()
    at_most = " at most" if any(array.compressed for array in arrays.values()) else ""
    written = format_count(len(arrays), "array")
    if plan.files:
        written = in_files(plan.files)
        at_most = ""
    show(
        f"{format_count(len(source.tensors), 'tensor')}, {format_size(source.nbytes)} -> {written}, "
        f"{format_size(plan.output_bytes)}{at_most}; {plan.plan.parameters:,} parameters; "
        f"peak memory {format_size(plan.peak_memory_bytes)}"
        + (f", and {format_size(plan.workspace_bytes)} of disk for the source" if plan.workspace_bytes else "")
    )
    if not isinstance(out, BucketPath):
        show_disk(plan, out or Path())


def show_disk(plan: "api.ConversionPlan", out: Path) -> None:
    """Shows the disk space that a plan needs; if the disk of OUT has less, the options that need less."""
    folder = next((path for path in (out, *out.absolute().parents) if path.is_dir()), Path("/"))
    options, free = plan.plan.options, shutil.disk_usage(folder).free
    workspace_on_disk = plan.workspace_bytes if plan.plan.source.workspace is None else 0
    beside = f", {format_size(plan.workspace_bytes)} for the source" if plan.workspace_bytes else ""
    takes = f"{format_size(plan.disk_bytes)} of disk for OUT{beside}"
    if plan.disk_bytes + workspace_on_disk <= free:
        show(f"  needs {takes}; {format_size(free)} are free")
        return
    less = ["an OUT on another disk or in a bucket (gs://, s3://, az://)"]
    less += ["--workspace on another disk"] * bool(workspace_on_disk)
    if plan.rules is None and options.layers is None:
        is_enough = plan.disk_bytes // 2 + workspace_on_disk <= free
        less += ["--quantize int8_weight_only: about half"] * (options.encoding != "keep" and is_enough)
        less += ["--layers 0-1: a trial"] * (not plan.files)
    show(
        ("  too little disk", "yellow"),
        f": the conversion needs {takes}, and {folder.absolute()} has {format_size(free)} free. It fits with "
        + ", or ".join(less),
    )


def _arrays_of(title: str, plan: "api.ConversionPlan") -> Table:
    """Returns a table of the arrays that would be written, with their source tensors."""
    from tpuconv.names import collapse

    arrays = plan.plan.arrays
    table = Table(
        title,
        ("source", "parameter", "axes", "shape", "dtype", "bytes"),
        right=("bytes",),
        optional=("axes", "dtype", "shape"),
    )
    for pattern, names in collapse(arrays, lambda name: arrays[name].kind).items():
        group = [arrays[name] for name in names]
        first = group[0]
        table.add_row(
            lines(collapse(name for array in group for name in array.sources)),
            pattern,
            first.axes,
            " ".join(map(str, first.shape)),
            first.dtype.name,
            format_size(sum(array.nbytes for array in group)),
        )
    return table


def tensor_table(title: str, files: "Sequence[Sequence[FileTensor]]") -> Table:
    """Returns a table of the tensors that would be written."""
    from tpuconv.convert.export.files import kind_of_tensor
    from tpuconv.names import collapse

    tensors = {tensor.name: tensor for file in files for tensor in file}
    table = Table(
        title, ("tensor", "count", "shape", "dtype", "bytes"), right=("count", "bytes"), optional=("count", "dtype")
    )
    for pattern, names in collapse(tensors, lambda name: kind_of_tensor(tensors[name])).items():
        first = tensors[names[0]]
        size = format_size(sum(tensors[name].nbytes for name in names))
        table.add_row(pattern, str(len(names)), " ".join(map(str, first.shape)), first.dtype, size)
    return table


def in_files(files: "Sequence[Sequence[FileTensor]]") -> str:
    """Returns the number of tensors and of files, as text."""
    return f"{format_count(sum(map(len, files)), 'tensor')} in {format_count(len(files), 'file')}"


def _show_adapters(adapters: "Sequence[Adapter]") -> None:
    """Shows a line for each adapter that is merged."""
    for facts in (adapter.to_summary() for adapter in adapters):
        tensors = format_count(facts["changes"], "tensor")
        show(f"  adapter {facts['name']}, weight {facts['weight']:g}: changes {tensors}")


def _show_ignored(ignored: "Sequence[IgnoredKey]") -> None:
    """Shows a line for each reason, with the first keys of config.json that it covers."""
    for reason, warning in dict.fromkeys((key.reason, key.warning) for key in ignored):
        keys = [key.key[:100] for key in ignored if (key.reason, key.warning) == (reason, warning)]
        show(
            f"  ignored in config.json: {some(keys, 4)}: {reason}",
            (f"  warning: {warning}" if warning else "", "yellow"),
        )


def _show_carried(count: int) -> None:
    """Shows the number of tensors that are copied to the output unchanged."""
    if count:
        show(f"  copied unchanged: {format_count(count, 'tensor')}")


def _show_left_out(left_out: "Sequence[LeftOut]") -> None:
    """Shows a line for each reason, with the first files that it covers."""
    for reason in dict.fromkeys(file.reason for file in left_out):
        names = [plain(file.name)[:100] for file in left_out if file.reason == reason]
        show(f"  not copied: {some(names, 4)}: {reason}")


def show_skipped(what: str, skipped: "Sequence[Skip]") -> None:
    """Shows a line for each reason, with the first patterns that it covers. `what` names the step that was skipped."""
    for line in skipped_lines(what, skipped):
        show(line)


def skipped_lines(what: str, skipped: "Sequence[Skip]") -> "Iterator[str]":
    """Yields the lines that `show_skipped` shows. Tensors are counted, or what a reason begins with: arrays, rows."""
    for reason in dict.fromkeys(skip.reason for skip in skipped):
        group = [skip for skip in skipped if skip.reason == reason]
        named = some([skip.pattern for skip in group], 2)
        number, (unit, _, rest) = sum(skip.count for skip in group), reason.partition(" ")
        counted = (
            f"{format_count(number, unit.removesuffix('s'))} {rest}"
            if unit in ("arrays", "rows")
            else f"{format_count(number, 'tensor')}, {reason}"
        )
        yield f"  {what}: {counted}: {named}"


def run_lines(run: "TrainedRun") -> "Iterator[str]":
    """Yields the lines that tell what is read of a trainer's checkpoint."""
    yield f"  {run.folder}: read as {run.target}: {run.arrays}"
    yield from skipped_lines("not read", run.skipped)


def show_runs(runs: "Sequence[TrainedRun]") -> None:
    """Shows what is read of trainers' checkpoints."""
    for line in (line for run in runs for line in run_lines(run)):
        show(line)


def show_report(report: "Report", out: Location) -> None:
    """Shows the quantization error by pattern and type of the parameters, worst first."""
    from tpuconv.convert.plan.quantization import REPORT
    from tpuconv.quantize.report import by_pattern

    table = Table(
        f"{report.config}: {report.weight_bits:.2f} bits a weight, {format_size(report.bytes)} on disk",
        ("parameters", "count", "type", "bits", "worst dB", "mean dB", "clipped"),
        right=("count", "bits", "worst dB", "mean dB", "clipped"),
        optional=("clipped", "mean dB", "count"),
    )
    for kind in by_pattern(report.rows):
        worst = kind.worst
        table.add_row(
            kind.pattern,
            str(len(kind.rows)),
            f"{worst.qtype}, {worst.source}" if worst.source else worst.qtype,
            f"{worst.bits:.2f}",
            f"{worst.snr_db:.1f}",
            f"{kind.mean_db:.1f}",
            f"{100 * max(row.clipped for row in kind.rows):.3g}%",
        )
    console().print(table)
    for note in report.notes:
        show(f"  {note}")
    show(f"dB: signal-to-noise ratio, worst first; plots in {out / REPORT}")
