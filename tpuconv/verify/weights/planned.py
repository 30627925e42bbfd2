"""The parameters of a release, or of a checkpoint with other names, made as a conversion makes them."""

from collections.abc import Iterator
from contextlib import contextmanager

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.convert.plan.types import Plan
from tpuconv.convert.run.made_arrays import made_arrays
from tpuconv.verify.weights.stored import Weight, ones, plain_weight
from tpuconv.verify.weights.trees import layer_weights


@contextmanager
def parameters(manifest: Manifest, plan: Plan | None) -> Iterator[dict[str, Weight]]:
    """Yields the parameters of a model under our names, each layer by itself. Nothing of them is read yet.

    Args:
        manifest: of the model.
        plan: how a release, or a checkpoint with other names, is read; None for a checkpoint of ours.
    """
    if plan is None:
        yield dict(layer_weights(manifest))
        return
    with made_arrays(plan) as made:
        yield {
            name: plain_weight(name, array.dtype, array.shape, ones(array.shape), lambda name, box: made[name][box])
            for name, array in plan.arrays.items()
        }
