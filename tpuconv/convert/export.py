"""Exporting a checkpoint of ours to safetensors with Hugging Face's names, by the inverse of the table.

If it was not cast, the exported bytes are those of the source: values, or quantized values and scales if they stayed
encoded. One row of the table is in memory at a time.
"""

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.checkpoint.reader import (
    SAFETENSORS_DTYPES,
    check_contents,
    companions_of,
    copy_companion,
    read_box,
    read_checkpoint_config,
)
from tpuconv.convert.export_tensor import ExportTensor
from tpuconv.convert.run import RunProgress
from tpuconv.convert.serving import WeightGroup, quantized_row
from tpuconv.convert.serving import encoding as describe_encoding
from tpuconv.convert.strided import copy_strided
from tpuconv.encodings.passthrough import pack, unrefine
from tpuconv.encodings.scheme import Scheme
from tpuconv.encodings.schemes import schemes
from tpuconv.errors import CorruptOutput, OutputError, UsageError
from tpuconv.layout import Shape
from tpuconv.mapping.passthrough import Stored, split
from tpuconv.mapping.table import Binding, HasAxes, MappingTable
from tpuconv.names import MANIFEST
from tpuconv.sources.companions import CARD, SOURCE_CARD
from tpuconv.sources.config import encoding_of, with_encoding, without_encoding
from tpuconv.sources.files import CONFIG_FILE, ENCODING_FILE, INDEX_FILE, SINGLE_FILE
from tpuconv.sources.headers import DTYPES
from tpuconv.storage import disk
from tpuconv.storage.hashes import hash_bytes
from tpuconv.storage.journal import Journal, State
from tpuconv.storage.sealed import MANIFEST_FORMAT, SAFETENSORS, raise_damage, read_sealed, seal, size_faults
from tpuconv.targets.registry import get_target

SHARD_BYTES = 5_000_000_000


def released_config(manifest: Manifest) -> dict[str, Any]:
    """The config.json to export: the source's, without the description of an encoding that was undone."""
    raw = _source_config(manifest)
    return raw if manifest.passthrough else without_encoding(raw)


def _source_config(manifest: Manifest) -> dict[str, Any]:
    raw = read_checkpoint_config(manifest)
    return with_encoding(raw, manifest.folder / ENCODING_FILE) if ENCODING_FILE in companions_of(manifest) else raw


def export(
    manifest: Manifest, table: MappingTable, config: HasAxes, out: Path, *, overwrite: bool = False
) -> Iterator[RunProgress]:
    """Writes the checkpoint to the folder `out`, and yields progress.

    `out` appears complete or not at all, and an old one stays until it does.

    Args:
        manifest: of the checkpoint.
        table: of the target that the checkpoint is for, from the released tensors as the manifest's variant names them.
        config: the family's, made of `released_config`, with the letters of the table.
        out: the output folder.
        overwrite: replace an existing output of ours.

    Raises:
        UsageError: the checkpoint holds only a part of a model, was quantized, or lacks the source's scales.
        CorruptOutput: an array is missing, cannot be read, or does not match its checksum.
        SourceError: the checkpoint was replaced while it was read.
        OutputError: `out` exists, and must not be replaced.
        ResourceError: there is too little disk space.
    """
    rows, encoding = _rows(manifest, table, config)
    shards = _shards([tensor for row in rows for tensor in row.tensors])
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    facts = {
        "format": MANIFEST_FORMAT,
        "kind": SAFETENSORS,
        "checkpoint": manifest.sealed.identity,
        "table": table.fingerprint,
    }
    fingerprint = hash_bytes(json.dumps(facts).encode())["xxh3_128"]
    with Journal(out, fingerprint, facts, overwrite=overwrite) as journal:
        state = journal.begin()
        if state is State.PUBLISHED:
            _check_exported(journal.out)
            yield RunProgress(total, total, total, "published")
            return
        if state is not State.COMPLETE:
            companions = sum(facts["bytes"] for facts in companions_of(manifest).values())
            disk.check_room(journal.out.parent, total + companions, "the export")
            check_contents(manifest, manifest.arrays)
            files: dict[str, Any] = {}
            yield from _write(manifest, rows, shards, journal.staging, total, files)
            _write_index_and_companions(manifest, shards, journal.staging, total, files, encoding)
            manifest.check_current()
            source = dict(manifest.raw["source"])
            manifest_facts = facts | {
                "fingerprint": fingerprint,
                "source": source,
                "family": manifest.family,
                "files": files,
            }
            disk.write_file(journal.staging / MANIFEST, seal(manifest_facts))
        journal.publish()
    yield RunProgress(total, total, 0, "published")


def _check_exported(out: Path) -> None:
    """Raises CorruptOutput if files of an earlier export are missing or have the wrong size."""
    sizes = {name: facts["bytes"] for name, facts in read_sealed(out).files.items()}
    raise_damage(out, size_faults(out, sizes))


