"""The source checkpoint: safetensors headers read strictly, weights read by offset.

Weights are never memory-mapped: a file that shrinks under a map kills the process, where a read raises an error. What
the safetensors library lets pass and a converter must not (a tensor twice, overlapping or missing ranges, names that
climb out of the folder) is refused here.
"""

import hashlib
import os
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import xxhash

from tpuconv.errors import ConfigError, SourceError, UsageError, shorten
from tpuconv.jsonfile import MAX_BYTES, Each, check, opened, parse, read_bytes, stand_in
from tpuconv.layout import Shape
from tpuconv.names import MANIFEST, collapse
from tpuconv.sources.companions import check_inside, find_companions
from tpuconv.sources.damaged import check_promise, sha256_of
from tpuconv.storage.hashes import stamp
from tpuconv.storage.sealed import copy_file
from tpuconv.text import has_surrogates, plain

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""Safetensors' names of element types (safetensors README, "Format")."""

MAX_HEADER_BYTES = 32 << 20  # the largest real ones have 2 MiB; a parser bomb has 100 MiB
MAX_NAME_LENGTH = 512
MAX_AXES = 64
MAX_TENSORS = 250_000
"""Of one shard; the largest real checkpoints have as many in all of theirs."""
MAX_SIGNS = {b"{": MAX_TENSORS + 2, b":": 5 * MAX_TENSORS, b",": 10 * MAX_TENSORS}
"""How often signs occur in a header of so many tensors: each is an object of three keys and a few numbers."""
MAX_INDEX_BYTES = 64 << 20
MAX_NAMES_TO_COLLAPSE = 10_000
HASH_BLOCK = 4 << 20

_SHARD_NAME = re.compile(r"[^/\\\0]+\.safetensors")

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the source: where its bytes are. `offset` counts from the start of the shard's file."""

    name: str
    dtype: str
    shape: Shape
    shard: str
    offset: int
    nbytes: int

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Shard:
    """One safetensors file. `digest` is of its header and of samples of its values, `stamp` of what the file system
    says of it, which differs once it was written to or is another file; `sha256` is what the Hub promised."""

    name: str
    size: int
    digest: str = ""
    stamp: str = ""
    sha256: str | None = None


SAMPLES, SAMPLE_BYTES = 16, 4096
"""Of the values of a shard: with the header they tell two checkpoints of one architecture apart."""


def _hash_stamp(status: os.stat_result) -> str:
    return xxhash.xxh3_64_hexdigest(repr(stamp(status)).encode())


def read_digest(path: Path) -> tuple[str, str]:
    """The digest and the stamp of a shard.

    Raises:
        SourceError: it cannot be read.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            size = status.st_size
            start = 8 + int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
            digest = xxhash.xxh3_128(os.pread(file.fileno(), min(start, 8 + MAX_HEADER_BYTES), 0))
            for i in range(SAMPLES):
                at = start + max(0, size - start - SAMPLE_BYTES) * i // (SAMPLES - 1)
                digest.update(os.pread(file.fileno(), SAMPLE_BYTES, at))
            return digest.hexdigest(), _hash_stamp(status)
    except OSError as e:
        raise SourceError(
            f"{path} cannot be read: {e.strerror}", hint="check the file, the disk and its permissions"
        ) from None


ENCODING_KEYS = ("quantization_config", "compression_config")
"""Of config.json; the second one older versions of compressed-tensors wrote."""

CONFIG_FILE = "config.json"
ENCODING_FILE = "hf_quant_config.json"
"""In which ModelOpt says how weights are encoded; older releases have it in the place of config.json's key."""


