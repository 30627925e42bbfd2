"""Benchmark and fit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuconv.api.opened import (
    OpenedModel,
    Speculation,
    check_draft,
    checkpoint_at,
    opened_draft,
    opened_model,
    runs_to_json,
)
from tpuconv.api.running import downloading_again
from tpuconv.convert.plan.options import Options
from tpuconv.errors import GateError, UsageError
from tpuconv.location import Location, to_location
from tpuconv.options import (
    CACHE_DTYPE_OPTION,
    DTYPE_OPTION,
    ENCODING_OPTION,
    MESH_OPTION,
    MOST_SEQUENCES,
    MOST_TOKENS,
    PROGRESS_ARGUMENT,
    QUANTIZE_OPTION,
    READ_ARGUMENT,
    SPECULATE_OPTION,
    TRAINED_CONFIG_OPTION,
    argument,
    described_as,
    option,
    takes,
)
from tpuconv.progress import Listener, Progress, ignore
from tpuconv.text import OneLine, format_count

if TYPE_CHECKING:
    from tpuconv.convert.export.trained import TrainedRun
    from tpuconv.quantize.config import QuantConfig
    from tpuconv.verify.benchmark import Machine, Timing, Workload
    from tpuconv.verify.topology.chips import Slice
    from tpuconv.verify.topology.request import CompileRequest, FitReport


@dataclass(frozen=True, repr=False)
class Benchmark(OneLine):
    """The decoding speed of a model on the devices of this machine.

    Attributes:
        checkpoint: the folder of the checkpoint.
        source, commit: where it comes from.
        dtype, cache_dtype: of the computation and of the KV cache (None: the same).
        repeats: runs of which the median is taken.
        machine: devices, limits and versions.
        text: a prompt and its greedy continuation; None without a tokenizer.
        timings: one for each combination of sizes.
        runs: the facts of a trainer's checkpoint.
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
    runs: Sequence["TrainedRun"] = ()

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
            **runs_to_json(self.runs),
        }


@dataclass(eq=False, repr=False)
class BenchmarkRequest:
    """The arguments of `benchmark`."""

    ckpt: str | Location = field(metadata=READ_ARGUMENT)
    _: KW_ONLY
    batch: Sequence[int] = option(
        (1,),
        "Sequences in a batch; a list such as 1,8.",
        python="Sequences in a batch; each is timed.",
        least=1,
        most=MOST_SEQUENCES,
    )
    prompt_length: Sequence[int] = option(
        (128,), "Tokens per prompt; a list such as 128,1024.", python="Tokens per prompt; each is timed.", least=1
    )
    new_tokens: Sequence[int] = option(
        (64,),
        "Tokens generated per prompt; a list such as 64,256.",
        python="Tokens generated per prompt; each is timed.",
    )
    repeats: int = option(3, "The number of runs; the median is shown.", least=1)
    dtype: str = field(default="auto", metadata=DTYPE_OPTION)
    cache_dtype: str | None = field(default=None, metadata=CACHE_DTYPE_OPTION)
    speculate: Speculation = field(default=False, metadata=SPECULATE_OPTION)
    config: str | Location | None = field(default=None, metadata=TRAINED_CONFIG_OPTION)
    progress: Listener = field(default=ignore, metadata=PROGRESS_ARGUMENT)


@takes(BenchmarkRequest)
def benchmark(asked: BenchmarkRequest) -> Benchmark:
    """Times prefill and decoding on all devices of this machine.

    Raises:
        TpuconvError: the checkpoint cannot be loaded, or a combination needs more memory or more positions than there
            are.
    """
    from tpuconv.verify import benchmark as measuring

    shapes = measuring.workloads(asked.batch, asked.prompt_length, asked.new_tokens)
    by_mtp = Options(include_mtp=asked.speculate is True)

    def timed() -> Benchmark:
        with opened_model(asked.ckpt, by_mtp, config=asked.config) as opened, opened_draft(asked.speculate) as draft:
            return _timed(asked, opened, draft, shapes)

    return downloading_again(timed, asked.progress)


