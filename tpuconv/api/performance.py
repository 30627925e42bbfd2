"""Benchmark and fit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuconv.errors import GateError, UsageError
from tpuconv.location import Location, to_location
from tpuconv.progress import Listener, Progress, ignore

if TYPE_CHECKING:
    from tpuconv.verify.benchmark import Machine, Timing
    from tpuconv.verify.topology.request import CompileRequest, FitReport


@dataclass(frozen=True)
class Benchmark:
    """The decoding speed of a model on the devices of this machine.

    Attributes:
        checkpoint: the folder of the checkpoint.
        source, commit: where it comes from.
        dtype, cache_dtype: of the computation and of the KV cache (None: the same).
        repeats: runs of which the median is taken.
        machine: devices, limits and versions.
        text: a prompt and its greedy continuation; None without a tokenizer.
        timings: one for each combination of sizes.
    """

    checkpoint: Location
    source: str
    commit: str | None
    dtype: str
    cache_dtype: str | None
    repeats: int
    machine: "Machine"
    text: str | None
    timings: Sequence["Timing"]

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        return {
            "checkpoint": str(self.checkpoint),
            "source": self.source,
            "commit": self.commit,
            "dtype": self.dtype,
            "cache_dtype": self.cache_dtype or self.dtype,
            "repeats": self.repeats,
            **self.machine.to_json(),
            "text": self.text,
            "timings": [timing.to_json() for timing in self.timings],
        }


def benchmark(
    ckpt: str | Location,
    *,
    batch: Sequence[int] = (1,),
    prompt_length: Sequence[int] = (128,),
    new_tokens: Sequence[int] = (64,),
    repeats: int = 3,
    dtype: str = "auto",
    cache_dtype: str | None = None,
    speculate: bool = False,
    progress: Listener = ignore,
) -> Benchmark:
    """Times prefill and decoding on all devices of this machine.

    Args:
        ckpt: a checkpoint of ours.
        batch, prompt_length, new_tokens: sequences at once, tokens of a prompt, tokens generated; every combination is
            timed.
        repeats: runs of which the median is taken.
        dtype: of parameters and activations: "auto" (the checkpoint's), "bfloat16" or "float32".
        cache_dtype: "int8", "float8_e4m3fn", or None for the model's.
        speculate: draft with the model's module for multi-token prediction, and time the tokenizer's prompt.
        progress: called before the model is loaded; nothing is called while times are taken.

    Raises:
        TpuconvError: the checkpoint cannot be loaded, or a combination needs more memory or more positions than there
            are.
    """
    from tpuconv.api.models import load_on_all_devices
    from tpuconv.checkpoint.companions import tokenizer_folder
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.checkpoint.reader import check_logits, check_mtp
    from tpuconv.models.stored import check_cache_dtype, check_positions
    from tpuconv.models.tokenizer import has_tokenizer, load_tokenizer
    from tpuconv.verify import benchmark as measuring

    shapes = measuring.workloads(batch, prompt_length, new_tokens)
    manifest = read_manifest(to_location(ckpt))
    check_logits(manifest)
    if speculate:
        check_mtp(manifest)
    check_cache_dtype(manifest, cache_dtype)
    longest = max(shapes, key=lambda shape: shape.tokens)
    check_positions(manifest, longest.tokens, str(longest), hint="make --prompt-length or --new-tokens smaller")
    compute = manifest.dtype if dtype == "auto" else dtype
    with tokenizer_folder(manifest) as path:
        tokenizer = load_tokenizer(path) if has_tokenizer(path) else None
    prompt_ids = tokenizer(measuring.PROMPT)["input_ids"] if tokenizer else []
    machine = measuring.machine()
    progress(Progress("loading"))
    model = load_on_all_devices(manifest.folder, compute, mtp=speculate)
    progress(Progress(""))  # nothing is drawn while times are taken
    timings = list(
        measuring.measure(model, shapes, repeats, machine.limits, prompt_ids, cache_dtype, speculate=speculate)
    )
    text = None
    if tokenizer:
        text = measuring.PROMPT + tokenizer.decode(timings[0].new_ids, skip_special_tokens=True)
    origin = manifest.raw["source"]
    return Benchmark(
        checkpoint=manifest.folder,
        source=origin["name"],
        commit=origin["commit"],
        dtype=compute,
        cache_dtype=cache_dtype,
        repeats=repeats,
        machine=machine,
        text=text,
        timings=timings,
    )


@dataclass(frozen=True)
class Fit:
    """The answer of the TPU compiler to the question whether a model fits TPU slices.

    Attributes:
        source: the model or checkpoint.
        request: batch, context, types and mesh.
        reports: one for each slice that was compiled for.
        layouts: the file that `write_layouts` wrote; None if it wrote none.
        positions: the longest context that the model has.
    """

    source: str
    request: "CompileRequest"
    reports: Sequence["FitReport"]
    layouts: Location | None
    positions: int

    @property
    def fitting(self) -> list["FitReport"]:
        """The reports of slices that the model fits."""
        return [report for report in self.reports if report.fits]

    @property
    def smallest(self) -> "FitReport | None":
        """The smallest slice that the model fits."""
        return min(self.fitting, key=lambda report: report.devices, default=None)

    @property
    def passed(self) -> bool:
        return bool(self.fitting)

    def check(self) -> None:
        """Raises GateError if the model fits no slice that was asked about."""
        from tpuconv.verify.topology.request import advice

        if not self.passed:
            raise GateError(
                f"{self.source} does not fit at batch {self.request.batch} and context {self.request.context}",
                details=[f"{report.topology}: {report.why}" for report in self.reports],
                hint=advice(self.request, self.reports[-1]),
            )

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        request = self.request
        return {
            "source": self.source,
            "batch": request.batch,
            "context": request.context,
            "positions": self.positions,
            "dtype": request.dtype,
            "cache_dtype": request.cache_dtype or request.dtype,
            "quantization": request.quantize and request.quantize["name"],
            "fits": self.passed,
            "smallest": self.smallest and self.smallest.topology,
            "layouts": self.layouts and str(self.layouts),
            "slices": [report.to_json() for report in self.reports],
        }


def fit(
    src: str | Location,
    topologies: Sequence[str],
    *,
    batch: int = 1,
    context: int = 2048,
    mesh: Mapping[str, int] | None = None,
    dtype: str = "auto",
    cache_dtype: str | None = None,
    quantize: str | Path | None = None,
    encoding: str = "dequantize",
    write_layouts: bool = False,
    on_report: Callable[["FitReport"], None] = lambda report: None,
    progress: Listener = ignore,
) -> Fit:
    """Asks the TPU compiler whether a model fits, and how fast it may be. No weights are read and no TPU is needed.

    Args:
        src: a checkpoint of ours, or a Hub id, a folder or a config.json.
        topologies: slices, such as "v5e:4x4"; a chip alone, "v5e", searches for its smallest slice.
        batch: sequences at once.
        context: tokens of a sequence, prompt and continuation.
        mesh: sizes of mesh axes; by default those with the fewest collectives.
        dtype: of parameters and activations: "auto" (bfloat16, or the checkpoint's), "bfloat16" or "float32".
        cache_dtype: "int8", "float8_e4m3fn", or None for the model's.
        quantize: name or path of a quantization config that the model would be quantized by.
        encoding: "keep" asks for encoded weights of a source as `convert --encoding keep` passes them through.
        write_layouts: write the compiler's preferred layouts into the checkpoint, for `load`.
        on_report: called with each slice's report as soon as it is known.
        progress: called while it runs.

    Raises:
        TpuconvError: the source cannot be read, a topology is unknown, or libtpu is missing.
    """
    from tpuconv.checkpoint import device_layouts
    from tpuconv.models.common.config import context_of
    from tpuconv.models.registry import find_family
    from tpuconv.verify.topology.request import CompileRequest, ask, parse_topologies

    described = _described(str(src), quantize, encoding, dtype, write_layouts)
    request = CompileRequest(**described, batch=batch, context=context, mesh=mesh, cache_dtype=cache_dtype)
    positions = context_of(find_family(request.config).config.from_hf(request.config))
    groups, reports = parse_topologies(topologies), []
    progress(Progress("compiling"))
    for report in ask(request, groups):
        reports.append(report)
        progress(Progress(""))  # ends what is shown before the report is
        on_report(report)
        progress(Progress("compiling"))
    layouts = None
    for report in [report for report in reports if report.fits] if write_layouts else ():
        layouts = device_layouts.write_layouts(to_location(src), report.device, report.mesh, report.layouts)
    return Fit(str(src), request, reports, layouts, positions)


def _described(src: str, quantize: str | Path | None, encoding: str, dtype: str, write_layouts: bool) -> dict[str, Any]:
    """Config, quantization and dtype of a source or a checkpoint, without its weights. `write_layouts` asks for a
    complete checkpoint."""
    from tpuconv.api.conversion import find_rules, is_checkpoint
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.checkpoint.reader import check_logits
    from tpuconv.models.common.config_keys import without_keys
    from tpuconv.models.registry import find_family
    from tpuconv.sources.hub import fetch_config
    from tpuconv.verify.topology.request import source_passthrough

    rules = find_rules(quantize, encoding)
    quantization: Mapping[str, Any] | None = rules.to_json() if rules else None
    checkpoint, stored = None, "bfloat16"
    allowed: Sequence[str] = ()
    if is_checkpoint(src):
        if encoding == "keep":
            raise UsageError(f"{src} is converted already: its weights are used as stored", hint="leave --encoding out")
        manifest = read_manifest(to_location(src))
        check_logits(manifest)
        stored, allowed = manifest.dtype, manifest.allow_config
        if manifest.quantization and quantization:
            raise UsageError(
                f"{src} is quantized already, by {manifest.quantization['name']}", hint="leave --quantize out"
            )
        quantization = quantization or manifest.quantization
        checkpoint = str(manifest.folder.absolute()) if rules is None else None
        if write_layouts:
            manifest.check_complete()
    if write_layouts and not checkpoint:
        state = "not quantized yet" if rules else "not a checkpoint of tpuconv"
        raise UsageError(
            f"--write-layouts writes into a checkpoint: {src} is {state}",
            hint="make one first, with `tpuconv quantize` or `tpuconv convert`",
        )
    config = without_keys(fetch_config(src), allowed)
    if returned := find_family(config).returns(config):
        raise UsageError(
            f"{src} has a model that returns {returned}: it cannot decode, and `fit` compiles decoding",
            hint="give a language model",
        )
    if encoding == "keep":
        quantization = source_passthrough(src, config)
    facts = {"config": config, "quantize": quantization, "checkpoint": checkpoint}
    return facts | {"dtype": stored if dtype == "auto" else dtype}
