"""Export."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from tpuconv.api.made import Made
from tpuconv.api.running import manifest_made, run_work
from tpuconv.convert.export.options import ExportOptions
from tpuconv.hosts import ProcessPart
from tpuconv.location import Location, to_location
from tpuconv.options import (
    ELSEWHERE_ARGUMENT,
    PART_ARGUMENT,
    PROGRESS_ARGUMENT,
    STORED_ARGUMENT,
    Budget,
    Replacing,
    argument,
    takes,
)
from tpuconv.progress import Listener, ignore
from tpuconv.text import OneLine

if TYPE_CHECKING:
    from tpuconv.convert.export.files import FileTensor
    from tpuconv.convert.plan.types import Skip
    from tpuconv.storage.sealed import Sealed


@dataclass(frozen=True, repr=False, kw_only=True)
class Export(Made):
    """The output of `export`.

    Attributes:
        family: the family of the model.
        target: the program that the checkpoint is for.
        arrays: the folder of the Orbax checkpoint.
        skipped: the arrays of a trainer's checkpoint, or the tensors skipped by the conversion, that were not exported.
        files: the number of safetensors files; 0 if OUT is not published.
        bytes: size of the tensors.
    """

    family: str
    target: str
    arrays: Location
    skipped: "tuple[Skip, ...]"
    files: int
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """The keys that docs/json.md lists."""
        return {
            **self.run_to_json(),
            "family": self.family,
            "target": self.target,
            "arrays": str(self.arrays),
            "skipped": [vars(skip) for skip in self.skipped],
            "files": self.files,
            "bytes": self.bytes,
        }


@dataclass(frozen=True, repr=False)
class ExportPlan(OneLine):
    """The plan of an export, before a value is read.

    Attributes:
        ckpt: the checkpoint.
        family: the family of the model.
        target: the program that the checkpoint is for.
        skipped: the arrays of a trainer's checkpoint, or the tensors skipped by the conversion, that would not be
            exported.
        files: the tensors of each safetensors file.
        encoding: the description of quantized parameters for config.json; None if there are none.
    """

    ckpt: Location
    family: str
    target: str
    skipped: "tuple[Skip, ...]"
    files: "Sequence[Sequence[FileTensor]]"
    encoding: dict[str, Any] | None

    @property
    def bytes(self) -> int:
        """Size of the tensors."""
        return sum(tensor.nbytes for file in self.files for tensor in file)

    def to_json(self) -> dict[str, Any]:
        """The keys that docs/json.md lists."""
        from tpuconv.convert.export.files import tensors_to_json

        return {
            "checkpoint": str(self.ckpt),
            "family": self.family,
            "target": self.target,
            "skipped": [vars(skip) for skip in self.skipped],
            "files": len(self.files),
            "bytes": self.bytes,
            "encoding": self.encoding,
            "tensors": tensors_to_json(self.files),
        }


@dataclass(eq=False, repr=False)
class PlanExportRequest(ExportOptions):
    """The arguments of `plan_export`."""

    ckpt: str | Location = field(metadata=STORED_ARGUMENT)
    _: KW_ONLY
    progress: Listener = field(default=ignore, metadata=PROGRESS_ARGUMENT)


@dataclass(eq=False, repr=False)
class ExportRequest(Budget, Replacing, ExportOptions):
    """The arguments of `export`."""

    ckpt: str | Location = field(metadata=STORED_ARGUMENT)
    out: str | Location = field(metadata=argument("The folder to write; it appears complete or not at all."))
    _: KW_ONLY
    part: ProcessPart | None = field(default=None, metadata=PART_ARGUMENT)
    elsewhere: "Sealed | None" = field(default=None, metadata=ELSEWHERE_ARGUMENT)
    progress: Listener = field(default=ignore, metadata=PROGRESS_ARGUMENT)


@takes(PlanExportRequest)
def plan_export(asked: PlanExportRequest) -> ExportPlan:
    """Plans `export` with the same arguments; no weights are read.

    Raises:
        TpuconvError: see `tpuconv.errors` for its children.
    """
    from tpuconv.convert.export.opening import opened_export

    ckpt = to_location(asked.ckpt)
    with opened_export(ckpt, asked, asked.progress) as what:
        return ExportPlan(ckpt, what.family, what.target, what.skipped, what.files, what.encoding)


@takes(ExportRequest)
def export(asked: ExportRequest) -> Export:
    """Writes a checkpoint as safetensors, under the names that its tensors had. What was neither cast nor dequantized
    comes back bit for bit. Quantized parameters are written in the formats that vLLM, SGLang, tpu-inference and
    transformers load. LoRA that was trained is written as an adapter of PEFT.

    Raises:
        TpuconvError: see `tpuconv.errors` for its children.
    """
    from tpuconv.convert.export.opening import opened_export
    from tpuconv.convert.run.sizing import Limits

    ckpt, out = to_location(asked.ckpt), to_location(asked.out)
    with opened_export(ckpt, asked, asked.progress) as what:
        sources = (what.checkpoint, asked.config, asked.with_skipped)
        work = what.work(Limits.of_this_machine(asked.jobs, asked.max_memory))
        ended = run_work(work, out, asked, "exporting", asked.progress, asked.part, sources, asked.elsewhere)
    made = manifest_made(ended, asked.elsewhere)
    return Export(
        **ended.made,
        family=what.family,
        target=what.target,
        arrays=what.arrays,
        skipped=what.skipped,
        files=sum(name.endswith(".safetensors") for name in made.files) if made else 0,
        bytes=ended.total,
    )
