"""From a checkpoint of ours back to safetensors under Hugging Face's names, by the inverse of the table.

Of a checkpoint that was not cast, the bytes of the source come back: values, or codes and scales where they were kept.
One row of the table is in memory at a time.
"""

import json
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tpuconv.convert.card import COPIED, SOURCE_CARD
from tpuconv.convert.checkpoint import CODES, read_box
from tpuconv.convert.codecs.kept import pack, unrefine
from tpuconv.convert.codecs.schemes import Scheme, schemes
from tpuconv.convert.journal import Journal
from tpuconv.convert.keep import Stored, split
from tpuconv.convert.manifest import Manifest
from tpuconv.convert.run import Progress
from tpuconv.convert.source import (
    CONFIG_FILE,
    DTYPES,
    ENCODING_FILE,
    ENCODING_KEYS,
    INDEX_FILE,
    SINGLE_FILE,
    encoding_of,
    read_config,
)
from tpuconv.convert.store import write_error
from tpuconv.convert.strided import copy_strided
from tpuconv.convert.table import Binding, HasAxes, MappingTable
from tpuconv.errors import CorruptOutput, OutputError, ResourceError, UsageError
from tpuconv.layout import Shape
from tpuconv.sizes import format_size

SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Tensor:
    """A tensor to be written: its dtype as safetensors names it, and how it is made of what the inverse row gives under
    the name `of`."""

    name: str
    dtype: str
    shape: Shape
    of: str
    made: Callable[[np.ndarray], np.ndarray]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


def released_config(manifest: Manifest) -> dict[str, Any]:
    """The config.json of what is exported: that of the source, which says nothing of an encoding that was undone."""
    raw = read_config(manifest.folder / CONFIG_FILE)
    return raw if manifest.kept else {key: value for key, value in raw.items() if key not in ENCODING_KEYS}


def export(manifest: Manifest, table: MappingTable, config: HasAxes, out: Path) -> Iterator[Progress]:
    """Writes the checkpoint to the folder `out`, yielding progress; `out` appears whole or not at all. `table` is the
    family's, `config` made of `released_config`.

    Raises:
        UsageError: the checkpoint holds only a part of a model, was quantized, or has not the source's scales.
        CorruptOutput: an array is missing, cannot be read, or does not hold its checksum.
        OutputError: `out` exists.
        ResourceError: too little disk.
    """
    rows = list(_rows(manifest, table, config))
    shards = _shards([tensor for _, tensors in rows for tensor in tensors])
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    if out.exists():
        raise OutputError(f"{out} exists already", hint="choose another OUT")
    with Journal(out, f"export of {manifest.raw['fingerprint']}") as journal:
        journal.begin()
        free = shutil.disk_usage(journal.staging).free
        if free < total:
            raise ResourceError(
                f"{out.absolute().parent} has {format_size(free)} free, the export needs {format_size(total)}",
                hint="free some space, or give an OUT on another disk",
            )
        try:
            yield from _write(manifest, rows, shards, journal.staging, total)
            _write_rest(manifest, shards, journal.staging, total)
        except OSError as e:
            raise write_error(out, e) from e
        journal.publish()
    yield Progress(total, total, 0, "published")


