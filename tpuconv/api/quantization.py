"""Quantize, and plan a quantization."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tpuconv.api.auto_recipes import measured_rules, planned_rules
from tpuconv.api.calibration import CalibrationOptions, CalibrationText, calibration_data
from tpuconv.api.converted import Conversion, ConversionPlan
from tpuconv.api.opened import OpenedModel, opened_model
from tpuconv.api.quantizers import quantizer_by
from tpuconv.api.running import downloading_again, run_plan
from tpuconv.convert.plan.options import Options
from tpuconv.errors import UsageError
from tpuconv.hosts import ProcessPart
from tpuconv.location import Location, named_path, to_location
from tpuconv.options import (
    COMPRESS_OPTION,
    ELSEWHERE_ARGUMENT,
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
    from tpuconv.quantize.config import QuantConfig
    from tpuconv.storage.sealed import Sealed


QUANTIZED = argument(
    "A checkpoint that is not quantized, or a release: a folder, an address in a bucket, or a Hub id, whose weights "
    "are downloaded to the Hub's cache."
)


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

    ckpt: str | Location = field(metadata=QUANTIZED)
    out: str | Location | None = field(
        default=None,
        metadata=argument(
            "The folder to write; by default `<ckpt>-<config>`, beside the checkpoint, or `<name>-orbax-<config>` of a "
            "release, in the current folder."
        ),
    )
    _: KW_ONLY
    workspace: str | Path | None = field(default=None, metadata=WORKSPACE_OPTION)
    part: ProcessPart | None = field(default=None, metadata=PART_ARGUMENT)
    elsewhere: "Sealed | None" = field(default=None, metadata=ELSEWHERE_ARGUMENT)
    progress: Listener = field(default=ignore, metadata=PROGRESS_ARGUMENT)


@dataclass(eq=False, repr=False)
class PlanQuantizationRequest(Budget, QuantizationOptions):
    """The arguments of `plan_quantization`."""

    ckpt: str | Location = field(metadata=QUANTIZED)


@takes(QuantizeRequest)
def quantize(asked: QuantizeRequest) -> Conversion:
    """Quantizes a checkpoint, or a release, by the Qwix rules of a config: the arrays are those that Qwix makes of the
    model, bit for bit. A release, and a checkpoint for another program, becomes a checkpoint of tpuconv. If the config
    has a `calibration`, its method chooses the quantized values instead.

    The output appears complete or not at all; interrupted, the same call continues.

    Raises:
        TpuconvError: see `tpuconv.errors` for its children.
    """
    from tpuconv.quantize.config import find_config

    rules = find_config(str(asked.config))
    workspace = checked_workspace(asked.workspace, to_location(asked.out or asked.ckpt), rules)
    if asked.part is not None and rules.calibration is not None:
        raise UsageError(
            f"{rules.name} has a calibration, which runs in one process",
            hint="leave out `part=`",
        )
    return downloading_again(lambda: _quantized(asked, rules, workspace), asked.progress)


def checked_workspace(workspace: str | Path | None, out: Location, rules: "QuantConfig") -> Path | None:
    """Returns the folder of a workspace for a quantization to `out`, if there is one.

    Raises:
        UsageError: it is not on a local disk, or the quantization does not use one.
    """
    from tpuconv.convert.plan.planning import workspace_folder

    folder = workspace_folder(workspace)
    is_calibrated = rules.calibration is not None or rules.target_bits is not None
    if folder is not None and (isinstance(out, Path) or not is_calibrated):
        raise UsageError(
            "`workspace=` holds the results of a calibration for an output in a bucket; this output is on a disk "
            "or has no calibration",
            hint="leave `workspace=` out",
        )
    return folder


def _quantized(asked: QuantizeRequest, rules: "QuantConfig", workspace: Path | None) -> Conversion:
    """Does the work of `quantize` by rules."""
    from tpuconv.convert.run.conversion import read_ahead
    from tpuconv.convert.run.sizing import Limits

    with opened_model(asked.ckpt, Options()) as opened:
        out = to_location(asked.out) if asked.out else _beside(opened, to_location(asked.ckpt), rules.name)
        checked_workspace(workspace, out, rules)  # of a release in a bucket the default is on a disk
        if rules.target_bits is not None and asked.part is None:
            rules = measured_rules(rules, opened, asked, asked.progress)
        quantizer = quantizer_by(rules, calibration_data(opened.manifest, rules, asked, opened.load))
        planned = _planned(opened, quantizer, compress=asked.compress, ahead=read_ahead)
        planned.check()
        limits = Limits.of_this_machine(asked.jobs, asked.max_memory)
        if (text := _text_of(planned)) is not None:
            text.announce(asked.progress)
        done = run_plan(
            planned, out, limits, asked, "quantizing", asked.progress, asked.part, workspace, asked.elsewhere
        )
        return replace(done, calibration=text)


@takes(PlanQuantizationRequest)
def plan_quantization(asked: PlanQuantizationRequest) -> ConversionPlan:
    """Plans `quantize` with these arguments. No weights are read. Of a release on the Hub none are downloaded; a
    checkpoint there is.

    Raises:
        TpuconvError: `ckpt` cannot be quantized, or the config does not fit it.
    """
    from tpuconv.quantize.config import find_config

    rules = find_config(str(asked.config))
    with opened_model(asked.ckpt, Options(), weights=False) as opened:
        notes: tuple[str, ...] = ()
        if rules.target_bits is not None:
            rules, notes = planned_rules(rules, opened, asked)
        data = calibration_data(opened.manifest, rules, asked, opened.load) if not notes else None
        planned = _planned(opened, quantizer_by(rules, data, notes), compress=asked.compress, ahead=None)
        planned.check()
        return replace(ConversionPlan.sized(planned, rules, asked), calibration=_text_of(planned))


def _beside(opened: OpenedModel, ckpt: Location, config: str) -> Location:
    """Returns the output for a model if none is given."""
    if opened.stored is None:
        assert opened.plan is not None
        return Path(f"{opened.plan.source.name}-orbax-{config}")
    named = named_path(ckpt)
    return named.with_name(f"{named.name}-{config}")


def _planned(
    opened: OpenedModel, quantizer: "Quantizer", *, compress: bool, ahead: "Callable[[Plan], None] | None"
) -> "Plan":
    """Returns the plan to quantize a model: a checkpoint of ours in the form that it has, a release and a checkpoint
    for another program under our names. See `tpuconv.convert.plan.planning.planned_quantization`."""
    from tpuconv.checkpoint.reader import check_unquantized
    from tpuconv.convert.plan.planning import planned_quantization, quantized_plan

    if opened.plan is None:
        return planned_quantization(opened.manifest.folder, quantizer, compress=compress, ahead=ahead)
    if opened.stored is not None:
        check_unquantized(opened.stored)
    return quantized_plan(opened.plan, quantizer, compress=compress)


def _text_of(plan: "Plan") -> CalibrationText | None:
    """Returns the amount of calibration text of a planned quantization; None without a calibration."""
    from tpuconv.quantize.calibrate.run import LayerwiseCalibration

    calibration = plan.quantization.calibration if plan.quantization else None
    if not isinstance(calibration, LayerwiseCalibration):
        return None
    return CalibrationText.of(calibration.data, calibration.widest)
