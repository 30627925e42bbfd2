"""A shard of a source: how to tell whether it is still the same file with the same bytes."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from tpuconv import buckets
from tpuconv.errors import SourceError, no_descriptors
from tpuconv.location import BucketPath, Location
from tpuconv.sources.damaged import hash_of
from tpuconv.sources.files import MAX_HEADER_BYTES
from tpuconv.sources.index import shard_names
from tpuconv.storage.hashes import known_hash, stamp


@dataclass(frozen=True)
class SourceShard:
    """One safetensors file, or one array of a checkpoint of ours.

    Attributes:
        digest: hash of its header and of samples of its values.
        stamp: hash of what the file system says about it. It changes when the file is written to or replaced.
        sha256: what the Hub promises; None for a local file.
    """

    name: str
    size: int
    digest: str = ""
    stamp: str = ""
    sha256: str | None = None

    @property
    def hash_name(self) -> str:
        """Which of `HASHES` is made of it: the one that is promised, else the fast one."""
        return "xxh3_128" if self.sha256 is None else "sha256"


SAMPLES, SAMPLE_BYTES = 16, 4096
"""Samples of a shard's values: with the header they distinguish checkpoints of the same architecture."""


def hash_stamp(status: os.stat_result) -> str:
    """Returns the hash of a file's stamp, in hex; see `tpuconv.storage.hashes.stamp`."""
    return xxhash.xxh3_64_hexdigest(repr(stamp(status)).encode())


def object_stamp(found: buckets.ObjectFacts) -> str:
    """Returns the stamp of a shard in a bucket, in hex: the hash of its size and version."""
    return xxhash.xxh3_64_hexdigest(repr((found.size, *sorted(found.version.items()))).encode())


CHANGED_HINT = "wait until nothing writes to the source, then run again"


def shard_changed(path: Location) -> SourceError:
    """Returns the error for a shard that is not the planned one any more."""
    return SourceError(f"{path} changed while it was converted", hint=CHANGED_HINT)


def check_object(path: BucketPath, stamp: str) -> buckets.ObjectFacts:
    """Returns the facts of an object, which must have the planned stamp.

    Raises:
        SourceError: it is missing or changed.
    """
    found = buckets.facts(path)
    if found is None:
        raise SourceError(f"{path} is missing now", hint=CHANGED_HINT)
    if object_stamp(found) != stamp:
        raise shard_changed(path)
    return found


def _object_digest(path: BucketPath) -> tuple[str, str]:
    found = buckets.facts(path)
    if found is None:
        raise SourceError(f"{path} is missing", hint="check the bucket")
    start = 8 + int.from_bytes(buckets.read(path, 0, 8), "little")
    digest = xxhash.xxh3_128(buckets.read(path, 0, min(start, 8 + MAX_HEADER_BYTES, found.size)))
    for sample in object_samples(path, start, found.size):
        digest.update(sample)
    return digest.hexdigest(), object_stamp(found)


def object_samples(path: BucketPath, start: int, size: int) -> Sequence[memoryview]:
    """The same bytes of an object as `samples` yields of a file."""
    if start >= size:
        return ()
    return buckets.read_ranges(path, _sample_starts(start, size), min(SAMPLE_BYTES, size - start))


def read_digest(path: Location) -> tuple[str, str]:
    """Returns the digest and the stamp of a shard.

    Raises:
        SourceError: it cannot be read.
    """
    if isinstance(path, BucketPath):
        return _object_digest(path)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            size = status.st_size
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
            start = 8 + int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
            digest = xxhash.xxh3_128(os.pread(file.fileno(), min(start, 8 + MAX_HEADER_BYTES), 0))
            for sample in samples(file.fileno(), start, size):
                digest.update(sample)
            return digest.hexdigest(), hash_stamp(status)
    except OSError as e:
        raise no_descriptors(path, e) or SourceError(
            f"{path} cannot be read: {e.strerror}", hint="check the file, the disk and its permissions"
        ) from None


def samples(fd: int, start: int, size: int) -> Iterator[bytes]:
    """Yields samples of the bytes of an open file from `start` to its end."""
    for place in _sample_starts(start, size):
        yield os.pread(fd, SAMPLE_BYTES, place)


def _sample_starts(start: int, size: int) -> list[int]:
    span = max(0, size - start - SAMPLE_BYTES)
    return [start + span * i // (SAMPLES - 1) for i in range(SAMPLES)]


def changed_shards(
    folder: Location, known: Mapping[str, Mapping[str, Any]], stamps: Mapping[str, str]
) -> list[str] | None:
    """Returns the shards of a source that are missing, or differ from the shards of a conversion.

    Args:
        folder: the source.
        known: what the manifest says about them, `bytes` and a hash by name.
        stamps: that the files had then, as far as they are known here. A shard with another stamp is read completely.

    Returns:
        The names; None if it cannot be told, because a file was replaced and its hash is not known.

    Raises:
        UsageError: the folder holds no safetensors.
        SourceError: the index or a shard cannot be read.
    """
    changed, is_known = [name for name in shard_names(folder) if name not in known], True
    for name, facts in known.items():
        found = _size_and_stamp(folder / name)
        if found is None or found[0] != facts["bytes"]:
            changed.append(name)
        elif found[1] in (stamps.get(name), facts.get("stamp")):  # formats before 3 had it in the manifest
            continue
        elif (promise := known_hash(facts)) is None:
            is_known = False
        elif hash_of(folder / name, promise[0]) != promise[1]:
            changed.append(name)
    return sorted(changed) if changed or is_known else None


def _size_and_stamp(path: Location) -> tuple[int, str] | None:
    """Returns the size and stamp of a shard; None if it is missing."""
    if isinstance(path, BucketPath):
        found = buckets.facts(path)
        return None if found is None else (found.size, object_stamp(found))
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, hash_stamp(status)
