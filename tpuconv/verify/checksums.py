"""Checks a checkpoint against its manifest. Reads every byte of every file once, with direct I/O and in bounded memory.
A file that the manifest does not list is a fault.

Shard files are read by `tpuconv.checkpoint.reader`, which checks the checksum of each chunk as TensorStore does
for Orbax. All other files, such as zarr.json and Orbax's metadata, are compared by hash.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from tpuconv import buckets
from tpuconv.checkpoint.device_layouts import check_layouts
from tpuconv.checkpoint.manifest import ORBAX_FILES, Manifest, element_bytes
from tpuconv.checkpoint.reader import read_checksum
from tpuconv.checkpoint.shards import ZARR_FILES
from tpuconv.checkpoint.stored import StoredArray
from tpuconv.convert.plan.quantization import REPORT
from tpuconv.errors import CorruptOutput, UsageError
from tpuconv.location import BucketPath, Location
from tpuconv.names import LAYOUTS, MANIFEST, is_beside
from tpuconv.pages import is_marked
from tpuconv.sources.companions import CARD, SOURCE_CARD, is_companion
from tpuconv.sources.files import CONFIG_FILE
from tpuconv.storage.hashes import blocks, hash_file
from tpuconv.storage.ownership import files_in, folders_of, unknown
from tpuconv.storage.places import is_file, names_in
from tpuconv.storage.sealed import STAGED, Sealed, check_current, reseal

MEANINGS = {
    CONFIG_FILE: "it may describe a different model",
    CARD: "no effect on the weights (model card)",
    SOURCE_CARD: "no effect on the weights (model card of the source)",
    REPORT: "no effect on the weights (report)",
    LAYOUTS: "device layouts may differ; values do not",
    "generation_config.json": "sampling and end tokens may differ",
}
"""The consequence of a change, by file."""

UPDATABLE = (LAYOUTS, CARD, REPORT)
"""Files that `update` accepts when they were changed on purpose, besides the companions."""


class FaultKind(Enum):
    """The kinds of faults for which a user does different things."""

    NOT_LISTED = "is not in the manifest"
    CHANGED = "was changed"
    DAMAGED = "is damaged"


@dataclass(frozen=True)
class Checked:
    """The result for one array or file: its name, its size in bytes, what is wrong with it (None if nothing is), and
    the kind of that fault."""

    name: str
    nbytes: int
    fault: str | None = None
    kind: FaultKind = FaultKind.DAMAGED


def _faulty(name: str, nbytes: int, kind: FaultKind, consequence: str) -> Checked:
    return Checked(name, nbytes, f"{kind.value}: {consequence}", kind)


def what_to_do(faults: Sequence[Checked], *, is_updatable: bool) -> Iterator[str]:
    """Yields what a user can do, by the kinds of faults; `is_updatable` says if `update` takes changes."""
    kinds = {each.kind for each in faults}
    if FaultKind.NOT_LISTED in kinds:
        yield "move away the files that are not in the manifest"
    if FaultKind.CHANGED in kinds and is_updatable:
        yield "if a file was changed on purpose, `tpuconv verify --update` takes the change into the manifest"
    if FaultKind.CHANGED in kinds:
        yield "delete files that were damaged, and give the command that made them again, with `overwrite=True`"
    elif FaultKind.DAMAGED in kinds:
        yield "give the command that made the output again, with `overwrite=True`"


def check_checkpoint(manifest: Manifest) -> Iterator[Checked]:
    """Checks every file and every array. Yields unexpected files, then the listed files, then the arrays, each in the
    manifest's order.

    Raises:
        SourceError: the checkpoint was replaced during the check.
    """
    faulty = False
    with ThreadPoolExecutor(_threads(manifest.folder) + 1) as pool:
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


def check_export(folder: Location, sealed: Sealed) -> Iterator[Checked]:
    """Checks every file of an export against its manifest. Yields unexpected files, then the listed ones.

    Raises:
        SourceError: the folder was replaced during the check.
    """
    for name in _unknown(folder, {*sealed.files, MANIFEST, STAGED}):
        yield _faulty(name, 0, FaultKind.NOT_LISTED, "tpuconv did not write it")
    with ThreadPoolExecutor(_threads(folder)) as pool:
        yield from pool.map(lambda item: _compare_file(folder, *item), sealed.files.items())
    check_current(folder, sealed)


def _threads(folder: Location) -> int:
    """Returns the number of threads: one for each processor, or the best number of requests at a time."""
    return buckets.REQUESTS if isinstance(folder, BucketPath) else len(os.sched_getaffinity(0))


def _files(manifest: Manifest) -> list[str]:
    """Returns all files except shards and the manifest. A manifest of format 1 lists none: then those that Orbax
    needs."""
    return list(manifest.sealed.files) or [manifest.path_of(name) for name in ORBAX_FILES]


def _check_file(manifest: Manifest, name: str) -> Checked:
    return _compare_file(manifest.folder, name, manifest.sealed.files.get(name))


def _compare_file(folder: Location, name: str, known: Mapping[str, Any] | None) -> Checked:
    try:
        found = hash_file(folder / name)
    except OSError as e:
        why = "is missing" if isinstance(e, FileNotFoundError) else f"cannot be read: {e.strerror}"
        return Checked(name, 0, f"{why}: {_meaning(name)}")
    if known is not None and found != known:
        return _faulty(name, found["bytes"], FaultKind.CHANGED, _meaning(name))
    return Checked(name, found["bytes"])


def _meaning(name: str) -> str:
    path = Path(name)
    if path.name in ORBAX_FILES:
        return "Orbax may fail to restore, or restore different arrays"
    if path.name in ZARR_FILES:
        return "Orbax may fail to restore the array"
    if name.startswith("tokenizer") or name.startswith("vocab"):
        return "tokenization may differ"
    return MEANINGS.get(name, "copied from the source")


def _extra(manifest: Manifest) -> Iterator[Checked]:
    """Files and folders that the manifest does not list, those at the top first. Of a folder in which nothing is known
    the top is yielded."""
    if not manifest.sealed.is_sealed:
        tops = {name.partition("/")[0] for name in files_in(manifest.params)} - {*manifest.arrays, *ORBAX_FILES}
        for name in sorted(tops):
            yield _faulty(manifest.path_of(name), 0, FaultKind.NOT_LISTED, "Orbax may read it as an array")
        return
    known = {MANIFEST, STAGED, *manifest.file_sizes()}
    arrays = {manifest.path_of(name) for name in manifest.arrays}
    for name in _tops(_unknown(manifest.folder, known), known):
        path = PurePosixPath(name)
        why = "tpuconv did not write it" if len(path.parts) == 1 else "Orbax may read it as an array"
        why = "not part of the array" if str(path.parent) in arrays else why
        yield _faulty(str(path), 0, FaultKind.NOT_LISTED, why)


def _unknown(folder: Location, known: Collection[str]) -> list[str]:
    """The files that are neither known nor beside an output."""
    return [name for name in unknown(files_in(folder), known) if not is_beside(name)]


def _tops(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Files, or the highest folders that hold some of them and no known file, those at the top first."""
    folders = {".", *folders_of(known)}
    tops = dict.fromkeys(
        next((str(folder) for folder in reversed(PurePosixPath(name).parents) if str(folder) not in folders), name)
        for name in names
    )
    return sorted((top.rstrip("/") for top in tops), key=lambda top: (top.count("/") > 0, top))


