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
from jax.experimental import mesh_utils
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, SingleDeviceSharding
from jax.typing import DTypeLike

from tpuconv.checkpoint.device_layouts import LAYOUTS, read_layouts
from tpuconv.checkpoint.manifest import Manifest, StoredArray, read_manifest
from tpuconv.checkpoint.reader import check_contents, read_checkpoint_config
from tpuconv.errors import CorruptOutput, UsageError, root_cause
from tpuconv.models.common.placement import sharding
from tpuconv.models.registry import get_family
from tpuconv.names import QVALUE, SCALE, collapse
from tpuconv.sharding import AXES, MESH_AXES, decoding_mesh


def load(ckpt: str | Path, dtype: DTypeLike | None = None, mesh: Mesh | None = None) -> nnx.Module:
    """The model of a checkpoint made by `tpuconv convert` or `tpuconv quantize`; `model(ids_BT)` gives its logits
    [B, T, V] in float32. A quantized one is the model as Qwix quantizes it, its parameters QArrays.

    What is loaded is what the manifest means: config.json and the arrays are compared with it, by their hashes and by
    the crc32c of each chunk, which Orbax checks as it reads; of a checkpoint of format 1, whose manifest has no such
    hashes, a warning says that only Orbax's check was made.

    The layers that predict further tokens (`convert --include-mtp`) are no part of it: a warning names their arrays,
    which Orbax restores.

    Args:
        ckpt: the folder that holds the checkpoint.
        dtype: of parameters and activations; the checkpoint's own where None. Quantized values stay as they are.
        mesh: devices with axes of the names in `tpuconv.sharding.AXES`, over which the parameters are divided:
            each device reads its part only. One device holds all where None. Arrays lie as `layouts.json` has it for
            devices and mesh, where `fit --write-layouts` wrote that.

    Raises:
        UsageError: the folder is no such checkpoint, or only a part of a model; no axis of the mesh has such a name.
        CorruptOutput: its arrays are not those of the manifest or of the model, a checksum does not hold, config.json
            was changed, or `layouts.json` is no such file.
        SourceError: the checkpoint was replaced while it was read.
    """
    manifest = read_manifest(Path(ckpt))
    manifest.check_complete()
    if mesh is not None:
        if not set(AXES) & set(mesh.axis_names):
            raise UsageError(
                f"a mesh with the axes {', '.join(mesh.axis_names)} would divide nothing",
                hint=f"those that divide are {', '.join(AXES)}",
            )
        # One of `jax.make_mesh` is explicit: every product would have to say where its result lies.
        mesh = Mesh(mesh.devices, mesh.axis_names)
    graphdef, state = nnx.split(abstract_model(manifest, dtype))
    flat = {_name(path): value for path, value in nnx.to_flat_state(state)}
    _check_arrays(manifest, flat)
    formats = _formats(manifest, {name: value.dtype.name for name, value in flat.items()}, mesh)
    targets = {}
    for name, value in flat.items():
        stored = jnp.dtype(manifest.arrays[name].dtype)
        # Codes of a type that has no place in a checkpoint (uint4) are stored in one that has, and cast below.
        dtype, where = (stored, formats[name].sharding) if stored == jnp.uint8 else (value.dtype, formats[name])
        targets[name] = jax.ShapeDtypeStruct(value.shape, dtype, sharding=where)  # type: ignore[no-untyped-call]
    if unused := manifest.arrays.keys() - flat.keys():
        patterns = ", ".join(collapse(sorted(unused)))
        warnings.warn(f"{ckpt}: the model does not use, and does not load, {patterns}", stacklevel=2)
    if not manifest.sealed.is_sealed:
        warnings.warn(
            f"{ckpt} was made by an older tpuconv: whether its arrays are those that were converted is not checked "
            f"(`tpuconv verify {ckpt}` does)",
            stacklevel=2,
        )
    check_contents(manifest, flat.keys())
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            tree = unflatten_dict(targets, sep=".")  # type: ignore[no-untyped-call]
            how = ocp.checkpoint_utils.construct_restore_args(tree, support_layout=True)
            wanted = ocp.args.PyTreeRestore(tree, restore_args=how, partial_restore=True)
            restored = checkpointer.restore(manifest.params.absolute(), wanted)
    except Exception as e:  # Orbax raises a bare Exception for an array that does not hold its checksum
        manifest.check_current()
        raise CorruptOutput(
            f"{ckpt} cannot be restored: {root_cause(e)}",
            hint=f"`tpuconv verify {ckpt}` names the damaged arrays",
        ) from e
    manifest.check_current()
    arrays = flatten_dict(restored, sep=".")  # type: ignore[no-untyped-call]
    for name, value in flat.items():
        if arrays[name].dtype != value.dtype:
            arrays[name] = jax.device_put(arrays[name].astype(value.dtype), formats[name], donate=True)
    leaves = [(path, value.replace(arrays[_name(path)])) for path, value in nnx.to_flat_state(state)]
    model: nnx.Module = nnx.merge(graphdef, nnx.from_flat_state(leaves))
    return model