def _timed(
    asked: BenchmarkRequest, opened: OpenedModel, opened_by: OpenedModel | None, shapes: "Sequence[Workload]"
) -> Benchmark:
    from tpuconv.checkpoint.companions import tokenizer_folder
    from tpuconv.checkpoint.reader import check_logits
    from tpuconv.models.denoise import choice_of
    from tpuconv.models.generate import Sampling
    from tpuconv.models.stored import check_cache_dtype, check_positions, model_config
    from tpuconv.models.tokenizer import has_tokenizer, load_tokenizer
    from tpuconv.verify import benchmark as measuring

    manifest = opened.manifest
    check_logits(manifest)
    check_draft(opened, opened_by, asked.speculate)
    check_cache_dtype(manifest, asked.cache_dtype)
    longest = max(shapes, key=lambda shape: shape.tokens)
    check_positions(manifest, longest.tokens, str(longest), hint="make `prompt_length=` or `new_tokens=` smaller")
    compute = manifest.dtype if asked.dtype == "auto" else asked.dtype
    with tokenizer_folder(manifest) as path:
        tokenizer = load_tokenizer(path) if has_tokenizer(path) else None
        chosen = choice_of(model_config(manifest), Sampling(), path)
    prompt_ids = tokenizer(measuring.PROMPT)["input_ids"] if tokenizer else []
    machine = measuring.machine()
    asked.progress(Progress("loading"))
    model = opened.load_on_all_devices(compute, mtp=asked.speculate is True)
    draft = None if opened_by is None else opened_by.load_on_all_devices(compute, beside=opened)
    asked.progress(Progress(""))  # nothing is drawn while times are taken
    timings = list(
        measuring.measure(
            *(model, shapes, asked.repeats, machine.limits, prompt_ids, asked.cache_dtype),
            sampling=chosen,
            speculate=bool(asked.speculate),
            draft=draft,
        )
    )
    text = None
    if tokenizer:
        read_ids = prompt_ids[-timings[0].workload.prompt_length :]
        text = tokenizer.decode([*read_ids, *timings[0].new_ids], skip_special_tokens=True)
    origin = manifest.raw["source"]
    return Benchmark(
        checkpoint=opened.folder,
        source=origin["name"],
        commit=origin["commit"],
        dtype=compute,
        cache_dtype=asked.cache_dtype,
        repeats=asked.repeats,
        machine=machine,
        text=text,
        timings=timings,
        runs=opened.runs,
    )


@dataclass(frozen=True, repr=False)
class Fit(OneLine):
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
            "images": request.images,
            "positions": self.positions,
            "dtype": request.dtype,
            "cache_dtype": request.cache_dtype or request.dtype,
            "quantization": request.quantize and request.quantize["name"],
            "fits": self.passed,
            "smallest": self.smallest and self.smallest.topology,
            "layouts": self.layouts and str(self.layouts),
            "slices": [report.to_json() for report in self.reports],
        }


@dataclass(eq=False, repr=False)
class FitRequest:
    """The arguments of `fit`."""

    src: str | Location = field(metadata=argument("A checkpoint of ours, or a Hub id, a folder or a config.json."))
    topologies: Sequence[str] = field(
        metadata=described_as(
            "A TPU slice such as v5e:4x4. `v5e` alone searches for the smallest slice.",
            python="TPU slices such as v5e:4x4. `v5e` alone searches for the smallest slice.",
        )
    )
    _: KW_ONLY
    batch: int = option(1, "Sequences in a batch.", least=1, most=MOST_SEQUENCES)
    context: int = option(2048, "Tokens per sequence: prompt and continuation.", least=1, most=MOST_TOKENS)
    mesh: Mapping[str, int] | None = field(default=None, metadata=MESH_OPTION)
    dtype: str = field(default="auto", metadata=DTYPE_OPTION)
    cache_dtype: str | None = field(default=None, metadata=CACHE_DTYPE_OPTION)
    quantize: str | Path | None = field(default=None, metadata=QUANTIZE_OPTION)
    encoding: str = field(default="dequantize", metadata=ENCODING_OPTION)
    images: int = option(
        0,
        "Images of the batch, of the encoder's size or 1024 x 1024 pixels, which are read before the prefill.",
        least=0,
    )
    write_layouts: bool = option(False, "Save the compiler's preferred weight layouts in CKPT, for `load`.")
    on_report: Callable[["FitReport"], None] = field(
        default=lambda report: None, metadata=argument("Called with the report of each slice as soon as it is known.")
    )
    progress: Listener = field(default=ignore, metadata=PROGRESS_ARGUMENT)


