"""Opens a checkpoint for a resharding: ours, or a trainer's."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.convert.export.array_source import BoxSource, CheckpointArrays
from tpuconv.convert.export.trained import check_converted, open_trained, trained_arrays
from tpuconv.convert.plan.types import Skip
from tpuconv.location import Location
from tpuconv.progress import Listener


@contextmanager
def opened_arrays(
    ckpt: Location, config: str | None, target: str | None, progress: Listener
) -> Iterator[tuple[BoxSource, tuple[Skip, ...]]]:
    """Opens a checkpoint. Yields its arrays, and the arrays of a trainer that are no parameters.

    Args:
        ckpt: a checkpoint of tpuconv; with `config` a trainer's.
        config: the model that was trained.
        target: whose tree a trainer's checkpoint has; None: of each target in turn.
        progress: called while config.json is downloaded.

    Raises:
        UsageError: a checkpoint of tpuconv has `config`, or a trainer's has none.
        TpuconvError: it cannot be read.
    """
    if config is None:
        check_converted(ckpt)
        yield CheckpointArrays(read_manifest(ckpt)), ()
        return
    with ExitStack() as stack:
        arrays, _, skipped = trained_arrays(open_trained(ckpt, config, stack, progress), target)
        yield arrays, skipped
