"""Quantize, and plan a quantization."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tpuconv.api.auto_recipes import measured_rules, planned_rules
from tpuconv.api.calibration import CalibrationOptions, CalibrationText, calibration_data
from tpuconv.api.converted import Conversion, ConversionPlan
from tpuconv.api.opened import OpenedModel
from tpuconv.api.quantizers import quantizer_by
from tpuconv.api.running import run_plan
from tpuconv.errors import UsageError
from tpuconv.hosts import ProcessPart
from tpuconv.location import Location, named_path, to_location
from tpuconv.names import OWN_TARGET
from tpuconv.options import (
    CKPT_ARGUMENT,
    COMPRESS_OPTION,
    PART_ARGUMENT,
    PROGRESS_ARGUMENT,
    WORKSPACE_OPTION,
    Budget,
    Replacing,
    argument,
    described_as,
    takes,
)
from tpuconv.progress import Listener, ignore

if TYPE_CHECKING:
    from tpuconv.convert.plan.planning import Quantizer
    from tpuconv.convert.plan.types import Plan
    from tpuconv.quantize.calibrate.data import CalibrationData
    from tpuconv.quantize.config import QuantConfig


@dataclass(eq=False, repr=False, kw_only=True)
class QuantizationOptions(CalibrationOptions):
    """The options of `quantize` and `plan_quantization`."""

    config: str | Path = field(
        metadata=described_as(
            "A config of this package (see `tpuconv quantize --list`), a YAML file, or auto:BITS (auto:4.5): the "
            "types that cost least at this mean of bits per quantized weight."
        )
    )
    compress: bool = field(default=False, metadata=COMPRESS_OPTION)


@dataclass(eq=False, repr=False)
class QuantizeRequest(Budget, Replacing, QuantizationOptions):
    """The arguments of `quantize`."""

    ckpt: str | Location = field(metadata=CKPT_ARGUMENT)
    out: str | Location | None = field(
        default=None, metadata=argument("The folder to write; by default `<ckpt>-<config>`, beside the checkpoint.")
    )
    _: KW_ONLY
    workspace: str | Path | None = field(default=None, metadata=WORKSPACE_OPTION)
    part: ProcessPart | None = field(default=None, metadata=PART_ARGUMENT)
    progress: Listener = field(default=ignore, metadata=PROGRESS_ARGUMENT)


@dataclass(eq=False, repr=False)
class PlanQuantizationRequest(Budget, QuantizationOptions):
    """The arguments of `plan_quantization`."""

    ckpt: str | Location = field(metadata=CKPT_ARGUMENT)


@takes(QuantizeRequest)
def quantize(asked: QuantizeRequest) -> Conversion:
    """Quantizes a checkpoint by the Qwix rules of a config: the arrays are those that Qwix makes of the model, bit for
    bit. A checkpoint for another program becomes one of tpuconv. If the config has a `calibration`, its method chooses
    the quantized values instead.

    The output appears complete or not at all; interrupted, the same call continues.

    Raises:
        TpuconvError: see `tpuconv.errors` for its children.
    """
    from tpuconv.convert.plan.planning import workspace_folder
    from tpuconv.convert.run.conversion import read_ahead
    from tpuconv.convert.run.sizing import Limits
    from tpuconv.quantize.config import find_config

    folder, out = to_location(asked.ckpt), to_location(asked.out) if asked.out else None
    rules = find_config(str(asked.config))
    _check_no_release(folder, asked.config, rules)
    if rules.target_bits is not None and asked.part is None:
        rules = measured_rules(rules, folder, asked, asked.progress)
    if asked.part is not None and rules.calibration is not None:
        raise UsageError(
            f"{rules.name} has a calibration, which runs in one process",
            hint="leave out `part=`",
        )
    named = named_path(folder)
    out = out or named.with_name(f"{named.name}-{rules.name}")
    workspace = workspace_folder(asked.workspace)
    if workspace is not None and (rules.calibration is None or isinstance(out, Path)):
        raise UsageError(
            "`workspace=` holds the results of a calibration for an output in a bucket; this output is on a disk or "
            "has no calibration",
            hint="leave `workspace=` out",
        )
    quantizer = quantizer_by(rules, _calibration_data(folder, rules, asked))
    planned = _planned(folder, quantizer, compress=asked.compress, ahead=read_ahead)
    planned.check()
    limits = Limits.of_this_machine(asked.jobs, asked.max_memory)
    if (text := _text_of(planned)) is not None:
        text.announce(asked.progress)
    done = run_plan(planned, out, limits, asked, "quantizing", asked.progress, asked.part, workspace)
    return replace(done, calibration=text)


@takes(PlanQuantizationRequest)
def plan_quantization(asked: PlanQuantizationRequest) -> ConversionPlan:
    """Plans `quantize` with these arguments. No weights are read.

    Raises:
        TpuconvError: `ckpt` is no checkpoint that can be quantized, or the config does not fit it.
    """
    from tpuconv.quantize.config import find_config

    folder, rules = to_location(asked.ckpt), find_config(str(asked.config))
    _check_no_release(folder, asked.config, rules)
    notes: tuple[str, ...] = ()
    if rules.target_bits is not None:
        rules, notes = planned_rules(rules, folder, asked)
    data = _calibration_data(folder, rules, asked) if not notes else None
    quantizer = quantizer_by(rules, data, notes)
    planned = _planned(folder, quantizer, compress=asked.compress, ahead=None)
    planned.check()
    return replace(ConversionPlan.sized(planned, rules, asked), calibration=_text_of(planned))


def _check_no_release(ckpt: Location, config: str | Path, rules: "QuantConfig") -> None:
    """Raises UsageError for a release or an export, with the commands that quantize it by a config."""
    from tpuconv.names import MANIFEST
    from tpuconv.sources.files import CONFIG_FILE
    from tpuconv.storage.places import is_there
    from tpuconv.storage.sealed import SAFETENSORS, kind_of

    is_release = is_there(ckpt / CONFIG_FILE) and not is_there(ckpt / MANIFEST)
    if is_release or kind_of(ckpt) == SAFETENSORS:
        what = "a release" if is_release else "an export"
        raise UsageError(
            f"{ckpt} is {what}, and `quantize` reads checkpoints",
            hint=f"run `tpuconv convert {ckpt}`, then `tpuconv quantize --config {config}`"
            if rules.calibration
            else f"run `tpuconv convert {ckpt} --quantize {config}`",
        )


def _planned(
    ckpt: Location, quantizer: "Quantizer", *, compress: bool, ahead: "Callable[[Plan], None] | None"
) -> "Plan":
    """Returns the plan to quantize a checkpoint: ours in the form that it has, a checkpoint for another program under
    our names. See `tpuconv.convert.plan.planning.planned_quantization`."""
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.checkpoint.reader import check_unquantized
    from tpuconv.convert.export.exported_source import exported_source
    from tpuconv.convert.plan.options import Options
    from tpuconv.convert.plan.planning import plan_of_source, planned_quantization

    manifest = read_manifest(ckpt)
    if manifest.target == OWN_TARGET:
        return planned_quantization(ckpt, quantizer, compress=compress, ahead=ahead)
    check_unquantized(manifest)
    options = Options(compress=compress, include_mtp=manifest.include_mtp, allow_config=manifest.allow_config)
    return plan_of_source(exported_source(manifest), options, quantizer)


def _calibration_data(ckpt: Location, rules: "QuantConfig", asked: QuantizationOptions) -> "CalibrationData | None":
    """Returns the samples for a config with a calibration; None for other configs.

    Raises:
        UsageError: a checkpoint for another program cannot be calibrated.
    """
    from tpuconv.checkpoint.manifest import read_manifest

    manifest = read_manifest(ckpt)
    if rules.calibration is not None and manifest.target != OWN_TARGET:
        raise UsageError(
            f"{rules.name} has a calibration, which reads the layers of a checkpoint of tpuconv, and {ckpt} is a "
            f"checkpoint for {manifest.target}",
            hint="`tpuconv export` it, `tpuconv convert` the export, and quantize that; or give a config without "
            "`calibration`",
        )
    return calibration_data(manifest, rules, asked, OpenedModel(manifest).load)


def _text_of(plan: "Plan") -> CalibrationText | None:
    """Returns the amount of calibration text of a planned quantization; None without a calibration."""
    from tpuconv.quantize.calibrate.run import LayerwiseCalibration

    calibration = plan.quantization.calibration if plan.quantization else None
    if not isinstance(calibration, LayerwiseCalibration):
        return None
    return CalibrationText.of(calibration.data, calibration.widest)
