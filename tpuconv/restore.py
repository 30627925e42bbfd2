"""Loads a checkpoint as a Flax NNX model. `load_from` assembles the model of any manifest, from arrays that a reader
places: of a checkpoint here, of a release in `tpuconv.direct`."""

import warnings
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import mesh_utils
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from tpuconv.checkpoint.device_layouts import layouts_of
from tpuconv.checkpoint.manifest import Manifest, read_manifest
from tpuconv.checkpoint.reader import check_contents, check_mtp, read_box
from tpuconv.checkpoint.stored import StoredArray
from tpuconv.encodings.casts import cast, largest
from tpuconv.errors import CorruptOutput, UsageError, root_cause, shorten
from tpuconv.forks import check_no_fork
from tpuconv.location import Location, to_location
from tpuconv.models.common.placement import check_axes, sharding
from tpuconv.models.registry import get_family
from tpuconv.models.stored import model_config
from tpuconv.names import LAYOUTS, QVALUE, SCALE, ZERO_POINT, collapse
from tpuconv.notation.layout import Shape
from tpuconv.notation.sharding import MESH_AXES, decoding_mesh
from tpuconv.notation.table import MTP_PARAMETERS
from tpuconv.storage.disk import aligned_array
from tpuconv.storage.places import is_readable
from tpuconv.targets.words import check_words
from tpuconv.text import format_count

MODEL_DTYPES = ("bfloat16", "float16", "float32")
"""The dtypes of the parameters and activations of a model."""


def load(
    ckpt: str | Location, dtype: DTypeLike | None = None, mesh: Mesh | None = None, *, mtp: bool = False
) -> nnx.Module:
    """Loads the model of a checkpoint made by `tpuconv convert` or `tpuconv quantize`.

    Config.json and the arrays are checked against the manifest: by hash, and by the crc32c of each chunk. The manifest
    of a checkpoint of format 1 has no hashes; then Orbax restores it, and a warning says that only Orbax's check was
    made. Layers for multi-token prediction (`convert --include-mtp`) are part of the model with `mtp` only; without, a
    warning lists their arrays, which Orbax restores.

    Args:
        ckpt: the folder of the checkpoint, or its URL in a bucket.
        dtype: of parameters and activations; None for the checkpoint's. Quantized values keep their dtype.
        mesh: devices to shard the parameters over, with axes of the names in `tpuconv.notation.sharding.AXES`.
            Each device reads its own shards only. None for one device of this process: with `jax.distributed`
            each process then has a copy. The device layouts come from `layouts.json` for this kind of device
            and mesh, if `fit --write-layouts` wrote them.
        mtp: with the module for multi-token prediction, `model.mtp`: of several such layers with the first.

    Returns:
        The model. `model(ids_BT)` returns logits [B, T, V] in float32; of a classifier scores [B, O] of each text, of a
        model without a head hidden states [B, T, D]. The parameters of a quantized model are Qwix's
        QArrays.

    Raises:
        UsageError: the folder has no checkpoint of tpuconv, or one with a part of the layers; `dtype` is not of
            `MODEL_DTYPES`, or cannot hold values of the checkpoint; an axis of the mesh is not in `AXES`; or `mtp` is
            asked for and the checkpoint has no such layers, or has them quantized; or this process was forked from one
            in which jax runs.
        UnsupportedConfig: `mtp` is asked for, and the family has no such module.
        CorruptOutput: the arrays do not match the manifest or the model, a checksum is wrong, config.json was changed,
            or `layouts.json` is malformed.
        SourceError: the checkpoint was replaced while it was read.
    """
    manifest = read_manifest(to_location(ckpt))
    manifest.check_complete()
    if not manifest.sealed.is_sealed:
        warnings.warn(
            f"{ckpt} was made by an older tpuconv: its arrays are not checked against the manifest "
            f"(`tpuconv verify {ckpt}` checks them)",
            stacklevel=2,
        )
    return load_from(manifest, _stored_reader(manifest), dtype, mesh, mtp=mtp)


ArrayReader = Callable[["Placing"], dict[str, jax.Array]]
"""Reads the arrays of a model, and places them on devices."""


