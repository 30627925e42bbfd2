"""Plans of conversions, from what a user gives."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuconv.api.calibration import CalibrationText
from tpuconv.errors import UsageError
from tpuconv.location import BucketPath, Location, local_path, to_location
from tpuconv.progress import Listener, Progress

if TYPE_CHECKING:
    from tpuconv.convert.plan.types import Options, Plan
    from tpuconv.quantize.calibrate.data import CalibrationData
    from tpuconv.quantize.config import QuantConfig


@dataclass(frozen=True)
class Origin:
    """The place of a source, and the treatment of its fetched files."""

    src: str
    revision: str | None
    keep_source: bool
    workspace: str | Path | None

    def __post_init__(self) -> None:
        if self.keep_source and (isinstance(place := to_location(self.src), BucketPath) or place.is_dir()):
            raise UsageError(f"--keep-source needs a Hub id, and {self.src} is a folder", hint="leave it out")
        _ = self.folder  # a faulty one is an error at once

    @property
    def folder(self) -> Path | None:
        """The workspace, as a folder."""
        return workspace_folder(self.workspace)


def workspace_folder(workspace: str | Path | None) -> Path | None:
    """Returns the folder of a workspace, if there is one.

    Raises:
        UsageError: it is not on a local disk.
    """
    return None if workspace is None else local_path(workspace, "the workspace is on a local disk")


@contextmanager
def planned_conversion(
    origin: Origin, options: "Options", rules: "QuantConfig | None", *, runs: bool, progress: Listener
) -> "Iterator[Plan]":
    """Yields the plan of a conversion; the source is held while it is used."""
    from tpuconv.models.registry import find_family
    from tpuconv.sources.hub import resolve
    from tpuconv.sources.source import fetched_meanwhile, open_source

    streams = not origin.keep_source
    with resolve(
        origin.src,
        revision=origin.revision,
        weights=runs and not streams,
        streams=runs and streams,
        progress=lambda n, of: progress(Progress("downloading", n, of)),
    ) as resolved:
        source = open_source(
            resolved.folder,
            repo=resolved.repo,
            commit=resolved.commit,
            sha256=resolved.sha256,
            unproved=resolved.unproved,
            listed=resolved.listed,
        )
        if streams:
            source = fetched_meanwhile(source, resolved.remote, origin.folder)
        yield _make_plan(source, find_family(source.config), None, options, rules, None, runs=runs)


def planned_quantization(
    ckpt: Location, rules: "QuantConfig", data: "CalibrationData | None", compress: bool, *, runs: bool
) -> "Plan":
    """Returns the plan to quantize a checkpoint."""
    from tpuconv.checkpoint.reader import open_checkpoint
    from tpuconv.convert.plan.types import Options
    from tpuconv.models.registry import get_family

    source = open_checkpoint(ckpt)
    options = Options.of_checkpoint(source.manifest, compress=compress)
    return _make_plan(source, get_family(source.manifest.family), source.table(), options, rules, data, runs=runs)


def text_of(plan: "Plan") -> "CalibrationText | None":
    """Returns the amount of calibration text of a planned quantization; None without a calibration."""
    from tpuconv.quantize.calibrate.run import LayerwiseCalibration

    calibration = plan.quantization.calibration if plan.quantization else None
    if not isinstance(calibration, LayerwiseCalibration):
        return None
    return CalibrationText.of(calibration.data, calibration.widest)


def _make_plan(
    source: Any,
    family: Any,
    table: Any,
    options: "Options",
    rules: "QuantConfig | None",
    data: "CalibrationData | None",
    *,
    runs: bool,
) -> "Plan":
    """Returns the plan for a table, or for the family's and the target's if it is None."""
    from tpuconv.convert.plan.coverage import make_plan
    from tpuconv.targets.compose import check_quantized, find_tree, same_parameters, target_table
    from tpuconv.targets.registry import get_target
    from tpuconv.targets.target import OWN

    target = get_target(options.target)
    if target.is_safetensors and (options.scan_layers or options.layers):
        raise UsageError(
            f"the target {target.name} always has all layers, unstacked", hint="leave out --scan-layers and --layers"
        )
    if options.scheme is not None and not target.is_safetensors:
        raise UsageError(
            f"the target {target.name} does not write formats of servers",
            hint="leave out --scheme, or use --target huggingface",
        )
    if rules is not None and target.quantized is None:
        raise UsageError(f"the target {target.name} has no quantized parameters", hint="leave out --quantize")
    if rules is not None and target.fp8_block:
        raise UsageError(
            f"the target {target.name} has no parameters that are quantized by rules",
            hint="leave out --quantize, or keep the FP8 weights of a release with --encoding keep",
        )
    returns = family.returns(source.config, source.tensors) if table is None else table.returns
    report = family.check_config(source.config, options.allow_config, source.tensors, returns)
    model_config, ignored = report.config, report.ignored

    released = family.table_for(source.tensors, model_config, returns)
    name, kind = family.in_targets(source.config["model_type"])

    def for_target(target: Any) -> Any:
        scan, mtp = options.scan_layers, options.include_mtp
        return target_table(target, name, kind, released, model_config, scan_layers=scan, include_mtp=mtp)

    table, config = (table, model_config) if table is not None else for_target(target)
    plan = make_plan(source, family.name, table, config, options, ignored_config=ignored)
    if rules is None or plan.faults:
        return plan
    from tpuconv.convert.run.conversion import read_ahead
    from tpuconv.quantize.apply import quantization

    if runs:  # begins before jax and Qwix are imported: these come in small pieces from the same disk
        read_ahead(plan)
    if target is OWN:
        how = quantization(plan, family, model_config, rules, data)
    else:
        our_table, _ = for_target(OWN)
        our_plan = make_plan(source, family.name, our_table, model_config, replace(options, target=OWN.name))
        names = same_parameters(our_table, model_config, table, config, options.include_mtp)
        how = quantization(our_plan, family, model_config, rules, for_servers=target.is_safetensors)
        if target.trees is not None:
            tree = find_tree(target, name, kind, model_config)
            check_quantized(target, tree, our_plan.arrays, (*how.encoders, *how.passthrough))
        how = how.renamed(names, target.name)
    return make_plan(source, family.name, table, config, options, how, ignored)
