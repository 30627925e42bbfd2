"""Loads a release, safetensors as they were published, as a Flax NNX model: no checkpoint is written between.

A plan of a conversion says which slabs of the source make which boxes of which arrays. Where a conversion writes the
boxes to files, here they are copied to the shards of this process's devices. A slab that no shard needs is not read,
and of the others only the ranges of letters that shards need.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise, product
from queue import Empty, SimpleQueue
from typing import Any

import jax
import numpy as np

from tpuconv.convert.plan.types import ZEROS, OutputArray, Plan
from tpuconv.convert.plan.units import Slab
from tpuconv.convert.run.sizing import Limits, jobs
from tpuconv.convert.run.slab_arrays import SlabArrays
from tpuconv.convert.run.slabs import check_copy, check_promise
from tpuconv.convert.run.strided import copy_strided
from tpuconv.convert.run.workers import Cancelled
from tpuconv.errors import SourceError
from tpuconv.location import BucketPath
from tpuconv.notation.layout import Axes, lead, runs, sliceable
from tpuconv.notation.table import Binding
from tpuconv.restore import Placing, box_of
from tpuconv.sources.reader import Reader
from tpuconv.storage.disk import aligned_array

GAP_BYTES, BUCKET_GAP_BYTES = 64 << 10, 2 << 20
"""Bytes of a tensor that are read rather than skipped, on a disk and in a bucket: a read costs as much as so many
bytes."""

BUCKET_JOBS = 16
"""Slabs of a source in a bucket that are read at a time, at least: requests wait most of their time."""

LetterBox = tuple[tuple[int, int], ...]
"""The range of each axis of a shard."""
Intervals = Sequence[tuple[int, int]]
"""Ranges of a letter, sorted and apart."""
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
        tasks: SimpleQueue[ReadTask] = SimpleQueue()
        for task in self._tasks(placing, reader, hashes, arrays, check_cancelled):
            tasks.put(task)
        need, count = self.plan.buffers, min(self._jobs(), tasks.qsize())

        def work() -> None:
            slab_arrays = SlabArrays(self.plan, need, reader)
            while True:
                try:
                    task = tasks.get_nowait()
                except Empty:
                    return
                check_cancelled()
                task(slab_arrays)

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
        return arrays

    def _jobs(self) -> int:
        limits = self.limits
        if isinstance(self.plan.source.folder, BucketPath):
            limits = replace(limits, jobs=max(limits.jobs, BUCKET_JOBS))
        return jobs(self.plan, limits)

    def _tasks(
        self,
        placing: Placing,
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
        for shards in _shards_by_binding(plan, placing, arrays):
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
        placing: places the arrays.
        boxes: of the shards of each array of the model.
        slabs: what the shards are made of.
        arrays: takes the arrays.
    """

    def __init__(
        self,
        plan: Plan,
        placing: Placing,
        boxes: Mapping[str, Sequence[LetterBox]],
        slabs: Sequence[Slab],
        arrays: dict[str, jax.Array],
    ):
        self.plan, self.placing, self.boxes, self.slabs, self._arrays = plan, placing, boxes, slabs, arrays
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
            self._arrays[name] = self.placing.place(name, partial(_shard_of, shards))

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
    return shards[_ranges(box)]


def _ranges(box: tuple[slice, ...]) -> LetterBox:
    return tuple((s.start, s.stop) for s in box)


def _shards_by_binding(plan: Plan, placing: Placing, arrays: dict[str, jax.Array]) -> Iterator[BindingShards]:
    """Yields the shards of each binding that makes arrays of the model, in the order in which the source is read."""
    gap = BUCKET_GAP_BYTES if isinstance(plan.source.folder, BucketPath) else GAP_BYTES
    by_binding: dict[int, list[Slab]] = {}
    for slab in (slab for unit in plan.units for slab in unit.slabs):
        by_binding.setdefault(id(slab.binding), []).append(slab)
    for slabs in by_binding.values():
        binding = slabs[0].binding
        boxes = {
            name: local_boxes(placing.targets[name])
            for stack in binding.dst
            for name in plan.stored_names(stack.names[0])
            if name in placing.targets
        }
        if not boxes:
            continue
        needed = needed_ranges(plan, binding, boxes)
        pieces = [piece for slab in slabs for piece in narrowed(plan, slab, needed, gap)]
        yield BindingShards(plan, placing, boxes, pieces, arrays)


