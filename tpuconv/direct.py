"""Loads a release, safetensors as they were published, as a Flax NNX model: no checkpoint is written between.

A plan of a conversion says which slabs of the source make which boxes of which arrays. Where a conversion writes the
boxes to files, here they are copied to the shards of this process's devices. A slab that no shard needs is not read,
and of the others only the ranges of letters that shards need (`tpuconv.needed`). Where several processes would read the
same bytes, they share the reading (`tpuconv.exchange`).
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from tpuconv.convert.plan.types import ZEROS, OutputArray, Plan
from tpuconv.convert.plan.units import Slab
from tpuconv.convert.run.sizing import Limits, jobs
from tpuconv.convert.run.slab_arrays import SlabArrays
from tpuconv.convert.run.slabs import check_copy, check_promise
from tpuconv.convert.run.strided import copy_strided
from tpuconv.convert.run.workers import Cancelled
from tpuconv.errors import SourceError
from tpuconv.exchange import Exchange, boxes_by_process
from tpuconv.location import BucketPath
from tpuconv.needed import LetterBox, box_ranges, narrowed, needed_ranges
from tpuconv.restore import Placing
from tpuconv.sources.reader import Reader
from tpuconv.storage.disk import aligned_array

GAP_BYTES, BUCKET_GAP_BYTES = 64 << 10, 2 << 20
"""Bytes of a tensor that are read rather than skipped, on a disk and in a bucket: a read costs as much as so many
bytes."""

BUCKET_JOBS, BUCKET_JOB_BYTES = 16, 800_000_000
"""Slabs of a source in a bucket that are read at a time, since requests wait most of their time, and the memory of
these slabs at most, unless `jobs=` asks for more."""

ReadTask = Callable[[SlabArrays], None]


@dataclass
class ReleaseArrays:
    """Reads the arrays of a planned release: an `ArrayReader` of `tpuconv.restore`.

    Args:
        plan: of the release; see `tpuconv.convert.plan.planning.planned_loading`.
        limits: threads and memory.
    """

    plan: Plan
    limits: Limits

    def __call__(self, placing: Placing) -> dict[str, jax.Array]:
        """Reads and places the arrays of a model. The files are read forward, a few arrays at a time.

        A process that holds complete arrays compares files of the Hub with their promised hashes. One of several
        processes reads a part of each file, and compares nothing.

        Raises:
            SourceError: the source cannot be read, changed, or holds values that are not finite.
            DamagedDownload: a file does not match the hash that the Hub promises.
            UsageError: the dtype of the model cannot hold some values.
            GateError: quantized values differ from Qwix's.
            ResourceError: there is too little memory for one thread.
        """
        arrays: dict[str, jax.Array] = {}
        stop = threading.Event()

        def check_cancelled() -> None:
            if stop.is_set():
                raise Cancelled

        hashes = [s.name for s in self.plan.source.promised] if jax.process_count() == 1 else []
        reader = self.plan.source.open(check_cancelled, hashes=hashes)
        gap = BUCKET_GAP_BYTES if isinstance(self.plan.source.folder, BucketPath) else GAP_BYTES
        exchange = Exchange(self.plan, placing.targets, gap)
        tasks: SimpleQueue[ReadTask] = SimpleQueue()
        for task in self._tasks(placing, exchange, reader, hashes, arrays, check_cancelled):
            tasks.put(task)
        need, count = self.plan.buffers, max(1, min(self._jobs(), tasks.qsize()))  # a process may have no shards

        def work() -> None:
            slab_arrays = SlabArrays(self.plan, need, reader)
            while True:
                try:
                    task = tasks.get_nowait()
                except Empty:
                    return
                check_cancelled()
                task(slab_arrays)

        def read() -> None:
            try:
                with ThreadPoolExecutor(count) as pool:
                    try:
                        for done in as_completed([pool.submit(work) for _ in range(count)]):
                            done.result()
                    finally:
                        stop.set()
            finally:
                reader.close()
            placing.check()

        exchange.run(read, arrays)
        return arrays

    def _jobs(self) -> int:
        limits = self.limits
        if isinstance(self.plan.source.folder, BucketPath):
            slabs = self.plan.buffers.nbytes - 2 * self.plan.buffers.shard  # shards are on devices
            limits = replace(limits, jobs=max(limits.jobs, min(BUCKET_JOBS, BUCKET_JOB_BYTES // slabs)))
        return jobs(self.plan, limits)

    def _tasks(
        self,
        placing: Placing,
        exchange: Exchange,
        reader: Reader,
        hashes: Sequence[str],
        arrays: dict[str, jax.Array],
        check_cancelled: Callable[[], None],
    ) -> Iterator[ReadTask]:
        """Yields the tasks in their order: copies are compared with their originals, slabs are read, and files are
        compared with their hashes. Of several processes each compares some of the copies."""
        plan = self.plan
        promised = {shard.name: shard for shard in plan.source.shards if shard.name in hashes}

        def check_hashes(names: Sequence[str], _: SlabArrays | None = None) -> None:
            for name in names:
                check_promise(plan.source, reader, promised[name])

        def checked(work: ReadTask, names: set[str], slab_arrays: SlabArrays) -> None:
            """Does work on some files. If they hold something wrong, damage on the way is the likely cause."""
            try:
                work(slab_arrays)
            except SourceError:
                check_hashes(sorted(names & promised.keys()))
                raise

        def compare(copy: str, original: str, _: SlabArrays) -> None:
            check_copy(plan, reader, copy, original, check_cancelled)

        for copy, original in list(plan.copies.items())[jax.process_index() :: jax.process_count()]:
            names = {plan.tensors[name].values.shard for name in (copy, original) if name != ZEROS}
            yield partial(checked, partial(compare, copy, original), names)
        for shards in _shards_by_binding(plan, placing, exchange, arrays):
            for slab in shards.slabs:
                names = {info.shard for name in slab.names for info in plan.tensors[name].stored}
                yield partial(checked, partial(shards.fill, slab), names)
        for name in hashes:
            yield partial(check_hashes, [name])


class BindingShards:
    """The shards in this process of the arrays that a binding makes. They are allocated when the first slab is read,
    and placed when the last one is.

    Args:
        plan: of the binding.
        place: returns an array on its devices, given its name and what gives the values of a box.
        boxes: of the shards of each array of the model.
        slabs: what the shards are made of.
        arrays: takes the arrays.
    """

    def __init__(
        self,
        plan: Plan,
        place: Callable[[str, Callable[[tuple[slice, ...]], np.ndarray]], jax.Array],
        boxes: Mapping[str, Sequence[LetterBox]],
        slabs: Sequence[Slab],
        arrays: dict[str, jax.Array],
    ):
        self.plan, self.boxes, self.slabs, self._place, self._arrays = plan, boxes, slabs, place, arrays
        self._left, self._lock = len(slabs), threading.Lock()
        self._memory: dict[str, dict[LetterBox, np.ndarray]] = {}

    def fill(self, slab: Slab, slab_arrays: SlabArrays) -> None:
        """Reads a slab and copies its boxes into the shards. Raises as `ReleaseArrays` does."""
        with self._lock:
            if not self._memory:
                self._memory = {
                    name: {box: aligned_array([b - a for a, b in box], self.plan.arrays[name].dtype) for box in boxes}
                    for name, boxes in self.boxes.items()
                }
        for array, box, values in slab_arrays.boxes(slab, {}):
            copy_strided(self._copies(array, box, values))
        with self._lock:
            self._left -= 1
            if self._left:
                return
        for stack in slab.binding.dst:
            if encoder := self.plan.encoders.get(stack.names[0]):
                encoder.check()
        for name in self.boxes:
            shards = self._memory.pop(name)
            self._arrays[name] = self._place(name, partial(_shard_of, shards))

    def _copies(
        self, array: OutputArray, box: tuple[slice, ...], values: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the parts of shards that are in a box of an array, each with its values."""
        for shard, memory in self._memory.get(array.name, {}).items():
            common = [(max(a, s.start), min(b, s.stop)) for (a, b), s in zip(shard, box, strict=True)]
            if all(a < b for a, b in common):
                inside: Any = (*(slice(a - c, b - c) for (a, b), (c, _) in zip(common, shard, strict=True)), ...)
                place: Any = (*(slice(a - s.start, b - s.start) for (a, b), s in zip(common, box, strict=True)), ...)
                yield memory.view(values.dtype)[inside], values[place]


