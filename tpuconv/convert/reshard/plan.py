"""The plan of a resharding: the arrays of the output, and the arrays of the checkpoint that each is read from."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import prod

import numpy as np

from tpuconv.checkpoint.manifest import Manifest, read_manifest
from tpuconv.checkpoint.stored import StoredArray
from tpuconv.convert.export.array_source import BoxSource, CheckpointArrays
from tpuconv.convert.export.exporting import target_form
from tpuconv.convert.export.trained import check_converted, opened_run
from tpuconv.convert.plan import sizes
from tpuconv.convert.plan.types import OutputArray, Skip
from tpuconv.convert.reshard.chunks import device_chunks, file_shape
from tpuconv.convert.reshard.places import LayerPlace, LayerStack, layer_places, layer_stacks
from tpuconv.errors import UnsupportedConfig, UsageError
from tpuconv.location import Location
from tpuconv.notation.layout import Shape
from tpuconv.notation.sharding import partition, shard_shape
from tpuconv.notation.sizes import HasSizes
from tpuconv.notation.table import Binding, MappingTable
from tpuconv.progress import Listener
from tpuconv.targets.registry import get_target
from tpuconv.targets.target import Target
from tpuconv.targets.words import check_words

ShardPlace = tuple[str, Shape]
"""The name of an array, and the place of a shard in its grid."""


@dataclass(frozen=True)
class ReshardUnit:
    """Shards that are recorded as done together; `nbytes` are the bytes of their values."""

    uid: str
    shards: tuple[ShardPlace, ...]
    nbytes: int


@dataclass(frozen=True)
class ReshardPlan:
    """A resharding.

    Attributes:
        source: the arrays of the checkpoint.
        mesh: size of each mesh axis.
        scan_layers: True if the layers of the output are stacked.
        pathways: True if the output is for Pathways.
        target: the program that the checkpoint is for.
        table, config: from released tensors to the arrays of the output, and the family's reading of config.json.
        arrays: of the output, by name.
        places: of layers that are stacked in the checkpoint alone, the place of each array in an array of it.
        stacks: of layers that are stacked in the output alone, the arrays of the checkpoint in each array.
    """

    source: BoxSource
    mesh: Mapping[str, int]
    scan_layers: bool
    pathways: bool
    target: Target
    table: MappingTable
    config: HasSizes
    arrays: Mapping[str, OutputArray]
    places: Mapping[str, LayerPlace]
    stacks: Mapping[str, LayerStack]

    @property
    def nbytes(self) -> int:
        """The number of bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def device_bytes(self) -> int:
        """The number of bytes that one device of the mesh reads."""
        shapes = {
            name: shard_shape(array.shape, partition(array.axes, array.shape, self.mesh), self.mesh)
            for name, array in self.arrays.items()
        }
        return sum(prod(shape) * self.arrays[name].dtype.itemsize for name, shape in shapes.items())

    @property
    def units(self) -> tuple[ReshardUnit, ...]:
        """The units of work. Shards that are read from the same chunks of the checkpoint are neighbours."""
        units: list[ReshardUnit] = []
        shards: list[ShardPlace] = []
        size = 0
        for name, index in self._shards():
            shards.append((name, index))
            size += self.shard_bytes(name, index)
            if size >= sizes.UNIT_BYTES:
                units.append(ReshardUnit(f"unit-{len(units):05d}", tuple(shards), size))
                shards, size = [], 0
        if shards:
            units.append(ReshardUnit(f"unit-{len(units):05d}", tuple(shards), size))
        return tuple(units)

    def _shards(self) -> Iterator[ShardPlace]:
        groups: dict[str, list[str]] = {}
        for name in self.arrays:
            groups.setdefault(self.places[name].stack if name in self.places else name, []).append(name)
        for names in groups.values():
            grid = self.arrays[names[0]].grid
            yield from ((name, index) for index in product(*map(range, grid)) for name in names)

    def box(self, name: str, index: Shape) -> tuple[slice, ...]:
        """Returns the part of an array that a shard has."""
        array = self.arrays[name]
        parts = zip(index, array.shards, array.shape, strict=True)
        return tuple(slice(i * s, min((i + 1) * s, n)) for i, s, n in parts)

    def shard_bytes(self, name: str, index: Shape) -> int:
        """Returns the bytes of the values of a shard."""
        elements: int = prod(part.stop - part.start for part in self.box(name, index))
        return elements * self.arrays[name].dtype.itemsize

    def values(self, unit: ReshardUnit) -> Iterator[tuple[str, tuple[slice, ...], np.ndarray]]:
        """Reads the shards of a unit. Yields for each the name of the array, its box, and the values as unsigned
        integers. Layers that lie in the same chunks of the checkpoint are read at once.

        Raises:
            CorruptOutput, SourceError: the checkpoint cannot be read.
        """
        for _, group in groupby(unit.shards, key=self._group):
            shards = list(group)
            if shards[0][0] in self.places:
                yield from self._layers(shards)
                continue
            for name, index in shards:
                box = self.box(name, index)
                yield name, box, self._read(name, box)

    @property
    def most_bytes(self) -> int:
        """The most bytes of values that are read at once."""
        files = {name: prod(array.shards) * array.dtype.itemsize for name, array in self.arrays.items()}
        return max((n * prod(self._together(name)) for name, n in files.items()), default=0)

    def _together(self, name: str) -> Shape:
        """Returns the number of layers along each stacked axis that are read at once for an array."""
        return layers_together(self.source, self.places[name]) if name in self.places else ()

    def _group(self, shard: ShardPlace) -> tuple[str, Shape, Shape]:
        name, index = shard
        place = self.places.get(name)
        if place is None:
            return name, index, ()
        return place.stack, index, tuple(i // n for i, n in zip(place.at.values(), self._together(name), strict=True))

    def _layers(self, shards: Sequence[ShardPlace]) -> Iterator[tuple[str, tuple[slice, ...], np.ndarray]]:
        """Yields the values of layers that are stacked in the checkpoint: of the same part of each."""
        places = [self.places[name] for name, _ in shards]
        first, box = places[0], self.box(*shards[0])
        spans = {axis: [place.at[axis] for place in places] for axis in first.at}
        whole = list(first.box(box))
        for axis, span in spans.items():
            whole[axis] = slice(min(span), max(span) + 1)
        values = _bits(self.source.read_box(first.stack, tuple(whole)))
        for (name, _), place in zip(shards, places, strict=True):
            at = tuple(place.at[i] - part.start if i in place.at else slice(None) for i, part in enumerate(whole))
            yield name, box, values[at]

    def _read(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        if (stack := self.stacks.get(name)) is None:
            return _bits(self.source.read_box(name, box))
        values = np.empty([part.stop - part.start for part in box], f"u{self.arrays[name].dtype.itemsize}")
        for layer, at, inner in stack.parts(box):
            values[at] = _bits(self.source.read_box(layer, inner))
        return values


def layers_together(source: BoxSource, place: LayerPlace) -> Shape:
    """Returns the number of layers along each stacked axis that lie in one chunk of a checkpoint, if it is small. What
    reads a large one keeps it until the next layer is read."""
    array = source.manifest.arrays[place.stack]
    is_large = prod(array.chunks) * np.dtype(array.dtype).itemsize > sizes.SLAB_BYTES
    return tuple(1 if is_large else array.chunks[axis] for axis in place.at)


def make_reshard_plan(
    source: BoxSource, mesh: Mapping[str, int], scan_layers: bool | None = None, *, pathways: bool = False
) -> ReshardPlan:
    """Plans a resharding. No values are read.

    Args:
        source: the arrays of a checkpoint.
        mesh: size of each mesh axis.
        scan_layers: stack the layers, or give each layer arrays of its own. None leaves them as they are.
        pathways: write a checkpoint for Pathways, also if the source is none.

    Raises:
        UsageError: the checkpoint has only some layers, or quantized parameters, and its layers are to be changed.
        UnsupportedConfig: the target has no stacked layers of this model, or Pathways does not read an array.
    """
    manifest = source.manifest
    check_words(manifest)
    is_changed = scan_layers is not None and scan_layers != manifest.scan_layers
    if is_changed:
        _check_changeable(manifest)
    scanned = manifest.scan_layers != is_changed
    table, config = target_form(source, scan_layers=scanned)
    stored: dict[str, StoredArray] = dict(manifest.arrays)
    places: dict[str, LayerPlace] = {}
    stacks: dict[str, LayerStack] = {}
    if is_changed:
        former_table, former_config = target_form(source, scan_layers=not scanned)
        wanted = list(table.bind(config, manifest.include_mtp))
        former = list(former_table.bind(former_config, manifest.include_mtp))
        if scanned:
            stacks = layer_stacks(layer_places(former, wanted))
        else:
            places = layer_places(wanted, former)
        stored = _stored_as(wanted, stored, places, stacks)
    target, pathways = get_target(manifest.target), pathways or manifest.pathways
    if pathways:
        target.check_pathways({name: array.dtype for name, array in stored.items()})
    return ReshardPlan(
        source=source,
        mesh=mesh,
        scan_layers=scanned,
        pathways=pathways,
        target=target,
        table=table,
        config=config,
        arrays={n: _output_array(array, mesh, source, places.get(n), pathways) for n, array in stored.items()},
        places=places,
        stacks=stacks,
    )


def _check_changeable(manifest: Manifest) -> None:
    """Raises UsageError if the layers of a checkpoint cannot be stacked or taken apart."""
    manifest.check_complete()
    if manifest.quantization is not None:
        raise UsageError(
            f"{manifest.folder} has quantized parameters, whose layers stay as they are",
            hint="leave out `scan_layers=` and `unscan_layers=`, or convert again with or without `scan_layers=`",
        )


def _stored_as(
    bindings: Sequence[Binding],
    stored: Mapping[str, StoredArray],
    places: Mapping[str, LayerPlace],
    stacks: Mapping[str, LayerStack],
) -> dict[str, StoredArray]:
    """Returns the arrays of the other form, each with the dtype of the arrays that it is read from."""
    arrays: dict[str, StoredArray] = {}
    for binding in bindings:
        axes, shapes = binding.dst_axes(), binding.dst_shapes()
        sources = tuple(name for stack in binding.src for name in stack.names)
        for name, shape in shapes.items():
            origins = [places[name].stack] if name in places else [name]
            if name in stacks:
                origins = list(stacks[name].layers.values())
            dtypes = {stored[origin].dtype for origin in origins}
            if len(dtypes) > 1:
                raise UnsupportedConfig(
                    f"the layers of {name} have the dtypes {', '.join(sorted(dtypes))}, so they cannot be stacked",
                    hint="leave out `scan_layers=`, or convert with one `dtype=`",
                )
            first = stored[origins[0]]
            arrays[name] = replace(first, name=name, shape=shape, axes=axes[name], sources=sources)
    return arrays


def _output_array(
    array: StoredArray, mesh: Mapping[str, int], source: BoxSource, place: LayerPlace | None, pathways: bool
) -> OutputArray:
    """Returns an array of the output, which lies at a place of the checkpoint if that has stacked layers."""
    dtype = np.dtype(array.dtype)
    within, most = None, sizes.SLAB_BYTES
    if place is not None:
        stack = source.manifest.arrays[place.stack]
        most //= prod(layers_together(source, place))
        if prod(stack.chunks) * dtype.itemsize > sizes.SLAB_BYTES:  # each is decoded once, for all its layers
            within = place.without_stack(stack.chunks)
    chunk_bytes = most if pathways else sizes.CHUNK_BYTES
    chunks = device_chunks(array.axes, array.shape, dtype.itemsize, mesh, chunk_bytes)
    files = file_shape(array.axes, array.shape, chunks, most // dtype.itemsize, within)
    return OutputArray(
        array.shape,
        dtype,
        chunks if pathways else files,
        chunks,
        array.name,
        array.axes,
        array.sources,
        array.buffer,
        compressed=array.is_compressed and not pathways,
        zarr2=pathways,
    )


def _bits(values: np.ndarray) -> np.ndarray:
    return values.view(f"u{values.itemsize}")


@contextmanager
def opened_arrays(
    ckpt: Location, config: str | None, target: str | None, progress: Listener, *, only_finite: bool
) -> Iterator[tuple[BoxSource, tuple[Skip, ...]]]:
    """Opens a checkpoint. Yields its arrays, and the arrays of a trainer that are no parameters.

    Args:
        ckpt: a checkpoint of tpuconv; with `config` a trainer's.
        config: the model that was trained.
        target: whose tree a trainer's checkpoint has; None: of each target in turn.
        progress: called while config.json is downloaded.
        only_finite: whether NaN and infinite values of a trainer's checkpoint are refused where they are read.

    Raises:
        UsageError: a checkpoint of tpuconv has `config`, or a trainer's has none.
        TpuconvError: it cannot be read.
    """
    if config is None:
        check_converted(ckpt)
        yield CheckpointArrays(read_manifest(ckpt)), ()
        return
    with opened_run(ckpt, config, progress, target, only_finite=only_finite) as run:
        yield run.arrays, run.facts.skipped
