"""Compare a converted model with the original."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuconv.api.opened import OpenedModel, opened_model
from tpuconv.api.running import downloading_again
from tpuconv.convert.plan.options import Options
from tpuconv.errors import GateError, UsageError
from tpuconv.location import Location, local_path, plain_path
from tpuconv.options import (
    COMPUTE_DTYPE_OPTION,
    MESH_OPTION,
    PROGRESS_ARGUMENT,
    PROMPTS_OPTION,
    argument,
    option,
    takes,
)
from tpuconv.progress import Listener, Progress, ignore
from tpuconv.text import OneLine

if TYPE_CHECKING:
    from tpuconv.verify.horizons import Horizon
    from tpuconv.verify.layerwise import LayerError
    from tpuconv.verify.logits import LogitStatistics
    from tpuconv.verify.sights import SightStatistics
    from tpuconv.verify.vectors import VectorStatistics


@dataclass(frozen=True, repr=False)
class Comparison(OneLine):
    """The logits, scores or hidden states of a converted model, compared with transformers.

    Attributes:
        checkpoint: the folder of the checkpoint.
        source: what it was compared with: a Hub id or a folder.
        given: whether the user gave it, in place of the one that was converted.
        source_changed: shards that are others than at the conversion; None if that cannot be told.
        statistics: differences, divergences and gates.
        rounded: whether the checkpoint is quantized to fewer bits than its source has.
        mesh: the mesh that the model ran on, None for one device.
        layers: errors of each layer; empty without `layerwise`.
        horizons: the lengths up to which a text does not show the whole computation, such as sliding windows, and
            whether a longer one was compared.
        sights: the same with images and with sounds, of a multimodal checkpoint.
        unseen: the parts of it that are not compared, with the reasons.
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
        return facts | {"passed": self.passed, "failures": self.failures}


@dataclass(eq=False, repr=False)
class CompareRequest:
    """The arguments of `compare`."""

    ckpt: str | Location = field(metadata=argument("A checkpoint of tpuconv, or a release."))
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
    on_source: Callable[[Sequence[str] | None], None] = field(
        default=lambda changed: None,
        metadata=argument("Called with `Comparison.source_changed` once that is known."),
    )
    on_layer: Callable[["LayerError"], None] = field(
        default=lambda layer: None,
        metadata=argument("Called with the error of each layer as soon as it is known."),
    )
    progress: Listener = field(default=ignore, metadata=PROGRESS_ARGUMENT)


@takes(CompareRequest)
def compare(asked: CompareRequest) -> Comparison:
    """Runs the model of a checkpoint and transformers' model of its source on the same prompts. A release is read as
    `load` reads it, and compared with itself. `compare_checkpoints` compares two checkpoints.

    Raises:
        TpuconvError: the source cannot be found or read, the checkpoint is damaged or for another program, or
            transformers lacks the model.
    """

    def compared() -> Comparison:
        with opened_model(asked.ckpt, Options()) as opened:
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


