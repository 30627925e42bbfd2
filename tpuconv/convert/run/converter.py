"""Converting slabs: what one job of a run does with its memory."""

from collections import deque
from concurrent.futures import Executor, Future

import numpy as np

from tpuconv.convert.plan.types import OutputArray, Plan
from tpuconv.convert.plan.units import Buffers, Slab
from tpuconv.convert.run.building import build_shard
from tpuconv.convert.run.calibrated import CalibratedValues
from tpuconv.convert.run.results import UnitResult
from tpuconv.convert.run.slab_arrays import SlabArrays
from tpuconv.convert.run.slabs import tensor_scales
from tpuconv.convert.run.store import Store
from tpuconv.sources.reader import Reader
from tpuconv.storage.disk import page_buffer


class SlabConverter:
    """Makes the arrays of slabs, builds their shards and has them written. It has memory for two shards, of which one
    is built while the other is written.

    Args:
        plan: of the slabs.
        need: the memory that they need.
        reader: of the source.
        store: takes the shards.
        calibrated: what a calibration found, if there was one.
        writers: the threads that write.
    """

    def __init__(
        self,
        plan: Plan,
        need: Buffers,
        reader: Reader,
        store: Store,
        calibrated: CalibratedValues | None,
        writers: Executor,
    ):
        self.store, self._writers = store, writers
        self._arrays = SlabArrays(plan, need, reader, calibrated)
        self._shards = deque(map(page_buffer, (need.shard, need.shard)))
        self._writes: deque[Future[str]] = deque()

    def convert(self, slab: Slab, result: UnitResult) -> list[Future[str]]:
        """Converts a slab, and begins to write its shards.

        Args:
            slab: what to convert.
            result: takes what is found.

        Returns:
            The writes, each with the path of the file.

        Raises:
            SourceError: the source cannot be read, or holds values that are not finite.
        """
        boxes = self._arrays.boxes(slab, result.statistics)
        writes = [
            self._write(array, part, values[place], result)
            for array, box, values in boxes
            for part, place in array.parts(box)
        ]
        result.tensor_scales |= tensor_scales(self._arrays.reader, self._arrays.plan, slab)
        return writes

    def _write(self, array: OutputArray, box: tuple[slice, ...], values: np.ndarray, result: UnitResult) -> Future[str]:
        """Builds the shard of the `values`, unsigned integers that fill `box`, and begins to write it."""
        shard = build_shard(array, box, values, self._room_for_shard(), result)
        self._writes.append(self._writers.submit(self.store.write, array.name, shard))
        self._shards.rotate(-1)  # the next shard gets the other memory
        return self._writes[-1]

    def _room_for_shard(self) -> np.ndarray:
        """Memory for a shard. Waits until the shard that was in it is written, and raises what went wrong."""
        if len(self._writes) == len(self._shards):
            self._writes.popleft().result()
        return self._shards[0]
