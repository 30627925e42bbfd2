"""The source checkpoint: safetensors headers read strictly, weights read by offset.

Weights are never memory-mapped: a file that shrinks under a map kills the process, where a read raises an error. What
the safetensors library lets pass and a converter must not (a tensor twice, overlapping or missing ranges, names that
climb out of the folder) is refused here.
"""

import hashlib
import json
import os
import re
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tpuconv.errors import ConfigError, SourceError, UsageError
from tpuconv.layout import Shape

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
HASH_BLOCK = 4 << 20

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
    """One safetensors file. `size` and `mtime_ns` tell whether it changed since; `sha256` is what the Hub promised."""

    name: str
    size: int
    mtime_ns: int
    sha256: str | None = None


ENCODING_KEYS = ("quantization_config", "compression_config")
"""Of config.json; the second one older versions of compressed-tensors wrote."""

CONFIG_FILE = "config.json"
ENCODING_FILE = "hf_quant_config.json"
"""In which ModelOpt says how weights are encoded; older releases have it in the place of config.json's key."""


def encoding_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a config.json says of how the weights are encoded."""
    return next((config[key] for key in ENCODING_KEYS if config.get(key) is not None), None)


@dataclass(frozen=True)
class Source:
    """A checkpoint folder, its headers read and checked. `repo` and `commit` say where on the Hub it came from."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    shards: tuple[Shard, ...]
    repo: str | None = None
    commit: str | None = None

    hashed = True
    """Whether its shards are hashed while they are read."""

    @property
    def encoding(self) -> Mapping[str, Any] | None:
        """What config.json says of how the weights are encoded."""
        return encoding_of(self.config)

    def origin(self, sha256: Mapping[str, str | None]) -> dict[str, Any]:
        """What the manifest says of it."""
        return {
            "name": self.name,
            "repo": self.repo,
            "commit": self.commit,
            "folder": None if self.repo else str(self.folder.resolve()),
            "shards": {s.name: {"bytes": s.size, "sha256": sha256[s.name]} for s in self.shards},
            "tensors": len(self.tensors),
            "bytes": self.nbytes,
        }

    def files(self, info: TensorInfo) -> list[tuple[Path, int, int]]:
        """Where a tensor lies: file, first byte, number of bytes."""
        return [(self.folder / info.shard, info.offset, info.nbytes)]

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
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder")
    shard_names, weight_map = _read_index(folder)
    config = read_config(folder / CONFIG_FILE)
    faults: list[str] = []
    tensors: dict[str, TensorInfo] = {}
    shards = []
    for name in shard_names:
        try:
            size, mtime_ns, infos = read_header(folder / name)
        except SourceError as error:
            faults += [error.message, *error.details]
            continue
        shards.append(Shard(name, size, mtime_ns, (sha256 or {}).get(name)))
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
    return Source(folder, config, tensors, tuple(shards), repo, commit)


def shorten(lines: Sequence[str], limit: int = 20) -> list[str]:
    """The first lines of a long list, and how many there are more."""
    more = len(lines) - limit
    return [*lines[:limit], f"... and {more} more"] if more > 0 else list(lines)


def read_json(path: Path, error: type[ConfigError] | type[SourceError]) -> dict[str, Any]:
    """A JSON file that must hold an object without duplicate keys."""
    try:
        value = json.loads(path.read_bytes(), object_pairs_hook=_no_duplicates)
    except FileNotFoundError:
        raise error(
            f"{path} is missing", hint="give a folder that holds all files of the model, or its Hub id"
        ) from None
    except (ValueError, RecursionError) as e:
        raise error(f"{path} is no valid JSON: {e}") from None
    if not isinstance(value, dict):
        raise error(f"{path} holds no JSON object")
    return value


def read_config(path: Path) -> dict[str, Any]:
    """A config.json; where it does not say how weights are encoded, with what ModelOpt's own file beside it says.

    Raises:
        ConfigError: one of them is no JSON object, or config.json is missing.
    """
    raw, beside = read_json(path, ConfigError), path.with_name(ENCODING_FILE)
    if encoding_of(raw) is not None or path.name != CONFIG_FILE or not beside.is_file():
        return raw
    return raw | {ENCODING_KEYS[0]: {"quant_method": "modelopt", **read_json(beside, ConfigError)}}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"'{twice}' stands twice")
    return out


