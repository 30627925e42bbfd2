"""Convert, plan, quantize."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuconv.api.calibration import CALIBRATION_LENGTH, CALIBRATION_SAMPLES, calibration_data
from tpuconv.api.converted import Conversion, ConversionPlan
from tpuconv.api.planning import Origin, planned_conversion, planned_quantization, text_of, workspace_folder
from tpuconv.errors import UsageError
from tpuconv.hosts import ProcessPart
from tpuconv.location import Location, to_location
from tpuconv.memory import peak_memory
from tpuconv.names import MANIFEST
from tpuconv.paths import named_path
from tpuconv.progress import Listener, Progress, ignore

if TYPE_CHECKING:
    from tpuconv.convert.plan.types import Options, Plan
    from tpuconv.convert.run.sizing import Limits
    from tpuconv.quantize.config import QuantConfig


DTYPE_CHOICES = ("auto", "bfloat16", "float32")
ENCODING_CHOICES = ("dequantize", "keep")
"""The values of `dtype` and `encoding`, and of `--dtype` of every command."""


def convert(
    src: str | Path,
    out: str | Location | None = None,
    *,
    dtype: str = "auto",
    encoding: str = "dequantize",
    compress: bool = False,
    quantize: str | Path | None = None,
    scan_layers: bool = False,
    layers: range | None = None,
    include_mtp: bool = False,
    revision: str | None = None,
    allow_nonfinite: bool = False,
    allow_config: Sequence[str] = (),
    target: str = "tpuconv",
    adapter: Sequence[str] = (),
    scheme: str | None = None,
    overwrite: bool = False,
    check: bool = False,
    keep_source: bool = False,
    workspace: str | Path | None = None,
    max_memory: int | None = None,
    jobs: int | None = None,
    part: ProcessPart | None = None,
    progress: Listener = ignore,
) -> Conversion:
    """Converts a Hugging Face checkpoint to an Orbax checkpoint. The output appears complete or not at all. After an
    interruption the same call continues.

    Args:
        src: a Hub id, or a folder with safetensors, on a disk or in a bucket (`gs://`, `s3://`, `az://`).
        out: the folder to write, there too; by default `<name>-orbax` or `<name>-<target>` in the current folder, with
            `-<config>` after it if `quantize` is given.
        dtype: of the parameters: "auto" (the source's), "bfloat16" or "float32".
        encoding: "dequantize" decodes FP8, INT8, INT4 and FP4 weights; "keep" passes them through.
        compress: compress all arrays by zstd, not only quantized values of less than 8 bits.
        quantize: name or path of a quantization config, applied on the way.
        scan_layers: stack the layers, for `jax.lax.scan`.
        layers: convert these layers only, as a trial.
        include_mtp: convert the multi-token prediction layers too.
        revision: branch, tag or commit of the Hub repository.
        allow_nonfinite: accept NaN and infinite values, and scales of 0.
        allow_config: keys of config.json that are not supported, to convert as if they were not there.
        target: the program that the output is for, one of `tpuconv.targets.registry.target_names()`.
        adapter: folders or Hub ids of LoRA adapters to merge, each perhaps with a weight: `my-lora:0.5`.
        scheme: of the target huggingface: how quantized parameters are written; see `export`.
        overwrite: replace an output of tpuconv in `out`; it stays complete until the new one is.
        check: if the output is there already, read all of it and compare checksums.
        keep_source: download a Hub checkpoint to the Hub's cache first. By default what is not there is streamed.
        workspace: the folder for the part of a streamed source that is needed at a time; by default beside a local
            `out`, else the folder for temporary files.
        max_memory: budget in bytes; 60% of the machine's by default.
        jobs: threads; one more than processors by default.
        part: which of several processes this is, on the same host or others. Each converts a part; the last one
            publishes.
        progress: called while it runs.

    Raises:
        TpuconvError: see `tpuconv.errors` for its children. Faults that headers show are raised before a weight byte is
            read.
    """
    from tpuconv.checkpoint.manifest import OWN_TARGET
    from tpuconv.convert.run.sizing import Limits
    from tpuconv.sources.damaged import DamagedDownload

    place = to_location(out) if out else None
    rules = find_rules(quantize, encoding)
    form = (dtype, scan_layers, layers, include_mtp, encoding, compress)
    options = _options(*form, allow_nonfinite, allow_config, target, adapter, scheme)
    limits = Limits.of_this_machine(jobs, max_memory)
    fetched_again: set[tuple[Path, ...]] = set()
    origin = Origin(str(src), revision, keep_source, workspace)
    while True:
        try:
            with planned_conversion(origin, options, rules, runs=True, progress=progress) as planned:
                kinds = ["orbax" if target == OWN_TARGET else target, *([rules.name] if rules else [])]
                to = place or Path("-".join([planned.source.name, *kinds]))
                return _run(planned, to, limits, overwrite, check, "converting", progress, part)
        except DamagedDownload as error:
            if tuple(error.files) in fetched_again:
                raise
            error.remove()
            fetched_again.add(tuple(error.files))
            progress(Progress("downloading", message=f"{error.message}: it is downloaded again."))


def plan(
    src: str | Path,
    *,
    dtype: str = "auto",
    encoding: str = "dequantize",
    compress: bool = False,
    quantize: str | Path | None = None,
    scan_layers: bool = False,
    layers: range | None = None,
    include_mtp: bool = False,
    revision: str | None = None,
    allow_nonfinite: bool = False,
    allow_config: Sequence[str] = (),
    target: str = "tpuconv",
    adapter: Sequence[str] = (),
    scheme: str | None = None,
    keep_source: bool = False,
    workspace: str | Path | None = None,
    max_memory: int | None = None,
    jobs: int | None = None,
    progress: Listener = ignore,
) -> ConversionPlan:
    """Plans `convert` with these arguments. No weights are downloaded or read. `plan.faults` lists the faults; `check`
    raises them.

    Raises:
        TpuconvError: the source cannot be read or its architecture is not supported.
    """
    rules = find_rules(quantize, encoding)
    form = (dtype, scan_layers, layers, include_mtp, encoding, compress)
    options = _options(*form, allow_nonfinite, allow_config, target, adapter, scheme)
    origin = Origin(str(src), revision, keep_source, workspace)
    with planned_conversion(origin, options, rules, runs=False, progress=progress) as planned:
        return ConversionPlan.sized(planned, rules, max_memory, jobs)


def _options(
    dtype: str,
    scan_layers: bool,
    layers: range | None,
    include_mtp: bool,
    encoding: str,
    compress: bool,
    allow_nonfinite: bool,
    allow_config: Sequence[str],
    target: str,
    adapter: Sequence[str],
    scheme: str | None,
) -> "Options":
    from tpuconv.convert.plan.types import Options
    from tpuconv.sources.adapter import read_adapter

    for name, value, known in (("dtype", dtype, DTYPE_CHOICES), ("encoding", encoding, ENCODING_CHOICES)):
        if value not in known:
            raise UsageError(f"{name} cannot be {value!r}", hint=f"give one of {', '.join(known)}")
    return Options(
        dtype=dtype,
        scan_layers=scan_layers,
        layers=layers,
        include_mtp=include_mtp,
        encoding=encoding,
        compress=compress,
        allow_nonfinite=allow_nonfinite,
        allow_config=tuple(allow_config),
        target=target,
        adapters=tuple(map(read_adapter, adapter)),
        scheme=scheme,
    )


def plan_quantization(
    ckpt: str | Location,
    *,
    config: str | Path,
    calibration: str | Path | None = None,
    samples: int = CALIBRATION_SAMPLES,
    length: int = CALIBRATION_LENGTH,
    compress: bool = False,
    max_memory: int | None = None,
    jobs: int | None = None,
) -> ConversionPlan:
    """Plans `quantize` with these arguments. No weights are read.

    Raises:
        TpuconvError: `ckpt` is no checkpoint that can be quantized, or the config does not fit it.
    """
    rules = _required_rules(config)
    data = calibration_data(to_location(ckpt), rules, calibration, samples, length)
    planned = planned_quantization(to_location(ckpt), rules, data, compress, runs=False)
    planned.check()
    return replace(ConversionPlan.sized(planned, rules, max_memory, jobs), calibration=text_of(planned))


def quantize(
    ckpt: str | Location,
    out: str | Location | None = None,
    *,
    config: str | Path,
    calibration: str | Path | None = None,
    samples: int = CALIBRATION_SAMPLES,
    length: int = CALIBRATION_LENGTH,
    compress: bool = False,
    overwrite: bool = False,
    check: bool = False,
    max_memory: int | None = None,
    jobs: int | None = None,
    part: ProcessPart | None = None,
    workspace: str | Path | None = None,
    progress: Listener = ignore,
) -> Conversion:
    """Quantizes a checkpoint by the Qwix rules of a config: the arrays are those that Qwix makes of the model, bit for
    bit. If the config has a `calibration`, its method chooses the quantized values instead.

    The output appears complete or not at all; interrupted, the same call continues.

    Args:
        ckpt: a checkpoint that `convert` wrote.
        out: the folder to write; `<ckpt>-<config>`, beside it, by default.
        config: the name of a config of this package, or the path of a YAML file.
        calibration: the text to calibrate on: a file, or "self" to draw it from the model, which then must fit in
            memory; by default a text of this package. For configs with a `calibration` only.
        samples: how many samples of the text, at most.
        length: tokens of a sample.
        compress, overwrite, check, max_memory, jobs, part, progress: as of `convert`.
        workspace: the folder for what a calibration finds if `out` is in a bucket; that for temporary files by default.

    Raises:
        TpuconvError: see `tpuconv.errors` for its children.
    """
    from tpuconv.convert.run.sizing import Limits

    folder, to = to_location(ckpt), to_location(out) if out else None
    rules = _required_rules(config)
    if part is not None and rules.calibration is not None:
        raise UsageError(
            f"{rules.name} has a calibration, which runs in one process",
            hint="leave out --process-count, --distributed and --ray",
        )
    own = named_path(folder)
    to = to or own.with_name(f"{own.name}-{rules.name}")
    place = workspace_folder(workspace)
    if place is not None and (rules.calibration is None or isinstance(to, Path)):
        raise UsageError(
            "--workspace holds the results of a calibration for an output in a bucket; this output is on a disk or "
            "has no "
            "calibration",
            hint="leave --workspace out",
        )
    data = calibration_data(folder, rules, calibration, samples, length)
    planned = planned_quantization(folder, rules, data, compress, runs=True)
    planned.check()
    limits = Limits.of_this_machine(jobs, max_memory)
    if (text := text_of(planned)) is not None:
        text.announce(progress)
    done = _run(planned, to, limits, overwrite, check, "quantizing", progress, part, place)
    return replace(done, calibration=text)


def is_checkpoint(path: str | Location) -> bool:
    """Returns True if a folder, on a disk or in a bucket, contains a checkpoint of tpuconv."""
    from tpuconv.storage.places import is_file

    return is_file(to_location(path) / MANIFEST)


def find_rules(config: str | Path | None, encoding: str = "dequantize") -> "QuantConfig | None":
    """Returns the quantization config of a name or path; None where none is given.

    Raises:
        ConfigError: it is no valid config.
        UsageError: there is none of this name, or encoded weights are to be kept.
    """
    if config is None:
        return None
    if encoding == "keep":
        raise UsageError(
            "--encoding keep and --quantize exclude each other: weights that stay encoded are not quantized again",
            hint="give one of them",
        )
    return _required_rules(config)


def _required_rules(config: str | Path) -> "QuantConfig":
    from tpuconv.quantize.config import find_config

    return find_config(str(config))


def _run(
    plan: "Plan",
    out: Location,
    limits: "Limits",
    overwrite: bool,
    check: bool,
    stage: str,
    progress: Listener,
    part: ProcessPart | None,
    workspace: Path | None = None,
) -> Conversion:
    from tpuconv.api.evaluation import verify
    from tpuconv.convert.export.carried import split_skipped
    from tpuconv.convert.export.export import convert_to_safetensors, described
    from tpuconv.convert.run.conversion import PART_DONE, run
    from tpuconv.quantize.report import report
    from tpuconv.storage.sealed import read_sealed

    progress(Progress(stage))  # from here on a rerun continues
    began, resumed, part_bytes, is_published = time.monotonic(), 0, plan.source_bytes, True
    convert_plan = convert_to_safetensors if plan.target.is_safetensors else partial(run, workspace=workspace)
    for step in convert_plan(plan, out, limits, overwrite=overwrite, part=part):
        progress(step.shown_as(f"{stage}, {part}" if part else stage))
        if step.stage in ("convert", "export"):
            part_bytes = step.total
        resumed = step.resumed * plan.source_bytes // max(1, step.total) or resumed
        is_published = step.stage != PART_DONE
    seconds = time.monotonic() - began
    raw: dict[str, Any] = dict(read_sealed(out).raw) if is_published else {}
    if raw and plan.target.is_safetensors:
        raw = described(plan, raw)
    skipped, carried = split_skipped(plan)
    done = Conversion(
        out=out,
        family=plan.family,
        source_state=raw["source"].get("verified") if raw else None,
        arrays=len(plan.arrays),
        parameters=plan.parameters,
        output_bytes=raw.get("stored_bytes", raw["bytes"]) if raw else plan.output_bytes,
        source_bytes=plan.source_bytes,
        resumed_bytes=resumed,
        seconds=seconds,
        peak_memory_bytes=peak_memory(),
        adapters=plan.options.adapters,
        skipped=skipped,
        carried=carried,
        ignored_config=plan.ignored_config,
        left_out=plan.left_out,
        quantization=report(raw) if raw and plan.quantization else None,
        part=part,
        part_bytes=part_bytes,
        published=is_published,
    )
    if check and done.already_there:
        verify(out, progress=progress).check()
    return done
