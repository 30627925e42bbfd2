"""The files of an export: how tensors are divided among them, their headers, and what lies beside them."""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tpuconv.convert.export.array_source import ArraySource, exported_config
from tpuconv.convert.export.tensor import ExportTensor
from tpuconv.convert.plan.quantization import REPORT
from tpuconv.convert.run.card import served_card
from tpuconv.convert.run.card_metadata import source_metadata
from tpuconv.models.common.heads import with_classes
from tpuconv.models.common.rope_keys import with_older_rope_keys
from tpuconv.names import MANIFEST, collapse
from tpuconv.notation.layout import Shape
from tpuconv.sources.companions import CARD, SOURCE_CARD
from tpuconv.sources.config import without_encoding
from tpuconv.sources.files import CONFIG_FILE, ENCODING_FILES, INDEX_FILE, SINGLE_FILE
from tpuconv.storage.sinks import Sink
from tpuconv.targets.registry import get_target

SHARD_BYTES = 5_000_000_000


def file_names(count: int) -> list[str]:
    """Returns the names of `count` shards, as Hugging Face names them."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def exported_names(arrays: ArraySource, count: int) -> set[str]:
    """Returns the name of each file that an export of `count` shards may write."""
    return {*file_names(count), *arrays.companions, CARD, SOURCE_CARD, INDEX_FILE, CONFIG_FILE, REPORT, MANIFEST}


def divide_tensors(tensors: list[ExportTensor]) -> list[list[ExportTensor]]:
    """Divides tensors among files of `SHARD_BYTES` at most, in their order; a larger tensor has one for itself."""
    shards: list[list[ExportTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


class FileTensor(Protocol):
    """A tensor of a file. `dtype` is safetensors' name."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> Shape: ...

    @property
    def nbytes(self) -> int: ...


def kind_of_tensor(tensor: FileTensor) -> tuple[Any, ...]:
    """Returns what tensors have in common that are shown as one."""
    return tensor.dtype, tuple(tensor.shape)


def tensors_to_json(files: Sequence[Sequence[FileTensor]]) -> dict[str, Any]:
    """Returns the description of the tensors of files that docs/json.md lists. Tensors of one dtype and shape
    whose names differ only in numbers are one entry."""
    tensors = {tensor.name: tensor for file in files for tensor in file}
    return {
        pattern: {"count": len(names), "shape": tensors[names[0]].shape, "dtype": tensors[names[0]].dtype}
        for pattern, names in collapse(tensors, lambda name: kind_of_tensor(tensors[name])).items()
    }


def safetensors_header(shard: Sequence[FileTensor]) -> bytes:
    """Returns what a file begins with: the names, dtypes, shapes and offsets of its tensors."""
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


def write_index_and_companions(
    arrays: ArraySource,
    shards: Sequence[Sequence[ExportTensor]],
    sink: Sink,
    files: dict[str, Any],
    encoding: dict[str, Any] | None,
    drafts: int,
) -> None:
    """Writes the index and the files that go with the weights, and adds them to `files`. Config.json describes an
    `encoding`. What is for other programs has older keys besides, and names classes that they know; what comes back
    as it was released has not. `drafts` is as `drafts_of` says."""
    total = sum(tensor.nbytes for shard in shards for tensor in shard)

    def write(name: str, text: str) -> None:
        files.update(sink.write_all({name: text.encode()}))

    if len(shards) > 1:
        names = file_names(len(shards))
        weight_map: Mapping[str, str] = {t.name: n for n, shard in zip(names, shards, strict=True) for t in shard}
        write(INDEX_FILE, json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))
    config = exported_config(arrays)
    if encoding is not None:
        config = without_encoding(config) | {"quantization_config": encoding}
    if encoding is not None or get_target(arrays.manifest.target).is_safetensors:
        config = with_classes(with_older_rope_keys(config))
    undone = not arrays.manifest.passthrough  # what is exported is not encoded any more
    is_rounded = encoding is not None and arrays.manifest.is_rounded
    if encoding is not None and is_rounded:
        kept = source_metadata(arrays.companions_folder, arrays.companions)
        write(CARD, served_card(arrays.manifest.raw, encoding["quant_method"], kept, drafts))
    for name, facts in arrays.companions.items():
        if undone and name in ENCODING_FILES:
            continue
        target = name
        if name in (CARD, SOURCE_CARD):
            target = SOURCE_CARD if is_rounded else CARD
        # config.json changes if it had a description of an encoding, one was read from the file that is left out, or it
        # gets older keys.
        if name == CONFIG_FILE and config != (arrays.file_config if undone else arrays.config):
            write(name, json.dumps(config, indent=2))
        else:
            arrays.copy_companion(name, sink, target)
            files[target] = facts
