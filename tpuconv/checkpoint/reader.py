"""A converted checkpoint as a source: reading its arrays. Everything that is read is checked: each chunk, and the index
of each shard, has its checksum.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tpuconv import buckets
from tpuconv.checkpoint.companions import companions_of, copy_companion
from tpuconv.checkpoint.manifest import (
    AS_RELEASED,
    Manifest,
    add_checksums,
    chunk_checksum,
    crc_checksum,
    element_bytes,
    read_manifest,
)
from tpuconv.checkpoint.shard_files import ShardFile, open_shard
from tpuconv.checkpoint.shards import (
    CRC_BYTES,
    INDEX_ENTRY,
    MAX_SLOTS,
    ZARR_FILES,
    ShardedArraySpec,
    checked,
    chunk_values,
)
from tpuconv.checkpoint.stored import StoredArray
from tpuconv.errors import ConfigError, CorruptOutput, UsageError, shorten
from tpuconv.jsonfile import MIB, check, parse
from tpuconv.location import BucketPath, Location
from tpuconv.names import collapse
from tpuconv.notation.layout import Shape
from tpuconv.notation.table import MTP_PARAMETERS, PERIODS, Map, MappingTable
from tpuconv.sources.files import CONFIG_FILE
from tpuconv.sources.headers import CODES, DTYPES, TensorInfo
from tpuconv.sources.reader import Reader
from tpuconv.sources.shard import SourceShard
from tpuconv.sources.source import Source
from tpuconv.storage.hashes import blocks, hash_bytes
from tpuconv.storage.sinks import Sink

MAX_ZARR_BYTES = 1 * MIB
"""The largest zarr.json. A real one has about 900 bytes."""


@dataclass(frozen=True)
class Checkpoint(Source):
    """A checkpoint made by `tpuconv convert` as a source: its arrays are the tensors, each a shard of its own. Chunks
    have checksums, so that nothing is hashed."""

    manifest: Manifest = field(kw_only=True)

    hashed = False

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    @property
    def skipped_before(self) -> Sequence[Mapping[str, Any]]:
        """The tensors that the conversion of the original source skipped."""
        skipped: Sequence[Mapping[str, Any]] = self.manifest.raw["skipped"]
        return skipped

    @cached_property
    def contents_checked(self) -> "Future[None]":
        """The result of `check_contents` for all arrays, which begins beside other work. It raises the same errors."""
        pool = ThreadPoolExecutor(1)
        future = pool.submit(check_contents, self.manifest, self.manifest.arrays)
        pool.shutdown(wait=False)
        return future

    def open(
        self, check_cancelled: Callable[[], None] = lambda: None, *, hashes: Collection[str] | None = None
    ) -> "CheckpointReader":
        """Returns a reader of the arrays. Waits until their contents are checked.

        Raises:
            CorruptOutput, SourceError: see `check_contents`.
        """
        self.contents_checked.result()
        return CheckpointReader(self.manifest)

    def start_checks(self) -> "Sequence[Future[None]]":
        """Begins `check_contents`; see `contents_checked`."""
        return [self.contents_checked]

    @property
    def encoding(self) -> None:
        """None: config.json describes the encoding of the original source."""

    def origin(self, hashes: Mapping[str, str | None]) -> dict[str, Any]:
        """Returns the manifest's description of the original source."""
        return self.manifest.origin

    def files(self, info: TensorInfo) -> list[tuple[Path, int, int]]:
        """Returns the shard files of an array: file, first byte and number of bytes."""
        folder = self.manifest.params / info.name
        if isinstance(folder, BucketPath):
            return []
        return [(path, 0, path.stat().st_size) for path in sorted(folder.glob("c*"))]

    def copy_companion(self, name: str, sink: Sink, target: str) -> None:
        """Copies a file that came with the weights into an output. Raises SourceError if it was changed."""
        copy_companion(self.manifest, name, sink, target, self.companions[name])

    def table(self) -> MappingTable:
        """Returns a table that maps every array to the parameter of the same name."""
        parts = set(self.manifest.parts)
        rows = [
            Map(
                a.name,
                a.name,
                a.axes,
                buffer=a.buffer,
                part=front if (front := a.name.partition(".")[0]) in parts else "",
            )
            for a in self.manifest.arrays.values()
        ]
        periods = {a.shape[0] for a in self.manifest.arrays.values() if a.axes.split()[:1] == [PERIODS]}
        sets = {PERIODS: range(periods.pop())} if len(periods) == 1 else {}
        return MappingTable(rows, release=self.manifest.release, returns=self.manifest.returns, layer_sets=sets)


