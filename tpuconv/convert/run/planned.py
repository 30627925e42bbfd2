"""The names of all files that a conversion may write into its output. No others are ever removed there."""

from pathlib import PurePosixPath

from tpuconv.checkpoint.manifest import ORBAX_FILES, path_in
from tpuconv.convert.plan.quantization import REPORT
from tpuconv.convert.plan.types import Plan
from tpuconv.names import MANIFEST
from tpuconv.sources.companions import CARD, SOURCE_CARD


def planned_names(plan: Plan) -> set[str]:
    """Returns the path in the output of each file that the conversion of a plan may write."""
    inside = plan.target.folder
    arrays = {
        path_in(inside, f"{array.name}/{name}")
        for array in plan.arrays.values()
        for name in ("zarr.json", *array.shard_names())
    }
    orbax = {path_in(inside, name) for name in ORBAX_FILES}
    step = {f"{PurePosixPath(inside).parent}/{name}" for name in ORBAX_FILES[1:] if plan.target.step_item}
    return {*arrays, *orbax, *step, *plan.source.companions, MANIFEST, CARD, SOURCE_CARD, REPORT}