def file_names(count: int) -> list[str]:
    """Of so many shards, as Hugging Face names them."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _rows(manifest: Manifest, table: MappingTable, config: HasAxes) -> Iterator[tuple[Binding, list[Tensor]]]:
    """Every inverse row with the tensors that come of it."""
    manifest.check_whole()
    if manifest.quantization is not None and manifest.is_rounded:
        raise UsageError(
            f"{manifest.folder} is quantized, with {manifest.quantization['name']}: its values are not the source's",
            hint="export the checkpoint that it was made from",
        )
    known = {scheme.title: scheme for scheme in schemes(encoding_of(released_config(manifest)))}
    own_table = table.stack_layers() if manifest.scan_layers else table
    for binding in own_table.bind(config, manifest.include_mtp):
        if facts := manifest.kept.get(binding.dst[0].names[0]):
            scheme = known[facts["kept"]]
            if scheme.tensor_scale:
                raise UsageError(
                    f"{manifest.folder} cannot be exported: of {scheme.title} the scales of blocks and of tensors were "
                    "multiplied, and cannot be told apart again",
                    hint="take the source; or convert it with --encoding dequantize, and export that",
                )
            yield from _kept(binding, scheme, [Stored.from_json(each) for each in facts["stored"]])
        else:
            _check(manifest, binding)
            dtype = CODES[manifest.arrays[binding.dst[0].names[0]].dtype]
            tensors = [Tensor(name, dtype, shape, name, _same) for name, shape in binding.src_shapes().items()]
            yield binding.inverse, tensors


def _check(manifest: Manifest, binding: Binding) -> None:
    for name, shape in binding.dst_shapes().items():
        if name not in manifest.arrays or manifest.arrays[name].shape != shape:
            raise CorruptOutput(
                f"{manifest.folder} has no array {name} of shape {list(shape)}",
                hint="it was made by another version of tpuconv: convert it again",
            )


def _same(array: np.ndarray) -> np.ndarray:
    return array


def _kept(binding: Binding, scheme: Scheme, stored: list[Stored]) -> Iterator[tuple[Binding, list[Tensor]]]:
    parts = split(binding, scheme, [each.shape for each in stored])
    codes, scales = [], []
    shapes = parts.codes.src_shapes()
    for code_stack, scale_stack, refine, own in zip(
        parts.codes.src, parts.scales.src, parts.refine, stored, strict=True
    ):
        for name, scale_name in zip(code_stack.names, scale_stack.names, strict=True):
            shape, base = shapes[name], name.removesuffix(scheme.values)
            codes.append(Tensor(name, scheme.dtype, scheme.stored_shape(shape), name, lambda x: pack(scheme, x)))
            for suffix, dtype in zip(scheme.extra, own.extra, strict=False):
                value = np.array(shape, DTYPES[dtype])
                codes.append(Tensor(base + suffix, dtype, value.shape, name, lambda x, value=value: value))  # type: ignore[misc]
            scales.append(
                Tensor(
                    scale_name,
                    own.dtype,
                    own.shape,
                    scale_name,
                    lambda x, own=own, refine=refine: unrefine(x, refine, own.dtype, own.shape),  # type: ignore[misc]
                )
            )
    yield parts.codes.inverse, codes
    yield parts.scales.inverse, scales


def _shards(tensors: list[Tensor]) -> list[list[Tensor]]:
    shards: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _write(
    manifest: Manifest, rows: list[tuple[Binding, list[Tensor]]], shards: list[list[Tensor]], folder: Path, total: int
) -> Iterator[Progress]:
    """The shards one after the other, in the order of the rows."""
    made, done = _made(manifest, rows), 0
    for name, shard in zip(file_names(len(shards)), shards, strict=True):
        with open(folder / name, "wb") as file:
            file.write(_header(shard))
            for tensor, values in islice(made, len(shard)):
                file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
                done += tensor.nbytes
                yield Progress(done, total, 0, "export")


def _made(manifest: Manifest, rows: list[tuple[Binding, list[Tensor]]]) -> Iterator[tuple[Tensor, np.ndarray]]:
    for binding, tensors in rows:
        arrays = binding(lambda name: _read(manifest, name))
        for tensor in tensors:
            values = tensor.made(_contiguous(arrays[tensor.of], manifest, binding))
            if (values.shape, values.nbytes) != (tensor.shape, tensor.nbytes):
                raise OutputError(f"{tensor.name} would be {values.shape}, not {tensor.shape}: a bug of tpuconv")
            yield tensor, values


def _read(manifest: Manifest, name: str) -> np.ndarray:
    """An array of the checkpoint as unsigned integers, which move faster than floats and keep every bit."""
    array = manifest.arrays[name]
    values = np.empty(array.shape, np.dtype(array.dtype))
    read_box(manifest, name, tuple(slice(0, n) for n in array.shape), values)
    return values.view(f"u{values.itemsize}")


def _contiguous(array: np.ndarray, manifest: Manifest, binding: Binding) -> np.ndarray:
    """In memory of its own and in the dtype of the row's arrays."""
    out = np.empty(array.shape, array.dtype)
    copy_strided([(out, array)])
    return out.view(np.dtype(manifest.arrays[binding.src[0].names[0]].dtype))


def _header(shard: list[Tensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it transformers refuses the file
    at = 0
    for tensor in shard:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the values begin at a multiple of 8
    return struct.pack("<Q", len(text)) + text


def _write_rest(manifest: Manifest, shards: list[list[Tensor]], folder: Path, total: int) -> None:
    if len(shards) > 1:
        names = file_names(len(shards))
        weight_map: Mapping[str, str] = {t.name: n for n, shard in zip(names, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=1))
    for pattern in COPIED:
        for path in sorted(manifest.folder.glob(pattern)):
            shutil.copyfile(path, folder / path.name)
    if not manifest.kept:
        (folder / ENCODING_FILE).unlink(missing_ok=True)
    config = released_config(manifest)
    if config != read_config(folder / CONFIG_FILE):
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2))
    if (manifest.folder / SOURCE_CARD).is_file():
        shutil.copyfile(manifest.folder / SOURCE_CARD, folder / "README.md")
