"""Measures the weights of a checkpoint, or of two side by side, in bounded memory: each is read once, box by box."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from math import lcm, prod
from queue import Empty, SimpleQueue
from typing import Any

from tpuconv.convert.run.workers import Cancelled
from tpuconv.errors import UsageError
from tpuconv.location import Location
from tpuconv.progress import TICK_SECONDS
from tpuconv.verify.weights.statistics import (
    DifferenceSums,
    TensorDifference,
    WeightStatistics,
    difference_sums,
    statistics_of,
)
from tpuconv.verify.weights.stored import Weight, boxes_of
from tpuconv.verify.weights.trees import WeightTree, opened_weights

BOX_ELEMENTS = 1 << 22
"""Values of a weight that are read at once."""
MOST_READERS = 8
"""The most threads that read: each holds a few boxes of `BOX_ELEMENTS`."""


@dataclass(frozen=True)
class MeasuredWeight:
    """A weight and its statistics: of its values, and of the quantized numbers that are stored for them, if any."""

    weight: Weight
    values: WeightStatistics
    numbers: WeightStatistics | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        weight = self.weight
        facts: dict[str, Any] = {"name": weight.name, "dtype": weight.dtype, "shape": list(weight.stored_shape)}
        facts |= {"bytes": weight.nbytes, "statistics": self.values.to_json()}
        return facts | ({} if self.numbers is None else {"stored": self.numbers.to_json()})


@dataclass(frozen=True)
class MeasuredPair:
    """A weight, the weight of another checkpoint with the same parameter, or one of them alone; and how they differ,
    if both are there and have one shape."""

    reference: MeasuredWeight | None
    other: MeasuredWeight | None
    difference: DifferenceSums | None = None


@dataclass(frozen=True)
class MeasuredTree:
    """The measured weights of a checkpoint, in their order."""

    place: str
    weights: Sequence[MeasuredWeight]
    notes: Sequence[str]

    @property
    def nbytes(self) -> int:
        """The size of all weights."""
        return sum(each.weight.nbytes for each in self.weights)


@dataclass(frozen=True)
class WeightComparison:
    """How the parameters of two checkpoints differ.

    Attributes:
        differences: of the parameters that both have in one shape, the largest relative difference first.
        only_reference, only_other: names of parameters that one of them has.
        reshaped: names of parameters that they have in different shapes.
    """

    differences: Sequence[TensorDifference]
    only_reference: Sequence[str]
    only_other: Sequence[str]
    reshaped: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        return {**vars(self), "differences": [each.to_json() for each in self.differences]}


@dataclass(frozen=True)
class MeasuredTrees:
    """The result for a checkpoint, or for two with their comparison."""

    trees: Sequence[MeasuredTree]
    comparison: WeightComparison | None = None


def measured_pair(
    reference: Weight | None,
    other: Weight | None,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
) -> MeasuredPair:
    """Measures a weight, or two beside each other, whose boxes are then read together.

    Args:
        reference, other: the weights, of one shape if both are given.
        on_bytes: called with the stored bytes of each box.

    Raises:
        CorruptOutput, SourceError: they cannot be read.
    """
    sides = [side for side in (reference, other) if side is not None]
    if len(sides) == 2 and sides[0].shape != sides[1].shape:
        alone = [measured_pair(side, None, on_bytes).reference for side in sides]
        return MeasuredPair(alone[0], alone[1])
    shape = sides[0].shape
    groups, chunks = (
        tuple(lcm(*sizes) for sizes in zip(*(getattr(side, name) for side in sides), strict=True))
        for name in ("groups", "chunks")
    )
    values = [WeightStatistics() for _ in sides]
    numbers: list[WeightStatistics | None] = [None for _ in sides]
    difference, size = DifferenceSums() if len(sides) == 2 else None, max(1, prod(shape))
    for box in boxes_of(shape, groups, chunks, BOX_ELEMENTS):
        parts = [side.read(box) for side in sides]
        for i, part in enumerate(parts):
            values[i] += statistics_of(part.values)
            if part.numbers is not None:
                numbers[i] = part.numbers + (numbers[i] or WeightStatistics())
        if difference is not None:
            difference += difference_sums(parts[0].values, parts[1].values)
        on_bytes(sum(side.nbytes * parts[0].values.size // size for side in sides))
    found = [MeasuredWeight(*each) for each in zip(sides, values, numbers, strict=True)]
    return MeasuredPair(
        found[0] if reference is not None else None, found[-1] if other is not None else None, difference
    )


def measured_trees(
    places: Sequence[tuple[str | Location, str | None]], on_progress: Callable[[int, int], None]
) -> MeasuredTrees:
    """Measures the weights of a checkpoint, or of two and how they differ.

    Args:
        places: one or two, each with the model that was trained if it is a trainer's; see `opened_weights`.
        on_progress: called with the bytes that are read and all bytes, about ten times a second.

    Raises:
        UsageError: they are of different kinds.
        TpuconvError: a place holds no checkpoint, or it cannot be read.
    """
    stop = threading.Event()

    def check_cancelled() -> None:
        if stop.is_set():
            raise Cancelled

    with ExitStack() as stack:
        trees = [stack.enter_context(opened_weights(*place, check_cancelled)) for place in places]
        pairs = list(_paired(*trees)) if len(trees) == 2 else [(weight, None) for weight in trees[0].weights]
        total = sum(weight.nbytes for tree in trees for weight in tree.weights)
        found = _measured(trees, pairs, stop, check_cancelled, lambda done: on_progress(done, total))
        for tree in trees:
            tree.check()
    sides = ([pair.reference for pair in found], [pair.other for pair in found])
    measured = []
    for tree, side in zip(trees, sides, strict=False):
        by_name = {each.weight.name: each for each in side if each is not None}
        measured.append(MeasuredTree(tree.place, [by_name[weight.name] for weight in tree.weights], tree.notes))
    return MeasuredTrees(measured, _comparison(found) if len(trees) == 2 else None)


def _paired(reference: WeightTree, other: WeightTree) -> Iterator[tuple[Weight | None, Weight | None]]:
    """Yields the weights of two checkpoints, two of the same parameter together.

    Raises:
        UsageError: one has arrays of Orbax and the other has safetensors. They have other names, and boxes of other
            forms.
    """
    kinds = ["safetensors" if tree.manifest is None else "an Orbax checkpoint" for tree in (reference, other)]
    if kinds[0] != kinds[1]:
        raise UsageError(
            f"{reference.place} is {kinds[0]} and {other.place} is {kinds[1]}: their tensors have different names",
            hint="convert the safetensors, or `tpuconv export` the checkpoint, and compare two of one kind",
        )
    theirs = {weight.parameter: weight for weight in other.weights if weight.parameter}
    for weight in reference.weights:
        yield weight, theirs.pop(weight.parameter, None)
    left = {weight.name for weight in theirs.values()} | {w.name for w in other.weights if not w.parameter}
    yield from ((None, weight) for weight in other.weights if weight.name in left)


def _measured(
    trees: Sequence[WeightTree],
    pairs: Sequence[tuple[Weight | None, Weight | None]],
    stop: threading.Event,
    check_cancelled: Callable[[], None],
    on_progress: Callable[[int], None],
) -> list[MeasuredPair]:
    """Returns what is measured of each pair, in their order. Threads take one pair after the other."""
    found: list[MeasuredPair | None] = [None] * len(pairs)
    tasks: SimpleQueue[int] = SimpleQueue()
    for number in range(len(pairs)):
        tasks.put(number)
    done: SimpleQueue[int] = SimpleQueue()

    def on_bytes(nbytes: int) -> None:
        check_cancelled()
        done.put(nbytes)

    def work() -> None:
        with suppress(Empty):
            while True:
                number = tasks.get_nowait()
                check_cancelled()
                found[number] = measured_pair(*pairs[number], on_bytes)
                for tree, weight in zip(trees, pairs[number], strict=False):
                    if weight is not None:
                        tree.finish(weight)

    total = 0
    count = min(MOST_READERS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(count) as pool:
        try:
            for i, tree in enumerate(trees):
                tree.begin([weight for pair in pairs if (weight := pair[i]) is not None])
            jobs = {pool.submit(work) for _ in range(count)}
            while jobs:
                finished, jobs = wait(jobs, TICK_SECONDS, FIRST_EXCEPTION)
                for job in finished:
                    job.result()
                while not done.empty():
                    total += done.get()
                on_progress(total)
        finally:
            stop.set()
    return [pair for pair in found if pair is not None]


def _comparison(pairs: Sequence[MeasuredPair]) -> WeightComparison:
    differences, only, reshaped = [], ([], []), []  # type: ignore[var-annotated]
    for pair in pairs:
        one, other = pair.reference, pair.other
        if one is not None and other is not None:
            name = one.weight.parameter
            if pair.difference is None:
                reshaped.append(name)
            else:
                differences.append(TensorDifference.of(name, pair.difference))
        elif (alone := one or other) is not None and alone.weight.parameter:
            only[0 if one is not None else 1].append(alone.weight.parameter)
    differences.sort(key=lambda each: (-each.relative, each.snr_db))
    return WeightComparison(differences, only[0], only[1], reshaped)