def check_logits(manifest: Manifest) -> None:
    """Checks that the model of a checkpoint returns logits.

    Raises:
        UsageError: it returns scores or hidden states.
    """
    if manifest.returns:
        raise UsageError(
            f"{manifest.folder} holds a model that returns {manifest.returns}, not logits: it predicts no next token",
            hint="take a checkpoint of a language model; `tpuconv.load` gives a model to call",
        )


def check_mtp(manifest: Manifest) -> None:
    """Checks that a checkpoint has layers for multi-token prediction.

    Raises:
        UsageError: it has none.
    """
    if not any(name.startswith(MTP_PARAMETERS) for name in manifest.arrays):
        raise UsageError(
            f"{manifest.folder} has no layers for multi-token prediction",
            hint="if its release has them, convert that again with `include_mtp=True`",
        )


def open_checkpoint(folder: Location) -> Checkpoint:
    """Opens the checkpoint in a folder.

    Raises:
        UsageError: it was not made by tpuconv, or is quantized already.
        CorruptOutput: its manifest or config.json cannot be understood.
    """
    manifest = read_manifest(folder)
    manifest.check_own()
    check_unquantized(manifest)
    tensors = {
        a.name: TensorInfo(a.name, CODES[a.dtype], a.shape, a.name, 0, prod(a.shape) * element_bytes(a.dtype))
        for a in manifest.arrays.values()
    }
    shards = tuple(SourceShard(a.name, tensors[a.name].nbytes, digest=a.xxh3) for a in manifest.arrays.values())
    return Checkpoint(
        folder, read_checkpoint_config(manifest), tensors, shards, companions=companions_of(manifest), manifest=manifest
    )


def check_unquantized(manifest: Manifest) -> None:
    """Raises UsageError if parameters of a checkpoint were quantized by rules."""
    if manifest.quantization is None:
        return
    is_kept = manifest.quantization["name"] == AS_RELEASED
    raise UsageError(
        f"{manifest.folder} is quantized already, "
        + ("as its release is" if is_kept else f"with {manifest.quantization['name']}"),
        hint='convert the release without `encoding="keep"`'
        if is_kept
        else "give the checkpoint that it was made from",
    )


def read_checkpoint_config(manifest: Manifest) -> dict[str, Any]:
    """Returns the parsed config.json of a checkpoint.

    Raises:
        CorruptOutput: it does not match the manifest.
        ConfigError: it holds no JSON object.
    """
    path = str(manifest.folder / CONFIG_FILE)
    raw = parse(manifest.read_file(CONFIG_FILE), path, ConfigError)
    return dict(check(raw, dict, path, ConfigError))


def read_box(manifest: Manifest, name: str, box: Sequence[slice | int], out: np.ndarray) -> None:
    """Reads a box of an array into `out`.

    Args:
        manifest: of the checkpoint.
        name: of the array.
        box: a slice or an integer for each of the first axes. `out` lacks axes with an integer; axes that `box` lacks
            are read completely.
        out: in the array's dtype.

    Raises:
        CorruptOutput: the array cannot be read, or a chunk does not match its checksum.
        SourceError: the checkpoint was replaced.
    """
    folder, array = manifest.params / name, manifest.arrays[name]
    dropped = tuple(axis for axis, part in enumerate(box) if isinstance(part, int))
    slices = [slice(part, part + 1) if isinstance(part, int) else part for part in box]
    slices += [slice(0, n) for n in array.shape[len(box) :]]
    try:
        _read_box(folder, _stored_spec(manifest, array), slices, np.expand_dims(out, dropped).view(f"u{out.itemsize}"))
    except (OSError, ValueError) as e:
        manifest.check_current()
        raise CorruptOutput(
            f"{folder} cannot be read: {_error_text(e)}",
            hint=f"`tpuconv verify {manifest.folder}` names all damaged arrays",
        ) from None


ReadArray = Callable[[str, int | None], np.ndarray]
"""Reads an array of a checkpoint by its name, or the slice of one layer if its first axis is L."""


def read_array(manifest: Manifest, name: str, layer: int | None) -> np.ndarray:
    """Returns an array of a checkpoint, or the slice of one layer if its first axis is L."""
    stored = manifest.arrays[name]
    out = np.empty(stored.shape if layer is None else stored.shape[1:], stored.dtype)
    read_box(manifest, name, () if layer is None else (layer,), out)
    return out


