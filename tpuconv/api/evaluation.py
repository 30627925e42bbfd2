"""Compare a converted model with the original."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tpuconv.api.exporting import export
from tpuconv.api.opened import OpenedModel, opened_model, runs_to_json
from tpuconv.api.running import downloading_again
from tpuconv.convert.plan.options import Options
from tpuconv.errors import GateError, UsageError
from tpuconv.location import Location, local_path, plain_path
from tpuconv.options import (
    COMPUTE_DTYPE_OPTION,
    MESH_OPTION,
    PROGRESS_ARGUMENT,
    PROMPTS_OPTION,
    READ_ARGUMENT,
    TRAINED_CONFIG_OPTION,
    argument,
    option,
    takes,
)
from tpuconv.progress import Listener, Progress, ignore
from tpuconv.text import OneLine

if TYPE_CHECKING:
    import numpy as np

    from tpuconv.convert.export.trained import TrainedRun
    from tpuconv.verify.horizons import Horizon
    from tpuconv.verify.layerwise import ComparedOutputs, LayerError
    from tpuconv.verify.logits import Gates, LogitStatistics
    from tpuconv.verify.merged import WeightedAdapter
    from tpuconv.verify.preparation import ComparedPrompts
    from tpuconv.verify.sights import Compared, SightStatistics
    from tpuconv.verify.vectors import VectorStatistics


@dataclass(frozen=True, repr=False)
class Comparison(OneLine):
    """The logits, scores or hidden states of a converted model, compared with transformers.

    Attributes:
        checkpoint: the folder of the checkpoint.
        source: what it was compared with: a Hub id or a folder.
        given: whether the user gave it, in place of the one that was converted.
        source_changed: shards that are others than at the conversion, and, of a source that was not given, files beside
            them; None if that cannot be told.
        statistics: differences, divergences and gates.
        rounded: whether the checkpoint is quantized to fewer bits than its source has.
        mesh: the mesh that the model ran on, None for one device.
        layers: errors of each layer; empty without `layerwise`.
        horizons: the lengths up to which a text does not show the whole computation, such as sliding windows, and
            whether a longer one was compared.
        sights: the same with images and with sounds, of a multimodal checkpoint.
        unseen: the parts of it that are not compared, with the reasons.
        runs: the facts of a trainer's checkpoint, which is compared with its export.
    """

    checkpoint: Location
    source: str
    given: bool
    source_changed: Sequence[str] | None
    statistics: "LogitStatistics | VectorStatistics"
    rounded: bool
    mesh: Mapping[str, int] | None
    layers: Sequence["LayerError"]
    horizons: Sequence["Horizon"] = ()
    sights: Sequence["SightStatistics"] = ()
    unseen: Mapping[str, str] = field(default_factory=dict)
    runs: Sequence["TrainedRun"] = ()

    @property
    def first_diverging(self) -> str | None:
        """The first layer whose error is above its gate."""
        return next((layer.name for layer in self.layers if layer.diverges), None)

    @property
    def failures(self) -> list[str]:
        """The failures, one sentence each."""
        first = self.first_diverging
        with_sights = [line for sight in self.sights for line in sight.failures()]
        return ([f"{first} is the first to diverge"] if first else []) + self.statistics.failures() + with_sights

    @property
    def passed(self) -> bool | None:
        """True if all gates hold; None if the quantization config has no gates."""
        return False if self.failures else self.statistics.passed

    def check(self) -> None:
        """Raises GateError if a gate failed."""
        if self.failures:
            from tpuconv.verify.vectors import VectorStatistics

            what = "quantized" if self.rounded else "converted"
            changed = (
                f"{self.source} has other weights than the converted source: give the converted source, or for merged "
                "adapters a source with the same adapters merged"
                if self.given
                else "the source changed since the conversion: convert it again"
            )
            is_whole = self.rounded or self.mesh or isinstance(self.statistics, VectorStatistics)
            where = None if is_whole or self.layers else "`layerwise=True` names the first layer that differs"
            raise GateError(
                f"the {what} model computes other outputs than the original",
                details=self.failures,
                hint=changed if self.source_changed else where,
            )

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        facts = {"checkpoint": str(self.checkpoint), "source": self.source, **self.statistics.to_json()}
        facts["source_changed"] = None if self.source_changed is None else bool(self.source_changed)
        if self.mesh:
            facts["mesh"] = dict(self.mesh)
        if self.layers:
            facts["layers"] = [layer.to_json() for layer in self.layers]
            facts["first_departing"] = self.first_diverging
        facts["horizons"] = [horizon.to_json() for horizon in self.horizons]
        if self.sights:
            facts["sights"] = [sight.to_json() for sight in self.sights]
        if self.unseen:
            facts["unseen"] = dict(self.unseen)
        return facts | runs_to_json(self.runs) | {"passed": self.passed, "failures": self.failures}


@dataclass(eq=False, repr=False)
class CompareRequest:
    """The arguments of `compare`."""

    ckpt: str | Location = field(metadata=READ_ARGUMENT)
    _: KW_ONLY
    layerwise: bool = option(False, "Compare one layer at a time, in the memory of one layer.")
    source: str | Path | None = option(
        None,
        "Path or Hub id of the source checkpoint.  [default: the source that was converted, if this machine knows it]",
    )
    adapter: Sequence[str] = option(
        (),
        "An adapter that was merged, to merge it into the source too; may be repeated.  [default: the Hub ids that the "
        "checkpoint names]",
    )
    prompts: Sequence[str] = field(default=(), metadata=PROMPTS_OPTION)
    dtype: str = field(default="auto", metadata=COMPUTE_DTYPE_OPTION)
    mesh: Mapping[str, int] | None = field(default=None, metadata=MESH_OPTION)
    config: str | Location | None = field(default=None, metadata=TRAINED_CONFIG_OPTION)
    on_source: Callable[[str, Sequence[str] | None], None] = field(
        default=lambda name, changed: None,
        metadata=argument("Called with `Comparison.source` and `Comparison.source_changed` once they are known."),
    )
    on_layer: Callable[["LayerError"], None] = field(
        default=lambda layer: None,
        metadata=argument("Called with the error of each layer as soon as it is known."),
    )
    progress: Listener = field(default=ignore, metadata=PROGRESS_ARGUMENT)


@takes(CompareRequest)
def compare(asked: CompareRequest) -> Comparison:
    """Runs the model of a checkpoint and transformers' model of its source on the same prompts. A release is read as
    `load` reads it, and compared with itself; a trainer's checkpoint is compared with its export, which is written to a
    temporary folder. `compare_checkpoints` compares two checkpoints.

    Raises:
        TpuconvError: the source cannot be found or read, the checkpoint is damaged or for another program, or
            transformers lacks the model.
    """

    def compared() -> Comparison:
        with opened_model(asked.ckpt, Options(), config=asked.config) as opened:
            return _compared(asked, opened)

    return downloading_again(compared, asked.progress)


def _check_request(asked: CompareRequest, opened: OpenedModel) -> None:
    """Raises TpuconvError if what is asked for cannot be compared."""
    from tpuconv.checkpoint.reader import check_logits
    from tpuconv.models.common.heads import AS_DRAFT

    if asked.layerwise and asked.mesh:
        raise UsageError("`layerwise=True` runs on one device", hint="leave `mesh=` out")
    manifest, stored = opened.manifest, opened.stored
    manifest.check_own()
    if stored is not None and stored.is_rounded and opened.plan is not None:
        raise UsageError(
            f"{asked.ckpt} is quantized for {stored.target}: its weights are decoded to run it, and the gates of a "
            "quantization are for a checkpoint of tpuconv",
            hint="convert without `target=`, with the same `quantize=`, and compare that",
        )
    if asked.layerwise or manifest.returns == AS_DRAFT:
        check_logits(manifest)


@dataclass(frozen=True)
class _BothModels:
    """Two models, and what both run on.

    Attributes:
        source: the folder of the source.
        compute: the dtype of parameters and activations.
        devices: the mesh of our model; None for one device.
        adapters: to merge into transformers' model.
    """

    asked: CompareRequest
    opened: OpenedModel
    source: Path
    prompts: "ComparedPrompts"
    compute: str
    devices: Any
    adapters: Sequence["WeightedAdapter"]

    def layers(self) -> "ComparedOutputs":
        """Runs both models layer by layer."""
        from tpuconv.verify.layerwise import compare_layers

        manifest, prompts = self.opened.manifest, self.prompts
        self.asked.progress(Progress("comparing layers"))
        with plain_path(manifest.folder) as folder, self.opened.reading() as read:
            return compare_layers(
                replace(manifest, folder=folder),
                self.source,
                prompts.windows,
                self.compute,
                self.asked.on_layer,
                read,
                prompts.sights,
            )

    def whole_models(self) -> "ComparedOutputs":
        """Runs one model after the other."""
        from tpuconv.verify.layerwise import ComparedOutputs
        from tpuconv.verify.logits import each_logits
        from tpuconv.verify.reference import reference

        manifest, prompts = self.opened.manifest, self.prompts
        made = self.opened.stored or manifest
        self.asked.progress(Progress("running transformers"))
        theirs = reference(
            self.source,
            prompts.windows,
            self.compute,
            manifest.returns,
            adapted=bool(made.raw["options"].get("adapters")) and not self.adapters,
            adapters=self.adapters,
            sights=prompts.sights,
        )
        self.asked.progress(Progress("running the converted model"))
        features: list[np.ndarray] = []
        every = [*prompts.windows, *prompts.sights]
        ours = list(each_logits(self.opened.load, every, self.compute, self.devices, on_seen=features.append))
        return ComparedOutputs([], theirs, ours, features)

    def gates(self, outputs: "ComparedOutputs") -> "tuple[Gates, float | None]":
        """Returns the gates of the outputs, and what a rounding changes: of transformers' model, or of a quantized one
        whose config has no gates."""
        from tpuconv.verify.logits import each_logits, quantized_gates, rounding_divergence, rounding_gates

        manifest, theirs = self.opened.manifest, outputs.theirs
        if not manifest.is_rounded or not manifest.quantization or manifest.returns:
            return rounding_gates(self.compute, theirs.rounding_kl), theirs.rounding_kl
        if (named := manifest.quantization["gates"]) is not None:
            return named, theirs.rounding_kl
        self.asked.progress(Progress("running another rounding of the model"))
        windows = self.prompts.windows
        rounding_kl = rounding_divergence(
            [window.scored for window in windows],
            lambda: outputs.ours[: len(windows)],
            lambda seed: each_logits(self.opened.load, windows, self.compute, self.devices, rounding=seed),
            self.compute,
        )
        return quantized_gates(self.compute, rounding_kl, manifest.quantization), rounding_kl

    def statistics(
        self, outputs: "ComparedOutputs", *, is_beside_plain: bool
    ) -> "tuple[LogitStatistics | VectorStatistics, list[SightStatistics]]":
        """Returns the differences of outputs, without and with images or sounds. A quantized export beside the
        model that it was made of (`is_beside_plain`) has no gates: its config is not a part of it."""
        from tpuconv.verify.logits import compare_logits, rounding_gates
        from tpuconv.verify.vectors import VECTOR_GATES, compare_vectors

        manifest, theirs, prompts = self.opened.manifest, outputs.theirs, self.prompts
        is_rounded = manifest.is_rounded or is_beside_plain
        ours, scored = outputs.ours[: len(prompts.windows)], [window.scored for window in prompts.windows]
        if manifest.returns:
            vector_gates = {} if is_rounded else VECTOR_GATES[self.compute]
            of_vectors = partial(compare_vectors, manifest.returns, dtype=self.compute, gates=vector_gates)
            return of_vectors(scored, theirs.logits, ours), self._sights(outputs, of_vectors)
        gates, rounding_kl = self.gates(outputs)
        gates = {} if is_beside_plain else gates
        statistics = compare_logits(scored, theirs.logits, ours, self.compute, gates, rounding_kl)
        kl = theirs.sights.rounding_kl if theirs.sights else None
        of_sights = gates if is_rounded else rounding_gates(self.compute, kl)
        compared = partial(compare_logits, dtype=self.compute, gates=of_sights, rounding_kl=kl)
        return statistics, self._sights(outputs, compared)

    def _sights(self, outputs: "ComparedOutputs", compared: "Compared") -> "list[SightStatistics]":
        """Returns the differences of outputs for prompts with images and sounds."""
        from tpuconv.verify.sights import compare_sights

        theirs, prompts = outputs.theirs.sights, self.prompts
        if theirs is None:
            return []
        both = (theirs.logits, theirs.features), (outputs.ours[len(prompts.windows) :], outputs.features)
        return compare_sights(prompts.sights, *both, self.compute, compared)


def _compared(asked: CompareRequest, opened: OpenedModel) -> Comparison:
    """Returns the comparison of an opened model."""
    from tpuconv.restore import mesh_of_processes
    from tpuconv.sources.config import encoding_of, read_config
    from tpuconv.sources.files import CONFIG_FILE
    from tpuconv.verify.logits import device_mesh
    from tpuconv.verify.merged import merged_adapters
    from tpuconv.verify.preparation import prompts_to_compare
    from tpuconv.verify.reference import check_sizes

    _check_request(asked, opened)
    manifest, stored = opened.manifest, opened.stored
    adapters = merged_adapters(stored or manifest, asked.adapter) if asked.adapter or asked.source is None else []
    devices = device_mesh(asked.mesh) if asked.mesh else mesh_of_processes(manifest)
    with ExitStack() as stack:
        own = local_path(_source_folder(asked, opened, stack), "transformers reads local files only")
        source = stack.enter_context(plain_path(own))
        check_sizes(manifest, own)
        layerwise = _is_layerwise(asked, opened, own, adapters)
        repo = manifest.raw["source"]["repo"] if stored is not None else None
        name = str(asked.source or repo or (own if opened.run is None else opened.folder))
        changed = _changed(asked, opened, own, name)
        compute = "float32" if asked.dtype == "auto" else asked.dtype
        prompts = prompts_to_compare(manifest, own, asked.prompts, compute, layerwise=layerwise)
        run = _BothModels(asked, opened, source, prompts, compute, devices, adapters)
        outputs = run.layers() if layerwise else run.whole_models()
        is_beside_plain = opened.is_decoded and encoding_of(read_config(own / CONFIG_FILE)) is None
    statistics, sights = run.statistics(outputs, is_beside_plain=is_beside_plain)
    return Comparison(
        checkpoint=opened.folder,
        source=name,
        given=asked.source is not None,
        source_changed=changed,
        statistics=statistics,
        rounded=manifest.is_rounded or is_beside_plain,
        mesh=asked.mesh,
        layers=outputs.errors,
        horizons=prompts.horizons,
        sights=sights,
        unseen=prompts.unseen,
        runs=opened.runs,
    )


def _source_folder(asked: CompareRequest, opened: OpenedModel, stack: ExitStack) -> Location:
    """Returns the folder of the source that is compared with, downloaded if it is on the Hub; of a trainer's checkpoint
    an export in a temporary folder. `stack` closes it."""
    from tpuconv.sources.hub import resolve
    from tpuconv.verify.preparation import find_source_folder

    if asked.source is None and opened.run is not None:
        out = Path(stack.enter_context(TemporaryDirectory())) / "export"
        return export(opened.run.folder, out, config=asked.config, progress=asked.progress).out
    stored, origin = opened.stored, opened.manifest.raw["source"]
    resolved = resolve(
        str(asked.source or (asked.ckpt if stored is None else origin["repo"] or find_source_folder(stored))),
        revision=None if asked.source or stored is None else origin["commit"],
        progress=lambda n, of: asked.progress(Progress("downloading", n, of)),
    )
    return stack.enter_context(resolved).folder


def _is_layerwise(asked: CompareRequest, opened: OpenedModel, own: Path, adapters: Sequence["WeightedAdapter"]) -> bool:
    """Returns True if the models are compared layer by layer, as a text model is whose export lacks other parts of a
    multimodal model: transformers does not load it. Raises UsageError if they cannot be, and must."""
    from tpuconv.models.common.wrapper import is_outside
    from tpuconv.verify.preparation import needs_decoded

    skipped = [skip for run in opened.runs for skip in run.skipped] if asked.source is None else []
    is_text_alone = any(is_outside(skip.reason) for skip in skipped)
    if is_text_alone and asked.mesh:
        raise UsageError(
            f"{asked.ckpt} has the text model alone, which is compared layer by layer, on one device",
            hint="leave `mesh=` out",
        )
    layerwise = asked.layerwise or is_text_alone or needs_decoded(opened.manifest, own, asked.mesh)
    if layerwise and adapters:
        raise UsageError(
            f"{asked.ckpt} has merged adapters, and is compared layer by layer with a source that has not",
            hint="leave `layerwise=` out; or merge them with peft (merge_and_unload, save_pretrained), and name that "
            "folder by `source=`",
        )
    return layerwise


def _changed(asked: CompareRequest, opened: OpenedModel, own: Path, name: str) -> Sequence[str] | None:
    """Returns `Comparison.source_changed`."""
    from tpuconv.sources.origins import changed_companions, known_stamps
    from tpuconv.sources.shard import changed_shards

    if opened.stored is None:
        return ()
    asked.progress(Progress("comparing the source with the source of the conversion"))
    stamps = known_stamps(opened.stored.sealed, own)
    changed = changed_shards(own, opened.manifest.raw["source"]["shards"], stamps)
    beside = [] if asked.source else changed_companions(opened.stored.sealed, own)
    changed = changed if not beside else [*beside, *(changed or ())]
    asked.on_source(name, changed)
    return changed
