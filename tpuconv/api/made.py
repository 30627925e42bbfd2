"""Outputs of `convert`, `quantize`, `export` and `reshard`, and the runs that made them."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpuconv.hosts import ProcessPart
from tpuconv.location import Location
from tpuconv.memory import peak_memory
from tpuconv.options import Replacing
from tpuconv.progress import Listener, Progress
from tpuconv.text import OneLine, format_size

if TYPE_CHECKING:
    from tpuconv.convert.run.engine import RunProgress


@dataclass(frozen=True, repr=False, kw_only=True)
class Made(OneLine):
    """An output, and the run that made it.

    Attributes:
        out: the folder of the output.
        resumed_bytes: the bytes that an earlier run had made.
        already_there: whether OUT was complete before.
        seconds: wall-clock time of the run, after its plan.
        peak_memory_bytes: peak resident memory of this process.
        part: the share of this process; None if there was only one process.
        published: whether OUT is complete. If not, the last of the other processes publishes it.
        is_elsewhere: whether the complete output is only where the argument `elsewhere` says.
    """

    out: Location
    resumed_bytes: int
    already_there: bool
    seconds: float
    peak_memory_bytes: int
    part: ProcessPart | None
    published: bool
    is_elsewhere: bool = False

    def run_to_json(self) -> dict[str, Any]:
        """Returns the keys of docs/json.md that all outputs have."""
        return {
            "out": str(self.out),
            "resumed_bytes": self.resumed_bytes,
            "already_there": self.already_there,
            "seconds": round(self.seconds, 3),
            "peak_memory_bytes": self.peak_memory_bytes,
            **({} if self.part is None else {"process": self.part.to_json(), "published": self.published}),
        }


@dataclass(frozen=True)
class Run:
    """A run that ended.

    Attributes:
        made: the fields of `Made`.
        total: the bytes of all work.
        part_total: the bytes of this process's share; None if the run did no share.
    """

    made: dict[str, Any]
    total: int
    part_total: int | None


def follow(
    steps: "Iterable[RunProgress]",
    out: Location,
    replacing: Replacing,
    stage: str,
    progress: Listener,
    part: ProcessPart | None,
) -> Run:
    """Does the steps that make an output, and compares an output that was there with its checksums if that is asked
    for.

    Args:
        steps: the work.
        out: the output.
        replacing: what to do with an output that is there.
        stage: the name of the work for `progress`.
        progress: called while it is done.
        part: the share of this process.

    Raises:
        TpuconvError: as `tpuconv.convert.run.engine.make` and `tpuconv.api.verify` do.
    """
    from tpuconv.api.verification import verify
    from tpuconv.convert.run.engine import ALREADY_ELSEWHERE, ALREADY_THERE, PART_DONE, WORKING, RunProgress

    progress(Progress(stage))  # from here on a rerun continues
    began, last = time.monotonic(), RunProgress(0, 0, 0, "")
    mine: int | None = None
    for last in _shown(steps, f"{stage}, {part}" if part else stage, progress):
        if last.stage == WORKING:
            mine = last.total
    made = {
        "out": out,
        "resumed_bytes": last.resumed,
        "already_there": last.stage in (ALREADY_THERE, ALREADY_ELSEWHERE),
        "seconds": time.monotonic() - began,
        "peak_memory_bytes": peak_memory(),
        "part": part,
        "published": last.stage != PART_DONE,
        "is_elsewhere": last.stage == ALREADY_ELSEWHERE,
    }
    if replacing.check and last.stage == ALREADY_THERE:
        verify(out, progress=progress).check()
    return Run(made, last.total, mine)


def _shown(steps: "Iterable[RunProgress]", stage: str, progress: Listener) -> "Iterator[RunProgress]":
    """Yields the steps of a run, and shows each; the bytes of an earlier run are told once."""
    is_told = False
    for step in steps:
        if step.resumed and step.done < step.total and not is_told:
            is_told = True
            done = f"{format_size(step.resumed)} of {format_size(step.total)}"
            progress(Progress(stage, message=f"resuming: {done} are done"))
        progress(step.shown_as(stage))
        yield step
