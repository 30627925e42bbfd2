"""Convert, plan, quantize."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuconv.errors import UsageError
from tpuconv.memory import peak_memory
from tpuconv.names import MANIFEST
from tpuconv.progress import Listener, Progress, ignore

if TYPE_CHECKING:
    from tpuconv.convert.plan.types import Options, Plan, Skip
    from tpuconv.convert.sizing import Limits
    from tpuconv.models.common.config import IgnoredKey
    from tpuconv.quantize.config import QuantConfig
    from tpuconv.quantize.report import Report


@dataclass(frozen=True)
class Conversion:
    """What `convert` or `quantize` wrote.

    Attributes:
        out: the folder of the checkpoint.
        family: the family of the model, such as "llama".
        source_state: how the source was checked, as the manifest says it; None if nothing is known.
        arrays: how many arrays the checkpoint has.
        parameters: how many parameters the model has; tied ones count once.
        output_bytes: size of the arrays.
        source_bytes: bytes of the source that are converted.
        resumed_bytes: how many of them an earlier run had converted.
        seconds: wall-clock time.
        peak_memory_bytes: peak resident memory of this process.
        skipped: source tensors that are not converted, and why.
        ignored_config: keys of config.json that are not read, and why.
        quantization: the quantization report; None for a checkpoint that is not quantized.
    """

    out: Path
    family: str
    source_state: str | None
    arrays: int
    parameters: int
    output_bytes: int
    source_bytes: int
    resumed_bytes: int
    seconds: float
    peak_memory_bytes: int
    skipped: Sequence["Skip"]
    ignored_config: Sequence["IgnoredKey"]
    quantization: "Report | None"

    @property
    def source_verified(self) -> bool:
        """Whether every weight file has the sha256 that the Hub lists."""
        from tpuconv.sources.source import VERIFIED

        return self.source_state == VERIFIED

    @property
    def already_there(self) -> bool:
        """Whether nothing was left to convert."""
        return self.resumed_bytes == self.source_bytes

    def to_json(self) -> dict[str, Any]:
        """The keys that docs/json.md lists."""
        facts = {
            "out": str(self.out),
            "family": self.family,
            "source_verified": self.source_verified,
            "arrays": self.arrays,
            "parameters": self.parameters,
            "output_bytes": self.output_bytes,
            "resumed_bytes": self.resumed_bytes,
            "seconds": round(self.seconds, 3),
            "peak_memory_bytes": self.peak_memory_bytes,
            "skipped": [vars(skip) for skip in self.skipped],
            "ignored_config": [key.to_json() for key in self.ignored_config],
        }
        return facts | ({"quantization": self.quantization.to_json()} if self.quantization else {})


@dataclass(frozen=True)
class ConversionPlan:
    """What a conversion would do, from headers alone.

    Attributes:
        plan: every array, the source tensors it is made of, and what does not fit (`plan.faults`).
        jobs: threads that would run.
        peak_memory_bytes: private memory that they would need at most.
        rules: the quantization config; None without one.
    """

    plan: "Plan"
    jobs: int
    peak_memory_bytes: int
    rules: "QuantConfig | None"

    def check(self) -> None:
        """Raises MappingError if source and family do not fit each other."""
        self.plan.check()

    def to_json(self) -> dict[str, Any]:
        """The keys that docs/json.md lists."""
        return self.plan.to_json(self.peak_memory_bytes)


def convert(
    src: str | Path,
    out: str | Path | None = None,
    *,
    dtype: str = "auto",
    encoding: str = "dequantize",
    quantize: str | Path | None = None,
    scan_layers: bool = False,
    layers: range | None = None,
    include_mtp: bool = False,
    revision: str | None = None,
    allow_nonfinite: bool = False,
    allow_config: Sequence[str] = (),
    overwrite: bool = False,
    check: bool = False,
    max_memory: int | None = None,
    jobs: int | None = None,
    progress: Listener = ignore,
) -> Conversion:
    """Converts a Hugging Face checkpoint to an Orbax checkpoint. The output appears complete or not at all. After an
    interruption the same call continues.

    Args:
        src: a Hub id, or a folder with safetensors.
        out: the folder to write; by default `<name>-orbax` in the current folder, or `<name>-<config>`.
        dtype: of the parameters: "auto" (the source's), "bfloat16" or "float32".
        encoding: "dequantize" decodes FP8, INT8, INT4 and FP4 weights; "keep" passes them through.
        quantize: name or path of a quantization config, applied on the way.
        scan_layers: stack the layers, for `jax.lax.scan`.
        layers: convert these layers only, as a trial.
        include_mtp: convert the multi-token prediction layers too.
        revision: branch, tag or commit of the Hub repository.
        allow_nonfinite: accept NaN and infinite values, and scales of 0.
        allow_config: keys of config.json that are not supported, to convert as if they were not there.
        overwrite: replace an output of tpuconv in `out`; it stays complete until the new one is.
        check: if the output is there already, read all of it and compare checksums.
        max_memory: budget in bytes; 60% of the machine's by default.
        jobs: threads; one more than processors by default.
        progress: called while it runs.

    Raises:
        TpuconvError: see `tpuconv.errors` for its children. Faults that headers show are raised before a weight byte is
            read.
    """
    from tpuconv.convert.plan.types import Options
    from tpuconv.convert.sizing import Limits
    from tpuconv.sources.damaged import DamagedDownload

    rules = find_rules(quantize, encoding)
    options = Options(dtype, scan_layers, layers, include_mtp, encoding, allow_nonfinite, tuple(allow_config))
    limits = Limits.of_this_machine(jobs, max_memory)
    fetched_again: set[tuple[Path, ...]] = set()
    while True:
        try:
            with _planned(str(src), options, rules, revision, weights=True, progress=progress) as planned:
                to = Path(out) if out else Path(f"{planned.source.name}-{rules.name if rules else 'orbax'}")
                return _run(planned, to, limits, overwrite, check, "converting", progress)
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
    quantize: str | Path | None = None,
    scan_layers: bool = False,
    layers: range | None = None,
    include_mtp: bool = False,
    revision: str | None = None,
    allow_nonfinite: bool = False,
    allow_config: Sequence[str] = (),
    max_memory: int | None = None,
    jobs: int | None = None,
    progress: Listener = ignore,
) -> ConversionPlan:
    """What `convert` with these arguments would do. No weights are downloaded or read. What does not fit is in
    `plan.faults`; `check` raises it.

    Raises:
        TpuconvError: the source cannot be read or its architecture is not supported.
    """
    from tpuconv.convert.plan.types import Options

    rules = find_rules(quantize, encoding)
    options = Options(dtype, scan_layers, layers, include_mtp, encoding, allow_nonfinite, tuple(allow_config))
    with _planned(str(src), options, rules, revision, weights=False, progress=progress) as planned:
        return _sized(planned, rules, max_memory, jobs)


def plan_quantization(
    ckpt: str | Path, *, config: str | Path, max_memory: int | None = None, jobs: int | None = None
) -> ConversionPlan:
    """What `quantize` with these arguments would do. No weights are read.

    Raises:
        TpuconvError: `ckpt` is no checkpoint that can be quantized, or the config does not fit it.
    """
    rules = _required_rules(config)
    planned = _planned_quantization(Path(ckpt), rules, runs=False)
    planned.check()
    return _sized(planned, rules, max_memory, jobs)


def quantize(
    ckpt: str | Path,
    out: str | Path | None = None,
    *,
    config: str | Path,
    overwrite: bool = False,
    check: bool = False,
    max_memory: int | None = None,
    jobs: int | None = None,
    progress: Listener = ignore,
) -> Conversion:
    """Quantizes a checkpoint by the Qwix rules of a config: the arrays are those that Qwix makes of the model, bit for
    bit. The output appears complete or not at all; interrupted, the same call continues.

    Args:
        ckpt: a checkpoint that `convert` wrote.
        out: the folder to write; `<ckpt>-<config>`, beside it, by default.
        config: the name of a config of this package, or the path of a YAML file.
        overwrite, check, max_memory, jobs, progress: as of `convert`.

    Raises:
        TpuconvError: see `tpuconv.errors` for its children.
    """
    from tpuconv.convert.sizing import Limits

    rules, folder = _required_rules(config), Path(ckpt)
    planned = _planned_quantization(folder, rules, runs=True)
    planned.check()
    to = Path(out) if out else folder.with_name(f"{folder.name}-{rules.name}")
    return _run(planned, to, Limits.of_this_machine(jobs, max_memory), overwrite, check, "quantizing", progress)


def is_checkpoint(path: str | Path) -> bool:
    """Whether a folder holds a checkpoint of ours."""
    return (Path(path) / MANIFEST).is_file()


def find_rules(config: str | Path | None, encoding: str = "dequantize") -> "QuantConfig | None":
    """The quantization config of a name or path; None where none is given.

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


def _sized(plan: "Plan", rules: "QuantConfig | None", max_memory: int | None, jobs: int | None) -> ConversionPlan:
    from tpuconv.convert import sizing

    count = sizing.jobs(plan, sizing.Limits.of_this_machine(jobs, max_memory))
    return ConversionPlan(plan, count, sizing.planned_memory(plan, count), rules)


@contextmanager
def _planned(
    src: str,
    options: "Options",
    rules: "QuantConfig | None",
    revision: str | None,
    *,
    weights: bool,
    progress: Listener,
) -> "Iterator[Plan]":
    """The plan of a conversion; the source is held while it is used."""
    from tpuconv.models.registry import find_family
    from tpuconv.sources.hub import resolve
    from tpuconv.sources.source import open_source

    with resolve(
        src, revision=revision, weights=weights, progress=lambda n, of: progress(Progress("downloading", n, of))
    ) as resolved:
        source = open_source(resolved.folder, repo=resolved.repo, commit=resolved.commit, sha256=resolved.sha256)
        family = find_family(source.config)
        yield _make_plan(source, family, family.table_for(source.tensors), options, rules, runs=weights)


def _planned_quantization(ckpt: Path, rules: "QuantConfig", *, runs: bool) -> "Plan":
    from tpuconv.checkpoint.reader import open_checkpoint
    from tpuconv.convert.plan.types import Options
    from tpuconv.models.registry import get_family

    source = open_checkpoint(ckpt)
    options = Options.of_checkpoint(source.manifest)
    return _make_plan(source, get_family(source.manifest.family), source.table(), options, rules, runs=runs)


def _make_plan(
    source: Any, family: Any, table: Any, options: "Options", rules: "QuantConfig | None", *, runs: bool
) -> "Plan":
    from tpuconv.convert.plan.coverage import make_plan

    report = family.check_config(source.config, options.allow_config, source.tensors)
    config, ignored = report.config, report.ignored
    plan = make_plan(source, family.name, table, config, options, ignored_config=ignored)
    if rules is None or plan.faults:
        return plan
    from tpuconv.convert.run import read_ahead
    from tpuconv.quantize.apply import quantization

    if runs:  # begins before jax and Qwix are imported: these come in small pieces from the same disk
        read_ahead(plan)
    how = quantization(plan, family, config, rules)
    return make_plan(source, family.name, table, config, options, how, ignored)


def _run(
    plan: "Plan",
    out: Path,
    limits: "Limits",
    overwrite: bool,
    check: bool,
    stage: str,
    progress: Listener,
) -> Conversion:
    from tpuconv.api.evaluation import verify
    from tpuconv.convert.run import run
    from tpuconv.quantize.report import report
    from tpuconv.storage.sealed import read_sealed

    progress(Progress(stage))  # from here on a rerun continues
    began, resumed = time.monotonic(), 0
    for step in run(plan, out, limits, overwrite=overwrite):
        progress(Progress(stage, step.done, step.total))
        resumed = step.resumed or resumed
    seconds = time.monotonic() - began
    raw = read_sealed(out).raw
    done = Conversion(
        out=out,
        family=plan.family,
        source_state=raw["source"].get("verified"),
        arrays=len(plan.arrays),
        parameters=plan.parameters,
        output_bytes=plan.output_bytes,
        source_bytes=plan.source_bytes,
        resumed_bytes=resumed,
        seconds=seconds,
        peak_memory_bytes=peak_memory(),
        skipped=plan.skipped,
        ignored_config=plan.ignored_config,
        quantization=report(raw) if plan.quantization else None,
    )
    if check and done.already_there:
        verify(out, progress=progress).check()
    return done