def local_boxes(target: jax.ShapeDtypeStruct) -> list[LetterBox]:
    """Returns the boxes of an array that devices of this process hold, each once."""
    place: Any = target.sharding
    indices = place.addressable_devices_indices_map(target.shape).values()
    return list(dict.fromkeys(_ranges(box_of(index, target.shape)) for index in indices))


def needed_ranges(plan: Plan, binding: Binding, boxes: Mapping[str, Sequence[LetterBox]]) -> dict[str, Intervals]:
    """Returns the ranges of each sliceable letter of a binding that lie in boxes of its arrays. They hold complete
    blocks of values that are encoded together, since a box of scales does."""
    layout, sizes = binding.layout, binding.sizes
    found: dict[str, set[tuple[int, int]]] = {}
    for stack, axes, shape in zip(binding.dst, layout.dst, layout.dst_shapes(sizes), strict=True):
        name = stack.names[0]
        encoder = plan.encoders.get(name)
        blocks = [part.blocks for part in encoder.parts] if encoder else [(1,) * len(shape)]
        for stored, block in zip(plan.stored_names(name), blocks, strict=True):
            for box, (axis, letter) in product(boxes.get(stored, ()), enumerate(map(lead, axes))):
                if shape[axis] and sliceable(layout, letter):
                    inner = shape[axis] // sizes[letter]
                    start, stop = (end * block[axis] for end in box[axis])
                    found.setdefault(letter, set()).add((start // inner, -(-stop // inner)))
    return {letter: _joined(sorted(ranges)) for letter, ranges in found.items()}


def _joined(ranges: Intervals) -> Intervals:
    """Returns sorted ranges without overlaps, adjacent ones joined."""
    out: list[tuple[int, int]] = []
    for start, stop in ranges:
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out


def narrowed(plan: Plan, slab: Slab, needed: Mapping[str, Intervals], gap: int) -> list[Slab]:
    """Returns the parts of a slab in these ranges of letters. A letter is not cut where that would leave gaps of at
    most `gap` bytes between the runs of a tensor that are read."""
    cuts: dict[str, Intervals] = {}
    for letter, intervals in needed.items():
        start, stop = slab.ranges.get(letter, (0, slab.binding.sizes[letter]))
        inside = [(max(a, start), min(b, stop)) for a, b in intervals if max(a, start) < min(b, stop)]
        if not inside:
            return []
        if inside != [(start, stop)] and _least_gap(plan, slab, letter, inside) > gap:
            cuts[letter] = inside
    if not cuts:
        return [slab]
    return [
        replace(slab, ranges={**slab.ranges, **dict(zip(cuts, ranges, strict=True))})
        for ranges in product(*cuts.values())
    ]


def _least_gap(plan: Plan, slab: Slab, letter: str, intervals: Intervals) -> float:
    """Returns the fewest bytes that lie between two runs of a source tensor if a letter of a slab is cut to these
    intervals; infinity if one run remains."""
    least, sizes = float("inf"), slab.binding.sizes
    for stack, axes in zip(slab.binding.src, slab.binding.layout.src, strict=True):
        inner = axes[stack.depth :]
        letters = [x for axis in inner for x in axis.letters() if x in sizes]
        if letter in letters:
            ranges = tuple((x, slab.ranges[x]) for x in letters if x in slab.ranges and x != letter)
            lengths = tuple((x, sizes[x]) for x in letters)
            skipped = _fewest_skipped(inner, lengths, ranges, letter, tuple(intervals))
            least = min(least, skipped * plan.tensors[stack.names[0]].stored_bytes(1 << 20) / (1 << 20))
    return least


@lru_cache(1 << 14)  # layers and experts are alike
def _fewest_skipped(
    axes: Axes,
    sizes: tuple[tuple[str, int], ...],
    ranges: tuple[tuple[str, tuple[int, int]], ...],
    letter: str,
    intervals: tuple[tuple[int, int], ...],
) -> float:
    """Returns the fewest elements of a tensor that lie between two of its runs in these ranges; infinity if there is
    one run."""
    found = sorted(run for each in intervals for run in runs(axes, dict(sizes), {**dict(ranges), letter: each}))
    return min((b[0] - a[1] for a, b in pairwise(found)), default=float("inf"))
