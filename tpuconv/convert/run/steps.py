"""The steps of a run in their order, with the files of the source that each reads."""

from collections.abc import Collection, Iterable, Sequence

from tpuconv.convert.plan.types import ZEROS, Plan
from tpuconv.convert.plan.units import WorkUnit
from tpuconv.sources.headers import TensorInfo
from tpuconv.sources.schedule import FetchSchedule, ReadStep, merged
from tpuconv.sources.shard import SourceShard

COMPARE_STEP = "compared"
"""In it, copies of tensors are compared with their originals."""


def proof_step(shard: int) -> str:
    """Returns the name of the step, and of the journal's entry, for the hash of a shard, by its number."""
    return f"hash-{shard:05d}"


def proof_of(number: int, shard: SourceShard) -> ReadStep:
    """The step for the hash of a shard."""
    return ReadStep(proof_step(number), (shard.name,), proves=shard.name)


def work_steps(plan: Plan, units: Sequence[WorkUnit], known: Collection[str] = ()) -> list[ReadStep]:
    """Units in the order of the source. The hash of a shard, mostly done by then, follows its last unit that is not
    wide. Copies are compared at the start, or, of a source that is fetched meanwhile, at the end.

    Args:
        plan: of the run.
        units: what is left to do.
        known: the names of other steps that are done.
    """
    narrow = [unit for unit in units if not unit.is_wide]
    last = {shard: unit.uid for unit in narrow for shard in plan.shards_of(unit)}
    proofs = {
        shard.name: proof_of(i, shard)
        for i, shard in enumerate(plan.source.shards)
        if plan.hashes_shards and proof_step(i) not in known
    }
    steps = []
    for unit in narrow:
        steps.append(_unit_step(plan, unit))
        steps += [
            proofs.pop(shard) for shard in sorted(plan.shards_of(unit)) if last[shard] == unit.uid and shard in proofs
        ]
    steps += [*proofs.values(), *(_unit_step(plan, unit) for unit in units if unit.is_wide)]
    compare = compare_steps(plan, known)
    return [*steps, *compare] if plan.source.remote else [*compare, *steps]


def compare_steps(plan: Plan, known: Collection[str]) -> list[ReadStep]:
    """Returns the step in which copies of tensors are compared, if there are any and it is not among those that are
    done."""
    if not plan.copies or COMPARE_STEP in known:
        return []
    return [ReadStep(COMPARE_STEP, {info.shard for info in _copied(plan)}, is_wide=True)]


def _copied(plan: Plan) -> set[TensorInfo]:
    return {plan.tensors[name].values for pair in plan.copies.items() for name in pair if name != ZEROS}


def copied_ranges(plan: Plan) -> dict[str, list[tuple[int, int]]]:
    """Returns the ranges of copies and their originals in each file that is fetched."""
    return ranges_by_file(plan, _copied(plan))


def _unit_step(plan: Plan, unit: WorkUnit) -> ReadStep:
    return ReadStep(unit.uid, plan.shards_of(unit) if plan.source.remote else (), unit.is_wide)


def wide_ranges(plan: Plan) -> dict[str, list[tuple[int, int]]]:
    """Returns the ranges of each file that is fetched that wide steps read, done or not: complete tensors, so that they
    do not depend on how slabs are cut."""
    if not plan.source.remote:
        return {}
    wide = (slab for unit in plan.units if unit.is_wide for slab in unit.slabs)
    infos = {info for slab in wide for name in slab.names for info in plan.tensors[name].stored}
    return ranges_by_file(plan, infos | _copied(plan))


def ranges_by_file(plan: Plan, infos: Iterable[TensorInfo]) -> dict[str, list[tuple[int, int]]]:
    """Returns the ranges of tensors in the files that are fetched, sorted and apart."""
    found: dict[str, list[tuple[int, int]]] = {}
    for info in infos:
        if info.shard in plan.source.remote:
            found.setdefault(info.shard, []).append((info.offset, info.offset + info.nbytes))
    return {name: merged(ranges) for name, ranges in found.items()}


def workspace_bytes(plan: Plan) -> int:
    """Returns the most that a source that is fetched takes on the disk of the workspace; 0 if all of it is here."""
    sizes = {shard.name: shard.size for shard in plan.source.shards if shard.name in plan.source.remote}
    if not sizes or plan.faults:
        return 0
    return FetchSchedule(sizes, work_steps(plan, plan.units), wide_ranges(plan)).peak_bytes