def _shard_of(shards: Mapping[LetterBox, np.ndarray], box: tuple[slice, ...]) -> np.ndarray:
    return shards[box_ranges(box)]


def _shards_by_binding(
    plan: Plan, placing: Placing, exchange: Exchange, arrays: dict[str, jax.Array]
) -> Iterator[BindingShards]:
    """Yields the shards of each binding that makes arrays of the model, in the order in which the source is read."""
    by_binding: dict[int, list[Slab]] = {}
    for slab in (slab for unit in plan.units for slab in unit.slabs):
        by_binding.setdefault(id(slab.binding), []).append(slab)
    for slabs in by_binding.values():
        binding = slabs[0].binding
        names = [name for stack in binding.dst for name in plan.stored_names(stack.names[0])]
        names = [name for name in names if name in placing.targets]
        if not names:
            continue
        places = exchange.places(slabs, names)
        boxes = {
            name: boxes_by_process(places[name], placing.targets[name].shape).get(jax.process_index(), [])
            for name in names
        }
        needed = needed_ranges(plan, binding, boxes)
        pieces = [piece for slab in slabs for piece in narrowed(plan, slab, needed, exchange.gap)]
        yield BindingShards(plan, partial(_place, placing, places), boxes, pieces, arrays)


def _place(
    placing: Placing, places: Mapping[str, Sharding], name: str, values_of: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array:
    return placing.place(name, values_of, places[name])
