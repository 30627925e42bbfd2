"""The names of all files that a conversion may write into its output. No others are ever removed there."""

from collections.abc import Collection, Iterable
from pathlib import PurePosixPath

from tpuconv.checkpoint.manifest import ORBAX_FILES, path_in
from tpuconv.convert.plan.quantization import REPORT
from tpuconv.convert.plan.types import OutputArray, Plan
from tpuconv.names import MANIFEST
from tpuconv.sources.companions import CARD, SOURCE_CARD
from tpuconv.targets.target import Target


def planned_names(plan: Plan) -> set[str]:
    """Returns the path in the output of each file that the conversion of a plan may write."""
    return written_names(plan.target, plan.arrays.values(), plan.source.companions)


def written_names(target: Target, arrays: Iterable[OutputArray], companions: Collection[str]) -> set[str]:
    """Returns the path in the output of each file of a checkpoint.

    Args:
        target: the program that the checkpoint is for.
        arrays: of the checkpoint.
        companions: the files that come with the weights.
    """
    inside = target.folder
    of_arrays = {
        path_in(inside, f"{array.name}/{name}")
        for array in arrays
        for name in (array.metadata_name, *array.shard_names())
    }
    orbax = {path_in(inside, name) for name in ORBAX_FILES}
    step = {f"{PurePosixPath(inside).parent}/{name}" for name in ORBAX_FILES[1:] if target.step_item}
    return {*of_arrays, *orbax, *step, *companions, MANIFEST, CARD, SOURCE_CARD, REPORT}
