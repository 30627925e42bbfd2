"""The division of reading among processes. Where the shards of a process are parts of rows, or copies of the shards of
another one, processes would read the same bytes. Then each reads its part of whole rows, and devices exchange them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import gcd
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from tpuconv.convert.plan.types import Plan
from tpuconv.convert.plan.units import Slab
from tpuconv.errors import SourceError
from tpuconv.location import BucketPath
from tpuconv.needed import Intervals, LetterBox, box_ranges, narrowed, needed_ranges
from tpuconv.notation.layout import Shape, lead, sliceable
from tpuconv.restore import box_of

MOST_READ = 1.05
"""How often processes read a byte on average before they share the reading."""
SLOW_DEVICES = ("cpu",)
"""Platforms whose devices exchange bytes more slowly than a local disk gives them. They share what comes from buckets
alone."""
LEAST_SHARED = 1 << 20
"""Bytes of the tensors that make arrays; fewer are read by each process, since an exchange takes longer."""


@dataclass
class Exchange:
    """The shardings by which processes read the arrays of a model. All processes choose the same.

    Args:
        plan: of the release.
        targets: shape, dtype and sharding of each array of the model.
        gap: bytes that are read rather than skipped.
    """

    plan: Plan
    targets: Mapping[str, jax.ShapeDtypeStruct]
    gap: int
    _shared: set[str] = field(default_factory=set, init=False)
    _kinds: dict[Any, Sequence[Sharding]] = field(default_factory=dict, init=False)

    def places(self, slabs: Sequence[Slab], names: Sequence[str]) -> dict[str, Sharding]:
        """Returns the sharding by which each of the arrays that the slabs of a binding make is read."""
        binding, own = slabs[0].binding, [_sharding_of(self.targets[name]) for name in names]
        if not self._may_share:
            return dict(zip(names, own, strict=True))
        shapes = tuple((self.targets[name].shape, place) for name, place in zip(names, own, strict=True))
        sources = tuple(self.plan.tensors[name].stored_bytes(1 << 20) for name in slabs[0].names[:1])
        kind = binding.layout, tuple(sorted(binding.sizes.items())), shapes, sources
        if kind not in self._kinds:  # layers and experts are alike
            self._kinds[kind] = self._chosen(slabs, names, own)
        found = dict(zip(names, self._kinds[kind], strict=True))
        self._shared |= {name for name, place in zip(names, own, strict=True) if found[name] != place}
        return found

    @cached_property
    def _may_share(self) -> bool:
        """True if arrays are on devices of several processes, and of all, and an exchange is worth its time."""
        place = next(iter(self.targets.values())).sharding  # the devices of all arrays are the same
        if jax.process_count() == 1 or not isinstance(place, NamedSharding):
            return False
        devices = list(place.mesh.devices.flat)
        is_slow = devices[0].platform in SLOW_DEVICES and not isinstance(self.plan.source.folder, BucketPath)
        return len({device.process_index for device in devices}) == jax.process_count() and not is_slow

    def _chosen(self, slabs: Sequence[Slab], names: Sequence[str], own: Sequence[Sharding]) -> Sequence[Sharding]:
        """Returns the shardings with which the processes read the fewest bytes in total: the `own` ones of the model,
        unless the tensors are large, and they read more than `MOST_READ` of them."""
        size = sum(map(self.plan.stored_bytes, slabs))
        least, chosen = self._read_bytes(slabs, names, own), own
        if size < LEAST_SHARED or least <= MOST_READ * size:
            return chosen
        layout = slabs[0].binding.layout
        letters = dict.fromkeys(lead(axis) for axes in layout.dst for axis in axes)
        for letter in (letter for letter in letters if sliceable(layout, letter)):
            places = self._divided(slabs, names, own, letter)
            if places and (read := self._read_bytes(slabs, names, places)) < least:
                least, chosen = read, places
        return chosen

    def _divided(
        self, slabs: Sequence[Slab], names: Sequence[str], own: Sequence[Any], letter: str
    ) -> Sequence[Sharding]:
        """Returns shardings that divide the axis of a letter in as many parts as possible; none if an array has no such
        axis."""
        binding, devices = slabs[0].binding, own[0].mesh.devices.reshape(-1)
        axes = {
            name: [lead(axis) for axis in axes].index(letter)
            for stack, axes in zip(binding.dst, binding.layout.dst, strict=True)
            for name in self.plan.stored_names(stack.names[0])
            if letter in map(lead, axes)
        }
        if not axes.keys() >= set(names):
            return ()
        parts = gcd(len(devices), *(self.targets[name].shape[axes[name]] for name in names))
        mesh = Mesh(devices.reshape(parts, -1), ("part", "copy"))  # the order of devices stays
        spec: Any = PartitionSpec
        return [NamedSharding(mesh, spec(*[None] * axes[name], "part")) for name in names]

    def _read_bytes(self, slabs: Sequence[Slab], names: Sequence[str], places: Sequence[Sharding]) -> int:
        """Returns the bytes that all processes read together by these shardings."""
        by_process: dict[int, dict[str, Sequence[LetterBox]]] = {}
        for name, place in zip(names, places, strict=True):
            for process, boxes in boxes_by_process(place, self.targets[name].shape).items():
                by_process.setdefault(process, {})[name] = boxes
        needs: Counter[tuple[tuple[str, tuple[tuple[int, int], ...]], ...]] = Counter()
        for boxes_by_name in by_process.values():
            found = needed_ranges(self.plan, slabs[0].binding, boxes_by_name)
            needs[tuple((letter, tuple(ranges)) for letter, ranges in found.items())] += 1
        return sum(count * self._piece_bytes(slabs, dict(needed)) for needed, count in needs.items())

    def _piece_bytes(self, slabs: Sequence[Slab], needed: Mapping[str, Intervals]) -> int:
        pieces = (piece for slab in slabs for piece in narrowed(self.plan, slab, needed, self.gap))
        return sum(map(self.plan.stored_bytes, pieces))

    def run(self, read: Callable[[], None], arrays: dict[str, jax.Array]) -> None:
        """Reads arrays, and moves those whose reading is shared to their shardings in the model, one after the other
        and in the same order in each process.

        Raises:
            SourceError: another process could not read its part.
            TpuconvError: as `read` does.
        """
        if not self._shared:
            read()
            return
        error: Exception | None = None
        try:
            read()
        except Exception as e:  # raised below, when the other processes know
            error = e
        failed = np.flatnonzero(multihost_utils.process_allgather(np.array(error is not None)))
        if error is not None:
            raise error
        if failed.size:
            raise SourceError(
                f"process {failed[0]} could not read its part of {self.plan.source.name}, which the others need",
                hint="see the error of that process",
            )
        for name, target in self.targets.items():
            if name in self._shared:
                place = target.format if target.format.layout is not None else target.sharding
                part, arrays[name] = arrays[name], jax.device_put(arrays[name], place)
                arrays[name].block_until_ready()  # before the next one takes memory
                part.delete()


def _sharding_of(target: jax.ShapeDtypeStruct) -> Sharding:
    place: Sharding | None = target.sharding
    assert place is not None
    return place


@lru_cache(1 << 14)  # layers and experts are alike
def boxes_by_process(place: Sharding, shape: Shape) -> Mapping[int, Sequence[LetterBox]]:
    """Returns the boxes of an array that devices hold, by process, each once."""
    found: dict[int, dict[LetterBox, None]] = {}
    indices: Mapping[Any, Any] = place.devices_indices_map(tuple(shape))
    for device, index in indices.items():
        found.setdefault(device.process_index, {})[box_ranges(box_of(index, shape))] = None
    return {process: list(boxes) for process, boxes in found.items()}
