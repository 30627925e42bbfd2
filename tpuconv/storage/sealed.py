"""A sealed folder: its manifest `tpuconv.json` holds the size and hash of every other file, and its own hash.

Every output of ours is one. Publishing, replacing and checking an output need nothing else of it. The last key of a
manifest is its seal: XXH3-128 of all bytes before it. The seal is also the identity of the folder's contents: two
folders with the same seal hold the same.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from tpuconv import buckets
from tpuconv.errors import AccessRefused, BucketError, CorruptOutput, SourceError, TpuconvError, UsageError, shorten
from tpuconv.jsonfile import Each, Optional, Range, Size, check, parse, read_bytes
from tpuconv.location import BucketPath, Location, near_folders
from tpuconv.names import MANIFEST
from tpuconv.storage.disk import replace_file
from tpuconv.storage.hashes import blocks, hash_bytes
from tpuconv.storage.places import check_finished, is_there, size_faults, stamp_of
from tpuconv.storage.sinks import Sink

MANIFEST_FORMAT = 3
"""Version of the manifest. It changes when conversions of the same source and table begin to write something else."""
SEALED_SINCE = 2
"""The first format whose manifests are sealed and list the files."""

CHECKPOINT, SAFETENSORS = "checkpoint", "safetensors"
"""Kinds of outputs: Orbax arrays of ours, and what `export` writes."""

STAGED = ".tpuconv-staged"
"""An empty file in an output that is not published yet, or whose publication was not finished."""

MAX_MANIFEST_BYTES = 1 << 30

SEALED_SCHEMA = {
    "format": Range(1),
    "fingerprint": str,
    "kind": Optional(str),
    "files": Optional(Each({"bytes": Size, "xxh3_128": str})),
}
"""The schema that the manifests of all kinds share."""

_SEAL = re.compile(rb',\n "seal": "([0-9a-f]{32})"\n}\n')


@dataclass(frozen=True)
class Sealed:
    """A manifest that was read. In formats before 2, `identity` is the hash of all its bytes. `stamp` is the stamp of
    the file."""

    raw: Mapping[str, Any]
    identity: str
    stamp: tuple[object, ...] | None

    @property
    def files(self) -> Mapping[str, Any]:
        """`bytes` and `xxh3_128` of each file, by its path in the folder. Empty in formats before 2."""
        files: Mapping[str, Any] = self.raw.get("files", {})
        return files

    @property
    def is_sealed(self) -> bool:
        """True if the format has seals and lists the files."""
        return int(self.raw["format"]) >= SEALED_SINCE


def seal(facts: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a manifest with these facts, which must not be empty."""
    unsealed = {key: value for key, value in facts.items() if key != "seal"}
    body = json.dumps(unsealed, indent=1).encode()[: -len(b"\n}")]
    return body + b',\n "seal": "%s"\n}\n' % xxhash.xxh3_128_hexdigest(body).encode()


def read_sealed(folder: Location) -> Sealed:
    """Reads the manifest of a folder, and checks its seal.

    Raises:
        UsageError: the folder has no manifest.
        CorruptOutput: the manifest cannot be read, or does not match its seal.
    """
    path = folder / MANIFEST
    stamp, data = stamp_of(path), _read_manifest(path)
    raw = check(parse(data, str(path), CorruptOutput), SEALED_SCHEMA, str(path), CorruptOutput)
    if raw["format"] < SEALED_SINCE:
        return Sealed(raw, xxhash.xxh3_128_hexdigest(data), stamp)
    found = seal_of(data)
    if found is None:
        raise CorruptOutput(
            f"{path} was changed: it does not hold its own hash", hint="move the checkpoint away, and convert it again"
        )
    return Sealed(raw, found, stamp)


def seal_of(data: bytes) -> str | None:
    """Returns the seal at the end of a manifest's bytes. None if there is none, or the bytes do not match it."""
    found = _SEAL.fullmatch(data, max(0, data.rfind(b",\n")))
    if found is None or found[1].decode() != xxhash.xxh3_128_hexdigest(data[: found.start()]):
        return None
    return found[1].decode()


