"""The arrays of a plan one at a time, as a conversion makes them, for work that reads a model layer by layer."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tpuconv.checkpoint.reader import ReadArray
from tpuconv.convert.plan.types import Plan
from tpuconv.convert.plan.units import Slab
from tpuconv.convert.run.slab_arrays import SlabArrays
from tpuconv.convert.run.slabs import check_as_promised
from tpuconv.sources.reader import Reader


@contextmanager
def reading(plan: Plan | None) -> Iterator[ReadArray | None]:
    """Yields a function that makes the arrays of a release, or of a checkpoint for another program, one at a time; None
    without a plan, for a checkpoint of ours, whose files have them."""
    if plan is None:
        yield None
        return
    with made_arrays(plan) as made:
        yield lambda name, layer: made[name] if layer is None else made[name][layer]


@contextmanager
def made_arrays(plan: Plan) -> "Iterator[MadeArrays]":
    """Yields the arrays of a plan, and checks the source at the end; see `check_as_promised`."""
    source = plan.source
    reader = source.open(lambda: None, hashes=[shard.name for shard in source.promised])
    try:
        yield MadeArrays(plan, reader)
        check_as_promised(source, reader)
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
        self._plan, self._slabs = plan, SlabArrays(plan, plan.buffers, reader)
        self._by_name: dict[str, list[Slab]] = {}
        for slab in plan.slabs:
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


def made_bytes(plan: Plan) -> int:
    """Returns the most memory in bytes that `MadeArrays` of a plan takes: arrays that are made of the same tensors are
    held together."""
    together = {tuple(stack.names[0] for stack in slab.binding.dst) for slab in plan.slabs}
    return plan.buffers.nbytes + max(sum(plan.arrays[name].nbytes for name in names) for names in together)
