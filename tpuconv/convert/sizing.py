"""How many jobs a run of a plan has, and how much memory it needs."""

import os
from dataclasses import dataclass

from tpuconv.convert.plan.types import Plan
from tpuconv.errors import ResourceError

BASE_MEMORY = 212 << 20
"""Measured: the interpreter, libraries and the compiler of loops, without pages of library files, which the system can
free."""


@dataclass(frozen=True)
class Limits:
    """What a run may use. Does not change the output. `max_memory` is in bytes."""

    jobs: int
    max_memory: int

    @classmethod
    def of_this_machine(cls, jobs: int | None = None, max_memory: int | None = None) -> "Limits":
        """By default one job per processor, one more that reads meanwhile, and 60% of the memory."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(jobs or len(os.sched_getaffinity(0)) + 1, max_memory or int(0.6 * memory))


@dataclass(frozen=True)
class Buffers:
    """Bytes that one job holds at most.

    Attributes:
        values: values in the dtype that is wanted.
        raw: values as they are stored, if that is another dtype.
        shard: one shard. While one is built, another is written.
        encoded: what encoders make, or what values are changed in.
    """

    values: int
    raw: int
    shard: int
    encoded: int

    @property
    def nbytes(self) -> int:
        """Their sum."""
        return self.values + self.raw + 2 * self.shard + self.encoded


def buffers(plan: Plan) -> Buffers:
    """The memory that one job of a plan needs."""
    slabs = [slab for unit in plan.units for slab in unit.slabs]
    return Buffers(
        values=max((slab.nbytes for slab in slabs), default=0),
        raw=max((plan.stored_bytes(slab) for slab in slabs if not plan.is_stored_as_wanted(slab)), default=0),
        shard=max((array.shard_bytes for array in plan.arrays.values()), default=0),
        encoded=max(
            2 * max((slab.elements for slab in slabs if plan.is_encoded(slab)), default=0),
            10 * max((slab.elements for slab in slabs if slab.binding.arithmetic), default=0),
        ),
    )


def jobs(plan: Plan, limits: Limits) -> int:
    """The number of jobs: those wanted, as far as the memory suffices.

    Raises:
        ResourceError: it does not suffice for one.
    """
    job_bytes = buffers(plan).nbytes
    fitting = (limits.max_memory - BASE_MEMORY) // max(1, job_bytes)
    if fitting < 1:
        raise ResourceError(
            f"{limits.max_memory / 1e6:.0f} MB of memory are too few to convert {plan.source.name}",
            hint=f"--max-memory must be at least {-(-(BASE_MEMORY + job_bytes) // 1_000_000)}MB",
        )
    return max(1, min(limits.jobs, fitting, len(plan.units)))


def planned_memory(plan: Plan, job_count: int) -> int:
    """The private memory in bytes that a conversion with `job_count` jobs needs at most."""
    return BASE_MEMORY + job_count * buffers(plan).nbytes
