"""Load and save models."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuconv.memory import check_address_space_for_jax
from tpuconv.paths import plain_path
from tpuconv.progress import Listener, Progress, ignore

if TYPE_CHECKING:
    from flax import nnx
    from jax.sharding import Mesh
    from jax.typing import DTypeLike

    from tpuconv.models.text_generator import TextGenerator


def load(ckpt: str | Path, dtype: "DTypeLike | None" = None, mesh: "Mesh | None" = None) -> "nnx.Module":
    """The model of a checkpoint, with its weights; see `tpuconv.restore.load`."""
    from tpuconv import restore

    with plain_path(Path(ckpt)) as folder:
        return restore.load(folder, dtype, mesh)


def load_on_all_devices(folder: Path, dtype: Any = None) -> Any:
    """The model of a checkpoint, sharded over all devices of this machine."""
    check_address_space_for_jax(sum(path.stat().st_size for path in folder.glob("params/*/*")))
    from tpuconv import restore

    with plain_path(folder) as path:
        return restore.load(path, dtype, restore.default_mesh(path))


def generator(
    ckpt: str | Path,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    cache_dtype: str | None = None,
) -> "TextGenerator":
    """What continues texts with the model of a checkpoint, on all devices of this machine; see
    `tpuconv.models.text_generator.TextGenerator`.

    Args:
        ckpt: a checkpoint with a tokenizer.
        temperature: 0 takes the most likely token.
        top_k: sample from the k most likely tokens.
        top_p: sample from the fewest tokens that have this probability together.
        cache_dtype: "int8", or None for the model's.

    Raises:
        TpuconvError: the checkpoint cannot be loaded, or has no tokenizer.
    """
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.models.generate import Sampling
    from tpuconv.models.text_generator import TextGenerator
    from tpuconv.models.tokenizer import end_tokens, load_tokenizer

    manifest = read_manifest(Path(ckpt))
    with plain_path(manifest.folder) as folder:
        tokenizer, ends = load_tokenizer(folder), end_tokens(folder)
    model = load_on_all_devices(manifest.folder)
    manifest.check_current()  # the tokenizer was read from the same checkpoint
    return TextGenerator(model, tokenizer, ends, Sampling(temperature, top_k, top_p), cache_dtype)


def save(
    model: "nnx.Module",
    out: str | Path,
    like: str | Path,
    *,
    overwrite: bool = False,
    max_memory: int | None = None,
    jobs: int | None = None,
    progress: Listener = ignore,
) -> Path:
    """Writes a trained or changed model as a checkpoint that every command takes. It appears complete or not at all.

    Args:
        model: a Flax NNX model as `load` returns it, not quantized; its dtype is that of the checkpoint.
        out: the folder to write.
        like: the checkpoint that the model was loaded from: config, tokenizer and names come from it, and the arrays of
            multi-token prediction layers, which are not part of the model.
        overwrite, max_memory, jobs, progress: as of `convert`.

    Returns:
        The folder.

    Raises:
        TpuconvError: the model is not that of `like`, or the folder cannot be written; see `tpuconv.errors`.
    """
    from tpuconv import persist
    from tpuconv.convert.sizing import Limits

    for step in persist.save(
        model, Path(out), Path(like), Limits.of_this_machine(jobs, max_memory), overwrite=overwrite
    ):
        progress(Progress("saving", step.done, step.total))
    return Path(out)