def _read_index(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """The names of the shards and, where there is an index, the shard of every tensor."""
    if not (folder / INDEX_FILE).exists():
        if (folder / SINGLE_FILE).exists():
            return [SINGLE_FILE], None
        shards = sorted(p.name for p in folder.glob("*.safetensors"))
        from tpuconv.convert.journal import MANIFEST

        if not shards and (folder / MANIFEST).is_file():
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
    missing = [s for s in shards if not (folder / s).exists()]
    if missing:
        raise SourceError(
            f"{len(missing)} of {len(shards)} shards are missing in {folder}",
            details=shorten(missing),
            hint="download them; if this is a Hub checkpoint, give its id instead of the folder",
        )
    return shards, weight_map


def read_weight_map(index: Path) -> dict[str, str]:
    """The shard of every tensor, as an index has it: names of safetensors files of its folder."""
    weight_map = read_json(index, SourceError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(
            f"{index} names no shards: it has no weight_map from names to files", hint="do not trust this checkpoint"
        )
    shards = sorted(set(map(str, weight_map.values())))
    if unsafe := [repr(s) for s in shards if not re.fullmatch(r"[^/\\\0]+\.safetensors", s)]:
        raise SourceError(
            f"{index} names files that are no safetensors file of its folder",
            details=shorten(unsafe),
            hint="do not trust this checkpoint",
        )
    return weight_map


def read_header(path: Path) -> tuple[int, int, list[TensorInfo]]:
    """Size and modification time (ns) of a safetensors file and its tensors in file order.

    Raises:
        SourceError: anything in the header that is not exactly as the format says.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO without a writer must not hang us
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise SourceError(f"{path} is no regular file")
        start = os.pread(fd, 64, 0)
        length = int.from_bytes(start[:8], "little")
        if len(start) < 8 or 8 + length > status.st_size:
            if start.startswith(b"version https://git-lfs"):
                raise SourceError(
                    f"{path} is a Git LFS pointer, not the weights: run `git lfs pull`, or give the Hub id"
                )
            if start.lstrip()[:1] == b"<":
                raise SourceError(
                    f"{path} is a web page, not weights: the download was answered by a login or error page"
                )
            raise SourceError(f"{path} is truncated: {status.st_size} bytes do not hold its header")
        if length > MAX_HEADER_BYTES:
            raise SourceError(f"{path} has a header of {length} bytes, more than any real checkpoint")
        raw = os.pread(fd, length, 8)
    finally:
        os.close(fd)
    try:
        header = json.loads(raw, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as e:
        raise SourceError(f"the header of {path} is no valid JSON: {e}") from None
    if not isinstance(header, dict):
        raise SourceError(f"the header of {path} is no JSON object")
    header.pop("__metadata__", None)
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
        what = "is truncated" if at > status.st_size else "has bytes that no tensor owns"
        faults.append(f"{path.name} {what}: its header describes {at} bytes, the file has {status.st_size}")
    if faults:
        raise SourceError(faults[0], details=faults[1:])
    return status.st_size, status.st_mtime_ns, infos


def _tensor_info(name: str, value: Any, shard: str, data_start: int) -> TensorInfo:
    if not name.isprintable() or ".." in name or not 0 < len(name) <= MAX_NAME_LENGTH:
        raise ValueError(f"unsafe tensor name {name[:80]!r}")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} is not described by dtype, shape and data_offsets alone")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"{name} has the unknown dtype {dtype!r}")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError(f"{name} has a shape or offsets that are no list of sizes")
    if len(offsets) != 2 or offsets[1] - offsets[0] != prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{name}: offsets {offsets} do not hold {dtype} {shape}")
    return TensorInfo(name, dtype, tuple(shape), shard, data_start + offsets[0], offsets[1] - offsets[0])


@dataclass
class _File:
    """An open shard. `digest` has seen its first `hashed` bytes."""

    fd: int
    size: int
    digest: Any = field(default_factory=hashlib.sha256)
    hashed: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Reader:
    """Reads weights of a source from any number of threads, and hashes its shards while it does: each byte is fetched
    from the disk once. `check_cancelled` raises when the work is to stop. Where only a part is read, nothing
    is hashed (`hashes`)."""

    def __init__(self, source: Source, check_cancelled: Callable[[], None] = lambda: None, *, hashes: bool = True):
        self.source = source
        self.hashes = hashes
        self._check_cancelled = check_cancelled
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

    def check_unchanged(self) -> None:
        """Raises SourceError if a shard is not the file any more that was planned from."""
        for shard in self.source.shards:
            try:
                status = os.stat(self.source.folder / shard.name)
            except OSError as e:
                raise SourceError(f"{shard.name} went away: {e.strerror}") from None
            if (status.st_size, status.st_mtime_ns) != (shard.size, shard.mtime_ns):
                raise SourceError(
                    f"{self.source.folder / shard.name} changed while it was converted",
                    hint="wait until nothing writes to the source, then run again",
                )

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
                raise SourceError(
                    f"{self.source.folder / shard} became shorter while it was read",
                    hint="wait until nothing writes to the source, then run again",
                )
            out, at = out[n:], at + n

    def _open(self, shard: str) -> _File:
        with self._lock:
            if shard not in self._files:
                fd = os.open(self.source.folder / shard, os.O_RDONLY)
                self._files[shard] = _File(fd, os.fstat(fd).st_size)
            return self._files[shard]

    def close(self) -> None:
        for file in self._files.values():
            os.close(file.fd)
        self._files.clear()
