"""Does a checkpoint hold what its manifest says? Every byte of every file is read once, past the page cache, in bounded
memory, and nothing may be there that the manifest does not know.

Shard files are read by the package's own reader, which checks the crc32c of each chunk as TensorStore does for Orbax;
what tells Orbax how to read them, zarr.json and the metadata, is compared byte for byte with what was written.
"""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from tpuconv.checkpoint.device_layouts import LAYOUTS
from tpuconv.checkpoint.manifest import PARAMS, Manifest, StoredArray, element_bytes
from tpuconv.checkpoint.reader import read_checksum
from tpuconv.convert.plan.types import REPORT
from tpuconv.convert.store import ORBAX_FILES
from tpuconv.errors import CorruptOutput, UsageError
from tpuconv.names import MANIFEST
from tpuconv.sources.companions import CARD, SOURCE_CARD, is_companion
from tpuconv.sources.files import CONFIG_FILE
from tpuconv.storage.hashes import hash_file
from tpuconv.storage.sealed import Sealed, check_current, extra_entries, reseal

MEANINGS = {
    CONFIG_FILE: "the model that it describes may be another",
    CARD: "it only describes the checkpoint",
    SOURCE_CARD: "it only describes the original",
    REPORT: "it only reports",
    LAYOUTS: "weights may be laid out in another way, which changes no value",
    "generation_config.json": "texts may end or be drawn in another way",
    **{f"{PARAMS}/{name}": "Orbax may not restore the arrays, or other ones" for name in ORBAX_FILES},
}
"""What it means where a file is not what it was."""

UPDATABLE = (LAYOUTS, CARD, REPORT)
"""Files beside the arrays, with the companions, whose change may be meant."""


@dataclass(frozen=True)
class Checked:
    """One array or file: `fault` says what is wrong with it, None if it is as it was written."""

    name: str
    nbytes: int
    fault: str | None


def check(manifest: Manifest) -> Iterator[Checked]:
    """Checks every file and every array, in the manifest's order, and names what should not be there.

    Raises:
        SourceError: the checkpoint was replaced meanwhile, so that nothing can be said of it.
    """
    faulty = False
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) + 1) as pool:
        for found in (
            _extra(manifest),
            pool.map(partial(_check_file, manifest), _files(manifest)),
            pool.map(partial(_check_array, manifest), manifest.arrays.values()),
        ):
            for checked in found:
                if checked.fault and not faulty:
                    manifest.check_current()
                    faulty = True
                yield checked
    manifest.check_current()


def check_export(folder: Path, sealed: Sealed) -> Iterator[Checked]:
    """Checks every file that `export` wrote.

    Raises:
        SourceError: the folder was replaced meanwhile.
    """
    for name in _entries(folder, {*sealed.files, MANIFEST}):
        yield Checked(name, 0, "is not in the manifest: tpuconv did not write it")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield from pool.map(lambda item: _compare_file(folder, *item), sealed.files.items())
    check_current(folder, sealed)


def _files(manifest: Manifest) -> list[str]:
    """All files but the shards and the manifest; where it lists none, those that Orbax asks for."""
    return list(manifest.sealed.files) or [f"{PARAMS}/{name}" for name in ORBAX_FILES]


def _check_file(manifest: Manifest, name: str) -> Checked:
    return _compare_file(manifest.folder, name, manifest.sealed.files.get(name))


def _compare_file(folder: Path, name: str, known: Mapping[str, Any] | None) -> Checked:
    try:
        found = hash_file(folder / name)
    except OSError as e:
        why = "is missing" if isinstance(e, FileNotFoundError) else f"cannot be read: {e.strerror}"
        return Checked(name, 0, f"{why}: {_meaning(name)}")
    changed = known is not None and found != known
    return Checked(name, found["bytes"], f"was changed: {_meaning(name)}" if changed else None)


def _meaning(name: str) -> str:
    if name.startswith("tokenizer") or name.startswith("vocab"):
        return "texts may be cut into other tokens"
    return MEANINGS.get(name, "Orbax may not restore the array" if name.startswith(f"{PARAMS}/") else "it was copied")


def _extra(manifest: Manifest) -> Iterator[Checked]:
    """What lies in the folder and is not in the manifest."""
    top = {name.partition("/")[0] for name in manifest.sealed.files} | {PARAMS, MANIFEST}
    inside = {*manifest.arrays, *ORBAX_FILES}
    if manifest.sealed.is_sealed:
        for name in _entries(manifest.folder, top):
            yield Checked(name, 0, "is not in the manifest: tpuconv did not write it")
    for name in _entries(manifest.params, inside):
        yield Checked(f"{PARAMS}/{name}", 0, "is not in the manifest: Orbax may take it for an array")
    if manifest.sealed.is_sealed:
        for array in manifest.arrays.values():
            for name in _entries(manifest.params / array.name, {"zarr.json", *array.spec.shard_sizes()}):
                yield Checked(f"{PARAMS}/{array.name}/{name}", 0, "is not in the manifest: it is no part of the array")


def _entries(folder: Path, known: set[str]) -> list[str]:
    try:
        return extra_entries(folder, known)
    except OSError:
        return []  # it is named as missing


def _check_array(manifest: Manifest, array: StoredArray) -> Checked:
    nbytes = prod(array.shape) * element_bytes(array.dtype)
    try:
        checksum = read_checksum(manifest, array.name)
    except CorruptOutput as e:
        return Checked(array.name, nbytes, e.message)
    return Checked(array.name, nbytes, None if checksum == array.xxh3 else "does not have the checksum of the manifest")


def update(manifest: Manifest) -> list[str]:
    """Seals the checkpoint again with the files beside the arrays as they are now, after they were changed on purpose:
    config.json, tokenizer, cards. Gives the names of those that changed, were added or are gone.

    Raises:
        UsageError: the manifest is of format 1.
        CorruptOutput: an array, or what Orbax needs to read it, is damaged: that is no change on purpose.
        SourceError: the checkpoint was replaced meanwhile.
    """
    if not manifest.sealed.is_sealed:
        raise UsageError(
            f"{manifest.folder} was made by an older tpuconv, whose manifests hold no hashes of files",
            hint="convert it again to have them checked",
        )
    kept = {name: facts for name, facts in manifest.sealed.files.items() if name.startswith(f"{PARAMS}/")}
    for name, known in kept.items():
        if (checked := _check_file(manifest, name)).fault and known:
            manifest.check_current()
            raise CorruptOutput(f"{manifest.folder / name} {checked.fault}", hint="convert the checkpoint again")
    before = {name: facts for name, facts in manifest.sealed.files.items() if name not in kept}
    names = sorted(entry.name for entry in manifest.folder.iterdir() if entry.is_file() and _may_change(entry.name))
    now = {name: hash_file(manifest.folder / name) for name in names}
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    manifest.check_current()
    if changed:
        reseal(manifest.folder, manifest.sealed, kept | now)
    return changed


def _may_change(name: str) -> bool:
    return is_companion(name) or name in (*UPDATABLE, SOURCE_CARD)
