"""The manifest `tpuconv.json`: where a checkpoint comes from, how it was made, and what every array and file must hold.

The checksum of an array is the sum, modulo 2^64, of xxh3_64(chunk, seed=i) over its chunks. i counts the chunks in
row-major order of their grid; a chunk is its row-major bytes, padded with zeros outside of the array. The sum can be
computed in any order and in parts. For an array of one chunk it is xxh3_64 of its bytes.

A second checksum is the sum over the array's shards of xxh3_64(crcs, seed=i). crcs are the crc32c that follow the
chunks in the file, in the order of the file; i counts the shards in row-major order. It tells, from a few bytes,
whether a file holds the chunks of the manifest. Whether the chunks match their crc32c is checked by those who read
them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import ml_dtypes  # noqa: F401  (numpy learns bfloat16 by it)
import numpy as np
import xxhash

from tpuconv.checkpoint.schema import CHECKPOINT_SCHEMA
from tpuconv.checkpoint.stored import StoredArray, array_fault, stored_arrays
from tpuconv.encodings.passthrough_rows import Passthrough
from tpuconv.errors import CorruptOutput, UsageError
from tpuconv.jsonfile import MAX_BYTES, check, read_bytes, short
from tpuconv.location import Location
from tpuconv.names import MANIFEST, OWN_TARGET, QVALUE, SCALE, ZERO_POINT
from tpuconv.notation.layout import Shape
from tpuconv.notation.release import Release
from tpuconv.storage.hashes import hash_bytes
from tpuconv.storage.places import is_there, size_faults
from tpuconv.storage.sealed import CHECKPOINT, MANIFEST_FORMAT, Sealed, check_current, raise_damage, read_sealed

PARAMS = "params"
"""The folder of the Orbax checkpoint, unless the target has it elsewhere."""
ORBAX_FILES = ("_METADATA", "_CHECKPOINT_METADATA", "commit_success.txt")
"""The files that make a folder of arrays an Orbax checkpoint."""
AS_RELEASED = "as released"
"""The name of the quantization of parameters that stay encoded, where others have the name of a config."""
LIBRARIES = ("tpuconv", "numpy", "ml_dtypes")
MAX_LAYERS = 1 << 20


def chunk_checksum(shape: Shape, chunks: Shape, start: Shape, chunk: np.ndarray) -> int:
    """Returns the part of the chunk at `start` in the checksum of its array. `chunk` is contiguous and of the full
    shape `chunks`."""
    index = 0
    for n, c, first in zip(shape, chunks, start, strict=True):
        index = index * -(-n // c) + first // c
    return xxhash.xxh3_64_intdigest(chunk.reshape(-1).view(np.uint8).data, seed=index)


def crc_checksum(grid: Shape, index: Shape, crcs: bytes) -> int:
    """Returns the part of a shard, at `index` in the grid of shards, in the sum over the crc32c of its chunks,
    `crcs`."""
    number = 0
    for n, i in zip(grid, index, strict=True):
        number = number * n + i
    return xxhash.xxh3_64_intdigest(crcs, seed=number)


def add_checksums(parts: Iterable[int]) -> int:
    """Returns the sum of parts of a checksum, modulo 2^64."""
    return sum(parts) % (1 << 64)


def add_statistics(total: dict[str, float], part: Mapping[str, float]) -> None:
    """Adds the statistics of a part of a parameter to the statistics of other parts."""
    for name, value in part.items():
        total[name] = total.get(name, 0) + value


@dataclass(frozen=True)
class Manifest:
    """A manifest that was read. `raw` is all of it."""

    folder: Location
    sealed: Sealed
    arrays: Mapping[str, StoredArray]

    @property
    def raw(self) -> Mapping[str, Any]:
        """The parsed JSON."""
        return self.sealed.raw

    def check_current(self) -> None:
        """Checks that the folder still holds this checkpoint.

        Raises:
            SourceError: it was replaced, so that what was read since may be of both.
        """
        check_current(self.folder, self.sealed)

    def read_file(self, name: str) -> bytes:
        """Returns the bytes of a small file beside the arrays.

        Raises:
            CorruptOutput: it cannot be read, or does not match the manifest.
            SourceError: the checkpoint was replaced.
        """
        path = self.folder / name
        try:
            data = read_bytes(path, MAX_BYTES, CorruptOutput)
        except CorruptOutput as e:
            self.check_current()
            raise CorruptOutput(e.message, hint="copy it from the source, or convert again") from None
        if self.sealed.is_sealed and hash_bytes(data) != self.sealed.files.get(name):
            self.check_current()
            raise CorruptOutput(
                f"{path} was changed since the checkpoint was made",
                hint=f"if that was intended, run `tpuconv verify --update {self.folder}`",
            )
        return data

    def find_file(self, name: str) -> bytes | None:
        """Returns the bytes of a small file beside the arrays; None if the checkpoint has no such file.

        Raises:
            CorruptOutput, SourceError: see `read_file`.
        """
        has = name in self.sealed.files if self.sealed.is_sealed else is_there(self.folder / name)
        return self.read_file(name) if has else None

    def size_faults(self) -> Iterator[tuple[str, str]]:
        """Yields each file, by its path in the folder, that is missing or has the wrong size, and what is wrong. Reads
        no contents. Manifests of format 1 list no files: only the folders of arrays are checked."""
        if not self.sealed.is_sealed:
            missing = (name for name in self.arrays if not is_there(self.params / name))
            yield from ((self.path_of(name), "is missing") for name in missing)
            return
        yield from size_faults(self.folder, self.file_sizes())

    def file_sizes(self) -> dict[str, int]:
        """Returns the size of each file but the manifest, by its path in the folder. A manifest of format 1 lists
        none."""
        if not self.sealed.is_sealed:
            return {}
        sizes = {name: int(facts["bytes"]) for name, facts in self.sealed.files.items()}
        for array in self.arrays.values():
            sizes |= {self.path_of(f"{array.name}/{name}"): n for name, n in array.spec.shard_sizes().items()}
        return sizes

    @property
    def pathways(self) -> bool:
        """True if the arrays have zarr's format 2, as Pathways reads it."""
        return any(array.zarr2 for array in self.arrays.values())

    @property
    def chunk_memory(self) -> int:
        """The bytes that a thread needs to read a box, besides the box: a chunk for Pathways is read completely."""
        return max((array.spec.shard_bytes for array in self.arrays.values() if array.zarr2), default=0)

    @property
    def params(self) -> Location:
        """The folder of the Orbax checkpoint."""
        return self.folder / str(self.raw.get("folder", PARAMS))

    def path_of(self, name: str) -> str:
        """Returns the path in the folder of a file or folder of the Orbax checkpoint."""
        return path_in(self.raw.get("folder", PARAMS), name)

    def is_of_arrays(self, path: str) -> bool:
        """Returns True if a path in the folder belongs to the Orbax checkpoint, not to the files beside the arrays."""
        top = self.path_of("").partition("/")[0]
        return path.startswith(f"{top}/") if top else "/" in path or path in ORBAX_FILES

    @property
    def target(self) -> str:
        """The program that the checkpoint is for."""
        return str(self.raw["options"].get("target", OWN_TARGET))

    @property
    def origin(self) -> dict[str, Any]:
        """What an output that is made of this checkpoint says about the source. Older manifests named the folder, and
        had stamps of its files or versions of objects, which are of the place."""
        source = {key: value for key, value in self.raw["source"].items() if key != "folder"}
        shards = {
            name: {key: value for key, value in facts.items() if key not in ("stamp", "version")}
            for name, facts in source["shards"].items()
        }
        return source | {"shards": shards}

    @property
    def source_names(self) -> set[str]:
        """The names of the tensors that the arrays were made from."""
        return {name for array in self.arrays.values() for name in array.sources}

    def check_own(self) -> None:
        """Checks that the tree is ours.

        Raises:
            UsageError: the checkpoint is for another program, or holds LoRA alone.
        """
        self._check_model()
        if self.target != OWN_TARGET:
            raise UsageError(
                f"{self.folder} is a checkpoint for {self.target}, with the names of that program",
                hint="convert without `target=`, or `tpuconv export` this and convert that",
            )

    @property
    def family(self) -> str:
        """The name of the model's family."""
        return str(self.raw["family"])

    @property
    def release(self) -> Release:
        """How the source named and grouped its tensors."""
        return Release(**self.raw.get("release", {}))

    @property
    def has_variant(self) -> bool:
        """Whether an older tpuconv wrote it, which kept a name in place of `release`. The names of the sources tell."""
        return "variant" in self.raw

    @property
    def returns(self) -> str:
        """The output of a model that does not return logits: see `MappingTable.returns`."""
        return str(self.raw.get("returns", ""))

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of a multimodal model beside its text model that the checkpoint has."""
        return tuple(self.raw.get("parts", ()))

    @property
    def scan_layers(self) -> bool:
        """True if the layers are stacked in one array each."""
        return bool(self.raw["options"]["scan_layers"])

    @property
    def include_mtp(self) -> bool:
        """True if the checkpoint has the layers that predict further tokens."""
        return bool(self.raw["options"].get("include_mtp"))

    @property
    def allow_config(self) -> tuple[str, ...]:
        """The keys of config.json that are read as if they were not there."""
        return tuple(self.raw["options"].get("allow_config", ()))

    @property
    def draft_for(self) -> str | None:
        """The name of the target of a draft, if it was converted with one."""
        name: str | None = self.raw["options"].get("draft_for")
        return name

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """The rules of the quantization, and the result for each parameter. Without rules, the parameters are encoded
        as they were released. None if no parameter is quantized."""
        quantization: Mapping[str, Any] | None = self.raw.get("quantization")
        return quantization

    @property
    def is_rounded(self) -> bool:
        """True if parameters were quantized by rules, so that their values differ from the source."""
        return self.quantization is not None and "rules" in self.quantization

    @property
    def passthrough(self) -> Mapping[str, Any]:
        """The parameters that are encoded as they were released, with their facts."""
        parameters = (self.quantization or {}).get("parameters", {})
        return {name: facts for name, facts in parameters.items() if "kept" in facts}

    @property
    def dtype(self) -> str:
        """The dtype in which the model computes: the dtype of most of its bytes, without quantized parameters."""
        total: dict[str, int] = {}
        for array in self.arrays.values():
            if array.name.endswith((QVALUE, SCALE, ZERO_POINT)):
                continue
            total[array.dtype] = total.get(array.dtype, 0) + prod(array.shape) * element_bytes(array.dtype)
        return max(total, key=lambda name: total[name])

    @property
    def layers(self) -> list[int] | None:
        """The first and last layer, if only a part of the model was converted; else None."""
        layers: list[int] | None = self.raw["options"]["layers"]
        return layers

    def check_complete(self) -> None:
        """Checks that the complete model was converted.

        Raises:
            UsageError: only a part of its layers was, or LoRA alone.
        """
        self._check_model()
        if self.layers is not None:
            raise UsageError(
                f"{self.folder} holds only layers {self.layers[0]} to {self.layers[1]}: a trial, not a complete model",
                hint="convert without `layers=`",
            )

    @property
    def holds_lora(self) -> bool:
        """True if an adapter was kept, so that there is LoRA alone."""
        return bool(self.raw["options"].get("keep_adapter"))

    def _check_model(self) -> None:
        if self.holds_lora:
            raise UsageError(
                f"{self.folder} holds LoRA alone, as a trainer loads it beside the model",
                hint="convert without `keep_adapter=`, which merges the adapter into the model; `export` with "
                "`adapter=` and `config=` gives the adapter back",
            )

    @property
    def layer_range(self) -> range | None:
        """The converted layers, if only a part of the model was converted; else None."""
        return None if self.layers is None else range(self.layers[0], self.layers[1] + 1)


def path_in(folder: str, name: str) -> str:
    """Returns the path of a name in a folder, of which "." is the output itself."""
    return name if folder == "." else f"{folder}/{name}"


def element_bits(dtype: str) -> int:
    """Returns the number of bits of an element that are used."""
    found = re.match(r"u?int([1-7])$|float([1-7])_", dtype)
    return int(found[1] or found[2]) if found else 8 * element_bytes(dtype)


def element_bytes(dtype: str) -> int:
    """Returns the number of bytes of an element as numpy holds it."""
    return np.dtype(dtype).itemsize


def passthrough_facts(passthrough: Mapping[str, Passthrough]) -> dict[str, Any]:
    """Returns the manifest's description of passthrough parameters."""
    titles = dict.fromkeys(parameter.scheme.title for parameter in passthrough.values())
    return {
        "name": AS_RELEASED,
        "summary": f"codes and scales as released: {', '.join(titles)}",
        "parameters": {name: parameter.to_json() for name, parameter in passthrough.items()},
    }


