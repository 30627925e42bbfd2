"""A shard of a source: how to tell whether it is still the same file with the same bytes."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from tpuconv.errors import SourceError
from tpuconv.sources.damaged import sha256_of
from tpuconv.sources.files import MAX_HEADER_BYTES
from tpuconv.sources.index import shard_names
from tpuconv.storage.hashes import stamp


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


SAMPLES, SAMPLE_BYTES = 16, 4096
"""Samples of a shard's values: with the header they distinguish checkpoints of the same architecture."""


def hash_stamp(status: os.stat_result) -> str:
    """The hash of a file's stamp, in hex; see `tpuconv.storage.hashes.stamp`."""
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
                offset = start + max(0, size - start - SAMPLE_BYTES) * i // (SAMPLES - 1)
                digest.update(os.pread(file.fileno(), SAMPLE_BYTES, offset))
            return digest.hexdigest(), hash_stamp(status)
    except OSError as e:
        raise SourceError(
            f"{path} cannot be read: {e.strerror}", hint="check the file, the disk and its permissions"
        ) from None


def changed_shards(folder: Path, known: Mapping[str, Mapping[str, Any]]) -> list[str] | None:
    """The shards of a source that are missing, or differ from what a manifest knows: `bytes`, `stamp` and `sha256` by
    name. A shard with another stamp is read completely.

    Returns:
        The names; None if it cannot be told, because a file was replaced and its sha256 is not known.

    Raises:
        UsageError: the folder holds no safetensors.
        SourceError: the index or a shard cannot be read.
    """
    changed, is_known = [name for name in shard_names(folder) if name not in known], True
    for name, facts in known.items():
        try:
            status = os.stat(folder / name)
        except OSError:
            changed.append(name)
            continue
        if status.st_size != facts["bytes"]:
            changed.append(name)
        elif hash_stamp(status) == facts.get("stamp"):
            continue
        elif facts["sha256"] is None:
            is_known = False
        elif sha256_of(folder / name) != facts["sha256"]:
            changed.append(name)
    return sorted(changed) if changed or is_known else None
