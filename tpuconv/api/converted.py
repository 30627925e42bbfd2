"""The result of a conversion, and the plan of one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpuconv.api.made import Made
from tpuconv.options import Budget
from tpuconv.text import OneLine

if TYPE_CHECKING:
    from tpuconv.api.calibration import CalibrationText
    from tpuconv.convert.export.files import FileTensor
    from tpuconv.convert.plan.types import Plan, Skip
    from tpuconv.models.common.ignored import IgnoredKey
    from tpuconv.quantize.config import QuantConfig
    from tpuconv.quantize.report import Report
    from tpuconv.sources.adapter import Adapter
    from tpuconv.sources.companions import LeftOut


@dataclass(frozen=True, repr=False, kw_only=True)
class Conversion(Made):
    """The output of `convert` or `quantize`.

    Attributes:
        family: the family of the model, such as "llama".
        source_state: the check of the source, as the manifest records it; None if none can be expected, as of a folder.
        arrays: the number of arrays in the checkpoint.
        parameters: the number of parameters of the model; tied parameters count once.
        output_bytes: size of the arrays on the disk.
        source_bytes: bytes of the source that are converted.
        adapters: the merged adapters.
        skipped: source tensors that are not converted, and why.
        carried: the number of source tensors that are copied to safetensors unchanged, such as the tensors of a tower.
        ignored_config: keys of config.json that are not read, and why.
        left_out: files of the source that are not copied, and why.
        quantization: the quantization report; None for a checkpoint that is not quantized, or not published yet.
        part_bytes: bytes of the source (of the files, for safetensors) in its part.
        rounded: a sentence about parameters that the way back from the target rounds; empty if there are none.
        differs: a sentence about what the target computes otherwise than transformers; empty if it is nothing.
        calibration: how much text a calibration had; None without one.
        serve: the commands that serve quantized safetensors by vLLM; none for other outputs.
        drafts: how many tokens they let a draft draft in a step.
    """

    family: str
    source_state: str | None
    arrays: int
    parameters: int
    output_bytes: int
    source_bytes: int
    adapters: Sequence["Adapter"]
    skipped: Sequence["Skip"]
    carried: int
    ignored_config: Sequence["IgnoredKey"]
    left_out: Sequence["LeftOut"]
    quantization: "Report | None"
    part_bytes: int
    rounded: str = ""
    differs: str = ""
    calibration: "CalibrationText | None" = None
    serve: Sequence[str] = ()
    drafts: int = 0

    @property
    def source_verified(self) -> bool:
        """True if every file has the hash that the Hub lists."""
        from tpuconv.sources.source import VERIFIED

        return self.source_state == VERIFIED

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        facts: dict[str, Any] = {
            **self.run_to_json(),
            "family": self.family,
            "source_verified": self.source_verified,
            "arrays": self.arrays,
            "parameters": self.parameters,
            "output_bytes": self.output_bytes,
            "adapters": [adapter.to_summary() for adapter in self.adapters],
            "skipped": [vars(skip) for skip in self.skipped],
            "carried": self.carried,
            "ignored_config": [key.to_json() for key in self.ignored_config],
            "left_out": [file._asdict() for file in self.left_out],
        }
        facts |= {key: text for key in ("rounded", "differs") if (text := getattr(self, key))}
        facts |= {"serve": list(self.serve)} if self.serve else {}
        if self.part is not None:
            facts["process"] |= {"bytes": self.part_bytes, "of_bytes": self.source_bytes}
        if self.calibration is not None:
            facts["calibration"] = self.calibration.to_json()
        return facts | ({"quantization": self.quantization.to_json()} if self.quantization else {})


@dataclass(frozen=True, repr=False)
class ConversionPlan(OneLine):
    """The plan of a conversion, from headers alone.

    Attributes:
        plan: every array, its source tensors, and the faults (`plan.faults`).
        jobs: threads that would run.
        peak_memory_bytes: the most private memory that they would need.
        workspace_bytes: the most bytes of a streamed source that are on the disk at a time; 0 if nothing is streamed.
        disk_bytes: the disk space of the output, with the files beside the weights.
        rules: the quantization config; None without one.
        calibration: how much text a calibration would have; None without one.
        files: for a target with safetensors, the tensors of each file that would be written; empty for other targets.
    """

    plan: "Plan"
    jobs: int
    peak_memory_bytes: int
    workspace_bytes: int
    disk_bytes: int
    rules: "QuantConfig | None"
    files: "Sequence[Sequence[FileTensor]]" = ()
    calibration: "CalibrationText | None" = None

    @classmethod
    def sized(cls, plan: "Plan", rules: "QuantConfig | None", budget: Budget) -> "ConversionPlan":
        """Returns the plan with the jobs and the memory of a run; see `tpuconv.api.convert`.

        Raises:
            ResourceError: the memory does not suffice.
            UsageError: no format of servers holds what is quantized.
        """
        from tpuconv.convert.run import sizing
        from tpuconv.convert.run.conversion import companion_bytes, disk_bytes
        from tpuconv.convert.run.steps import workspace_bytes

        if rules is not None and rules.target_bits is not None and plan.quantization is not None:
            from tpuconv.quantize.config import QuantConfig

            rules = QuantConfig.from_json(plan.quantization.config)  # these were chosen for the model
        limits = sizing.Limits.of_this_machine(budget.jobs, budget.max_memory)
        if plan.target.is_safetensors:
            from tpuconv.convert.export.export import planned_files

            if plan.faults:
                return cls(plan, limits.jobs, 0, 0, 0, rules)
            planned = planned_files(plan, limits)
            disk = sum(tensor.nbytes for file in planned.files for tensor in file) + companion_bytes(plan)
            return cls(plan, planned.room.jobs, planned.memory, planned.workspace_bytes, disk, rules, planned.files)
        count = sizing.jobs(plan, limits)
        memory, disk = sizing.planned_memory(plan, count), disk_bytes(plan, plan.units)
        return cls(plan, count, memory, workspace_bytes(plan), disk, rules)

    @property
    def output_bytes(self) -> int:
        """Size of what would be written, without files beside the weights."""
        return sum(tensor.nbytes for file in self.files for tensor in file) if self.files else self.plan.output_bytes

    @property
    def split_skipped(self) -> "tuple[tuple[Skip, ...], int]":
        """The tensors that are left out of the output, and the number of tensors that are copied unchanged."""
        from tpuconv.convert.export.carried import split_skipped

        return split_skipped(self.plan)

    @property
    def notes(self) -> "Sequence[str]":
        """Sentences about modules that rules name and that stay unquantized, about parameters that the way back from
        the target rounds, and about what the target computes otherwise."""
        of_rules = self.plan.quantization.config.get("notes", ()) if self.plan.quantization else ()
        return (*of_rules, *filter(None, [self.plan.rounded, self.plan.differs]))

    def check(self) -> None:
        """Raises MappingError if the source does not match the table of the family."""
        self.plan.check()

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        facts = self.plan.to_json(self.peak_memory_bytes) | {
            "workspace_bytes": self.workspace_bytes,
            "disk_bytes": self.disk_bytes,
        }
        skipped, carried = self.split_skipped
        facts |= {"skipped": [vars(skip) for skip in skipped], "carried": carried}
        facts |= {"notes": list(self.notes)} if self.notes else {}
        facts |= {"calibration": self.calibration.to_json()} if self.calibration else {}
        if not self.files:
            return facts
        from tpuconv.convert.export.files import tensors_to_json

        written = {"output_bytes": self.output_bytes, "files": len(self.files)}
        return facts | written | {"tensors": tensors_to_json(self.files)}