def read_manifest(folder: Location) -> Manifest:
    """Reads the manifest of a converted checkpoint.

    Raises:
        UsageError: the folder has none.
        CorruptOutput: the manifest cannot be understood, or does not match its seal.
    """
    return manifest_of(folder, read_sealed(folder))


def check_checkpoint_files(folder: Location) -> Sealed:
    """Returns the manifest of an existing checkpoint, whose files have the sizes that it lists.

    Raises:
        UsageError: the folder has none.
        CorruptOutput: they have not, or the manifest cannot be read.
    """
    manifest = read_manifest(folder)
    raise_damage(folder, manifest.size_faults())
    return manifest.sealed


def manifest_of(folder: Location, sealed: Sealed) -> Manifest:
    """Returns the manifest of a converted checkpoint, whose file was read. Raises as `read_manifest` does."""
    raw, path = sealed.raw, folder / MANIFEST
    if raw["format"] > MANIFEST_FORMAT:
        raise UsageError(f"{folder} was made by a newer tpuconv (format {raw['format']})", hint="update tpuconv")
    if raw.get("kind", CHECKPOINT) != CHECKPOINT:
        raise UsageError(
            f"{folder} is a checkpoint for huggingface: it holds safetensors",
            hint="convert it with `tpuconv convert`, or give the checkpoint that it was made from",
        )
    check(raw, CHECKPOINT_SCHEMA, str(path), CorruptOutput)
    arrays = stored_arrays(raw)
    inside = raw.get("folder", PARAMS)
    if inside != "." and any(part in ("", ".", "..") for part in inside.split("/")):
        raise CorruptOutput(f"{path}: folder is not a folder in the output, but {short(inside)}")
    layers = raw["options"]["layers"]
    if layers is not None and not (len(layers) == 2 and layers[0] <= layers[1] <= MAX_LAYERS):
        raise CorruptOutput(f"{path}: options.layers is not a range of layers, but {short(layers)}")
    for name, array in arrays.items():
        if fault := array_fault(array, sealed.is_sealed, raw):
            raise CorruptOutput(f"{path}: arrays.{name} {fault}", hint="move the checkpoint away, and convert it again")
    if "target" not in raw["options"]:  # others have names of their own for the parts of a parameter
        for name in (raw.get("quantization") or {}).get("parameters", ()):
            if fault := _quantized_fault(name, arrays, raw["quantization"]):
                raise CorruptOutput(f"{path}: quantization.parameters.{name} {fault}")
    return Manifest(folder, sealed, arrays)


def _quantized_fault(name: str, arrays: Mapping[str, StoredArray], quantization: Mapping[str, Any]) -> str | None:
    """Returns the fault of a quantized parameter; None if it has none."""
    values, scale, facts = arrays.get(name + QVALUE), arrays.get(name + SCALE), quantization["parameters"][name]
    if values is None or scale is None:
        return "has no quantized values or no scales in arrays"
    if "float" not in scale.dtype:
        return f"has scales of the dtype {scale.dtype}"
    if len(facts["tiles"]) != len(values.shape):
        return f"has the tiles {facts['tiles']} for values of shape {values.shape}"
    if "rule" in facts and facts["rule"] >= len(quantization["rules"]):
        return f"has rule {facts['rule']} of {len(quantization['rules'])}"
    return None
