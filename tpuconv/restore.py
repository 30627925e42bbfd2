"""From a checkpoint to a Flax NNX model with its weights, quantized or not."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, SingleDeviceSharding
from jax.typing import DTypeLike

from tpuconv.convert.manifest import Manifest, StoredArray, read_manifest
from tpuconv.convert.names import QVALUE, SCALE, collapse
from tpuconv.convert.source import read_json
from tpuconv.errors import ConfigError, CorruptOutput
from tpuconv.models.placement import sharding
from tpuconv.models.registry import get_family
from tpuconv.sharding import MESH_AXES

MTP_TREE = "mtp."
"""What the arrays of layers that predict further tokens are called."""


def load(ckpt: str | Path, dtype: DTypeLike | None = None, mesh: Mesh | None = None) -> nnx.Module:
    """The model of a checkpoint made by `tpuconv convert` or `tpuconv quantize`; `model(ids_BT)` gives its logits
    [B, T, V] in float32. A quantized one is the model as Qwix quantizes it, its parameters QArrays.

    The layers that predict further tokens (`convert --include-mtp`) are no part of it: a warning names their arrays,
    which Orbax restores.

    Args:
        ckpt: the folder that holds the checkpoint.
        dtype: of parameters and activations; the checkpoint's own where None. Quantized values stay as they are.
        mesh: devices with axes of the names in `tpuconv.sharding.MESH_AXES`, over which the parameters are divided:
            each device reads its part only. One device holds all where None.

    Raises:
        UsageError: the folder is no such checkpoint, or only a part of a model.
        CorruptOutput: its arrays are not those of the model, or a checksum does not hold.
    """
    manifest = read_manifest(Path(ckpt))
    manifest.check_whole()
    if mesh is not None:  # one of `jax.make_mesh` is explicit: every product would have to say where its result lies
        mesh = Mesh(mesh.devices, mesh.axis_names)
    graphdef, state = nnx.split(abstract_model(manifest, dtype))
    flat = {_name(path): value for path, value in nnx.to_flat_state(state)}
    _check_arrays(manifest, flat)
    targets = {
        name: jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            value.shape, _restored_as(value.dtype, manifest.arrays[name]), sharding=_sharding(manifest, name, mesh)
        )
        for name, value in flat.items()
    }
    if unused := manifest.arrays.keys() - flat.keys():
        patterns = ", ".join(collapse(sorted(unused)))
        warnings.warn(f"{ckpt}: the model does not use, and does not load, {patterns}", stacklevel=2)
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            tree = unflatten_dict(targets, sep=".")  # type: ignore[no-untyped-call]
            how = ocp.checkpoint_utils.construct_restore_args(tree)
            wanted = ocp.args.PyTreeRestore(tree, restore_args=how, partial_restore=True)
            restored = checkpointer.restore(manifest.params.absolute(), wanted)
    except Exception as e:  # Orbax raises a bare Exception for an array that does not hold its checksum
        raise CorruptOutput(
            f"{ckpt} cannot be restored: {str(e).partition(chr(10))[0][:200]}",
            hint=f"`tpuconv verify {ckpt}` names the damaged arrays",
        ) from e
    arrays = flatten_dict(restored, sep=".")  # type: ignore[no-untyped-call]
    leaves = [(path, value.replace(_as_loaded(arrays[_name(path)], value))) for path, value in nnx.to_flat_state(state)]
    model: nnx.Module = nnx.merge(graphdef, nnx.from_flat_state(leaves))
    return model


def abstract_model(manifest: Manifest, dtype: DTypeLike | None = None) -> Any:
    """The model with shapes instead of arrays."""
    family = get_family(manifest.family)
    config = family.config.from_hf(read_json(manifest.folder / "config.json", ConfigError))
    own = jnp.dtype(manifest.dtype if dtype is None else dtype)

    def build() -> Any:
        return family.model_class(config, scan_layers=manifest.scan_layers, dtype=own)

    if manifest.quantization is None:
        return nnx.eval_shape(build)
    from tpuconv.quantize.rules import abstract

    return abstract(build, manifest.quantization)


def _restored_as(wanted: Any, stored: StoredArray) -> Any:
    """The dtype in which an array is read: the model's, but scales are never rounded, and codes never cast."""
    if stored.name.endswith(SCALE):
        return jnp.promote_types(stored.dtype, wanted)
    return jnp.dtype(stored.dtype) if stored.name.endswith(QVALUE) else wanted


def _as_loaded(array: jax.Array, wanted: Any) -> jax.Array:
    """Codes of a type that has no place in a checkpoint (uint4) are stored in one that has."""
    return array.astype(wanted.dtype) if array.dtype == jnp.uint8 else array


def _sharding(manifest: Manifest, name: str, mesh: Mesh | None) -> jax.sharding.Sharding:
    if mesh is None:
        return SingleDeviceSharding(jax.devices()[0])
    array = manifest.arrays[name]
    return sharding(array.axes, array.shape, mesh, MESH_AXES)


def _check_arrays(manifest: Manifest, model: Mapping[str, Any]) -> None:
    have = {name: array.shape for name, array in manifest.arrays.items() if not name.startswith(MTP_TREE)}
    want = {name: tuple(value.shape) for name, value in model.items()}
    faults = [
        f"{name}: {have.get(name)} stored, {want.get(name)} in the model"
        for name in sorted(have | want)
        if have.get(name) != want.get(name)
    ]
    if faults:
        raise CorruptOutput(
            f"the arrays of {manifest.folder} are not those of a {manifest.family} model",
            details=faults[:10],
            hint="it was made by another version of tpuconv: convert it again",
        )


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