def abstract_model(manifest: Manifest, dtype: DTypeLike | None = None) -> Any:
    """The model with shapes instead of arrays, in the dtypes that these have once they are loaded."""
    family, config = get_family(manifest.family), _model_config(manifest)
    own = jnp.dtype(manifest.dtype if dtype is None else dtype)

    if manifest.quantization is None:
        return nnx.eval_shape(lambda: family.model_class(config, scan_layers=manifest.scan_layers, dtype=own))
    from tpuconv.quantize.rules import abstract_quantized_model

    model = abstract_quantized_model(
        lambda: family.model_class(config, dtype=own), manifest.quantization, stacked=manifest.scan_layers
    )
    graphdef, state = nnx.split(model)
    leaves = []
    for path, value in nnx.to_flat_state(state):
        dtype = _loaded_as(value.dtype, manifest.arrays.get(_name(path)))
        leaves.append((path, value.replace(jax.ShapeDtypeStruct(value.shape, dtype))))  # type: ignore[no-untyped-call]
    return nnx.merge(graphdef, nnx.from_flat_state(leaves))


def default_mesh(ckpt: str | Path) -> Mesh | None:
    """All devices here as the mesh over which the model decodes with the fewest collectives; None where there is one.

    Raises:
        UsageError: the folder is no such checkpoint.
    """
    devices = jax.devices()
    if len(devices) == 1:
        return None
    sizes = decoding_mesh(_model_config(read_manifest(Path(ckpt))).axes, len(devices))
    return Mesh(mesh_utils.create_device_mesh(tuple(sizes.values()), devices), tuple(sizes))


def _model_config(manifest: Manifest) -> Any:
    return get_family(manifest.family).read_config(read_checkpoint_config(manifest), manifest.allow_config)


def _loaded_as(wanted: Any, stored: StoredArray | None) -> Any:
    """The dtype of an array in the model: that of its place, but scales are never rounded, and codes never cast."""
    if stored is None or stored.dtype == "uint8":
        return wanted
    if stored.name.endswith(SCALE):
        return jnp.promote_types(stored.dtype, wanted)
    return jnp.dtype(stored.dtype) if stored.name.endswith(QVALUE) else wanted


def _formats(manifest: Manifest, dtypes: Mapping[str, str], mesh: Mesh | None) -> dict[str, Format]:
    """Where every array lies, and where layouts were written for the devices how."""
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    if (manifest.folder / LAYOUTS).exists():
        manifest.read_file(LAYOUTS)  # the one that the manifest means
    layouts = read_layouts(manifest.folder, device.device_kind, {} if mesh is None else dict(mesh.shape))
    out = {}
    for name, dtype in dtypes.items():
        array, known = manifest.arrays[name], layouts.get(name)
        where = SingleDeviceSharding(device) if mesh is None else sharding(array.axes, array.shape, mesh, MESH_AXES)
        if known and sorted(known.major_to_minor) != list(range(len(array.shape))):
            raise CorruptOutput(
                f"{manifest.folder / LAYOUTS} has the axes {known.major_to_minor} for {name}, which is {array.shape}",
                hint="delete the file, and let `tpuconv fit --write-layouts` write it",
            )
        layout = Layout(known.major_to_minor, known.tiling) if known and known.dtype == dtype else None
        out[name] = Format(layout, where)
    return out


def _check_arrays(manifest: Manifest, model: Mapping[str, Any]) -> None:
    have = {name: array.shape for name, array in manifest.arrays.items()}
    want = _mtp_shapes(manifest) | {name: tuple(value.shape) for name, value in model.items()}
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


def _mtp_shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """The arrays of layers that predict further tokens, which are no part of the model, and their shapes; none where
    these were left out."""
    table, config = get_family(manifest.family).table, _model_config(manifest)
    every, own = ({n: s for b in table.bind(config, mtp) for n, s in b.dst_shapes().items()} for mtp in (True, False))
    out = {}
    for name in every.keys() - own.keys():
        if facts := manifest.passthrough.get(name):
            out[name + QVALUE] = every[name]
            out[name + SCALE] = tuple(n // tile for n, tile in zip(every[name], facts["tiles"], strict=True))
        else:
            out[name] = every[name]
    return out if out.keys() & manifest.arrays.keys() else {}


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
