"""Compare a converted model with the original."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuconv.errors import GateError, ResourceError, UsageError
from tpuconv.location import Location, local_path, to_location
from tpuconv.memory import available_memory
from tpuconv.options import (
    CKPT_ARGUMENT,
    COMPUTE_DTYPE_OPTION,
    MESH_OPTION,
    PROGRESS_ARGUMENT,
    PROMPTS_OPTION,
    argument,
    option,
    takes,
)
from tpuconv.paths import plain_path
from tpuconv.progress import Listener, Progress, ignore
from tpuconv.sizes import format_size

if TYPE_CHECKING:
    from tpuconv.checkpoint.manifest import Manifest
    from tpuconv.verify.horizons import Horizon
    from tpuconv.verify.layerwise import LayerError
    from tpuconv.verify.logits import LogitStatistics
    from tpuconv.verify.vectors import VectorStatistics


@dataclass(frozen=True)
class Comparison:
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

    @property
    def first_diverging(self) -> str | None:
        """The first layer whose error is above its gate."""
        return next((layer.name for layer in self.layers if layer.diverges), None)

    @property
    def failures(self) -> list[str]:
        """The failures, one sentence each."""
        first = self.first_diverging
        return ([f"{first} is the first to diverge"] if first else []) + self.statistics.failures()

    @property
    def passed(self) -> bool | None:
        """True if all gates hold; None if the quantization config has no gates."""
        return False if self.failures else self.statistics.passed

    def check(self) -> None:
        """Raises GateError if a gate failed."""
        if self.failures:
            what = "quantized" if self.rounded else "converted"
            changed = (
                f"{self.source} has other weights than the converted source: give the converted source, or for merged "
                "adapters a source with the same adapters merged"
                if self.given
                else "the source changed since the conversion: convert it again"
            )
            raise GateError(
                f"the {what} model computes other outputs than the original",
                details=self.failures,
                hint=changed if self.source_changed else None,
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
        return facts | {"passed": self.passed, "failures": self.failures}


@dataclass(frozen=True)
class CompareRequest:
    """The arguments of `compare`."""

    ckpt: str | Location = field(metadata=CKPT_ARGUMENT)
    _: KW_ONLY
    layerwise: bool = option(False, "Compare one layer at a time, in the memory of one layer.")
    source: str | Path | None = option(
        None,
        "Path or Hub id of the source checkpoint.  [default: the source that was converted, if this machine knows it]",
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
    """Runs the model of a checkpoint and transformers' model of its source on the same prompts.

    Raises:
        TpuconvError: the source cannot be found or read, the checkpoint is damaged or for another program, or
            transformers lacks the model.
    """
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.checkpoint.reader import check_logits
    from tpuconv.models.logits import whole_texts
    from tpuconv.models.stored import model_config
    from tpuconv.sources.hub import resolve
    from tpuconv.sources.origins import known_stamps
    from tpuconv.sources.shard import changed_shards
    from tpuconv.verify import logits
    from tpuconv.verify.horizons import long_prompts, seen_horizons
    from tpuconv.verify.layerwise import compare_layers
    from tpuconv.verify.reference import Reference, check_sizes, reference
    from tpuconv.verify.vectors import VECTOR_GATES, compare_vectors

    if asked.layerwise and asked.mesh:
        raise UsageError("`layerwise=True` runs on one device", hint="leave `mesh=` out")
    manifest = read_manifest(to_location(asked.ckpt))
    manifest.check_own()
    if asked.layerwise:
        check_logits(manifest)
    if manifest.raw["options"].get("adapters") and asked.source is None:
        raise UsageError(
            f"{asked.ckpt} has merged adapters, and its source has not",
            hint="merge them with peft (merge_and_unload, save_pretrained), and name that folder by `source=`",
        )
    origin = manifest.raw["source"]
    devices = logits.device_mesh(asked.mesh) if asked.mesh else None
    layers: Sequence[LayerError] = ()
    resolved = resolve(
        str(asked.source or origin["repo"] or _source_folder(manifest)),
        revision=None if asked.source else origin["commit"],
        progress=lambda n, of: asked.progress(Progress("downloading", n, of)),
    )
    own = local_path(resolved.folder, "transformers reads local files only")
    with resolved, plain_path(own) as source_folder, plain_path(manifest.folder) as folder:
        check_sizes(manifest, own)
        layerwise = asked.layerwise or _needs_decoded(manifest, own, asked.mesh)
        asked.progress(Progress("comparing the source with the source of the conversion"))
        changed = changed_shards(own, origin["shards"], known_stamps(manifest.sealed, own))
        asked.on_source(changed)
        ids = tokenized(manifest, own, asked.prompts)
        compute = "float32" if asked.dtype == "auto" else asked.dtype
        room = _room(manifest, compute, layerwise=layerwise)
        windows, config = whole_texts(ids), model_config(manifest)
        if asked.prompts:
            horizons = seen_horizons(config, ids)
        else:
            further, horizons = long_prompts(config, ids, own, room)
            windows += further
        if layerwise:
            asked.progress(Progress("comparing layers"))
            layers, expected, ours = compare_layers(
                replace(manifest, folder=folder), source_folder, windows, compute, asked.on_layer
            )
            theirs = Reference(expected, None)
        else:
            asked.progress(Progress("running transformers"))
            adapted = bool(manifest.raw["options"].get("adapters"))
            theirs = reference(source_folder, windows, compute, manifest.returns, adapted=adapted)
    scored = [window.scored for window in windows]
    rounding_kl, gates = theirs.rounding_kl, logits.rounding_gates(compute, theirs.rounding_kl)
    if not layerwise:
        asked.progress(Progress("running the converted model"))
        with plain_path(manifest.folder) as folder:
            ours = list(logits.each_logits(folder, windows, compute, devices))
            if manifest.is_rounded and manifest.quantization and not manifest.returns:
                gates = manifest.quantization["gates"]
                if gates is None:
                    asked.progress(Progress("running another rounding of the model"))
                    rounding_kl = logits.rounding_divergence(
                        scored,
                        lambda: ours,
                        lambda seed: logits.each_logits(folder, windows, compute, devices, rounding=seed),
                        compute,
                    )
                    gates = logits.quantized_gates(compute, rounding_kl, manifest.quantization)
    if manifest.returns:
        statistics: LogitStatistics | VectorStatistics = compare_vectors(
            manifest.returns, scored, theirs.logits, ours, compute, {} if manifest.is_rounded else VECTOR_GATES[compute]
        )
    else:
        statistics = logits.compare_logits(scored, theirs.logits, ours, compute, gates, rounding_kl)
    return Comparison(
        checkpoint=manifest.folder,
        source=str(asked.source or origin["repo"] or own),
        given=asked.source is not None,
        source_changed=changed,
        statistics=statistics,
        rounded=manifest.is_rounded,
        mesh=asked.mesh,
        layers=layers,
        horizons=horizons,
    )


def _source_folder(manifest: "Manifest") -> Path:
    """Returns the local folder that a checkpoint was converted from, or a copy of it.

    Raises:
        UsageError: nobody knows it on this machine.
    """
    from tpuconv.sources.origins import find_folder

    named = manifest.raw["source"].get("folder")  # in formats before 3
    folder = find_folder(manifest.sealed, manifest.folder) or (Path(named) if named else None)
    if folder is None:
        raise UsageError(
            f"{manifest.folder} was converted from a local folder, which a checkpoint does not name",
            details=["this machine remembers no folder with the same weights, and there is none beside the checkpoint"],
            hint="give this folder or a copy with `source=FOLDER`; a changed copy is reported",
        )
    return folder


def _needs_decoded(manifest: "Manifest", source: Path, mesh: Mapping[str, int] | None) -> bool:
    """Returns True if transformers needs decoded weights, which are compared layer by layer. On the encoded source it
    would round the inputs of matrices, and the converted model does not.

    Raises:
        UsageError: transformers needs them, and this checkpoint cannot be compared layer by layer.
    """
    from tpuconv.encodings.schemes import quantizes_inputs
    from tpuconv.models.stored import model_config
    from tpuconv.sources.config import encoding_of, read_config
    from tpuconv.sources.files import CONFIG_FILE

    if not quantizes_inputs(encoding_of(read_config(source / CONFIG_FILE))):
        return False
    cannot = [
        *(["it is quantized"] if manifest.quantization is not None else []),
        *([f"it returns {manifest.returns}"] if manifest.returns else []),
        *([why] if (why := model_config(manifest).inseparable) else []),
        *(["a mesh was given"] if mesh else []),
    ]
    if cannot:
        raise UsageError(
            f"not compared: transformers rounds the inputs of the matrices in {source}, and the model in "
            f"{manifest.folder} does not",
            details=[f"decoded weights are compared layer by layer, and here {reason}" for reason in cannot],
            hint="compare a checkpoint in which the weights are decoded, without `mesh=`; `tpuconv compare` compares "
            "it with this one",
        )
    return True


def _room(manifest: "Manifest", dtype: str, *, layerwise: bool) -> int | None:
    """Returns the memory in bytes that is left beside transformers' model. None if nobody knows, or if there are
    several processes, which all have to run the same prompts.

    Raises:
        ResourceError: the model does not fit: the system would end this process.
    """
    import jax

    try:
        available, _ = available_memory()
    except OSError:  # systems without /proc do not say
        return None
    sizes = [] if layerwise else [prod(array.shape) for array in manifest.arrays.values()]
    need = sum(sizes) * (4 if dtype == "float32" else 2)
    if need > available:
        ways = []
        if manifest.quantization is None and not manifest.returns:
            ways.append("use `layerwise=True`, which holds one layer")
        if dtype == "float32":
            ways.append('give `dtype="bfloat16"`')
        if manifest.is_rounded:
            ways.append("compare with the unquantized checkpoint: `tpuconv compare`")
        raise ResourceError(
            f"transformers' model takes {format_size(need)} in {dtype}, and {format_size(available)} of memory are "
            "available",
            hint=", or ".join(ways) or "compare on a machine with more memory",
        )
    return available - need if jax.process_count() == 1 else None


def tokenized(manifest: "Manifest", tokenizer_folder: Path, prompts: Sequence[str]) -> list[list[int]]:
    """Returns the token ids of prompts, by the tokenizer in a folder. Without prompts it uses the built-in ones, of
    which no more is taken than the model has positions for.

    Raises:
        UsageError: there is no tokenizer, or a prompt is longer than the context of the model.
    """
    from tpuconv.models.common.config import context_of
    from tpuconv.models.stored import model_config
    from tpuconv.verify.logits import tokenize

    vocab = next(array.shape[0] for array in manifest.arrays.values() if array.axes.startswith("V"))
    config = model_config(manifest)
    context = context_of(config)
    with plain_path(tokenizer_folder) as path:
        ids = tokenize(path, prompts, vocab)
    if not prompts:
        return [prompt_ids[: config.position_limit] for prompt_ids in ids]
    for number, prompt_ids in enumerate(ids, 1):
        if len(prompt_ids) > context:
            raise UsageError(
                f"prompt {number} has {len(prompt_ids)} tokens, and the model was made for {context}",
                hint="shorten it, or divide it into several prompts",
            )
    return ids


def model_context(manifest: "Manifest") -> int:
    """Returns the number of tokens that the model of a checkpoint was made for."""
    from tpuconv.models.common.config import context_of
    from tpuconv.models.stored import model_config

    return context_of(model_config(manifest))