def encoding_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a config.json says of how the weights are encoded."""
    return next((config[key] for key in ENCODING_KEYS if config.get(key) is not None), None)


VERIFIED = "by the sha256 that the Hub promises"
UNVERIFIED = "unverified: nobody promised a hash"
UNREAD = "unverified: only a part of it was read"
"""What a manifest says of whether the bytes of the source are those that were published."""


@dataclass(frozen=True)
class Source:
    """A checkpoint folder, its headers read and checked. `repo` and `commit` say where on the Hub it came from."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    shards: tuple[Shard, ...]
    repo: str | None = None
    commit: str | None = None
    companions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The files that go with the weights, with size and hash as a manifest has them."""

    hashed = True
    """Whether its shards are hashed while they are read."""

    @property
    def encoding(self) -> Mapping[str, Any] | None:
        """What config.json says of how the weights are encoded."""
        return encoding_of(self.config)

    def origin(self, sha256: Mapping[str, str | None]) -> dict[str, Any]:
        """What the manifest says of it."""
        folder = self.folder.resolve()  # a name that is no text has no place in JSON
        return {
            "name": plain(self.name),
            "repo": self.repo,
            "commit": self.commit,
            "folder": None if self.repo or has_surrogates(str(folder)) else str(folder),
            "shards": {s.name: {"bytes": s.size, "sha256": sha256[s.name], "stamp": s.stamp} for s in self.shards},
            "verified": self._verified(sha256),
            "tensors": len(self.tensors),
            "bytes": self.nbytes,
        }

    def _verified(self, sha256: Mapping[str, str | None]) -> str:
        if not all(s.sha256 for s in self.shards):
            return UNVERIFIED
        return VERIFIED if all(sha256[s.name] == s.sha256 for s in self.shards) else UNREAD

    def files(self, info: TensorInfo) -> list[tuple[Path, int, int]]:
        """Where a tensor lies: file, first byte, number of bytes."""
        return [(self.folder / info.shard, info.offset, info.nbytes)]

    def copy_companion(self, name: str, target: Path) -> None:
        """Copies a file that goes with the weights. Raises SourceError if it changed since."""
        copy_file(self.folder / name, target, self.companions[name])

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def name(self) -> str:
        return self.repo.split("/")[-1] if self.repo else self.folder.resolve().name


def open_source(
    folder: Path, *, repo: str | None = None, commit: str | None = None, sha256: Mapping[str, str] | None = None
) -> Source:
    """Reads config.json, the index and every header.

    Raises:
        UsageError: the folder does not exist or is no checkpoint.
        ConfigError: config.json is missing or no JSON object.
        SourceError: the index or a header is broken, incomplete or unsafe; all that were found are named.
        DamagedDownload: such a file has not the `sha256` that is promised of it.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder")
    if repo is None:
        check_inside(folder, [CONFIG_FILE, INDEX_FILE])
    shard_names, weight_map = _read_index(folder)
    if repo is None:
        check_inside(folder, shard_names)
    config = read_config(folder / CONFIG_FILE)
    faults: list[str] = []
    tensors: dict[str, TensorInfo] = {}
    shards = []
    for name in shard_names:
        try:
            size, _, infos = read_header(folder / name)
            digest, own_stamp = read_digest(folder / name)
        except SourceError as error:
            check_promise(folder / name, (sha256 or {}).get(name))  # a download that is damaged is downloaded again
            faults += [error.message, *error.details]
            continue
        shards.append(Shard(name, size, digest, own_stamp, (sha256 or {}).get(name)))
        for info in infos:
            if info.name in tensors:
                faults.append(f"{info.name} is in {tensors[info.name].shard} and in {name}")
            elif weight_map is not None and weight_map.get(info.name) != name:
                place = weight_map.get(info.name)
                faults.append(f"{info.name} is in {name}; the index {f'says {place}' if place else 'does not name it'}")
            tensors[info.name] = info
    if not faults:
        placed = (weight_map or {}).items()
        faults += [f"{name} is not in {shard}, where the index has it" for name, shard in placed if name not in tensors]
    if faults:
        raise SourceError(
            f"the checkpoint in {folder} cannot be read safely: {len(faults)} faults"
            if len(faults) > 1
            else f"the checkpoint in {folder} cannot be read safely",
            details=shorten(faults),
            hint="download it again, or ask where it comes from",
        )
    companions = find_companions(folder, trusted=repo is not None)
    return Source(folder, config, tensors, tuple(shards), repo, commit, companions)


