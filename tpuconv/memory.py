"""The memory that this process has used, and the memory that it may use."""

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tpuconv.errors import ResourceError
from tpuconv.text import format_size

ADDRESS_SPACE, ADDRESS_SPACE_PER_CPU = 450_000_000, 50_000_000  # to import numpy and numba
JAX_ADDRESS_SPACE, JAX_ADDRESS_SPACE_PER_CPU = 2_500_000_000, 250_000_000


def peak_memory() -> int:
    """Returns the peak resident memory of this process in bytes. Linux's getrusage would count the memory of the parent
    before exec."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def available_memory() -> tuple[int, int]:
    """Returns the available and the total memory in bytes: of this machine, or of the container of this process."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    sizes = {parts[0].rstrip(":"): int(parts[1]) * 1024 for parts in lines if len(parts) == 3}
    total, available = sizes["MemTotal"], sizes["MemAvailable"]
    for limit, used in _limits_of_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")):
        total, available = min(total, limit), min(available, max(0, limit - used))
    return available, total


def _limits_of_groups(own: Path, root: Path) -> Iterator[tuple[int, int]]:
    """Yields the limits in bytes of the control groups that this process is in, of either version, with what is used of
    each without the page cache. `own` is the kernel's list of them, `root` where they are mounted."""
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top = root / "memory" if controllers else root
            names = (
                ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
            )
            group = top / path.lstrip("/")
            for folder in (group, *group.parents):
                if not folder.is_relative_to(top):
                    break
                with suppress(OSError, ValueError):  # it has no limit, or is not seen from within
                    limit, used = (int((folder / name).read_text()) for name in names)
                    figures = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    cache = figures.get("total_inactive_file", figures.get("inactive_file", "0"))
                    yield limit, used - int(cache)


def check_address_space() -> None:
    """Raises ResourceError if a limit of this process (`ulimit -v`) is too small for numpy and numba. With less these
    libraries fail to load, each in its own way: OpenBLAS sends the process a SIGINT."""
    _check_limit(ADDRESS_SPACE + ADDRESS_SPACE_PER_CPU * len(os.sched_getaffinity(0)))


def check_address_space_for_jax(more: int = 0) -> None:
    """Raises ResourceError if a limit of this process (`ulimit -v`) is too small for jax and `more` bytes. Libraries of
    jax end the process when a thread or an allocation is refused. A command takes up to 2.6 GB on two processors, most
    of it addresses without memory: libraries, stacks, thread pools."""
    _check_limit(JAX_ADDRESS_SPACE + JAX_ADDRESS_SPACE_PER_CPU * len(os.sched_getaffinity(0)) + more)


def address_space_limit() -> int | None:
    """Returns the limit on the addresses of this process (`ulimit -v`) in bytes; None without one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _check_limit(need: int) -> None:
    limit = address_space_limit()
    if limit is not None and limit < need:
        raise ResourceError(
            f"the address space of this process is limited to {format_size(limit)}, and the command needs "
            f"{format_size(need)}",
            hint=f"raise the limit: `ulimit -v {-(-need // 1024)}`, or `ulimit -v unlimited`",
        )
