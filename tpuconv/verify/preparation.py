"""The preparation of a comparison: the source of a checkpoint, the memory, and token ids."""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.encodings.schemes import quantizes_inputs
from tpuconv.errors import ResourceError, UsageError
from tpuconv.location import plain_path
from tpuconv.memory import available_memory
from tpuconv.models.common.config import context_of
from tpuconv.models.common.heads import HIDDEN, LOGITS
from tpuconv.models.logits import Window, whole_texts
from tpuconv.models.stored import model_config
from tpuconv.sources.config import MLX_METHOD, encoding_of, read_config
from tpuconv.sources.files import CONFIG_FILE
from tpuconv.sources.origins import find_folder
from tpuconv.text import format_size
from tpuconv.verify.horizons import Horizon, long_prompts, seen_horizons
from tpuconv.verify.logits import tokenize
from tpuconv.verify.reference_types import unreadable
from tpuconv.verify.sights import SightWindow, sight_windows, without_media_tokens


def find_source_folder(manifest: Manifest) -> Path:
    """Returns the local folder that a checkpoint was converted from, or a copy of it.

    Raises:
        UsageError: nobody knows it on this machine.
    """
    named = manifest.raw["source"].get("folder")  # in formats before 3
    folder = find_folder(manifest.sealed, manifest.folder) or (Path(named) if named else None)
    if folder is None:
        raise UsageError(
            f"{manifest.folder} was converted from a local folder, which a checkpoint does not name",
            details=["this machine remembers no folder with the same weights, and there is none beside the checkpoint"],
            hint="give this folder or a copy with `source=FOLDER`; a changed copy is reported",
        )
    return folder


def needs_decoded(manifest: Manifest, source: Path, mesh: Mapping[str, int] | None) -> bool:
    """Returns True if transformers needs decoded weights, which are compared layer by layer. It does not read what MLX
    encoded; of others it may round the inputs of matrices, and the converted model does not.

    Raises:
        UsageError: transformers needs them, and this checkpoint cannot be compared layer by layer.
    """
    encoding = encoding_of(read_config(source / CONFIG_FILE))
    is_of_mlx = encoding is not None and encoding.get("quant_method") == MLX_METHOD
    if not is_of_mlx and not quantizes_inputs(encoding):
        return False
    cannot = [
        *(["it is quantized"] if manifest.quantization is not None else []),
        *([f"it returns {manifest.returns}"] if manifest.returns else []),
        *([why] if (why := model_config(manifest).inseparable) else []),
        *(["a mesh was given"] if mesh else []),
    ]
    if cannot:
        raise UsageError(
            f"not compared: transformers does not read weights that MLX encoded, as in {source}"
            if is_of_mlx
            else f"not compared: transformers rounds the inputs of the matrices in {source}, and the model in "
            f"{manifest.folder} does not",
            details=[f"decoded weights are compared layer by layer, and here {reason}" for reason in cannot],
            hint="compare a checkpoint in which the weights are decoded, without `mesh=`; `tpuconv compare` compares "
            "it with this one",
        )
    return True


def free_beside_reference(manifest: Manifest, dtype: str, *, layerwise: bool) -> int | None:
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


NOT_SCORED = "scores are compared of texts alone"
NOT_DENOISED = "the logits of the encoder are compared, whose weights the steps of a canvas use too"


class ComparedPrompts(NamedTuple):
    """The prompts that two models run on.

    Attributes:
        windows: token ids without images or sounds.
        sights: prompts with images and sounds.
        unseen: the parts of the model that no prompt has, with the reasons.
        horizons: the lengths that a text must exceed to show the whole computation.
    """

    windows: Sequence[Window]
    sights: Sequence[SightWindow]
    unseen: Mapping[str, str]
    horizons: Sequence[Horizon]


def prompts_to_compare(
    manifest: Manifest, source: Path, prompts: Sequence[str], dtype: str, *, layerwise: bool
) -> ComparedPrompts:
    """Returns what the model of a checkpoint and transformers' run on: these prompts, or the built-in ones and others
    that are longer than each horizon; and prompts with images and sounds.

    Args:
        manifest: the checkpoint, or the planned one of a release.
        source: the folder of its source, with the tokenizer.
        prompts: texts; none for the built-in ones.
        dtype: of parameters and activations.
        layerwise: whether one layer is in memory at a time.

    Raises:
        UsageError: see `tokenized`.
        ResourceError: see `free_beside_reference`.
    """
    config, ids = model_config(manifest), tokenized(manifest, source, prompts)
    room = free_beside_reference(manifest, dtype, layerwise=layerwise)
    windows: list[Window] = whole_texts(ids)
    if prompts:
        horizons = seen_horizons(config, ids)
    else:
        further, horizons = long_prompts(config, ids, source, room)
        windows = without_media_tokens(manifest, config, [*windows, *further])
    why = unreadable(config) if config.parts else ""
    if manifest.returns not in (LOGITS, HIDDEN):
        why = NOT_SCORED
    sights, unseen = ([], {}) if why else sight_windows(manifest, config, ids)
    if why:
        sights, unseen = [], dict.fromkeys(config.parts, why)
    if config.canvas_length:
        unseen = {**unseen, "canvas": NOT_DENOISED}
    return ComparedPrompts(windows, sights, unseen, horizons)


def tokenized(manifest: Manifest, tokenizer_folder: Path, prompts: Sequence[str]) -> list[list[int]]:
    """Returns the token ids of prompts, by the tokenizer in a folder. Without prompts it uses the built-in ones, of
    which no more is taken than the model has positions for.

    Raises:
        UsageError: there is no tokenizer, or a prompt is longer than the context of the model.
    """
    config = model_config(manifest)
    context = context_of(config)
    with plain_path(tokenizer_folder) as path:
        ids = tokenize(path, prompts, config.sizes["V"])
    if not prompts:
        return [prompt_ids[: config.position_limit] for prompt_ids in ids]
    for number, prompt_ids in enumerate(ids, 1):
        if len(prompt_ids) > context:
            raise UsageError(
                f"prompt {number} has {len(prompt_ids)} tokens, and the model was made for {context}",
                hint="shorten it, or divide it into several prompts",
            )
    return ids


def model_context(manifest: Manifest) -> int:
    """Returns the number of tokens that the model of a checkpoint was made for."""
    return context_of(model_config(manifest))