def file_names(count: int) -> list[str]:
    """The names of `count` shards, as Hugging Face names them."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


@dataclass(frozen=True)
class ExportRow:
    """An inverse row with the tensors that it makes. `repeats` says how often the values of an array are repeated along
    every axis before."""

    inverse: Binding
    tensors: Sequence[ExportTensor]
    repeats: Mapping[str, Shape] = field(default_factory=dict)


def _rows(manifest: Manifest, table: MappingTable, config: HasAxes) -> tuple[list[ExportRow], dict[str, Any] | None]:
    """Every inverse row, and the description for config.json of what is quantized by rules."""
    manifest.check_complete()
    rows: list[ExportRow] = []
    groups: dict[WeightGroup, list[str]] = {}
    plain: list[str] = []
    part = get_target(manifest.target).part
    quantized = manifest.quantization["parameters"] if manifest.quantization and manifest.is_rounded else {}
    own_table = table.stack_layers() if manifest.scan_layers else table
    for binding in own_table.bind(config, manifest.include_mtp):
        if not any(stack.names[0] in quantized for stack in binding.dst):
            rows += [ExportRow(*row) for row in _plain_rows(manifest, binding, part)]
            plain += _linear_modules(binding)
            continue
        row = quantized_row(manifest, binding, part)
        _check_inverse(manifest, row.qvalues.inverse)
        for inverse, tensors, repeats in (
            (row.qvalues, row.of_qvalues, {}),
            (row.scales, row.of_scales, row.repeats),
        ):
            rows.append(ExportRow(inverse, tensors, repeats))
        groups.setdefault(row.group, []).extend(row.modules)
    return rows, describe_encoding(groups, plain) if quantized else None


def _linear_modules(binding: Binding) -> list[str]:
    """The modules of a row that are matrices, besides embeddings."""
    return [
        name.removesuffix(".weight")
        for name, shape in binding.src_shapes().items()
        if len(shape) == 2 and name.endswith(".weight") and "embed" not in name
    ]


def _plain_rows(
    manifest: Manifest, binding: Binding, part: Callable[[str, str], str]
) -> Iterator[tuple[Binding, list[ExportTensor]]]:
    """Yields the inverse rows of parameters that are plain, or encoded as they were released."""
    known = {scheme.title: scheme for scheme in schemes(encoding_of(released_config(manifest)))}
    if facts := manifest.passthrough.get(binding.dst[0].names[0]):
        scheme = known.get(facts["kept"])
        if scheme is None or len(facts["stored"]) != len(binding.src):
            raise CorruptOutput(
                f"{manifest.folder}: config.json and the manifest do not agree on how {binding.src[0].names[0]} "
                "was stored",
                hint="convert the checkpoint again",
            )
        if scheme.tensor_scale:
            raise UsageError(
                f"{manifest.folder} cannot be exported: of {scheme.title} the scales of blocks and of tensors were "
                "multiplied, and cannot be separated again",
                hint="take the source; or convert it with --encoding dequantize, and export that",
            )
        stored = [Stored.from_json(each) for each in facts["stored"]]
        yield from _passthrough_rows(manifest, binding, scheme, stored, part)
    else:
        _check_inverse(manifest, binding)
        dtype = SAFETENSORS_DTYPES[manifest.arrays[binding.dst[0].names[0]].dtype]
        tensors = [ExportTensor(name, dtype, shape, name, _same) for name, shape in binding.src_shapes().items()]
        yield binding.inverse, tensors


def _check_inverse(manifest: Manifest, binding: Binding) -> None:
    for name, shape in binding.dst_shapes().items():
        if name not in manifest.arrays or manifest.arrays[name].shape != shape:
            raise CorruptOutput(
                f"{manifest.folder} has no array {name} of shape {list(shape)}",
                hint="it was made by another version of tpuconv: convert it again",
            )


def _same(array: np.ndarray) -> np.ndarray:
    return array


def _passthrough_rows(
    manifest: Manifest, binding: Binding, scheme: Scheme, stored: list[Stored], part: Callable[[str, str], str]
) -> Iterator[tuple[Binding, list[ExportTensor]]]:
    parts = split(binding, scheme, [each.shape for each in stored], part)
    _check_inverse(manifest, parts.qvalues)
    _check_inverse(manifest, parts.scales)
    qvalues, scales = [], []
    shapes = parts.qvalues.src_shapes()
    for qvalue_stack, scale_stack, refine, stored_scales in zip(
        parts.qvalues.src, parts.scales.src, parts.refine, stored, strict=True
    ):
        for name, scale_name in zip(qvalue_stack.names, scale_stack.names, strict=True):
            shape, base = shapes[name], name.removesuffix(scheme.values)
            qvalues.append(
                ExportTensor(name, scheme.dtype, scheme.stored_shape(shape), name, lambda x: pack(scheme, x))
            )
            for suffix, dtype in zip(scheme.extra, stored_scales.extra, strict=False):
                value = np.array(shape, DTYPES[dtype])
                qvalues.append(ExportTensor(base + suffix, dtype, value.shape, name, lambda x, value=value: value))  # type: ignore[misc]
            scales.append(
                ExportTensor(
                    scale_name,
                    stored_scales.dtype,
                    stored_scales.shape,
                    scale_name,
                    lambda x, stored_scales=stored_scales, refine=refine: unrefine(
                        x, refine, stored_scales.dtype, stored_scales.shape
                    ),  # type: ignore[misc]
                )
            )
    yield parts.qvalues.inverse, qvalues
    yield parts.scales.inverse, scales


def _shards(tensors: list[ExportTensor]) -> list[list[ExportTensor]]:
    shards: list[list[ExportTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _write(
    manifest: Manifest,
    rows: list[ExportRow],
    shards: list[list[ExportTensor]],
    folder: Path,
    total: int,
    files: dict[str, Any],
) -> Iterator[RunProgress]:
    """Writes the shards in the order of the rows, and adds them to `files`."""
    produced, done = _produce(manifest, rows), 0
    for name, shard in zip(file_names(len(shards)), shards, strict=True):
        with disk.Writer(folder / name) as file:
            file.write(_header(shard))
            for tensor, values in islice(produced, len(shard)):
                file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
                done += tensor.nbytes
                yield RunProgress(done, total, 0, "export")
        files[name] = file.facts()


def _produce(manifest: Manifest, rows: list[ExportRow]) -> Iterator[tuple[ExportTensor, np.ndarray]]:
    for row in rows:
        arrays = row.inverse(partial(_read_array, manifest, row))
        for tensor in row.tensors:
            values = tensor.make(_contiguous(arrays[tensor.of], manifest, row.inverse))
            if (values.shape, values.nbytes) != (tensor.shape, tensor.nbytes):
                raise OutputError(f"{tensor.name} would be {values.shape}, not {tensor.shape}: a bug of tpuconv")
            yield tensor, values


def _read_array(manifest: Manifest, row: ExportRow, name: str) -> np.ndarray:
    """An array of the checkpoint, without the changes that its row makes, as unsigned integers: these are faster to
    move than floats and keep every bit."""
    array = manifest.arrays[name]
    values = np.empty(array.shape, np.dtype(array.dtype))
    read_box(manifest, name, tuple(slice(0, n) for n in array.shape), values)
    if (change := row.inverse.inverse.arithmetic.get(name)) is not None:
        values = change.undo(values, row.inverse.sizes)
    for axis, count in enumerate(row.repeats.get(name, ())):
        values = values if count == 1 else np.repeat(values, count, axis)
    return values.view(f"u{values.itemsize}")


def _contiguous(array: np.ndarray, manifest: Manifest, binding: Binding) -> np.ndarray:
    """A contiguous copy in the dtype of the row's arrays."""
    out = np.empty(array.shape, array.dtype)
    copy_strided([(out, array)])
    return out.view(np.dtype(manifest.arrays[binding.src[0].names[0]].dtype))


