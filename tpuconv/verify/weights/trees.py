"""The weights of a checkpoint of ours, for any target, or of safetensors, on a disk, in a bucket or on the Hub."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import numpy as np

from tpuconv.checkpoint.manifest import Manifest, element_bits, read_manifest
from tpuconv.convert.export.trained import opened_run
from tpuconv.convert.run.slabs import check_as_promised
from tpuconv.encodings.decode import Tensor
from tpuconv.encodings.reshaped import shaped, stated_shapes
from tpuconv.encodings.tensors import decode_names
from tpuconv.errors import UnsupportedConfig
from tpuconv.location import Location, to_location
from tpuconv.names import CACHE_SCALES, INPUT_SCALE, MANIFEST, QVALUE, SCALE, ZERO_POINT, collapse
from tpuconv.progress import ignore
from tpuconv.sources.headers import read_header
from tpuconv.sources.hub import resolve
from tpuconv.sources.reader import Reader
from tpuconv.sources.schedule import ReadStep
from tpuconv.sources.shard import SourceShard, read_digest
from tpuconv.sources.source import Source, fetched_meanwhile, open_source
from tpuconv.storage.places import is_file
from tpuconv.storage.sealed import SAFETENSORS, kind_of
from tpuconv.targets.registry import get_target
from tpuconv.targets.target import Target
from tpuconv.verify.weights.stored import ArrayWeight, TensorWeight, Weight, ones, plain_weight, tensor_weight


@dataclass(frozen=True)
class WeightTree:
    """The weights of a checkpoint.

    Attributes:
        place: as the user named it.
        weights: all arrays or tensors, in their order.
        check: raises SourceError if the checkpoint was replaced since it was opened, or is damaged.
        notes: sentences about what cannot be decoded.
        manifest: of a checkpoint of ours, or of a trainer's.
        reader: of safetensors.
    """

    place: str
    weights: Sequence[Weight]
    check: Callable[[], None]
    notes: Sequence[str] = ()
    manifest: Manifest | None = None
    reader: Reader | None = field(default=None, repr=False)

    def begin(self, order: Sequence[Weight]) -> None:
        """Says in which order weights will be read. From here on those on the Hub are fetched."""
        if self.reader is not None:
            steps = [ReadStep(weight.name, weight.files) for weight in order]
            self.reader.begin(steps, {}, Path(gettempdir()))

    def finish(self, weight: Weight) -> None:
        """Says that a weight is read: what was fetched for it alone is dropped."""
        if self.reader is not None:
            self.reader.finish(weight.name)


@contextmanager
def opened_weights(
    place: str | Location, config: str | None, check_cancelled: Callable[[], None]
) -> Iterator[WeightTree]:
    """Yields the weights of a checkpoint of ours or a trainer's, a folder of safetensors or one such file, on a disk or
    in a bucket, or of a model on the Hub. Nothing of them is read yet.

    Args:
        place: where they are.
        config: the model that was trained, of a trainer's checkpoint.
        check_cancelled: raises an exception when the work must stop.

    Raises:
        TpuconvError: the place is none of these.
    """
    location = to_location(place)
    if config is not None:
        with opened_run(location, config, ignore) as run:
            arrays = run.arrays
            stored = [
                plain_weight(name, np.dtype(each.dtype), each.shape, each.chunks, arrays.read_box)
                for name, each in arrays.manifest.arrays.items()
            ]
            yield WeightTree(str(place), stored, arrays.tree.check_unchanged, manifest=arrays.manifest)
        return
    if is_file(location / MANIFEST) and kind_of(location) != SAFETENSORS:
        manifest = read_manifest(location)
        weights = array_weights(manifest)
        yield WeightTree(str(place), weights, manifest.check_current, _undecoded(manifest, weights), manifest)
        return
    if str(place).endswith(".safetensors") and is_file(location):
        size, _, infos = read_header(location)
        shard = SourceShard(location.name, size, *read_digest(location))
        source = Source(location.parent, {}, {info.name: info for info in infos}, (shard,))
        with _opened(str(place), source, check_cancelled) as tree:
            yield tree
        return
    with resolve(str(place), weights=False, streams=True) as resolved:
        source = open_source(resolved.folder, repo=resolved.repo, commit=resolved.commit, sha256=resolved.sha256)
        if resolved.remote:
            source = fetched_meanwhile(source, resolved.remote, None)
        with _opened(str(place), source, check_cancelled) as tree:
            yield tree


@contextmanager
def _opened(place: str, source: Source, check_cancelled: Callable[[], None]) -> Iterator[WeightTree]:
    reader = source.open(check_cancelled, hashes=[shard.name for shard in source.promised])
    try:
        weights, notes = _tensor_weights(source, reader)
        yield WeightTree(place, weights, partial(check_as_promised, source, reader), notes, reader=reader)
    finally:
        reader.close()


def _tensor_weights(source: Source, reader: Reader) -> tuple[list[TensorWeight], list[str]]:
    """Returns the tensors of a source, and why some are not decoded."""
    notes: list[str] = []
    seen: Mapping[str, Tensor] = {}
    try:
        seen, faults = decode_names(source.tensors, source.encoding, any_scales=True)
        seen = shaped(seen, stated_shapes(seen, reader))
        notes += [f"shown as stored: {fault}" for fault in faults]
    except UnsupportedConfig as e:
        notes.append(f"quantized tensors are shown as stored: {e.message}")
    encoded = {tensor.values.name: tensor for tensor in seen.values() if tensor.scheme is not None}
    parts = {info.name for tensor in encoded.values() for info in tensor.stored[1:]}
    weights = [
        tensor_weight(info, encoded.get(name), reader, is_part=name in parts) for name, info in source.tensors.items()
    ]
    return weights, notes


# -- checkpoints of ours ----------------------------------------------------------------------------------------------

QUANTIZED_PARTS = (QVALUE, SCALE, ZERO_POINT)
"""The parts of a quantized parameter: first its values."""


def array_weights(manifest: Manifest) -> list[ArrayWeight]:
    """Returns the arrays of a checkpoint. One of quantized values has the name of its parameter; scales have none."""
    target = get_target(manifest.target)
    quantized: Mapping[str, Any] = (manifest.quantization or {}).get("parameters", {})
    values: dict[str, tuple[str, str, tuple[str, ...]]] = {}
    for parameter, facts in quantized.items():
        parts = tuple(name for name in _part_names(target, parameter) if name in manifest.arrays)
        values[parts[0]] = parameter, facts["qtype"], parts[1:]
    scales = {name for _, _, beside in values.values() for name in beside}
    static = (INPUT_SCALE, *CACHE_SCALES)
    out = []
    for name, array in manifest.arrays.items():
        parameter, qtype, beside = values.get(name, (name, None, ()))
        groups = ones(array.shape)
        if qtype is not None:
            shapes = {manifest.arrays[each].shape for each in beside}
            scaled = shapes.pop() if len(shapes) == 1 else ()
            if len(scaled) == len(groups) and all(n % s == 0 for n, s in zip(array.shape, scaled, strict=True)):
                groups = tuple(n // s for n, s in zip(array.shape, scaled, strict=True))
            else:
                qtype = None
        weight = ArrayWeight(
            name=name,
            parameter="" if name in scales or name.endswith(static) or (beside and not qtype) else parameter,
            dtype=array.dtype,
            stored_shape=array.shape,
            nbytes=-(-prod(array.shape) * element_bits(array.dtype) // 8),
            shape=array.shape,
            groups=groups,
            chunks=array.chunks,
            manifest=manifest,
            qtype=qtype,
            beside=beside,
        )
        out.append(weight)
    return out


def _part_names(target: Target, parameter: str) -> Iterator[str]:
    """Yields the names of the arrays that may hold a quantized parameter: its values, then what is beside them."""
    for part in QUANTIZED_PARTS:
        suffix = part.removeprefix(".")
        if suffix in (target.quantized or {}):
            yield target.part(parameter, suffix)


def _undecoded(manifest: Manifest, weights: Sequence[ArrayWeight]) -> list[str]:
    """Returns a sentence about quantized parameters whose scales do not divide their axes."""
    left = [weight.name for weight in weights if weight.beside and weight.qtype is None]
    return [f"shown as stored, not decoded: {pattern}" for pattern in collapse(left)]


def layer_weights(manifest: Manifest) -> dict[str, ArrayWeight]:
    """Returns the parameters of a checkpoint under our names, by the names that they have in a model of separate
    layers."""
    weights = [weight for weight in array_weights(manifest) if weight.parameter]
    if not manifest.scan_layers:
        return {weight.parameter: weight for weight in weights}
    from tpuconv.models.stored import model_config

    config = model_config(manifest)
    stacks, out = config.stacks, {}
    for weight in weights:
        for name, layer in stacks.names_in(weight.parameter):
            out[name] = weight if layer is None else weight.of_layer(name, layer)
    return out