def _to_make(folder: Path) -> str:
    """Returns the hint for a folder that does not exist. It may be meant as a Hub id."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(folder)) or folder.parent.exists():
        return "make a checkpoint with `tpuconv convert SRC`"
    return (
        f"on the Hub, `tpuconv convert {folder}` makes a checkpoint of a release, and "
        f"`hf download {folder} --local-dir {folder.name}` downloads one that was pushed"
    )


def _read_manifest(path: Location) -> bytes:
    with suppress(OSError, ValueError):
        if isinstance(path, Path) and not os.path.lexists(path.parent):
            check_finished(path.parent)
            raise UsageError(f"{path.parent} does not exist", hint=near_folders(path.parent) or _to_make(path.parent))
        if not is_there(path):
            if is_there(path.parent.parent / MANIFEST):
                raise UsageError(
                    f"{path.parent} is a part of a checkpoint of tpuconv", hint=f"give {path.parent.parent}"
                )
            if isinstance(path, BucketPath):
                with suppress(AccessRefused):
                    buckets.names(path.parent)  # raises if there is no bucket; the question for one object does not
                check_finished(path.parent)
            raise UsageError(
                f"{path.parent} is not a checkpoint made by tpuconv: it has no {MANIFEST}",
                hint="make one with `tpuconv convert SRC`, or from a run with `tpuconv reshard RUN OUT --config SRC`",
            )
    return read_bytes(path, MAX_MANIFEST_BYTES, CorruptOutput)


def kind_of(folder: Location) -> str | None:
    """Returns the kind of an output of ours. None if its manifest cannot be read."""
    try:
        return str(read_sealed(folder).raw.get("kind", CHECKPOINT))
    except BucketError:
        raise
    except TpuconvError:
        return None


def check_current(folder: Location, sealed: Sealed) -> None:
    """Checks that a folder still holds the output whose manifest was read.

    Raises:
        SourceError: it holds another one by now.
    """
    if stamp_of(folder / MANIFEST) == sealed.stamp is not None:
        return
    if identity(folder) != sealed.identity:
        raise SourceError(f"{folder} was replaced or changed while it was read", hint="run again")


def identity(folder: Location) -> str | None:
    """Returns the identity of a folder's contents. None if it has no valid manifest."""
    try:
        return read_sealed(folder).identity
    except BucketError:
        raise
    except TpuconvError:
        return None


def copy_file(path: Location, sink: Sink, name: str, expected: Mapping[str, Any]) -> None:
    """Copies a file, that must have the expected size and hash, as `name` into an output.

    Raises:
        SourceError: the file cannot be read, or was changed.
        ResourceError: the copy cannot be written.
    """
    try:
        if "/" in name:
            sink.make_folders([str(PurePosixPath(name).parent)])
        with sink.writer(name) as out:
            for block in blocks(path):
                out.write(block)
    except OSError as e:
        raise SourceError(f"{path} cannot be read: {e.strerror}", hint="check the file, or remove it") from None
    if out.facts() != expected:
        raise SourceError(
            f"{path} was changed",
            hint="wait until nothing writes to it, then run again; in a checkpoint of ours `tpuconv verify --update` "
            "accepts an intended change",
        )


def write_listed(folder: Location, name: str, data: bytes) -> None:
    """Writes a file into a published output, and its hash into the manifest. Until then, and after a crash, the
    manifest does not list it.

    Raises:
        CorruptOutput: the manifest cannot be read.
        ResourceError: the file or the manifest cannot be written.
    """
    sealed = read_sealed(folder)
    others = {other: facts for other, facts in sealed.files.items() if other != name}
    if sealed.is_sealed and others != sealed.files:
        reseal(folder, sealed, others)
    write_whole(folder / name, data)
    if sealed.is_sealed:
        now = read_sealed(folder)  # `verify --update` may have listed others meanwhile
        reseal(folder, now, {**now.files, name: hash_bytes(data)})


def reseal(folder: Location, sealed: Sealed, files: Mapping[str, Any]) -> None:
    """Writes the manifest with other facts of the files."""
    write_whole(folder / MANIFEST, seal({**sealed.raw, "files": dict(files)}))


def write_whole(location: Location, data: bytes) -> None:
    """Writes or replaces a file of a published output: after a crash it is the old one or the new one."""
    if isinstance(location, BucketPath):
        buckets.put_object(location, data)
    else:
        replace_file(location, data)


def check_file_sizes(folder: Location) -> Sealed:
    """Returns the manifest of an existing output, whose files have the sizes that it lists.

    Raises:
        CorruptOutput: they have not, or the manifest cannot be read.
    """
    sealed = read_sealed(folder)
    raise_damage(folder, size_faults(folder, {name: facts["bytes"] for name, facts in sealed.files.items()}))
    return sealed


def raise_damage(folder: Location, faults: Iterable[tuple[str, str]]) -> None:
    """Checks that an existing output has no faults: pairs of a file and what is wrong with it.

    Raises:
        CorruptOutput: it has some; they are listed.
    """
    if lines := [f"{name} {fault}" for name, fault in faults]:
        raise CorruptOutput(
            f"{folder} is damaged: {len(lines)} of its files are not as they were written",
            details=shorten(lines),
            hint="delete these files, then give `overwrite=True` to make it again",
        )