def _check_array(manifest: Manifest, array: StoredArray) -> Checked:
    nbytes = prod(array.shape) * element_bytes(array.dtype)
    try:
        checksum = read_checksum(manifest, array.name)
    except CorruptOutput as e:
        return Checked(array.name, nbytes, e.message)
    return Checked(array.name, nbytes, None if checksum == array.xxh3 else "does not have the checksum of the manifest")


def update(manifest: Manifest) -> list[str]:
    """Accepts intended changes of the files beside the arrays, such as config.json, tokenizer and cards: writes their
    current hashes into the manifest. Returns the names of files that were changed, added or removed.

    Raises:
        UsageError: the manifest is of format 1, or a file has the name of one of ours, and is another's.
        CorruptOutput: an array or a file that Orbax needs is damaged, or layouts cannot be understood.
        SourceError: the checkpoint was replaced meanwhile.
    """
    if not manifest.sealed.is_sealed:
        raise UsageError(
            f"{manifest.folder} was made by an older tpuconv, whose manifests hold no hashes of files",
            hint="convert it again to have them checked",
        )
    params = {name: facts for name, facts in manifest.sealed.files.items() if manifest.is_of_arrays(name)}
    for name, known in params.items():
        if (checked := _check_file(manifest, name)).fault and known:
            manifest.check_current()
            raise CorruptOutput(
                f"a file of the arrays is damaged: {manifest.folder / name} {checked.fault}",
                hint="convert the checkpoint again",
            )
    before = {name: facts for name, facts in manifest.sealed.files.items() if name not in params}
    folder = manifest.folder
    inside = [name for name in before if "/" in name]
    names = [name for name in [*names_in(folder), *inside] if _may_change(name) and is_file(folder / name)]
    if LAYOUTS in names:
        check_layouts(folder)
    if REPORT in names and REPORT not in before and not is_marked(bytes(next(blocks(folder / REPORT), b""))):
        raise UsageError(
            f"{folder / REPORT} was not made by tpuconv, and has the name of its report", hint="move it away"
        )
    now = {name: hash_file(manifest.folder / name) for name in names}
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    manifest.check_current()
    if changed:
        reseal(manifest.folder, manifest.sealed, params | now)
    return changed


def _may_change(name: str) -> bool:
    return "/" in name or is_companion(name) or name in (*UPDATABLE, SOURCE_CARD)