def read_json(path: Path, error: type[ConfigError] | type[SourceError], limit: int = MAX_BYTES) -> dict[str, Any]:
    """A JSON file that must hold an object without duplicate keys.

    Raises:
        error: it is missing, or holds no such object.
        SourceError: it cannot be read, is larger than `limit` bytes, or something else lies in its place.
    """
    if not os.path.lexists(path):
        raise error(f"{path} is missing", hint="give a folder that holds all files of the model, or its Hub id")
    value = parse(read_bytes(path, limit, SourceError), str(path), error)
    if not isinstance(value, dict):
        raise error(f"{path} holds no JSON object")
    return value


def read_config(path: Path) -> dict[str, Any]:
    """A config.json; where it does not say how weights are encoded, with what ModelOpt's own file beside it says.

    Raises:
        ConfigError: one of them is no JSON object, or config.json is missing.
        SourceError: one of them cannot be read, or something else lies in its place.
    """
    raw, beside = read_json(path, ConfigError), path.with_name(ENCODING_FILE)
    return with_encoding(raw, beside) if path.name == CONFIG_FILE and os.path.lexists(beside) else raw


def with_encoding(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """A parsed config.json; where it does not say how weights are encoded, with what ModelOpt's own file says.

    Raises:
        ConfigError: the file is no JSON object.
    """
    if encoding_of(raw) is not None:
        return raw
    return raw | {ENCODING_KEYS[0]: {"quant_method": "modelopt", **read_json(path, ConfigError)}}


def _read_index(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """The names of the shards and, where there is an index, the shard of every tensor.

    Raises:
        UsageError: the folder holds no safetensors.
        SourceError: the folder cannot be listed, the index is missing or broken, or shards that it names are.
    """
    try:
        names = set(os.listdir(folder))  # once: an index may name very many files
    except OSError as e:
        raise SourceError(f"{folder} cannot be read: {e.strerror}") from None
    if INDEX_FILE not in names:
        if SINGLE_FILE in names:
            return [SINGLE_FILE], None
        shards = sorted(name for name in names if name.endswith(".safetensors"))
        if not shards and MANIFEST in names:
            raise UsageError(
                f"{folder} is converted already",
                hint="`tpuconv quantize` makes a smaller one of it, `tpuconv export` safetensors",
            )
        if not shards:
            raise UsageError(
                f"{folder} holds no {SINGLE_FILE} and no {INDEX_FILE}",
                hint="a Hugging Face checkpoint in safetensors is needed",
            )
        raise SourceError(
            f"{INDEX_FILE} is missing in {folder}, which holds {len(shards)} safetensors files",
            hint="without the index nobody knows whether files are missing: download the checkpoint again",
        )
    weight_map = read_weight_map(folder / INDEX_FILE)
    shards = sorted(set(weight_map.values()))
    missing = [s for s in shards if s not in names]
    if missing:
        raise SourceError(
            f"{len(missing)} of {len(shards)} shards are missing in {folder}",
            details=describe_missing(weight_map, missing),
            hint="download them; if this is a Hub checkpoint, give its id instead of the folder",
        )
    return shards, weight_map


def describe_missing(weight_map: Mapping[str, str], missing: Sequence[str]) -> list[str]:
    """Shards that are missing, and the patterns of the tensors that an index has in them."""
    shards = set(missing)
    names = list(islice((name for name, shard in weight_map.items() if shard in shards), MAX_NAMES_TO_COLLAPSE))
    patterns = [f"{pattern}  ({len(own)} tensors)" for pattern, own in collapse(names).items()]
    more = ["... and more"] if len(names) == MAX_NAMES_TO_COLLAPSE else []
    return [*shorten(missing), "the index has these tensors in them:", *shorten(patterns), *more]


def changed_shards(folder: Path, known: Mapping[str, Mapping[str, Any]]) -> list[str] | None:
    """The shards of a source that are not those that a manifest knows by `bytes`, `stamp` and `sha256`, or are missing;
    None where it cannot be told, as the file is another one and no hash of it is known. A shard with another stamp is
    read as a whole.

    Raises:
        UsageError: the folder holds no safetensors.
        SourceError: the index or a shard cannot be read.
    """
    changed, is_known = [name for name in _shard_names(folder) if name not in known], True
    for name, facts in known.items():
        try:
            status = os.stat(folder / name)
        except OSError:
            changed.append(name)
            continue
        if status.st_size != facts["bytes"]:
            changed.append(name)
        elif _hash_stamp(status) == facts.get("stamp"):
            continue
        elif facts["sha256"] is None:
            is_known = False
        elif sha256_of(folder / name) != facts["sha256"]:
            changed.append(name)
    return sorted(changed) if changed or is_known else None


def _shard_names(folder: Path) -> set[str]:
    if (folder / INDEX_FILE).exists():
        return set(read_weight_map(folder / INDEX_FILE).values())
    return {SINGLE_FILE}


def read_weight_map(index: Path) -> dict[str, str]:
    """The shard of every tensor, as an index has it: names of safetensors files of its folder.

    Raises:
        SourceError: it has no such map, or names anything else.
    """
    weight_map = read_json(index, SourceError, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(
            f"{index} names no shards: it has no weight_map from names to files", hint="do not trust this checkpoint"
        )
    unsafe = {repr(s)[:80] for s in weight_map.values() if not isinstance(s, str) or not _SHARD_NAME.fullmatch(s)}
    if unsafe:
        raise SourceError(
            f"{index} names files that are no safetensors file of its folder",
            details=shorten(sorted(unsafe)),
            hint="do not trust this checkpoint",
        )
    return weight_map


def read_header(path: Path) -> tuple[int, int, list[TensorInfo]]:
    """Size and modification time (ns) of a safetensors file and its tensors in file order.

    Raises:
        SourceError: the file cannot be read, or anything in the header is not exactly as the format says.
    """
    with opened(path, SourceError) as (fd, status):
        start = os.pread(fd, 64, 0)
        length = int.from_bytes(start[:8], "little")
        if len(start) < 8 or 8 + length > status.st_size:
            if other := stand_in(start):
                raise SourceError(f"{path} is {other}")
            raise SourceError(f"{path} is truncated: {status.st_size} bytes do not hold its header")
        if length > MAX_HEADER_BYTES:
            raise SourceError(f"{path} has a header of {length} bytes, more than any real checkpoint")
        raw = os.pread(fd, length, 8)
    what = f"the header of {path}"
    if any(raw.count(sign) > most for sign, most in MAX_SIGNS.items()):  # before a parser makes objects of them
        raise SourceError(f"{what} describes more than {MAX_TENSORS} tensors, more than any real checkpoint")
    if not raw.startswith(b"{"):
        raise SourceError(f"{what} is no JSON object")
    header = parse(raw, what, SourceError, constants=False)
    metadata = header.pop("__metadata__", {})
    check(metadata, Each(str), f"{what}, __metadata__", SourceError)
    infos, faults = [], []
    for name, value in header.items():
        try:
            infos.append(_tensor_info(name, value, path.name, 8 + length))
        except ValueError as e:
            faults.append(f"{path.name}: {e}")
    infos.sort(key=lambda info: (info.offset, info.nbytes))
    at = 8 + length
    for info in infos:
        if info.offset != at:
            faults.append(
                f"{path.name}: {info.name} {'overlaps the one before' if info.offset < at else 'follows a gap'}"
            )
        at = info.offset + info.nbytes
    if not faults and at != status.st_size:
        fault = "is truncated" if at > status.st_size else "has bytes that no tensor owns"
        faults.append(f"{path.name} {fault}: its header describes {at} bytes, the file has {status.st_size}")
    if faults:
        raise SourceError(faults[0], details=shorten(faults[1:]))
    return status.st_size, status.st_mtime_ns, infos


def _tensor_info(name: str, value: Any, shard: str, data_start: int) -> TensorInfo:
    if not name.isprintable() or ".." in name or not 0 < len(name) <= MAX_NAME_LENGTH:
        raise ValueError(f"unsafe tensor name {name[:80]!r}")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} is not described by dtype, shape and data_offsets alone")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name} has the unknown dtype {str(dtype)[:80]!r}")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
            raise ValueError(f"{name} has a shape or offsets that are no list of sizes")
    if len(shape) > MAX_AXES:
        raise ValueError(f"{name} has {len(shape)} axes")
    if len(offsets) != 2 or offsets[1] - offsets[0] != prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{name}: offsets {offsets[:3]} do not hold {dtype} {shape}")
    return TensorInfo(name, dtype, tuple(shape), shard, data_start + offsets[0], offsets[1] - offsets[0])


@dataclass
class _File:
    """An open shard. `digest` has seen its first `hashed` bytes."""

    fd: int
    size: int
    digest: Any = field(default_factory=hashlib.sha256)
    hashed: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


WAIT = "wait until nothing writes to the source, then run again"


class Reader:
    """Reads weights of a source from any number of threads, and hashes its shards while it does: each byte is fetched
    from the disk once. `check_cancelled` raises when the work is to stop. Where only a part is read, nothing
    is hashed (`hashes`)."""

    def __init__(self, source: Source, check_cancelled: Callable[[], None] = lambda: None, *, hashes: bool = True):
        self.source = source
        self.hashes = hashes
        self._check_cancelled = check_cancelled
        self._shards = {shard.name: shard for shard in source.shards}
        self._files: dict[str, _File] = {}
        self._lock = threading.Lock()

    def read(self, info: TensorInfo, start: int, out: memoryview) -> None:
        """Fills `out` with the bytes of a tensor from byte `start` of it on."""
        file, at = self._open(info.shard), info.offset + start
        with file.lock:
            first = self.hashes and file.hashed <= at
            if first:
                self._hash_to(file, info.shard, at)
                self._fill(file, info.shard, at, out)
                file.digest.update(out)
                file.hashed = at + len(out)
        if not first:
            self._fill(file, info.shard, at, out)
        # It will not be needed again; fresh pages for the cache cost more than the read itself.
        os.posix_fadvise(file.fd, at, len(out), os.POSIX_FADV_DONTNEED)

    def sha256(self, shard: str) -> str:
        """The hash of a whole shard; reads what was not read yet."""
        file = self._open(shard)
        with file.lock:
            self._hash_to(file, shard, file.size)
            return str(file.digest.hexdigest())

    def check_unchanged(self, shards: Collection[str] | None = None) -> None:
        """Raises SourceError if one of the shards, all where None, is not the file any more that was planned from."""
        for shard in self.source.shards:
            if shards is not None and shard.name not in shards:
                continue
            try:
                status = os.stat(self.source.folder / shard.name)
            except OSError as e:
                raise SourceError(f"{self.source.folder / shard.name} went away: {e.strerror}", hint=WAIT) from None
            self._check_stamp(shard, status)

    def _check_stamp(self, shard: Shard, status: os.stat_result) -> None:
        if _hash_stamp(status) != shard.stamp:
            raise SourceError(f"{self.source.folder / shard.name} changed while it was converted", hint=WAIT)

    def _hash_to(self, file: _File, shard: str, end: int) -> None:
        buffer = memoryview(bytearray(min(HASH_BLOCK, end - file.hashed)))
        while file.hashed < end:
            self._check_cancelled()
            block = buffer[: end - file.hashed]
            self._fill(file, shard, file.hashed, block)
            file.digest.update(block)
            file.hashed += len(block)

    def _fill(self, file: _File, shard: str, at: int, out: memoryview) -> None:
        while out:
            try:
                n = os.preadv(file.fd, [out], at)
            except OSError as e:
                raise SourceError(
                    f"{self.source.folder / shard} cannot be read at byte {at}: {e.strerror}",
                    hint="check the disk; a rerun goes on where this one stopped",
                ) from None
            if n == 0:
                raise SourceError(f"{self.source.folder / shard} became shorter while it was read", hint=WAIT)
            out, at = out[n:], at + n

    def _open(self, shard: str) -> _File:
        with self._lock:
            if shard not in self._files:
                try:
                    fd = os.open(self.source.folder / shard, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as e:
                    raise SourceError(f"{self.source.folder / shard} cannot be read: {e.strerror}", hint=WAIT) from None
                status = os.fstat(fd)
                self._files[shard] = _File(fd, status.st_size)
                self._check_stamp(self._shards[shard], status)
            return self._files[shard]

    def close(self) -> None:
        for file in self._files.values():
            os.close(file.fd)
        self._files.clear()
