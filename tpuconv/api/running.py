"""Runs a plan."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tpuconv.api.converted import Conversion
from tpuconv.api.made import Run, follow
from tpuconv.hosts import ProcessPart
from tpuconv.location import Location, to_location
from tpuconv.options import Replacing
from tpuconv.progress import Listener, Progress

if TYPE_CHECKING:
    from tpuconv.convert.plan.types import Plan
    from tpuconv.convert.run.engine import Work
    from tpuconv.convert.run.sizing import Limits
    from tpuconv.storage.sealed import Sealed

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


def run_work(
    work: "Work",
    out: Location,
    replacing: Replacing,
    stage: str,
    progress: Listener,
    part: ProcessPart | None,
    sources: Iterable[str | Location | None] = (),
    elsewhere: "Sealed | None" = None,
) -> Run:
    """Does work that makes an output.

    Args:
        work: what to do.
        out, replacing, stage, progress, part: as of `tpuconv.api.made.follow`.
        sources: places besides the work's own source that the output must lie outside of.
        elsewhere: as of `tpuconv.convert.run.engine.make`.

    Raises:
        TpuconvError: as `tpuconv.convert.run.engine.make` does.
    """
    from tpuconv.convert.run.engine import check_outside, make

    for source in sources:
        if source is not None:
            check_outside(to_location(source), out)
    steps = make(work, out, overwrite=replacing.overwrite, part=part, elsewhere=elsewhere)
    return follow(steps, out, replacing, stage, progress, part)


def manifest_made(run: Run, elsewhere: "Sealed | None") -> "Sealed | None":
    """Returns the manifest of the output of a run, which may be `elsewhere`; None if it is not published."""
    from tpuconv.storage.sealed import read_sealed

    if not run.made["published"]:
        return None
    return elsewhere if run.made["is_elsewhere"] else read_sealed(run.made["out"])


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
    elsewhere: "Sealed | None" = None,
) -> Conversion:
    """Runs a plan, and returns facts about its output. `stage` is the name of the work for `progress`, `workspace` the
    folder of a calibration, `elsewhere` as of `tpuconv.convert.run.engine.make`."""
    from tpuconv.convert.export.carried import split_skipped
    from tpuconv.convert.export.export import convert_to_safetensors, described
    from tpuconv.convert.run.card import drafts_of, serve_commands
    from tpuconv.convert.run.conversion import run
    from tpuconv.quantize.report import report

    convert_plan = convert_to_safetensors if plan.target.is_safetensors else partial(run, workspace=workspace)
    steps = convert_plan(plan, out, limits, overwrite=replacing.overwrite, part=part, elsewhere=elsewhere)
    ended = follow(steps, out, replacing, stage, progress, part)
    manifest = manifest_made(ended, elsewhere)
    raw: dict[str, Any] = dict(manifest.raw) if manifest else {}
    if raw and plan.target.is_safetensors:
        raw = described(plan, raw)
    skipped, carried = split_skipped(plan)
    is_served = bool(raw) and plan.target.is_safetensors and plan.quantization is not None
    drafts = drafts_of(plan.config)
    resumed = ended.made["resumed_bytes"] * plan.source_bytes // max(1, ended.total)
    return Conversion(
        **{**ended.made, "resumed_bytes": resumed},
        family=plan.family,
        source_state=_state_of(raw["source"]) if raw else None,
        arrays=len(plan.arrays),
        parameters=plan.parameters,
        output_bytes=raw.get("stored_bytes", raw["bytes"]) if raw else plan.output_bytes,
        source_bytes=plan.source_bytes,
        adapters=plan.options.adapters,
        skipped=skipped,
        carried=carried,
        ignored_config=plan.ignored_config,
        left_out=plan.left_out,
        quantization=report(raw) if raw and plan.quantization else None,
        part_bytes=plan.source_bytes if ended.part_total is None else ended.part_total,
        rounded=plan.rounded,
        differs=plan.differs,
        serve=serve_commands(plan.family, str(out), drafts) if is_served else (),
        drafts=drafts,
    )
