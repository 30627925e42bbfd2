"""Load and save models."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tpuconv.api.opened import OpenedModel, Speculation, check_draft, opened_draft, opened_model
from tpuconv.api.running import downloading_again
from tpuconv.convert.plan.options import Options
from tpuconv.errors import UsageError
from tpuconv.hosts import ProcessPart, find_part
from tpuconv.location import Location, to_location
from tpuconv.options import (
    ADAPTER_OPTION,
    ALLOW_CONFIG_OPTION,
    CACHE_DTYPE_OPTION,
    ENCODING_OPTION,
    NONFINITE_OPTION,
    OVERWRITE_OPTION,
    PROGRESS_ARGUMENT,
    QUANTIZE_OPTION,
    REVISION_OPTION,
    SCAN_LAYERS_OPTION,
    SPECULATE_OPTION,
    TEXT_ONLY_OPTION,
    TRAINED_CONFIG_OPTION,
    Budget,
    argument,
    option,
    takes,
)
from tpuconv.progress import Listener, ignore

if TYPE_CHECKING:
    from flax import nnx
    from jax.sharding import Mesh
    from jax.typing import DTypeLike

    from tpuconv.convert.export.trained import TrainedRun
    from tpuconv.models.sentences import TextEmbedder
    from tpuconv.models.text_generator import PromptEncoder, TextGenerator
    from tpuconv.sources.adapter import Adapter


@dataclass(eq=False, repr=False)
class LoadRequest:
    """The arguments of `load`."""

    src: str | Location = field(
        metadata=argument(
            "A checkpoint of tpuconv, or a release: a folder with safetensors, on a disk or in a bucket, or a Hub id; "
            "with `config` a trainer's checkpoint."
        )
    )
    dtype: "DTypeLike | None" = field(
        default=None,
        metadata=argument(
            "Of parameters and activations; None for the dtype of the checkpoint or release. Quantized values are not "
            "cast."
        ),
    )
    mesh: "Mesh | None" = field(
        default=None,
        metadata=argument(
            "Devices to shard the parameters over, with axes of the names in `tpuconv.notation.sharding.AXES`; each "
            "device has its own shards only. None for one device of this process, jax's default."
        ),
    )
    _: KW_ONLY
    mtp: bool = field(
        default=False,
        metadata=argument("With the module for multi-token prediction, `model.mtp`: of several layers the first."),
    )
    scan_layers: bool = field(default=False, metadata=SCAN_LAYERS_OPTION)
    text_only: bool = field(default=False, metadata=TEXT_ONLY_OPTION)
    encoding: str = field(default="dequantize", metadata=ENCODING_OPTION)
    quantize: str | Path | None = field(default=None, metadata=QUANTIZE_OPTION)
    adapter: "Sequence[str | Adapter]" = field(default=(), metadata=ADAPTER_OPTION)
    revision: str | None = field(default=None, metadata=REVISION_OPTION)
    allow_nonfinite: bool = field(default=False, metadata=NONFINITE_OPTION)
    allow_config: Sequence[str] = field(default=(), metadata=ALLOW_CONFIG_OPTION)
    config: str | Location | None = field(default=None, metadata=TRAINED_CONFIG_OPTION)


@takes(LoadRequest)
def load(asked: LoadRequest) -> "nnx.Module":
    """Returns the model of a checkpoint or of a release, with its weights.

    A release is read as `convert` reads it, a trainer's checkpoint as `export` does. The model has the bits that the
    converted checkpoint has; nothing is written but the Hub's cache. Each process reads the byte ranges of its own
    shards. A file of the Hub is compared with the hash that the Hub promises where one process reads all of it. The
    options between `mtp` and `config` are for releases.

    The model takes `model(ids_BT)` and returns logits [B, T, V] in float32; of a classifier scores [B, O] of each text,
    of a model without a head hidden states [B, T, D]. Parameters that are quantized are QArrays of Qwix.

    Raises:
        UsageError: there is no checkpoint and no release; an option is not for it; `dtype` cannot hold its values; or
            `mtp` is asked for and there are no such layers.
        TpuconvError: a release cannot be converted, or is damaged: faults that headers show are raised before a weight
            byte is read, as by `convert`. Of a checkpoint see `tpuconv.restore.load`.
    """

    names = {each.name for each in fields(Options)} & {each.name for each in fields(asked)} - {"dtype"}
    options = Options(include_mtp=asked.mtp, **{name: getattr(asked, name) for name in names})

    def loaded() -> "nnx.Module":
        with opened_model(asked.src, options, config=asked.config) as opened:
            model: nnx.Module = opened.load(asked.dtype, asked.mesh, mtp=asked.mtp)
            return model

    return downloading_again(loaded, ignore)


COORDINATOR = "JAX_COORDINATOR_ADDRESS"


def join_processes() -> ProcessPart:
    """Joins the processes of this cluster: from then on jax has the devices of all of them. It finds them on Cloud TPU,
    GKE, Slurm and Open MPI; elsewhere JAX_COORDINATOR_ADDRESS is host and port of process 0, and index and count are
    found as `tpuconv.hosts.find_part` does.

    Returns:
        Which of them this is.

    Raises:
        UsageError: they are not found.
    """
    import jax

    if not jax.distributed.is_initialized():
        if address := os.environ.get(COORDINATOR):
            part = find_part()
            jax.distributed.initialize(address, part.count, part.index)
        else:
            try:
                jax.distributed.initialize()
            except (RuntimeError, ValueError) as e:
                raise UsageError(
                    f"jax finds no other processes: {str(e).partition(chr(10))[0]}",
                    hint=f"set {COORDINATOR} to HOST:PORT of process 0, JAX_PROCESS_ID and JAX_NUM_PROCESSES",
                ) from e
    return ProcessPart(jax.process_index(), jax.process_count())


def leave_processes() -> None:
    """Waits until all processes that joined call this, and ends what connects them."""
    import jax

    jax.distributed.shutdown()  # type: ignore[no-untyped-call]


@dataclass(eq=False, repr=False)
class GeneratorRequest:
    """The arguments of `generator`."""

    ckpt: str | Location = field(
        metadata=argument("A checkpoint or a release, with a tokenizer; with `config` a trainer's checkpoint.")
    )
    _: KW_ONLY
    temperature: float = option(0.0, "0 takes the most likely token.")
    top_p: float = option(1.0, "Sample from the smallest set of tokens with this total probability.")
    top_k: int | None = option(None, "Sample from the k most likely tokens.", least=1)
    cache_dtype: str | None = field(default=None, metadata=CACHE_DTYPE_OPTION)
    speculate: Speculation = field(default=False, metadata=SPECULATE_OPTION)
    config: str | Location | None = field(default=None, metadata=TRAINED_CONFIG_OPTION)
    before_reading: "Callable[[PromptEncoder], None] | None" = field(
        default=None,
        metadata=argument("Called before the weights are read, to refuse prompts: large models take minutes."),
    )
    on_run: "Callable[[TrainedRun], None]" = field(
        default=lambda run: None,
        metadata=argument("Called with a trainer's checkpoint: whose tree it has, and what of it is not read."),
    )


@takes(GeneratorRequest)
def generator(asked: GeneratorRequest) -> "TextGenerator":
    """Returns a generator that continues texts with the model of a checkpoint, on all devices of this machine; see
    `tpuconv.models.text_generator.TextGenerator`.

    Raises:
        TpuconvError: the checkpoint cannot be loaded, or has no tokenizer; or the model's cache cannot have this dtype;
            or `speculate` is asked for with a temperature, of a checkpoint without a module for multi-token prediction,
            or with a draft of another model.
    """
    by_mtp = Options(include_mtp=asked.speculate is True)

    def made() -> "TextGenerator":
        with opened_model(asked.ckpt, by_mtp, config=asked.config) as opened, opened_draft(asked.speculate) as draft:
            return _generator(asked, opened, draft)

    return downloading_again(made, ignore)


def _generator(asked: GeneratorRequest, opened: OpenedModel, opened_by: OpenedModel | None) -> "TextGenerator":
    from tpuconv.checkpoint.companions import tokenizer_folder
    from tpuconv.checkpoint.reader import check_logits

    manifest = opened.manifest
    check_logits(manifest)
    check_draft(opened, opened_by, asked.speculate)
    for run in opened.runs:
        asked.on_run(run)
    # These take seconds, in which a mistake would not be said yet.
    from tpuconv.models.denoise import choice_of
    from tpuconv.models.generate import Sampling
    from tpuconv.models.speculate import check_greedy
    from tpuconv.models.stored import check_cache_dtype, model_config
    from tpuconv.models.text_generator import TextGenerator, prompt_encoder
    from tpuconv.models.tokenizer import end_tokens, load_tokenizer

    check_cache_dtype(manifest, asked.cache_dtype)
    sampling = Sampling(asked.temperature, asked.top_k, asked.top_p)
    if asked.speculate:
        check_greedy(sampling)
    config = model_config(manifest)
    with tokenizer_folder(manifest) as folder:
        tokenizer = load_tokenizer(folder)
        ends = end_tokens(folder, tokenizer)
        chosen = choice_of(config, sampling, folder)
    kept = ExitStack()  # the files of processors, while the generator lives
    copied = opened.run is not None  # the folder of what was trained is temporary, if it is on the Hub
    files = cache(lambda: kept.enter_context(tokenizer_folder(manifest, copied=copied)))
    processors = files if manifest.parts else None
    if processors and copied:
        processors()
    if asked.before_reading is not None:
        asked.before_reading(prompt_encoder(tokenizer, config, processors, manifest.parts))
    model = opened.load_on_all_devices(mtp=asked.speculate is True)
    draft = None if opened_by is None else opened_by.load_on_all_devices(manifest.dtype, beside=opened)
    manifest.check_current()  # the tokenizer was read from the same checkpoint
    return TextGenerator(
        *(model, tokenizer, ends, chosen, asked.cache_dtype),
        speculate=bool(asked.speculate),
        draft=draft,
        folder=processors,
        parts=manifest.parts,
    )


@dataclass(eq=False, repr=False)
class EmbedderRequest:
    """The arguments of `embedder`."""

    ckpt: str | Location = field(metadata=argument("A checkpoint or a release of an embedding model."))


@takes(EmbedderRequest)
def embedder(asked: EmbedderRequest) -> "TextEmbedder":
    """Returns a function of texts that returns their vectors, as sentence-transformers computes them: with the pooling,
    dense layers and prompts of the release, on all devices of this machine; see
    `tpuconv.models.sentences.TextEmbedder`.

    Raises:
        UsageError: the model does not return hidden states, or its release does not say how they become vectors.
        UnsupportedConfig: a module after the model is not implemented.
        TpuconvError: the checkpoint cannot be loaded, or has no tokenizer.
    """

    def made() -> "TextEmbedder":
        with opened_model(asked.ckpt, Options()) as opened:
            from tpuconv.checkpoint.companions import tokenizer_folder
            from tpuconv.models.sentences import TextEmbedder, TextModules
            from tpuconv.models.stored import check_hidden_states
            from tpuconv.models.tokenizer import load_tokenizer

            manifest = opened.manifest
            check_hidden_states(manifest)
            with tokenizer_folder(manifest) as folder:
                modules, tokenizer = TextModules.read(folder), load_tokenizer(folder)
            model = opened.load_on_all_devices()
            manifest.check_current()
            return TextEmbedder(model, tokenizer, modules)

    return downloading_again(made, ignore)


@dataclass(eq=False, repr=False)
class SaveRequest(Budget):
    """The arguments of `save`."""

    model: "nnx.Module" = field(
        metadata=argument("A Flax NNX model as `load` returns it, not quantized; it has the dtype of the checkpoint.")
    )
    out: str | Location = field(metadata=argument("The folder to write."))
    like: str | Location = field(
        metadata=argument(
            "The checkpoint that the model was loaded from: config, tokenizer and names come from it, and the arrays "
            "of multi-token prediction layers that the model does not have."
        )
    )
    _: KW_ONLY
    lora_alpha: float | None = field(
        default=None,
        metadata=argument("Of a model with LoRA: the alpha of its training. Changes are scaled by alpha / rank."),
    )
    overwrite: bool = field(default=False, metadata=OVERWRITE_OPTION)
    progress: Listener = field(default=ignore, metadata=PROGRESS_ARGUMENT)


@takes(SaveRequest)
def save(asked: SaveRequest) -> Location:
    """Writes a trained or changed model as a checkpoint that every command takes. Of a model with LoRA
    (`qwix.apply_lora_to_model`) it writes the adapter alone, as PEFT does. The output appears complete or not at all.

    Returns:
        The folder.

    Raises:
        TpuconvError: the model differs from `like`, or the folder cannot be written; see `tpuconv.errors`.
    """
    from tpuconv import persist
    from tpuconv.convert.run.sizing import Limits

    folder, limits = to_location(asked.out), Limits.of_this_machine(asked.jobs, asked.max_memory)
    steps = persist.save(
        *(asked.model, folder, to_location(asked.like), limits), lora_alpha=asked.lora_alpha, overwrite=asked.overwrite
    )
    for step in steps:
        asked.progress(step.shown_as("saving"))
    return folder
