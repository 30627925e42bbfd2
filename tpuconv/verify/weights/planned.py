"""The parameters of a release, or of a checkpoint for another program, made as a conversion makes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.convert.plan.types import Plan, Slab
from tpuconv.convert.run.sizing import buffers
from tpuconv.convert.run.slab_arrays import SlabArrays
from tpuconv.sources.reader import Reader
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


@contextmanager
def made_arrays(plan: Plan) -> "Iterator[MadeArrays]":
    """Yields the arrays of a plan, and checks at the end that the source is still the same."""
    reader = plan.source.open(lambda: None, hashes=())
    try:
        yield MadeArrays(plan, reader)
        reader.check_unchanged()
    finally:
        reader.close()


class MadeArrays:
    """Makes the arrays of a plan. Those that are made of the same tensors are made together. The last array that was
    asked for is kept, and those that were made but not asked for yet.

    Args:
        plan: without quantized arrays.
        reader: of its source.
    """

    def __init__(self, plan: Plan, reader: Reader):
        self._plan, self._slabs = plan, SlabArrays(plan, buffers(plan), reader)
        self._by_name: dict[str, list[Slab]] = {}
        for slab in (slab for unit in plan.units for slab in unit.slabs):
            for stack in slab.binding.dst:
                self._by_name.setdefault(stack.names[0], []).append(slab)
        self._kept: dict[str, np.ndarray] = {}
        self._asked: set[str] = set()

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns an array. Raises SourceError if it cannot be read."""
        if name not in self._kept:
            slabs = self._by_name[name]
            for asked in self._asked & self._kept.keys():  # before the others take memory
                del self._kept[asked]
            made = [self._plan.arrays[stack.names[0]] for stack in slabs[0].binding.dst]
            new = {array.name: np.empty(array.shape, array.dtype) for array in made}
            for slab in slabs:
                for array, box, values in self._slabs.boxes(slab, {}):
                    new[array.name][box] = values.view(array.dtype)
            self._kept |= new
            self._asked -= new.keys()
        self._asked.add(name)
        return self._kept[name]


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