def _header(shard: list[ExportTensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it transformers refuses the file
    offset = 0
    for tensor in shard:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the values begin at a multiple of 8
    return struct.pack("<Q", len(text)) + text


def _write_index_and_companions(
    manifest: Manifest,
    shards: list[list[ExportTensor]],
    folder: Path,
    total: int,
    files: dict[str, Any],
    encoding: dict[str, Any] | None,
) -> None:
    """Writes the index and the files that go with the weights, and adds them to `files`. Config.json describes an
    `encoding`."""

    def write(name: str, text: str) -> None:
        disk.write_file(folder / name, text.encode())
        files[name] = hash_bytes(text.encode())

    if len(shards) > 1:
        names = file_names(len(shards))
        weight_map: Mapping[str, str] = {t.name: n for n, shard in zip(names, shards, strict=True) for t in shard}
        write(INDEX_FILE, json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))
    config = released_config(manifest)
    if encoding is not None:
        config = without_encoding(config) | {"quantization_config": encoding}
    undone = not manifest.passthrough  # what is exported is not encoded any more
    for name, facts in companions_of(manifest).items():
        if undone and name == ENCODING_FILE:
            continue
        target = CARD if name == SOURCE_CARD else name
        # config.json changes if it had a description of an encoding, or one was read from the file that is left out.
        if name == CONFIG_FILE and config != (read_checkpoint_config if undone else _source_config)(manifest):
            write(name, json.dumps(config, indent=2))
        else:
            copy_companion(manifest, name, folder / target, facts)
            files[target] = facts
