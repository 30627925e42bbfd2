"""Runs a plan."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tpuconv.api.converted import Conversion
from tpuconv.hosts import ProcessPart
from tpuconv.location import Location, to_location
from tpuconv.memory import peak_memory
from tpuconv.options import Replacing
from tpuconv.progress import Listener, Progress
from tpuconv.text import format_size

if TYPE_CHECKING:
    from tpuconv.convert.plan.types import Plan
    from tpuconv.convert.run.engine import RunProgress, Work
    from tpuconv.convert.run.sizing import Limits

Outcome = TypeVar("Outcome")


def downloading_again(work: Callable[[], Outcome], progress: Listener) -> Outcome:
    """Returns the result of work on a source. If a file in the Hub's cache turns out to be damaged, it is downloaded
    once again."""
    from tpuconv.sources.damaged import DamagedDownload

    removed: set[tuple[Path, ...]] = set()
    while True:
        try:
            return work()
        except DamagedDownload as error:
            if tuple(error.files) in removed:
                raise
            error.remove()
            removed.add(tuple(error.files))
            progress(Progress("downloading", message=f"{error.message}: it is downloaded again."))


@dataclass(frozen=True)
class WorkDone:
    """The end of work that makes an output: the bytes of all, and of them those that an earlier run had made; whether
    the output was complete before, and whether it is published."""

    total: int
    resumed: int
    already_there: bool
    published: bool


def run_work(
    work: "Work",
    out: Location,
    replacing: Replacing,
    stage: str,
    progress: Listener,
    part: ProcessPart | None,
    sources: Iterable[str | Location | None] = (),
) -> WorkDone:
    """Does work that makes an output, and compares an output that was there with its checksums if that is asked for.

    Args:
        work: what to do.
        out: the output.
        replacing: what to do with an output that is there.
        stage: the name of the work for `progress`.
        progress: called while it is done.
        part: the share of this process.
        sources: places besides the work's own source that the output must lie outside of.

    Raises:
        TpuconvError: as `tpuconv.convert.run.engine.make` does.
    """
    from tpuconv.api.verification import verify
    from tpuconv.convert.run.engine import ALREADY_THERE, PART_DONE, RunProgress, check_outside, make

    for source in sources:
        if source is not None:
            check_outside(to_location(source), out)
    progress(Progress(stage))
    last = RunProgress(0, 0, 0, "")
    reports = make(work, out, overwrite=replacing.overwrite, part=part)
    for report in _shown(reports, f"{stage}, {part}" if part else stage, progress):
        last = report
    was_there = last.stage == ALREADY_THERE
    if replacing.check and was_there:
        verify(out, progress=progress).check()
    return WorkDone(last.total, last.resumed, was_there, last.stage != PART_DONE)


def _shown(reports: "Iterable[RunProgress]", stage: str, progress: Listener) -> "Iterator[RunProgress]":
    """Yields the reports of a run, and shows each; the bytes of an earlier run are told once."""
    is_told = False
    for report in reports:
        if report.resumed and report.done < report.total and not is_told:
            is_told = True
            done = f"{format_size(report.resumed)} of {format_size(report.total)}"
            progress(Progress(stage, message=f"resuming: {done} are done"))
        progress(report.shown_as(stage))
        yield report


def _state_of(source: Mapping[str, Any]) -> str | None:
    """Returns the check of a source, as a manifest records it; None of a folder, of which nobody publishes hashes."""
    from tpuconv.sources.source import UNVERIFIED

    state: str | None = source.get("verified")
    return None if state == UNVERIFIED and not source.get("repo") else state


def run_plan(
    plan: "Plan",
    out: Location,
    limits: "Limits",
    replacing: Replacing,
    stage: str,
    progress: Listener,
    part: ProcessPart | None,
    workspace: Path | None = None,
) -> Conversion:
    """Runs a plan, and returns facts about its output. `stage` is the name of the work for `progress`, `workspace` the
    folder of a calibration."""
    from tpuconv.api.verification import verify
    from tpuconv.convert.export.carried import split_skipped
    from tpuconv.convert.export.export import convert_to_safetensors, described
    from tpuconv.convert.run.card import serve_commands
    from tpuconv.convert.run.conversion import run
    from tpuconv.convert.run.engine import ALREADY_THERE, PART_DONE, WORKING, RunProgress
    from tpuconv.quantize.report import report
    from tpuconv.storage.sealed import read_sealed

    progress(Progress(stage))  # from here on a rerun continues
    began, part_bytes, last = time.monotonic(), plan.source_bytes, RunProgress(0, 0, 0, "")
    convert_plan = convert_to_safetensors if plan.target.is_safetensors else partial(run, workspace=workspace)
    reports = convert_plan(plan, out, limits, overwrite=replacing.overwrite, part=part)
    for last in _shown(reports, f"{stage}, {part}" if part else stage, progress):
        if last.stage == WORKING:
            part_bytes = last.total
    is_published = last.stage != PART_DONE
    seconds = time.monotonic() - began
    raw: dict[str, Any] = dict(read_sealed(out).raw) if is_published else {}
    if raw and plan.target.is_safetensors:
        raw = described(plan, raw)
    skipped, carried = split_skipped(plan)
    is_served = is_published and plan.target.is_safetensors and plan.quantization is not None
    done = Conversion(
        out=out,
        family=plan.family,
        source_state=_state_of(raw["source"]) if raw else None,
        arrays=len(plan.arrays),
        parameters=plan.parameters,
        output_bytes=raw.get("stored_bytes", raw["bytes"]) if raw else plan.output_bytes,
        source_bytes=plan.source_bytes,
        resumed_bytes=last.resumed * plan.source_bytes // max(1, last.total),
        already_there=last.stage == ALREADY_THERE,
        seconds=seconds,
        peak_memory_bytes=peak_memory(),
        adapters=plan.options.adapters,
        skipped=skipped,
        carried=carried,
        ignored_config=plan.ignored_config,
        left_out=plan.left_out,
        quantization=report(raw) if raw and plan.quantization else None,
        part=part,
        part_bytes=part_bytes,
        published=is_published,
        rounded=plan.rounded,
        differs=plan.differs,
        serve=serve_commands(plan.family, str(out)) if is_served else (),
    )
    if replacing.check and done.already_there:
        verify(out, progress=progress).check()
    return done
