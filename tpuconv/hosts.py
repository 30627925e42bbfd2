"""Finds the share of this process when several processes convert one model.

Nothing here starts processes: clusters do. Each process knows its index and their count, from options or from what the
cluster says in the environment.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tpuconv.errors import UsageError

METADATA_SECONDS = 2.0
"""The time limit for an answer of the metadata server of a TPU VM."""


@dataclass(frozen=True)
class ProcessPart:
    """One process of several.

    Attributes:
        index: from 0 to `count` - 1.
        count: of processes.
        publishes: whether it publishes the output if it is the last one to end.
        starts_with_others: whether all processes are started at the same time.

    Raises:
        UsageError: there is no such process.
    """

    index: int
    count: int
    publishes: bool = True
    starts_with_others: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise UsageError(
                f"there is no process {self.index} of {self.count}",
                hint=f"indices begin at 0: the last one is {self.count - 1}",
            )

    def __str__(self) -> str:
        return f"process {self.index} of {self.count}"

    def to_json(self) -> dict[str, int]:
        """Returns the keys that docs/json.md lists."""
        return {"index": self.index, "count": self.count}


Piece = TypeVar("Piece")


def divided(items: Sequence[Piece], sizes: Sequence[int], count: int) -> list[list[Piece]]:
    """Cuts a sequence into `count` runs of neighbours with about the same sum of sizes. An item belongs to the run in
    which its middle lies, so that each run differs from an even share by at most one item."""
    runs: list[list[Piece]] = [[] for _ in range(count)]
    total, position = max(1, sum(sizes)), 0
    for item, size in zip(items, sizes, strict=True):
        runs[min(count - 1, (2 * position + size) * count // (2 * total))].append(item)
        position += size
    return runs


Environment = Mapping[str, str]


@dataclass(frozen=True)
class Cluster:
    """A kind of cluster, the variables by which it tells a process its index and the count of processes, and whether it
    starts all of them at the same time."""

    name: str
    index: str
    count: str
    starts_all: bool = True


CLUSTERS = (
    Cluster("by hand", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES", starts_all=False),
    Cluster("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    Cluster("Slurm, within srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    Cluster("SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
)
"""The clusters that have a variable for each number, in the order of the search."""
TPU_ON_GKE = ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES")
SLICES = ("MEGASCALE_SLICE_ID", "MEGASCALE_NUM_SLICES")
INDEXED_JOB = "JOB_COMPLETION_INDEX"
"""The variable of an indexed Job of Kubernetes, and of a JobSet. There is no variable for the count."""
TPU_VM = ("agent-worker-number", "worker-network-endpoints")
"""Attributes of a TPU VM on its metadata server."""


def find_part(count: int | None = None, environment: Environment = os.environ) -> ProcessPart:
    """Returns the part of this process, from what its cluster says.

    Args:
        count: of processes, if it was given.
        environment: the variables to look at.

    Raises:
        UsageError: no cluster says it, or its variables are no numbers, or say another count.
    """
    found = _from_variables(environment) or _from_gke(environment)
    if found is None and INDEXED_JOB in environment:
        if count is None:
            raise UsageError(
                f"{INDEXED_JOB} is the index of this process, and nothing says how many there are",
                hint="add `count=N`, the `completions` of the Job",
            )
        found = ProcessPart(_number(environment, INDEXED_JOB), count)
    found = found or _from_tpu_vm()
    if found is None:
        raise UsageError(
            "`find_part()` finds neither the index nor the count of processes",
            details=[
                *(f"{c.name}: {c.index} and {c.count} are not set" for c in CLUSTERS),
                f"TPUs on GKE: {' and '.join(TPU_ON_GKE)} are not set",
                f"an indexed Job of Kubernetes, JobSet: {INDEXED_JOB} is not set",
                "TPU VM: no metadata server answers",
            ],
            hint="give `ProcessPart(I, N)`",
        )
    if count not in (None, found.count):
        raise UsageError(f"`count={count}` is given, and this is {found}", hint="leave one of them out")
    return found


def _from_variables(environment: Environment) -> ProcessPart | None:
    for cluster in CLUSTERS:
        if cluster.index in environment and cluster.count in environment:
            index, count = _number(environment, cluster.index), _number(environment, cluster.count)
            return ProcessPart(index, count, starts_with_others=cluster.starts_all)
    return None


def _from_gke(environment: Environment) -> ProcessPart | None:
    """Returns the share for one process on each host of each slice."""
    if not all(name in environment for name in TPU_ON_GKE):
        return None
    hosts = len(environment[TPU_ON_GKE[1]].split(","))
    has_slices = all(name in environment for name in SLICES)
    place, slices = (_number(environment, name) for name in SLICES) if has_slices else (0, 1)
    index = place * hosts + _number(environment, TPU_ON_GKE[0])
    return ProcessPart(index, hosts * slices, starts_with_others=True)


def _from_tpu_vm(ask: Callable[[str], str | None] | None = None) -> ProcessPart | None:
    answers = [(ask or _metadata)(name) for name in TPU_VM]
    if not answers[0] or not answers[1] or not answers[0].isdecimal():
        return None
    return ProcessPart(int(answers[0]), len(answers[1].split(",")), starts_with_others=True)


def _metadata(attribute: str) -> str | None:
    """Returns an attribute of this virtual machine of Google Cloud; None elsewhere."""
    from urllib.request import ProxyHandler, Request, build_opener

    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/attributes/{attribute}"
    try:
        with build_opener(ProxyHandler({})).open(
            Request(url, headers={"Metadata-Flavor": "Google"}), timeout=METADATA_SECONDS
        ) as answer:
            return str(answer.read(1 << 16), "utf-8").strip()
    except (OSError, ValueError):
        return None


def _number(environment: Environment, name: str) -> int:
    text = environment[name]
    if not text.isascii() or not text.isdecimal():
        raise UsageError(f"{name} is {text!r}, which is no number", hint="give `ProcessPart(I, N)`")
    return int(text)
