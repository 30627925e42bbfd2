"""How many jobs a run of a plan has, and the memory that it needs."""

import os
from dataclasses import dataclass

from tpuconv.convert.plan.types import Plan
from tpuconv.errors import ResourceError

BASE_MEMORY = 212 << 20
"""Of the interpreter, libraries and the compiler of kernels, measured; without the pages of library files, which the
system takes back where memory is short."""


@dataclass(frozen=True)
class Limits:
    """What the machine gives: neither changes the output."""

    jobs: int
    max_memory: int

    @classmethod
    def of_this_machine(cls, jobs: int | None = None, max_memory: int | None = None) -> "Limits":
        """By default a job for each processor and one that reads meanwhile, and 60% of the memory."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(jobs or len(os.sched_getaffinity(0)) + 1, max_memory or int(0.6 * memory))


@dataclass(frozen=True)
class Buffers:
    """Bytes that one job holds at most.

    Attributes:
        values: of values as they are wanted.
        raw: of values as they are stored, where that is not the same.
        shard: of a shard; one is built while another is written.
        encoded: of what encoders make.
    """

    values: int
    raw: int
    shard: int
    encoded: int

    @property
    def nbytes(self) -> int:
        return self.values + self.raw + 2 * self.shard + self.encoded


def buffers(plan: Plan) -> Buffers:
    """What one job of a plan needs."""
    slabs = [slab for unit in plan.units for slab in unit.slabs]
    return Buffers(
        values=max((slab.nbytes for slab in slabs), default=0),
        raw=max((plan.stored_bytes(slab) for slab in slabs if not plan.is_stored_as_wanted(slab)), default=0),
        shard=max((array.shard_bytes for array in plan.arrays.values()), default=0),
        encoded=2 * max((slab.elements for slab in slabs if plan.is_encoded(slab)), default=0),
    )


def jobs(plan: Plan, limits: Limits) -> int:
    """As many of the wanted jobs as the memory allows.

    Raises:
        ResourceError: not even one fits.
    """
    each = buffers(plan).nbytes
    fitting = (limits.max_memory - BASE_MEMORY) // max(1, each)
    if fitting < 1:
        raise ResourceError(
            f"{limits.max_memory / 1e6:.0f} MB of memory are too few to convert {plan.source.name}",
            hint=f"--max-memory must be at least {-(-(BASE_MEMORY + each) // 1_000_000)}MB",
        )
    return max(1, min(limits.jobs, fitting, len(plan.units)))


def peak_memory(plan: Plan, job_count: int) -> int:
    """Private memory in bytes that a conversion with so many jobs needs at most."""
    return BASE_MEMORY + job_count * buffers(plan).nbytes