@takes(FitRequest)
def fit(asked: FitRequest) -> Fit:
    """Asks the TPU compiler whether a model fits, and how fast it may be. No weights are read and no TPU is needed.

    Raises:
        TpuconvError: the source cannot be read, a topology is unknown, or libtpu is missing.
    """
    from tpuconv.checkpoint import device_layouts
    from tpuconv.models.common.config import context_of
    from tpuconv.models.registry import find_family
    from tpuconv.notation.sharding import named_mesh
    from tpuconv.verify.topology.chips import parse_topologies
    from tpuconv.verify.topology.request import CompileRequest, ask

    facts = _described(str(asked.src), asked.quantize, asked.encoding, asked.dtype, asked.write_layouts)
    request = CompileRequest(
        **facts,
        batch=asked.batch,
        context=asked.context,
        mesh=None if asked.mesh is None else named_mesh(asked.mesh),
        cache_dtype=asked.cache_dtype,
        images=asked.images,
    )
    if asked.images:
        _check_sees(str(asked.src), request)
    positions = context_of(find_family(request.config).config.from_hf(request.config))
    groups, reports = parse_topologies(asked.topologies), []

    def on_slice(topology: "Slice", number: int, count: int) -> None:
        of_all = f", {number} of {count} slices" if count > 1 else ""
        asked.progress(Progress(f"compiling {format_count(programs, 'program')} for {topology.name}{of_all}"))

    programs = len(request.programs) + bool(request.images)
    for report in ask(request, groups, on_slice):
        reports.append(report)
        asked.progress(Progress(""))  # ends what is shown before the report is
        asked.on_report(report)
    layouts = None
    for report in [report for report in reports if report.fits] if asked.write_layouts else ():
        layouts = device_layouts.write_layouts(to_location(asked.src), report.device, report.mesh, report.layouts)
    return Fit(str(asked.src), request, reports, layouts, positions)


def _check_sees(src: str, request: "CompileRequest") -> None:
    """Raises UsageError if a model has no encoder of images."""
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.models.common.beside import VISION
    from tpuconv.models.registry import find_family

    if all(each.part != VISION for each in find_family(request.config).modalities):
        raise UsageError(f"{src} has no encoder of images, or none that is implemented", hint="leave `images=` out")
    if request.checkpoint and VISION not in read_manifest(to_location(request.checkpoint)).parts:
        raise UsageError(
            f"{src} has the text model alone", hint="leave `images=` out, or convert the whole model again"
        )


def _chosen_rules(rules: "QuantConfig", raw: Mapping[str, Any]) -> "QuantConfig":
    """Returns the rules that a config with a number of bits has for a model."""
    from tpuconv.models.registry import find_family
    from tpuconv.quantize.recipe.roles import recipe_for_bits
    from tpuconv.quantize.rules import ModelBuilder

    family = find_family(raw)
    config = family.read_config(raw)
    return recipe_for_bits(rules, ModelBuilder(family.model_class, config))


def _described(src: str, quantize: str | Path | None, encoding: str, dtype: str, write_layouts: bool) -> dict[str, Any]:
    """Config, quantization and dtype of a source or a checkpoint, without its weights. `write_layouts` asks for a
    complete checkpoint."""
    from tpuconv.api.quantizers import find_rules
    from tpuconv.checkpoint.device_layouts import check_layouts
    from tpuconv.checkpoint.reader import check_logits
    from tpuconv.models.common.config_keys import without_keys
    from tpuconv.models.registry import find_family
    from tpuconv.names import MANIFEST, OWN_TARGET
    from tpuconv.sources.config import stated_dtype
    from tpuconv.sources.hub import fetch_config
    from tpuconv.storage.places import is_file
    from tpuconv.verify.topology.request import source_passthrough

    rules = find_rules(quantize, encoding)
    quantization: Mapping[str, Any] | None = rules.to_json() if rules else None
    checkpoint, stored = None, ""
    allowed: Sequence[str] = ()
    manifest = checkpoint_at(src) if is_file(to_location(src) / MANIFEST) else None
    if manifest is not None:
        if encoding == "keep":
            raise UsageError(
                f"{src} is converted already: its weights are used as stored", hint="leave `encoding=` out"
            )
        check_logits(manifest)
        with opened_model(src, Options()) as opened:
            stored, allowed = opened.manifest.dtype, manifest.allow_config
        if manifest.quantization and quantization:
            raise UsageError(
                f"{src} is quantized already, by {manifest.quantization['name']}", hint="leave `quantize=` out"
            )
        quantization = quantization or manifest.quantization
        if rules is None and manifest.target == OWN_TARGET:
            checkpoint = str(manifest.folder.absolute())
        if write_layouts:
            manifest.check_complete()
            check_layouts(manifest.folder)
    if write_layouts and not checkpoint:
        state = "not quantized yet" if rules else "not a checkpoint with the names of tpuconv"
        raise UsageError(
            f"`write_layouts=True` writes into a checkpoint: {src} is {state}",
            hint="make one first, with `tpuconv quantize` or `tpuconv convert`",
        )
    config = without_keys(fetch_config(src), allowed)
    if returned := find_family(config).returns(config):
        raise UsageError(
            f"{src} has a model that returns {returned}: it cannot decode, and `fit` compiles decoding",
            hint="give a language model",
        )
    if rules is not None and rules.target_bits is not None:
        quantization = _chosen_rules(rules, config).to_json()
    if encoding == "keep":
        quantization = source_passthrough(src, config)
    facts = {"config": config, "quantize": quantization, "checkpoint": checkpoint}
    return facts | {"dtype": (stored or stated_dtype(config)) if dtype == "auto" else dtype}
