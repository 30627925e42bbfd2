"""The share of one process of several in a plan."""

from dataclasses import dataclass

from tpuconv.convert.plan.types import Plan
from tpuconv.convert.plan.units import WorkUnit
from tpuconv.convert.run.steps import COMPARE_STEP, proof_step
from tpuconv.hosts import ProcessPart, divided
from tpuconv.sources.shard import SourceShard


@dataclass(frozen=True)
class Share:
    """A part of a plan.

    Attributes:
        units: neighbours in the source.
        shards: files of the source to be hashed.
        others: names of the steps, besides units, that other processes do.
    """

    units: tuple[WorkUnit, ...]
    shards: tuple[SourceShard, ...]
    others: frozenset[str]

    @property
    def nbytes(self) -> int:
        """The bytes of the source that are converted."""
        return sum(unit.nbytes for unit in self.units)


def share_of(plan: Plan, part: ProcessPart | None) -> Share:
    """Returns the share of a process in a plan: all of it if there is no other process. A shard is hashed by the
    process that reads most of it."""
    shards = plan.source.shards if plan.hashes_shards else ()
    if part is None:
        return Share(plan.units, shards, frozenset())
    runs = divided(plan.units, [unit.nbytes for unit in plan.units], part.count)
    read: dict[str, list[int]] = {shard.name: [0] * part.count for shard in shards}
    for process, units in enumerate(runs):
        for unit in units:
            for slab in unit.slabs:
                first = plan.tensors[slab.begins()[0]].values.shard
                if first in read:
                    read[first][process] += slab.nbytes
    owner = {name: shares.index(max(shares)) for name, shares in read.items()}
    is_first = part.index == 0
    others = {proof_step(i) for i, s in enumerate(plan.source.shards) if owner.get(s.name, part.index) != part.index}
    return Share(
        tuple(runs[part.index]),
        tuple(shard for shard in shards if owner[shard.name] == part.index),
        frozenset(others if is_first else others | {COMPARE_STEP}),
    )


def entries_of(plan: Plan) -> list[str]:
    """Returns the entries of a journal in which all parts of a plan are done."""
    return [
        *(unit.uid for unit in plan.units),
        *(proof_step(number) for number in range(len(plan.source.shards) if plan.hashes_shards else 0)),
        *([COMPARE_STEP] if plan.copies else []),
    ]
