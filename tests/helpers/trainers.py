"""Checkpoints as trainers save them with Orbax, without a manifest of tpuconv."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tpuconv.checkpoint.manifest import read_manifest


def trained_tree(out: Path) -> dict[str, Any]:
    """The tree of arrays in a checkpoint of `convert`, restored by Orbax."""
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(read_manifest(out).params.absolute())


def arrays_of(out: Path) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint of `convert`, by the names of its target."""
    import jax

    flat = jax.tree_util.tree_flatten_with_path(trained_tree(out))[0]
    return {
        ".".join(str(getattr(key, "key", getattr(key, "idx", ""))) for key in path): np.asarray(x) for path, x in flat
    }


def adam_state(params: Any) -> Any:
    """A state of optax's Adam for some parameters."""
    import jax
    import optax

    shapes = jax.eval_shape(optax.adam(1e-3).init, params)
    return jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes)


def save_standard(folder: Path, tree: Any) -> Path:
    """The idiom of Orbax's documentation: OCDBT and zarr's format 2."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), tree)
    return folder


def save_pytree(folder: Path, tree: Any, **options: bool) -> Path:
    """By `PyTreeCheckpointer`, with `use_ocdbt` and `use_zarr3` as they are given."""
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer(**options) as checkpointer:
        checkpointer.save(folder.absolute(), tree)
    return folder


def save_step(folder: Path, step: int, tree: Any, item: str = "") -> Path:
    """A step of a run, by `CheckpointManager`; its item is `default` or has a name."""
    import orbax.checkpoint as ocp

    saved = ocp.args.StandardSave(tree)
    with ocp.CheckpointManager(folder.absolute()) as manager:
        manager.save(step, args=ocp.args.Composite(**{item: saved}) if item else saved)
        manager.wait_until_finished()
    return folder


def changed_leaf(tree: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The tree with another array at a dotted path; without it if the array is None."""
    first, _, rest = path.partition(".")
    inner: Mapping[str, Any] = tree.get(first, {})
    if rest:
        return {**tree, first: changed_leaf(dict(inner), rest, value)}
    return {key: leaf for key, leaf in ({**tree, first: value}).items() if leaf is not None}