def _compared(asked: CompareRequest, opened: OpenedModel) -> Comparison:
    """Returns the comparison of an opened model."""
    from tpuconv.models.logits import whole_texts
    from tpuconv.models.stored import model_config
    from tpuconv.restore import mesh_of_processes
    from tpuconv.sources.config import encoding_of, read_config
    from tpuconv.sources.files import CONFIG_FILE
    from tpuconv.sources.hub import resolve
    from tpuconv.sources.origins import known_stamps
    from tpuconv.sources.shard import changed_shards
    from tpuconv.verify import logits
    from tpuconv.verify.horizons import long_prompts, seen_horizons
    from tpuconv.verify.layerwise import compare_layers
    from tpuconv.verify.merged import merged_adapters
    from tpuconv.verify.preparation import find_source_folder, free_beside_reference, needs_decoded, tokenized
    from tpuconv.verify.reference import check_sizes, reference
    from tpuconv.verify.reference_types import unreadable
    from tpuconv.verify.sights import SightWindow, compare_sights, sight_windows, without_media_tokens
    from tpuconv.verify.vectors import VECTOR_GATES, compare_vectors

    _check_request(asked, opened)
    manifest, stored = opened.manifest, opened.stored
    made = stored or manifest
    adapters = merged_adapters(made, asked.adapter) if asked.adapter or asked.source is None else []
    origin = manifest.raw["source"]
    devices = logits.device_mesh(asked.mesh) if asked.mesh else mesh_of_processes(manifest)
    layers: Sequence[LayerError] = ()
    resolved = resolve(
        str(asked.source or (asked.ckpt if stored is None else origin["repo"] or find_source_folder(stored))),
        revision=None if asked.source or stored is None else origin["commit"],
        progress=lambda n, of: asked.progress(Progress("downloading", n, of)),
    )
    own = local_path(resolved.folder, "transformers reads local files only")
    with resolved, plain_path(own) as source_folder, plain_path(manifest.folder) as folder:
        check_sizes(manifest, own)
        is_beside_plain = opened.is_decoded and encoding_of(read_config(own / CONFIG_FILE)) is None
        layerwise = asked.layerwise or needs_decoded(manifest, own, asked.mesh)
        if layerwise and adapters:
            raise UsageError(
                f"{asked.ckpt} has merged adapters, and is compared layer by layer with a source that has not",
                hint="leave `layerwise=` out; or merge them with peft (merge_and_unload, save_pretrained), and name "
                "that folder by `source=`",
            )
        with_sights: Sequence[SightWindow] = []
        unseen: Mapping[str, str] = {}
        changed: Sequence[str] | None = ()
        if stored is not None:
            asked.progress(Progress("comparing the source with the source of the conversion"))
            changed = changed_shards(own, origin["shards"], known_stamps(stored.sealed, own))
            asked.on_source(changed)
        ids = tokenized(manifest, own, asked.prompts)
        compute = "float32" if asked.dtype == "auto" else asked.dtype
        room = free_beside_reference(manifest, compute, layerwise=layerwise)
        windows, config = whole_texts(ids), model_config(manifest)
        if asked.prompts:
            horizons = seen_horizons(config, ids)
        else:
            further, horizons = long_prompts(config, ids, own, room)
            windows = without_media_tokens(manifest, config, [*windows, *further])
        if not manifest.returns:
            with_sights, unseen = sight_windows(manifest, config, ids)
            if with_sights and (why := unreadable(config)):
                with_sights, unseen = [], dict.fromkeys(config.parts, why)
        if layerwise:
            asked.progress(Progress("comparing layers"))
            with opened.reading() as read:
                layers, theirs, ours, features = compare_layers(
                    replace(manifest, folder=folder), source_folder, windows, compute, asked.on_layer, read, with_sights
                )
        else:
            asked.progress(Progress("running transformers"))
            adapted = bool(made.raw["options"].get("adapters")) and not adapters
            theirs = reference(
                source_folder,
                windows,
                compute,
                manifest.returns,
                adapted=adapted,
                adapters=adapters,
                sights=with_sights,
            )
    scored = [window.scored for window in windows]
    if not layerwise:
        asked.progress(Progress("running the converted model"))
        features, every = [], [*windows, *with_sights]
        ours = list(logits.each_logits(opened.load, every, compute, devices, on_seen=features.append))
    ours, seen = ours[: len(windows)], ours[len(windows) :]
    rounding_kl, gates = theirs.rounding_kl, logits.rounding_gates(compute, theirs.rounding_kl)
    # A quantized export beside the model that it was made of has no gates: its config is not a part of it.
    is_rounded = manifest.is_rounded or is_beside_plain
    if is_beside_plain:
        gates = {}
    if manifest.is_rounded and manifest.quantization and not manifest.returns:
        gates = manifest.quantization["gates"]
        if gates is None:
            asked.progress(Progress("running another rounding of the model"))
            rounding_kl = logits.rounding_divergence(
                scored,
                lambda: ours,
                lambda seed: logits.each_logits(opened.load, windows, compute, devices, rounding=seed),
                compute,
            )
            gates = logits.quantized_gates(compute, rounding_kl, manifest.quantization)
    if manifest.returns:
        statistics: LogitStatistics | VectorStatistics = compare_vectors(
            manifest.returns,
            scored,
            theirs.logits,
            ours,
            compute,
            {} if is_rounded else VECTOR_GATES[compute],
        )
    else:
        statistics = logits.compare_logits(scored, theirs.logits, ours, compute, gates, rounding_kl)
    sights = []
    if theirs.sights is not None:
        of_theirs = theirs.sights.logits, theirs.sights.features
        kl = theirs.sights.rounding_kl
        of_sights = gates if is_rounded else logits.rounding_gates(compute, kl)
        sights = compare_sights(with_sights, of_theirs, (seen, features), compute, of_sights, kl)
    return Comparison(
        checkpoint=manifest.folder,
        source=str(asked.source or (stored is not None and origin["repo"]) or own),
        given=asked.source is not None,
        source_changed=changed,
        statistics=statistics,
        rounded=is_rounded,
        mesh=asked.mesh,
        layers=layers,
        horizons=horizons,
        sights=sights,
        unseen=unseen,
    )
