"""Convert, and plan a conversion."""

from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tpuconv.api.converted import Conversion, ConversionPlan
from tpuconv.api.quantizers import find_rules, quantizer_by
from tpuconv.api.running import downloading_again, run_plan
from tpuconv.convert.plan.options import Fetching, Options
from tpuconv.hosts import ProcessPart
from tpuconv.location import Location, to_location
from tpuconv.names import OWN_TARGET
from tpuconv.options import ELSEWHERE_ARGUMENT, PART_ARGUMENT, PROGRESS_ARGUMENT, Budget, Replacing, argument, takes
from tpuconv.progress import Listener, ignore

if TYPE_CHECKING:
    from tpuconv.storage.sealed import Sealed

SRC = argument("A Hub id, or a folder with safetensors, on a disk or in a bucket (`gs://`, `s3://`, `az://`).")


@dataclass(eq=False, repr=False)
class ConvertRequest(Budget, Fetching, Replacing, Options):
    """The arguments of `convert`."""

    src: str | Path = field(metadata=SRC)
    out: str | Location | None = field(
        default=None,
        metadata=argument(
            "The folder to write, there too; by default `<name>-orbax` or `<name>-<target>` in the current folder, "
            "with `-<config>` after it if `quantize` is given."
        ),
    )
    _: KW_ONLY
    part: ProcessPart | None = field(default=None, metadata=PART_ARGUMENT)
    elsewhere: "Sealed | None" = field(default=None, metadata=ELSEWHERE_ARGUMENT)
    progress: Listener = field(default=ignore, metadata=PROGRESS_ARGUMENT)


@dataclass(eq=False, repr=False)
class PlanRequest(Budget, Fetching, Options):
    """The arguments of `plan`."""

    src: str | Path = field(metadata=SRC)
    _: KW_ONLY
    progress: Listener = field(default=ignore, metadata=PROGRESS_ARGUMENT)


@takes(ConvertRequest)
def convert(asked: ConvertRequest) -> Conversion:
    """Converts a Hugging Face checkpoint to an Orbax checkpoint. The output appears complete or not at all. After an
    interruption the same call continues.

    Raises:
        TpuconvError: see `tpuconv.errors` for its children. Faults that headers show are raised before a weight byte is
            read.
    """
    from tpuconv.convert.plan.planning import planned_conversion
    from tpuconv.convert.run.conversion import read_ahead
    from tpuconv.convert.run.sizing import Limits

    place, progress = to_location(asked.out) if asked.out else None, asked.progress
    rules = find_rules(asked.quantize, asked.encoding)
    kinds = ["orbax" if asked.target == OWN_TARGET else asked.target, *([rules.name] if rules else [])]
    limits = Limits.of_this_machine(asked.jobs, asked.max_memory)

    def converted() -> Conversion:
        with planned_conversion(
            str(asked.src),
            asked,
            asked,
            quantizer_by(rules) if rules else None,
            ahead=read_ahead,
            progress=progress,
        ) as planned:
            out = place or Path("-".join([planned.source.name, *kinds]))
            return run_plan(planned, out, limits, asked, "converting", progress, asked.part, elsewhere=asked.elsewhere)

    return downloading_again(converted, progress)


@takes(PlanRequest)
def plan(asked: PlanRequest) -> ConversionPlan:
    """Plans `convert` with these arguments. No weights are downloaded or read. `plan.faults` lists the faults; `check`
    raises them.

    Raises:
        TpuconvError: the source cannot be read or its architecture is not supported.
    """
    from tpuconv.convert.plan.planning import planned_conversion

    rules = find_rules(asked.quantize, asked.encoding)
    with planned_conversion(
        str(asked.src), asked, asked, quantizer_by(rules) if rules else None, ahead=None, progress=asked.progress
    ) as planned:
        return ConversionPlan.sized(planned, rules, asked)
