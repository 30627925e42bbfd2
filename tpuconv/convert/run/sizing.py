"""The number of jobs and the memory of a run of a plan."""

import os
from dataclasses import dataclass

from tpuconv.convert.plan.types import Plan
from tpuconv.errors import ResourceError
from tpuconv.memory import available_memory
from tpuconv.text import format_size

BASE_MEMORY = 212 << 20
"""Measured: the interpreter, libraries and the compiler of loops, without pages of library files, which the system can
free."""

QUANTIZE_MEMORY = 170 << 20
"""Measured: what jax and Qwix add."""

IN_FLIGHT_BYTES = 1 << 30
"""The bytes of an export's tensors that are made and not written yet, unless one tensor is larger or memory is
scarce."""


@dataclass(frozen=True)
class Limits:
    """The limits of a run. They do not change the output. `max_memory` is in bytes."""

    jobs: int
    max_memory: int

    @classmethod
    def of_this_machine(cls, jobs: int | None = None, max_memory: int | None = None) -> "Limits":
        """By default one job per processor, one more that reads meanwhile, and 60% of the memory of the machine or
        container."""
        _, memory = available_memory()
        return cls(jobs or len(os.sched_getaffinity(0)) + 1, max_memory or int(0.6 * memory))


def jobs(plan: Plan, limits: Limits) -> int:
    """Returns the number of jobs: the wanted number, as far as the memory suffices.

    Raises:
        ResourceError: the memory does not suffice for one job.
    """
    fitting = fitting_jobs(f"the conversion of {plan.source.name}", limits, plan.buffers.nbytes, _base_memory(plan))
    calibration = plan.quantization.calibration if plan.quantization else None
    if calibration and calibration.memory > limits.max_memory:
        raise _too_little(
            f"the calibration of {plan.source.name}",
            calibration.memory,
            limits,
            "; samples of a smaller `length=` need less",
        )
    return max(1, min(fitting, len(plan.slabs)))


def fitting_jobs(work: str, limits: Limits, job_bytes: int, base: int) -> int:
    """Returns the number of jobs: the wanted number, as far as the memory suffices.

    Args:
        work: what the error calls it.
        limits: jobs and memory.
        job_bytes: the most that a job holds.
        base: the memory that is needed without any job.

    Raises:
        ResourceError: the memory does not suffice for one job.
    """
    fitting = (limits.max_memory - base) // max(1, job_bytes)
    if fitting < 1:
        raise _too_little(work, base + job_bytes, limits)
    return min(limits.jobs, fitting)


def _too_little(work: str, needed: int, limits: Limits, advice: str = "") -> ResourceError:
    """Returns the error of work that needs more bytes of memory than it may take."""
    unit, size = ("GB", 10**9) if needed >= 10**11 else ("MB", 10**6)
    least = -(-needed // size)
    return ResourceError(
        f"{work} needs at least {least} {unit} of memory; `max_memory=` is {format_size(limits.max_memory)}",
        hint=f"`max_memory=` must be at least {least}{unit}{advice}",
    )


@dataclass(frozen=True)
class TensorRoom:
    """The limits of a run that makes tensors: `in_flight` are bytes of tensors that wait to be written."""

    jobs: int
    in_flight: int = IN_FLIGHT_BYTES


def room_for_tensors(name: str, limits: Limits, job_bytes: int, total: int, more: int = 0) -> TensorRoom:
    """Returns the room of a run that makes tensors, as far as the memory suffices. If it is scarce, one tensor is made
    and written after the other.

    Args:
        name: of the model.
        limits: jobs and memory.
        job_bytes: the most that a job holds: values as they are stored, as they are wanted, rearranged and encoded.
        total: bytes of all tensors.
        more: what reading takes besides.

    Raises:
        ResourceError: it does not suffice for one job.
    """
    left = limits.max_memory - BASE_MEMORY - more
    if left < job_bytes:
        raise _too_little(f"writing {name} as safetensors", BASE_MEMORY + more + job_bytes, limits)
    for jobs in range(
        limits.jobs, 0, -1
    ):  # one tensor more than jobs waits, and takes less than half of what a job does
        in_flight = min(IN_FLIGHT_BYTES, total, (jobs + 1) * job_bytes // 2)
        if jobs * job_bytes + in_flight <= left:
            return TensorRoom(jobs, in_flight)
    return TensorRoom(1, left - job_bytes)


def planned_memory_for_tensors(room: TensorRoom, job_bytes: int, more: int) -> int:
    """Returns the private memory in bytes that a run with this room needs at most; see `room_for_tensors`."""
    return BASE_MEMORY + more + room.in_flight + room.jobs * job_bytes


def _base_memory(plan: Plan) -> int:
    """Returns the memory that a run needs whatever the model."""
    return BASE_MEMORY + (QUANTIZE_MEMORY if plan.quantization else 0)


def planned_memory(plan: Plan, job_count: int) -> int:
    """Returns the private memory in bytes that a conversion with `job_count` jobs needs at most."""
    calibration = plan.quantization.calibration if plan.quantization else None
    return max(_base_memory(plan) + job_count * plan.buffers.nbytes, calibration.memory if calibration else 0)
