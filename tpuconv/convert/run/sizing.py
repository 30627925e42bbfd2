"""How many jobs a run of a plan has, and how much memory it needs."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from tpuconv.convert.plan.types import Plan
from tpuconv.errors import ResourceError
from tpuconv.memory import available_memory
from tpuconv.sizes import format_size
from tpuconv.storage.local_file import READ_BYTES, room_for

BASE_MEMORY = 212 << 20
"""Measured: the interpreter, libraries and the compiler of loops, without pages of library files, which the system can
free."""

QUANTIZE_MEMORY = 170 << 20
"""Measured: what jax and Qwix add."""

IN_FLIGHT_BYTES = 1 << 30
"""Of tensors of an export that are made and not written yet, unless one alone is larger."""


@dataclass(frozen=True)
class Limits:
    """What a run may use. Does not change the output. `max_memory` is in bytes."""

    jobs: int
    max_memory: int

    @classmethod
    def of_this_machine(cls, jobs: int | None = None, max_memory: int | None = None) -> "Limits":
        """By default one job per processor, one more that reads meanwhile, and 60% of the memory of the machine or
        container."""
        _, memory = available_memory()
        return cls(jobs or len(os.sched_getaffinity(0)) + 1, max_memory or int(0.6 * memory))


@dataclass(frozen=True)
class Buffers:
    """Bytes that one job holds at most.

    Attributes:
        values: values in the dtype that is wanted.
        raw: values as they are stored, if that is another dtype.
        read: what is read from a disk at once to be copied.
        changed: what the changes of an adapter are computed in.
        shard: one shard. While one is built, another is written.
        encoded: what encoders make, or what values are changed in.
    """

    values: int
    raw: int
    read: int
    changed: int
    shard: int
    encoded: int

    @property
    def nbytes(self) -> int:
        """Their sum."""
        return self.values + self.raw + self.read + self.changed + 2 * self.shard + self.encoded


def buffers(plan: Plan) -> Buffers:
    """The memory that one job of a plan needs."""
    values = raw = changed = encoded = 0
    for slab in (slab for unit in plan.units for slab in unit.slabs):  # 100,000 of a large model: once, for all
        elements, tensors = slab.elements, [plan.tensors[name] for name in slab.names()]
        values = max(values, elements * slab.dtype.itemsize)
        if not all(tensor.is_stored_as(slab.dtype) for tensor in tensors):
            raw = max(raw, *(tensor.stored_bytes(elements) for tensor in tensors))
            changed = max(changed, *(tensor.work_bytes(elements) for tensor in tensors))
        if plan.is_encoded(slab):
            encoded = max(encoded, 2 * elements)
        if slab.binding.arithmetic:
            encoded = max(encoded, 10 * elements)
    shard = max((array.shard_bytes for array in plan.arrays.values()), default=0)
    return Buffers(room_for(values), raw, room_for(READ_BYTES), changed, shard, encoded)


def jobs(plan: Plan, limits: Limits) -> int:
    """The number of jobs: those wanted, as far as the memory suffices.

    Raises:
        ResourceError: it does not suffice for one.
    """
    job_bytes, base = buffers(plan).nbytes, _base_memory(plan)
    fitting = (limits.max_memory - base) // max(1, job_bytes)
    if fitting < 1:
        raise ResourceError(
            f"{format_size(limits.max_memory)} of memory are too few to convert {plan.source.name}",
            hint=f"--max-memory must be at least {-(-(base + job_bytes) // 1_000_000)}MB",
        )
    calibration = plan.quantization.calibration if plan.quantization else None
    if calibration and calibration.memory > limits.max_memory:
        raise ResourceError(
            f"{format_size(limits.max_memory)} of memory are too few to calibrate {plan.source.name}",
            hint=f"--max-memory must be at least {-(-calibration.memory // 1_000_000)}MB; samples of "
            "a smaller --length need less",
        )
    return max(1, min(limits.jobs, fitting, sum(len(unit.slabs) for unit in plan.units)))


def jobs_for_tensors(plan: Plan, limits: Limits, slabs: Mapping[str, int]) -> int:
    """The number of jobs of a run that makes tensors, as far as the memory suffices for the largest: each job holds its
    values as they are stored, as they are wanted, rearranged and encoded. `slabs` says by name in how many parts one
    after the other a tensor is made; others are made complete.

    Raises:
        ResourceError: it does not suffice for one.
    """
    (waiting, job_bytes), base = _tensor_bytes(plan, slabs), _base_memory(plan)
    fitting = (limits.max_memory - base - waiting) // max(1, job_bytes)
    if fitting < 1:
        raise ResourceError(
            f"{format_size(limits.max_memory)} of memory are too few to write {plan.source.name} as safetensors",
            hint=f"--max-memory must be at least {-(-(base + waiting + job_bytes) // 1_000_000)}MB",
        )
    return max(1, min(limits.jobs, fitting))


def _tensor_bytes(plan: Plan, slabs: Mapping[str, int]) -> tuple[int, int]:
    """Of a run that makes tensors the bytes that wait to be written, and those of one job, at most."""
    largest = max((-(-prod(tensor.shape) // slabs.get(name, 1)) for name, tensor in plan.tensors.items()), default=0)
    job_bytes = 4 * max(2, *(array.dtype.itemsize for array in plan.arrays.values())) * largest
    return min(IN_FLIGHT_BYTES, plan.output_bytes), job_bytes


def planned_memory_for_tensors(plan: Plan, job_count: int, slabs: Mapping[str, int]) -> int:
    """The private memory in bytes that a run with `job_count` jobs which makes tensors, in so many `slabs`, needs at
    most."""
    waiting, job_bytes = _tensor_bytes(plan, slabs)
    return _base_memory(plan) + waiting + job_count * job_bytes


def _base_memory(plan: Plan) -> int:
    """What a run needs whatever the model."""
    return BASE_MEMORY + (QUANTIZE_MEMORY if plan.quantization else 0)


def planned_memory(plan: Plan, job_count: int) -> int:
    """The private memory in bytes that a conversion with `job_count` jobs needs at most."""
    calibration = plan.quantization.calibration if plan.quantization else None
    return max(_base_memory(plan) + job_count * buffers(plan).nbytes, calibration.memory if calibration else 0)
