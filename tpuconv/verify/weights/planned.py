"""The parameters of a release, or of a checkpoint for another program, made as a conversion makes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.convert.plan.types import Plan
from tpuconv.convert.run.made_arrays import MadeArrays, made_arrays
from tpuconv.verify.weights.stored import Weight, WeightBox, WeightPart, ones
from tpuconv.verify.weights.trees import layer_weights


@contextmanager
def parameters(manifest: Manifest, plan: Plan | None) -> Iterator[dict[str, Weight]]:
    """Yields the parameters of a model under our names, each layer by itself. Nothing of them is read yet.

    Args:
        manifest: of the model.
        plan: how a release, or a checkpoint for another program, is read; None for a checkpoint of ours.
    """
    if plan is None:
        yield dict(layer_weights(manifest))
        return
    with made_arrays(plan) as made:
        yield {
            name: PlannedWeight(
                name=name,
                parameter=name,
                dtype=array.dtype.name,
                stored_shape=array.shape,
                nbytes=array.nbytes,
                shape=array.shape,
                groups=ones(array.shape),
                chunks=ones(array.shape),
                made=made,
            )
            for name, array in plan.arrays.items()
        }


@dataclass(frozen=True, kw_only=True)
class PlannedWeight(Weight):
    """A parameter that a plan makes.

    Attributes:
        made: the arrays of the plan.
    """

    made: MadeArrays

    @property
    def files(self) -> set[str]:
        """See `Weight`: the source is opened as a whole."""
        return set()

    @property
    def is_quantized(self) -> bool:
        """See `Weight`."""
        return False

    def read(self, box: WeightBox) -> WeightPart:
        """See `Weight`."""
        return WeightPart(self.made[self.name][box], None)