def _error_text(error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename).name} is missing"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _stored_spec(manifest: Manifest, array: StoredArray) -> ShardedArraySpec:
    name = ZARR_FILES[array.zarr2]
    data = b"".join(islice(blocks(manifest.params / array.name / name, MAX_ZARR_BYTES), 1))
    if manifest.sealed.is_sealed:
        if hash_bytes(data) != manifest.sealed.files.get(manifest.path_of(f"{array.name}/{name}")):
            raise ValueError(f"{name} was changed")
        return array.spec
    try:
        found = parse(data, "zarr.json", CorruptOutput)
        shards = tuple(found["chunk_grid"]["configuration"]["chunk_shape"])
        dtype = np.dtype(array.dtype)
        spec = ShardedArraySpec(array.shape, dtype, shards, array.chunks, compressed=array.is_compressed)
        divide = all(s and s % c == 0 for s, c in zip(shards, array.chunks, strict=True))
        if divide and prod(spec.slots) <= MAX_SLOTS and found == spec.metadata():
            return spec
    except (CorruptOutput, ValueError, KeyError, TypeError):
        pass
    raise ValueError("zarr.json does not describe the array of the manifest")


def _read_box(folder: Location, spec: ShardedArraySpec, box: Sequence[slice], out: np.ndarray) -> None:
    """`out` has unsigned integers of the size of the elements. From a bucket several shards come at a time."""

    def read(index: Shape) -> None:
        slots, sources, targets = [], [], []
        for slot, start in spec.starts(index):
            ends = (min(a + c, b.stop) for a, c, b in zip(start, spec.chunks, box, strict=True))
            ranges = [(max(a, b.start), end) for a, b, end in zip(start, box, ends, strict=True)]
            if all(first < end for first, end in ranges):
                slots.append(slot)
                sources.append(tuple(slice(f - a, e - a) for (f, e), a in zip(ranges, start, strict=True)))
                targets.append(tuple(slice(f - b.start, e - b.start) for (f, e), b in zip(ranges, box, strict=True)))
        if not slots:
            return
        with open_shard(folder / spec.shard_name(index), spec.size_of(index)) as file:
            for chunk, source, target in zip(_read_chunks(file, spec, slots), sources, targets, strict=True):
                out[target] = chunk.view(out.dtype).reshape(spec.chunks)[source]

    indices = list(product(*(range(b.start // n, -(-b.stop // n)) for b, n in zip(box, spec.shards, strict=True))))
    if isinstance(folder, BucketPath) and len(indices) > 1:
        buckets.for_each(read, indices)
    else:
        for index in indices:
            read(index)


def read_checksum(manifest: Manifest, name: str) -> str:
    """Returns the checksum of an array as it is stored, in hex. Every byte is read once, past the page cache.

    Raises:
        CorruptOutput: it cannot be read, or a chunk does not match its crc32c.
    """
    folder, array = manifest.params / name, manifest.arrays[name]
    total = 0
    try:
        spec = _stored_spec(manifest, array)
        for index in product(*map(range, spec.grid)):
            slots, starts = zip(*spec.starts(index), strict=True)
            with open_shard(folder / spec.shard_name(index), spec.size_of(index)) as file:
                for start, chunk in zip(starts, _read_chunks(file, spec, slots), strict=True):
                    total += chunk_checksum(spec.shape, spec.chunks, start, chunk)
    except (OSError, ValueError) as e:
        raise CorruptOutput(f"cannot be read: {_error_text(e)}") from None
    return f"{add_checksums((total,)):016x}"


def check_contents(manifest: Manifest, names: Collection[str]) -> None:
    """Checks that the files of some arrays hold the chunks of the manifest, by the crc32c of each: only a few bytes of
    each chunk are read. Whether the chunks match their crc32c is checked when they are read.

    Raises:
        CorruptOutput: files are missing, or hold other chunks. The arrays are named.
        SourceError: the checkpoint was replaced.
    """
    if not manifest.sealed.is_sealed:
        return
    with ThreadPoolExecutor(BUCKET_CHECKERS if isinstance(manifest.folder, BucketPath) else CHECKERS) as pool:
        faults = [fault for fault in pool.map(lambda name: _content_fault(manifest, name), names) if fault]
    if faults:
        manifest.check_current()
        kinds: dict[str, list[str]] = {}
        for name, fault in faults:
            kinds.setdefault(fault, []).append(name)
        raise CorruptOutput(
            f"{manifest.folder} does not hold the arrays of its manifest",
            details=shorten([f"{pattern}: {what}" for what, names in kinds.items() for pattern in collapse(names)]),
            hint=f"`tpuconv verify {manifest.folder}` names all that is wrong; convert it again",
        )


CHECKERS, BUCKET_CHECKERS = 8, 32
"""Number of threads: each waits most of the time, for the disk or for a bucket."""


def _content_fault(manifest: Manifest, name: str) -> tuple[str, str] | None:
    folder, array = manifest.params / name, manifest.arrays[name]
    total = 0
    try:
        spec = _stored_spec(manifest, array)
        for index in product(*map(range, spec.grid)):
            with open_shard(folder / spec.shard_name(index), spec.size_of(index)) as file:
                file.begin_samples()
                entries = _read_shard_index(file, spec)
                if not spec.is_dense(index, entries, file.size):
                    raise ValueError(f"{spec.shard_name(index)} does not hold the chunks that tpuconv writes")
                ends = (entries[spec.in_array(index)].sum(axis=1) - CRC_BYTES).tolist()
                total += crc_checksum(spec.grid, index, b"".join(file.samples(ends, CRC_BYTES)))
                file.end_samples()
    except (OSError, ValueError) as e:
        return name, _error_text(e)
    return None if f"{add_checksums((total,)):016x}" == array.crc32c else (name, "holds other values")


def _read_chunks(file: ShardFile, spec: ShardedArraySpec, slots: Sequence[int]) -> Iterator[np.ndarray]:
    """Yields the bytes of some chunks of a shard, each valid until the next. Adjacent chunks are read together."""
    file.expect(len(slots) * spec.slot_bytes)
    end = file.size - spec.index_bytes
    index = _read_shard_index(file, spec)
    spans = []
    for slot in slots:
        start, length = map(int, index[slot])
        fits = CRC_BYTES < length <= spec.slot_bytes if spec.compressed else length == spec.slot_bytes
        if not fits or start + length > end:
            raise ValueError(f"a chunk of {file.name} is missing")
        spans.append((start, start + length))
    while spans:
        count = 1
        while count < len(spans) and spans[count][0] == spans[count - 1][1] <= spans[0][0] + file.read_bytes:
            count += 1
        first = spans[0][0]
        data = file.read(first, spans[count - 1][1])
        for start, stop in spans[:count]:
            yield chunk_values(data[start - first : stop - first], spec, f"a chunk of {file.name}")
        del spans[:count]


def _read_shard_index(file: ShardFile, spec: ShardedArraySpec) -> np.ndarray:
    """[chunks, 2]: where each chunk of a shard begins, and how long it is."""
    if spec.zarr2:
        return np.array([[0, file.size]], INDEX_ENTRY)
    if file.size < spec.index_bytes:
        raise ValueError(f"{file.name} is too short")
    data = file.read(file.size - spec.index_bytes, file.size)
    return checked(data, f"the index of {file.name}").copy().view(INDEX_ENTRY).reshape(-1, 2)


class CheckpointReader(Reader):
    """Reads the arrays of a checkpoint, from any number of threads; see `tpuconv.sources.reader.Reader`."""

    def __init__(self, manifest: Manifest):
        self.manifest = manifest

    def read(self, info: TensorInfo, start: int, out: memoryview) -> None:
        """Fills `out` with the bytes of an array from byte `start` on. Complete rows are read."""
        dtype = DTYPES[info.dtype]
        row_bytes = max(1, prod(info.shape[1:]) * dtype.itemsize)
        first, last = start // row_bytes, -(-(start + len(out)) // row_bytes)
        rows = np.empty((last - first, *info.shape[1:]) if info.shape else (), dtype)
        self.read_box(info, [slice(first, last)] if info.shape else [], rows)
        skip = start - first * row_bytes
        out[:] = rows.reshape(-1).view(np.uint8)[skip : skip + len(out)].data

    def read_box(self, info: TensorInfo, box: Sequence[slice], out: np.ndarray) -> None:
        """Fills `out` with a box of an array; see the function `read_box`."""
        read_box(self.manifest, info.name, box, out)

    def hash_of(self, shard: str) -> None:
        """None: chunks have checksums, which are checked when they are read."""

    def check_unchanged(self, shards: Collection[str] | None = None) -> None:
        """Raises SourceError if the checkpoint was replaced."""
        self.manifest.check_current()

    def close(self) -> None:
        """Nothing stays open."""
