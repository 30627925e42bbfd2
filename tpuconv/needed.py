"""The parts of slabs that shards of arrays need."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, product

from tpuconv.convert.plan.types import Plan
from tpuconv.convert.plan.units import Slab
from tpuconv.notation.layout import Axes, lead, runs, sliceable
from tpuconv.notation.table import Binding
from tpuconv.sources.schedule import merged

LetterBox = tuple[tuple[int, int], ...]
"""The range of each axis of a shard."""
Intervals = Sequence[tuple[int, int]]
"""Ranges of a letter, sorted and apart."""


def box_ranges(box: tuple[slice, ...]) -> LetterBox:
    """Returns the ranges of a box."""
    return tuple((s.start, s.stop) for s in box)


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
    return {letter: merged(ranges) for letter, ranges in found.items()}


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