def load_from(
    manifest: Manifest,
    read: ArrayReader,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    *,
    mtp: bool = False,
) -> nnx.Module:
    """Returns the model that a manifest describes, with arrays that `read` gives; the others are arguments of `load`,
    which says what is raised."""
    check_no_fork()
    if dtype is not None and getattr(dtype, "__name__", str(dtype)) not in MODEL_DTYPES:
        raise UsageError(
            f"a model cannot have the dtype {dtype}", hint=f"give one of {', '.join(MODEL_DTYPES)}, or None"
        )
    if mesh is not None:
        check_axes(mesh)
    if mtp:
        check_mtp(manifest)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):  # shapes without a mesh
        graphdef, state = nnx.split(abstract_model(manifest, dtype, mtp=mtp))
    flat = {_name(path): value for path, value in nnx.to_flat_state(state)}
    _check_arrays(manifest, flat)
    formats = _formats(manifest, {name: value.dtype.name for name, value in flat.items()}, mesh)
    targets = {}
    for name, value in flat.items():
        stored = jnp.dtype(manifest.arrays[name].dtype)
        # Quantized values of a dtype that checkpoints do not have (uint4) are stored as uint8, and cast below.
        dtype, place = (stored, formats[name].sharding) if stored == jnp.uint8 else (value.dtype, formats[name])
        targets[name] = jax.ShapeDtypeStruct(value.shape, dtype, sharding=place)  # type: ignore[no-untyped-call]
    # With the module, the further layers after its first one are expected to be left.
    if unused := {n for n in manifest.arrays.keys() - flat.keys() if not (mtp and n.startswith(MTP_PARAMETERS))}:
        patterns = ", ".join(collapse(sorted(unused)))
        warnings.warn(f"{manifest.folder}: not loaded, since the model does not use them: {patterns}", stacklevel=3)
    arrays = read(Placing(manifest, targets))
    manifest.check_current()
    for name, value in flat.items():
        if arrays[name].dtype != value.dtype:
            arrays[name] = jax.device_put(arrays[name].astype(value.dtype), formats[name], donate=True)
    leaves = [(path, value.replace(arrays[_name(path)])) for path, value in nnx.to_flat_state(state)]
    model: nnx.Module = nnx.merge(graphdef, nnx.from_flat_state(leaves))
    return model


class Placing:
    """Places arrays on devices, shard by shard, in the dtypes of a model. A CPU takes aligned values as they are,
    without a copy.

    Args:
        manifest: of the arrays.
        targets: shape, dtype and format of each array of the model.
    """

    def __init__(self, manifest: Manifest, targets: Mapping[str, jax.ShapeDtypeStruct]):
        self.manifest, self.targets = manifest, targets
        self._overflown: list[str] = []

    def place(
        self, name: str, values_of: Callable[[tuple[slice, ...]], np.ndarray], other: Sharding | None = None
    ) -> jax.Array:
        """Returns an array on its devices, by another sharding than the model's if one is given. `values_of` gives the
        stored values of a box, for each shard of this process. Several threads may call this."""
        target = self.targets[name]
        is_other = other is not None and other != target.sharding
        sharding_of: Any = other if is_other else target.sharding
        layout = None if is_other else target.format.layout

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            out, is_too_large = cast(values_of(box_of(index, target.shape)), np.dtype(target.dtype))
            if is_too_large:
                self._overflown.append(name)
            return out

        array = jax.make_array_from_callback(target.shape, sharding_of, part)
        return array if layout is None else jax.device_put(array, Format(layout, sharding_of), donate=True)

    def check(self) -> None:
        """Raises UsageError if finite values of placed arrays became infinite."""
        _check_casts(self.manifest, self.targets, self._overflown)


def box_of(index: tuple[slice, ...] | None, shape: Shape) -> tuple[slice, ...]:
    """Returns the box of a shard, given its index as a sharding has it."""
    return tuple(slice(*s.indices(n)[:2]) for s, n in zip(index or (), shape, strict=True))


