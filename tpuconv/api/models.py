"""Load and save models."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from tpuconv.errors import UsageError
from tpuconv.hosts import ProcessPart, find_part
from tpuconv.location import Location, plain_path, to_location
from tpuconv.memory import check_address_space_for_jax
from tpuconv.options import (
    CACHE_DTYPE_OPTION,
    OVERWRITE_OPTION,
    PROGRESS_ARGUMENT,
    SPECULATE_OPTION,
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

    from tpuconv.models.text_generator import PromptEncoder, TextGenerator


def load(
    ckpt: str | Location, dtype: "DTypeLike | None" = None, mesh: "Mesh | None" = None, *, mtp: bool = False
) -> "nnx.Module":
    """Returns the model of a checkpoint, with its weights; see `tpuconv.restore.load`."""
    from tpuconv import restore

    with plain_path(to_location(ckpt)) as folder:
        return restore.load(folder, dtype, mesh, mtp=mtp)


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


def load_on_all_devices(folder: Location, dtype: Any = None, *, mtp: bool = False) -> Any:
    """Returns the model of a checkpoint, sharded over all devices (with `jax.distributed`, of all processes); with
    `mtp` and its module for multi-token prediction."""
    from tpuconv.checkpoint.manifest import read_manifest

    check_address_space_for_jax(int(read_manifest(folder).raw["bytes"]))
    from tpuconv import restore

    with plain_path(folder) as path:
        return restore.load(path, dtype, restore.default_mesh(path), mtp=mtp)


@dataclass(eq=False, repr=False)
class GeneratorRequest:
    """The arguments of `generator`."""

    ckpt: str | Location = field(metadata=argument("A checkpoint with a tokenizer."))
    _: KW_ONLY
    temperature: float = option(0.0, "0 takes the most likely token.")
    top_p: float = option(1.0, "Sample from the smallest set of tokens with this total probability.")
    top_k: int | None = option(None, "Sample from the k most likely tokens.", least=1)
    cache_dtype: str | None = field(default=None, metadata=CACHE_DTYPE_OPTION)
    speculate: bool = field(default=False, metadata=SPECULATE_OPTION)
    before_reading: "Callable[[PromptEncoder], None] | None" = field(
        default=None,
        metadata=argument("Called before the weights are read, to refuse prompts: large models take minutes."),
    )


@takes(GeneratorRequest)
def generator(asked: GeneratorRequest) -> "TextGenerator":
    """Returns a generator that continues texts with the model of a checkpoint, on all devices of this machine; see
    `tpuconv.models.text_generator.TextGenerator`.

    Raises:
        TpuconvError: the checkpoint cannot be loaded, or has no tokenizer; or the model's cache cannot have this dtype;
            or `speculate` is asked for with a temperature, or of a checkpoint without a module for multi-token
            prediction.
    """
    from tpuconv.checkpoint.companions import tokenizer_folder
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.checkpoint.reader import check_logits, check_mtp

    manifest = read_manifest(to_location(asked.ckpt))
    check_logits(manifest)
    if asked.speculate:
        check_mtp(manifest)
    # These take seconds, in which a mistake would not be said yet.
    from tpuconv.models.common.config import context_of
    from tpuconv.models.generate import Sampling
    from tpuconv.models.speculate import check_greedy
    from tpuconv.models.stored import check_cache_dtype, model_config
    from tpuconv.models.text_generator import PromptEncoder, TextGenerator
    from tpuconv.models.tokenizer import end_tokens, load_tokenizer

    check_cache_dtype(manifest, asked.cache_dtype)
    sampling = Sampling(asked.temperature, asked.top_k, asked.top_p)
    if asked.speculate:
        check_greedy(sampling)
    with tokenizer_folder(manifest) as folder:
        tokenizer = load_tokenizer(folder)
        ends = end_tokens(folder, tokenizer)
    kept = ExitStack()  # the files of processors, while the generator lives
    processors = cache(lambda: kept.enter_context(tokenizer_folder(manifest))) if manifest.parts else None
    if asked.before_reading is not None:
        asked.before_reading(PromptEncoder(tokenizer, context_of(model_config(manifest)), processors))
    model = load_on_all_devices(manifest.folder, mtp=asked.speculate)
    manifest.check_current()  # the tokenizer was read from the same checkpoint
    return TextGenerator(
        model, tokenizer, ends, sampling, asked.cache_dtype, speculate=asked.speculate, folder=processors
    )


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
