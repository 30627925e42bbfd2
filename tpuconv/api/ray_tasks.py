"""Run `convert`, `quantize`, `export` or `reshard` on a Ray cluster (extra `ray`).

Each Ray task is one of several processes, as `tpuconv.hosts` describes them: they meet in the journal of the output.
Ray chooses the nodes, and runs a task again if its node or its process dies.
"""

import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

from tpuconv import libtpu
from tpuconv.api.converted import Conversion
from tpuconv.api.exporting import Export
from tpuconv.api.resharding import Resharding
from tpuconv.errors import ResourceError, TpuconvError, UsageError
from tpuconv.extras import install_command
from tpuconv.hosts import ProcessPart
from tpuconv.location import Location, to_location
from tpuconv.progress import Listener, Progress, ignore

LOCK_SECONDS = 180.0
"""The time that a repeated task waits for the lock of the process that it follows. NFS frees it after 90 s."""
POLL_OF_TASKS_SECONDS = 0.5

Result = TypeVar("Result", Conversion, Export, Resharding)


def on_ray(
    command: Callable[..., Result],
    src: str | Location,
    out: str | Location | None,
    *,
    address: str = "auto",
    count: int | None = None,
    progress: Listener = ignore,
    **options: Any,
) -> Result:
    """Runs a function of this package as tasks of a Ray cluster, then publishes the output: it is equal to the output
    of one process, bit for bit. Interrupted, the same call continues.

    Args:
        command: `convert`, `quantize`, `export` or `reshard`.
        src: its first argument, which every node must be able to read.
        out: the folder to write, in a bucket or on a disk that all nodes share.
        address: of the cluster: "auto" for the one that this host belongs to, else `HOST:PORT` or `ray://HOST:PORT`. If
            `ray.init` was called, that cluster is used.
        count: of tasks; by default one for each node. A task takes as many CPUs as the smallest node has.
        progress: called while tasks run.
        options: further arguments of `command`.

    Raises:
        UsageError: Ray is not installed, there is no cluster, `out` is missing or not shared by the nodes.
        ResourceError: a task died again and again.
        TpuconvError: what a task raised.
    """
    if out is None:
        raise UsageError("`on_ray()` needs OUT", hint="name a folder in a bucket, or on a disk that all nodes share")
    began, to = time.monotonic(), _absolute(to_location(out))
    with _cluster(address) as ray, _mark(to) as mark:
        nodes = [cpus for node in ray.nodes() if node["Alive"] and (cpus := node["Resources"].get("CPU"))]
        task = ray.remote(_do_part).options(num_cpus=min(nodes, default=1), scheduling_strategy="SPREAD")
        total = count or len(nodes) or 1
        given = {name: value for name, value in options.items() if name != "check"}
        arguments = (command, _absolute(src), to, given, os.getcwd(), mark)
        left = [task.remote(ProcessPart(index, total, publishes=False), *arguments) for index in range(total)]
        resumed = 0
        try:
            while left:
                progress(Progress(f"{command.__name__} on Ray, {total - len(left)} of {total} parts done"))
                ended, left = ray.wait(left, timeout=POLL_OF_TASKS_SECONDS)
                resumed += sum(map(ray.get, ended))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, TpuconvError):
                raise error.cause from None
            raise
        except ray.exceptions.RayError as error:
            raise ResourceError(
                "a task of Ray died, and so did its repetitions",
                details=str(error).splitlines()[:10],
                hint="the same command continues; with too little memory on a node give `max_memory=`",
            ) from error
        finally:
            for each in left:
                ray.cancel(each, force=True)
    # An output of the same plan is left as it is: that is what `overwrite` means to one of several processes.
    result = command(_absolute(src), to, part=ProcessPart(0, 1), progress=progress, **options)
    # To this process all was done before; the tasks know by which run.
    most = result.source_bytes if isinstance(result, Conversion) else result.bytes
    return replace(result, resumed_bytes=min(resumed, most), part=None, seconds=time.monotonic() - began)


def _do_part(
    part: ProcessPart,
    command: Callable[..., Any],
    src: str | Location,
    out: Location,
    options: Mapping[str, Any],
    folder: str,
    mark: Path | None,
) -> int:
    """Does one part, in the working directory of the driver, if this node has it. Returns how many bytes of the source,
    or of the output of an export, an earlier run had done."""
    from tpuconv.storage.shared_journal import PartRunning

    libtpu.hide_without_tpu()
    if Path(folder).is_dir():
        os.chdir(folder)
    _check_shared(out, mark)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            done = command(src, out, part=part, **options)
            break
        except PartRunning:  # by the process that this one follows, which ends, or whose lock the disk still holds
            if time.monotonic() > deadline:
                raise
            time.sleep(1)
    if isinstance(done, Conversion):
        return done.resumed_bytes * done.part_bytes // max(1, done.source_bytes)
    return int(done.resumed_bytes)


@contextmanager
def _cluster(address: str) -> Iterator[Any]:
    """Ray, connected to a cluster."""
    if find_spec("ray") is None:
        raise UsageError("`on_ray()` needs the package ray", hint=f"install it: {install_command('ray')}")
    import ray

    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"no Ray cluster answers at {address}: {str(error).partition(chr(10))[0]}",
            hint="run this on a node of the cluster, after `ray start`, or give `address=HOST:PORT`",
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _mark(out: Location) -> Iterator[Path | None]:
    """Yields an empty file with a random name beside an output on a disk while tasks run: a node that does not see it
    has another disk there. Its lock shows that this process lives; marks of killed ones are removed. None for a
    bucket."""
    from tpuconv.storage import disk

    if not isinstance(out, Path):
        yield None
        return
    disk.make_folder(out.parent)
    name = f".{out.name}.tpuconv-ray-"
    for each in disk.entries(out.parent):
        if re.fullmatch(rf"{re.escape(name)}[0-9a-f]{{16}}", each):
            _remove_left(out.parent / each)
    path, lock = _locked_mark(out.parent, name)
    try:
        yield path
    finally:
        disk.remove(path)
        os.close(lock)


def _locked_mark(folder: Path, name: str) -> tuple[Path, int]:
    """Creates a mark, and returns its path and the descriptor that holds its lock."""
    from tpuconv.storage import disk, locks

    while True:
        path = folder / f"{name}{token_hex(8)}"
        lock = disk.open_lock(path)
        if locks.lock(lock, path) and locks.same_file(lock, path):  # else another driver took it for a killed one's
            return path, lock
        os.close(lock)


def _remove_left(path: Path) -> None:
    """Removes a mark whose process was killed. A file with bytes in it is of others, whatever its name."""
    from tpuconv.storage import disk, locks

    try:
        status = os.lstat(path)
    except FileNotFoundError:  # another driver removed it
        return
    if status.st_size or not stat.S_ISREG(status.st_mode):
        return
    lock = disk.open_lock(path)
    try:
        if locks.lock(lock, path):
            disk.remove(path)
    finally:
        os.close(lock)


def _check_shared(out: Location, mark: Path | None) -> None:
    """Raises UsageError if an output is on a disk that this node does not share with the driver."""
    if mark is not None and not mark.exists():
        raise UsageError(
            f"{out} is not on a disk that all nodes of the cluster share: {socket.gethostname()} has another one there",
            hint="name a folder in a bucket, or on a disk that all nodes and this host mount at the same path",
        )


def _absolute(place: Any) -> Any:
    """Returns a path that holds in other working directories; a Hub id as it is."""
    location = to_location(place)
    if isinstance(location, Path) and (location.exists() or isinstance(place, Path)):
        return Path(os.path.abspath(location))
    return place