def _stored_reader(manifest: Manifest) -> ArrayReader:
    """Returns what reads the arrays of a checkpoint: our own reader, which takes two thirds of the processor time of
    Orbax, and reads from every bucket; Orbax, if the manifest does not say how arrays are divided."""

    def read(placing: Placing) -> dict[str, jax.Array]:
        check_contents(manifest, placing.targets.keys())
        if not manifest.sealed.is_sealed:
            return _restored(manifest, placing.targets)

        def placed(name: str) -> jax.Array:
            def values_of(box: tuple[slice, ...]) -> np.ndarray:
                values = aligned_array([s.stop - s.start for s in box], np.dtype(manifest.arrays[name].dtype))
                read_box(manifest, name, box, values)
                return values

            return placing.place(name, values_of)

        with ThreadPoolExecutor(READERS) as pool:
            arrays = dict(zip(placing.targets, pool.map(placed, placing.targets), strict=True))
        placing.check()
        return arrays

    return read


def _restored(manifest: Manifest, targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Restores the arrays by Orbax, for a checkpoint whose manifest does not say how arrays are divided."""
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            tree = unflatten_dict(targets, sep=".")  # type: ignore[no-untyped-call]
            restore_args = ocp.checkpoint_utils.construct_restore_args(tree, support_layout=True)
            args = ocp.args.PyTreeRestore(tree, restore_args=restore_args, partial_restore=True)
            restored = checkpointer.restore(Path(str(manifest.params)).absolute(), args)
    except Exception as e:  # Orbax raises a plain Exception for a wrong checksum
        manifest.check_current()
        raise CorruptOutput(
            f"{manifest.folder} cannot be restored: {root_cause(e)}",
            hint=f"`tpuconv verify {manifest.folder}` lists the damaged arrays",
        ) from e
    arrays: dict[str, jax.Array] = flatten_dict(restored, sep=".")  # type: ignore[no-untyped-call]
    if not manifest.raw["options"].get("allow_nonfinite"):  # then what was stored is finite
        narrowed = [n for n, x in arrays.items() if x.dtype != jnp.dtype(manifest.arrays[n].dtype)]
        _check_casts(manifest, targets, [name for name in narrowed if not jnp.isfinite(arrays[name]).all()])
    return arrays


READERS = 4
"""Arrays that are read at a time; of each in a bucket, several shards."""


def _check_casts(manifest: Manifest, targets: Mapping[str, jax.ShapeDtypeStruct], overflown: Collection[str]) -> None:
    """Raises UsageError if finite values of these arrays became infinite."""
    if not overflown:
        return
    patterns = collapse([name for name in targets if name in overflown])
    dtype = np.dtype(targets[next(iter(overflown))].dtype)
    raise UsageError(
        f"{manifest.folder} has values that {dtype.name} cannot hold: its largest number is {largest(dtype):g}",
        details=shorten([f"{pattern} ({format_count(len(names), 'array')})" for pattern, names in patterns.items()]),
        hint="load it in bfloat16 or float32",
    )


def abstract_model(manifest: Manifest, dtype: DTypeLike | None = None, *, mtp: bool = False) -> Any:
    """Returns the model of a checkpoint with shapes instead of arrays, in the dtypes that `load` gives them; with `mtp`
    the module for multi-token prediction too."""
    family, config = get_family(manifest.family), _model_config(manifest)
    model_dtype = jnp.dtype(manifest.dtype if dtype is None else dtype)

    def build(*, scan_layers: bool = False) -> Any:
        model = family.model_class(config, scan_layers=scan_layers, dtype=model_dtype)
        if mtp:
            model.add_mtp(dtype=model_dtype)
        return model

    if manifest.quantization is None:
        return nnx.eval_shape(partial(build, scan_layers=manifest.scan_layers))
    from tpuconv.quantize.rules import abstract_quantized_model

    stacks = config.stacks if manifest.scan_layers else None
    model = abstract_quantized_model(build, manifest.quantization, stacks)
    graphdef, state = nnx.split(model)
    leaves = []
    for path, value in nnx.to_flat_state(state):
        dtype = _loaded_dtype(value.dtype, manifest.arrays.get(_name(path)))
        leaves.append((path, value.replace(jax.ShapeDtypeStruct(value.shape, dtype))))  # type: ignore[no-untyped-call]
    return nnx.merge(graphdef, nnx.from_flat_state(leaves))


def mesh_of_processes(manifest: Manifest) -> Mesh | None:
    """Returns the mesh of all devices if there are several processes; None for one process, whose first device
    suffices."""
    return default_mesh_of(manifest) if jax.process_count() > 1 else None


def default_mesh_of(manifest: Manifest) -> Mesh | None:
    """Returns a mesh of all devices (with `jax.distributed`, of all processes), with which the model of a manifest
    decodes with the fewest collectives; None if there is only one device.

    Raises:
        UsageError: the checkpoint is for another program.
    """
    devices = jax.devices()
    if len(devices) == 1:
        return None
    sizes = decoding_mesh(_model_config(manifest).sizes, len(devices))
    return Mesh(mesh_utils.create_device_mesh(tuple(sizes.values()), devices), tuple(sizes))


def _model_config(manifest: Manifest) -> Any:
    manifest.check_own()
    return model_config(manifest)


def _loaded_dtype(wanted: Any, stored: StoredArray | None) -> Any:
    """The dtype of an array in the model: `wanted`, except that scales are not rounded and quantized values not
    cast."""
    if stored is None or stored.dtype == "uint8":
        return wanted
    if stored.name.endswith(SCALE):
        return jnp.promote_types(stored.dtype, wanted)
    return jnp.dtype(stored.dtype) if stored.name.endswith((QVALUE, ZERO_POINT)) else wanted


def _default_device() -> Any:
    """Returns the device that jax puts arrays on."""
    (device,) = jnp.zeros(()).devices()
    return device


def _formats(manifest: Manifest, dtypes: Mapping[str, str], mesh: Mesh | None) -> dict[str, Format]:
    """The sharding of each array, and its device layout if `layouts.json` has one for this kind of device and mesh."""
    device = _default_device() if mesh is None else mesh.devices.flat[0]
    if mesh is not None:
        check_words(manifest)
    path, sizes = manifest.folder / LAYOUTS, {} if mesh is None else dict(mesh.shape)
    data = manifest.find_file(LAYOUTS) if is_readable(path) else None  # a user may delete the file
    layouts = {} if data is None else layouts_of(path, data, device.device_kind, sizes)
    out = {}
    for name, dtype in dtypes.items():
        array, known = manifest.arrays[name], layouts.get(name)
        place = SingleDeviceSharding(device) if mesh is None else sharding(array.axes, array.shape, mesh, MESH_AXES)
        if known and sorted(known.major_to_minor) != list(range(len(array.shape))):
            raise CorruptOutput(
                f"{manifest.folder / LAYOUTS} has the axes {known.major_to_minor} for {name}, which is {array.shape}",
                hint="delete the file; `tpuconv fit --write-layouts` writes a new one",
            )
        layout = Layout(known.major_to_minor, known.tiling) if known and known.dtype == dtype else None
        out[name] = Format(layout, place)
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
            f"the arrays of {manifest.folder} do not match a {manifest.family} model",
            details=faults[:10],
            hint="it was made by another version of tpuconv: convert it again",
        )


def _mtp_shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays of layers for multi-token prediction, which are not part of the model; empty if they
    were not converted."""
    config, quantized = _model_config(manifest), (manifest.quantization or {}).get("parameters", {})
    table = get_family(manifest.family).table_without_release(manifest.returns, config.parts)
    with_mtp, model_only = (
        {n: s for b in table.bind(config, mtp) for n, s in b.dst_shapes().items()} for mtp in (True, False)
    )
    out = {}
    for name in with_mtp.keys() - model_only.keys():
        if facts := quantized.get(name):
            out[name + QVALUE] = with_mtp[name]
            for part in (SCALE, ZERO_POINT) if facts.get("zero_points") else (SCALE,):
                out[name + part] = tuple(n // size for n, size in zip(with_mtp[name], facts["tiles"], strict=True))
        else:
            out[name] = with_mtp[name]
    return out if out.keys() & manifest.arrays.keys() else {}


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
