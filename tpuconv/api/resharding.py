"""Reshard."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from tpuconv.api.made import Made
from tpuconv.api.running import run_work
from tpuconv.convert.export.options import WITH_CONFIG, refuse_options
from tpuconv.errors import UsageError
from tpuconv.hosts import ProcessPart
from tpuconv.location import Location, to_location
from tpuconv.options import (
    MESH_OPTION,
    PART_ARGUMENT,
    PATHWAYS_OPTION,
    PROGRESS_ARGUMENT,
    STORED_ARGUMENT,
    TRAINED_CONFIG_OPTION,
    TRAINED_NONFINITE_OPTION,
    TRAINED_TARGET_OPTION,
    Budget,
    Replacing,
    argument,
    option,
    takes,
)
from tpuconv.progress import Listener, ignore
from tpuconv.text import OneLine

if TYPE_CHECKING:
    from tpuconv.convert.plan.types import Skip
    from tpuconv.convert.reshard.plan import ReshardPlan


@dataclass(frozen=True, repr=False, kw_only=True)
class ReshardingPlan(OneLine):
    """The plan of a resharding, before a value is read.

    Attributes:
        target: the program that the checkpoint is for.
        mesh: sizes of the mesh axes.
        scan_layers: whether the layers of the output are stacked.
        arrays: for each pattern of names the number of arrays, and the shape, chunks and files of the first one.
        skipped: the arrays of a trainer's checkpoint that are not written.
        bytes: size of the arrays.
        device_bytes: size of the chunks that one device reads.
    """

    target: str
    mesh: Mapping[str, int]
    scan_layers: bool
    arrays: Mapping[str, Mapping[str, Any]]
    skipped: "tuple[Skip, ...]"
    bytes: int
    device_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The keys that docs/json.md lists."""
        return {
            "target": self.target,
            "mesh": dict(self.mesh),
            "scan_layers": self.scan_layers,
            "bytes": self.bytes,
            "device_bytes": self.device_bytes,
            "skipped": [vars(skip) for skip in self.skipped],
            "arrays": dict(self.arrays),
        }


@dataclass(frozen=True, repr=False, kw_only=True)
class Resharding(ReshardingPlan, Made):
    """The output of `reshard`, with the facts of its plan."""

    def to_json(self) -> dict[str, Any]:
        """The keys that docs/json.md lists."""
        return {**self.run_to_json(), **super().to_json()}


@dataclass(eq=False, repr=False, kw_only=True)
class ReshardOptions:
    """The options of `reshard` and `plan_reshard`."""

    mesh: Mapping[str, int] | None = field(default=None, metadata=MESH_OPTION)
    scan_layers: bool = option(False, "Stack the layers into one array each, for jax.lax.scan.")
    unscan_layers: bool = option(False, "Give each layer arrays of its own.")
    pathways: bool = field(default=False, metadata=PATHWAYS_OPTION)
    config: str | Location | None = field(default=None, metadata=TRAINED_CONFIG_OPTION)
    target: str | None = field(default=None, metadata=TRAINED_TARGET_OPTION)
    allow_nonfinite: bool = field(default=False, metadata=TRAINED_NONFINITE_OPTION)

    def check_together(self) -> None:
        """Raises UsageError for options that do not go together."""
        if self.scan_layers and self.unscan_layers:
            raise UsageError("`scan_layers=` and `unscan_layers=` exclude each other", hint="give one of them")
        if not (self.mesh or self.scan_layers or self.unscan_layers or self.pathways or self.config):
            raise UsageError(
                "nothing is to be changed",
                hint="give `mesh=`, `scan_layers=`, `unscan_layers=` or `pathways=`; for a trainer's run `config=`",
            )
        if self.config is None:
            refuse_options(self, WITH_CONFIG)


@dataclass(eq=False, repr=False)
class PlanReshardRequest(ReshardOptions):
    """The arguments of `plan_reshard`."""

    ckpt: str | Location = field(metadata=STORED_ARGUMENT)
    _: KW_ONLY
    progress: Listener = field(default=ignore, metadata=PROGRESS_ARGUMENT)


@dataclass(eq=False, repr=False)
class ReshardRequest(Budget, Replacing, ReshardOptions):
    """The arguments of `reshard`."""

    ckpt: str | Location = field(metadata=STORED_ARGUMENT)
    out: str | Location = field(metadata=argument("The folder to write; it appears complete or not at all."))
    _: KW_ONLY
    part: ProcessPart | None = field(default=None, metadata=PART_ARGUMENT)
    progress: Listener = field(default=ignore, metadata=PROGRESS_ARGUMENT)


@takes(PlanReshardRequest)
def plan_reshard(asked: PlanReshardRequest) -> ReshardingPlan:
    """Plans `reshard` with the same arguments; no weights are read.

    Raises:
        TpuconvError: see `tpuconv.errors` for its children.
    """
    with _planned(to_location(asked.ckpt), asked, asked.progress) as (planned, skipped):
        return ReshardingPlan(**_facts(planned, skipped))


@takes(ReshardRequest)
def reshard(asked: ReshardRequest) -> Resharding:
    """Writes a checkpoint in the chunks that the devices of a mesh read, with its layers stacked or apart. Values stay
    as they are, bit for bit. Of a trainer's checkpoint the parameters are written.

    The output appears complete or not at all; interrupted, the same call continues.

    Raises:
        TpuconvError: see `tpuconv.errors` for its children.
    """
    from tpuconv.convert.reshard.work import ReshardWork
    from tpuconv.convert.run.sizing import Limits

    out = to_location(asked.out)
    with _planned(to_location(asked.ckpt), asked, asked.progress) as (planned, skipped):
        work = ReshardWork(planned, skipped, Limits.of_this_machine(asked.jobs, asked.max_memory))
        ended = run_work(work, out, asked, "resharding", asked.progress, asked.part, [asked.config])
        return Resharding(**ended.made, **_facts(planned, skipped))


@contextmanager
def _planned(
    ckpt: Location, asked: ReshardOptions, progress: Listener
) -> "Iterator[tuple[ReshardPlan, tuple[Skip, ...]]]":
    """Yields the plan of a resharding, and the arrays that are not written."""
    from tpuconv.convert.reshard.plan import make_reshard_plan, opened_arrays
    from tpuconv.notation.sharding import named_mesh

    asked.check_together()
    mesh = named_mesh(asked.mesh or {})
    config = None if asked.config is None else str(asked.config)
    scan_layers = True if asked.scan_layers else False if asked.unscan_layers else None
    with opened_arrays(ckpt, config, asked.target, progress, only_finite=not asked.allow_nonfinite) as (
        arrays,
        skipped,
    ):
        yield make_reshard_plan(arrays, mesh, scan_layers, pathways=asked.pathways), skipped


def _facts(planned: "ReshardPlan", skipped: "tuple[Skip, ...]") -> dict[str, Any]:
    """Returns the facts of a plan that its output has too."""
    from tpuconv.names import collapse

    arrays = {
        pattern: {
            "count": len(names),
            "shape": (first := planned.arrays[names[0]]).shape,
            "dtype": first.dtype.name,
            "axes": first.axes,
            "chunks": first.chunks,
            "files": first.shards,
        }
        for pattern, names in collapse(planned.arrays, lambda name: planned.arrays[name].kind).items()
    }
    return {
        "target": planned.target.name,
        "mesh": planned.mesh,
        "scan_layers": planned.scan_layers,
        "arrays": arrays,
        "skipped": skipped,
        "bytes": planned.nbytes,
        "device_bytes": planned.device_bytes,
    }
