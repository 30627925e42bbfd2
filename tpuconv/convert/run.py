"""The loop of a conversion: does what is left to do, and publishes the output when it is complete."""

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuconv.checkpoint import manifest
from tpuconv.convert.card import model_card
from tpuconv.convert.describe import describe
from tpuconv.convert.plan.types import REPORT, Plan, WorkUnit
from tpuconv.convert.sizing import Limits, jobs
from tpuconv.convert.store import OrbaxTree, Store, step_files
from tpuconv.convert.workers import HASH_ENTRY, UNIT_ENTRY, Checksums, Workers, add_sums, hash_entry
from tpuconv.errors import OutputError, UsageError
from tpuconv.jsonfile import MIB, Each
from tpuconv.names import MANIFEST
from tpuconv.sources.companions import CARD, SOURCE_CARD
from tpuconv.storage import disk
from tpuconv.storage.hashes import hash_bytes
from tpuconv.storage.journal import Journal, State
from tpuconv.storage.sealed import STAGED, raise_damage, seal

AHEAD_BYTES = 768 * MIB
"""Bytes of the source that are read while the rules of a quantization are resolved: what a disk delivers
in a second."""


@dataclass(frozen=True)
class RunProgress:
    """How far a conversion is, in bytes of the source. `resumed` are those of an earlier run."""

    done: int
    total: int
    resumed: int
    stage: str


def read_ahead(plan: Plan) -> None:
    """Begins to check a checkpoint's contents and then to load what `run` reads first into the page cache, while other
    work leaves the disk idle. Runs in a thread; errors are left to `run`."""
    checked = plan.source.start_checks()

    def read() -> None:
        wait(checked)
        left = AHEAD_BYTES
        names = dict.fromkeys(name for unit in plan.units for slab in unit.slabs for name in slab.names())
        with suppress(OSError):  # `run` raises the error when it reads the file
            for path, start, size in (
                place for n in names for i in plan.tensors[n].stored for place in plan.source.files(i)
            ):
                with path.open("rb", buffering=0) as file:
                    os.posix_fadvise(file.fileno(), start, min(size, left), os.POSIX_FADV_WILLNEED)
                left -= size
                if left <= 0:
                    return

    threading.Thread(target=read, daemon=True).start()


def run(plan: Plan, out: Path, limits: Limits, *, overwrite: bool = False) -> Iterator[RunProgress]:
    """Converts, and yields progress. If it is killed at any moment and run again, it resumes.

    Args:
        plan: what to convert.
        out: the output folder.
        limits: jobs and memory.
        overwrite: replace an existing output of ours.

    Raises:
        MappingError: the plan has faults.
        SourceError: the source changed, cannot be read, or holds values that are not finite.
        DamagedDownload: a shard from the Hub does not match its promised sha256.
        ResourceError: there is too little disk space or memory.
        OutputError: `out` exists, is locked, or belongs to another plan.
        UsageError: `out` lies in the source folder.
    """
    plan.check()
    job_count = jobs(plan, limits)
    inside, target = Path(os.path.realpath(plan.source.folder)), Path(os.path.realpath(out))
    if target == inside or inside in target.parents:
        raise UsageError(f"{out} lies in the source folder", hint="give an OUT outside of it")
    with Journal(out, plan.fingerprint, plan.facts, overwrite=overwrite) as journal:
        state = journal.begin()
        if state is State.PUBLISHED:
            yield from _check_published(plan, journal.out)
            yield RunProgress(plan.source_bytes, plan.source_bytes, plan.source_bytes, "published")
            return
        if _forget_changed(plan, journal) or state is not State.COMPLETE:
            yield from _work(plan, journal, job_count)
        yield RunProgress(plan.source_bytes, plan.source_bytes, 0, "publish")
        journal.publish()
    yield RunProgress(plan.source_bytes, plan.source_bytes, 0, "published")


def _check_published(plan: Plan, out: Path) -> Iterator[RunProgress]:
    """Checks that an output of this plan has all its files, in their sizes, and was made from the files of the source
    as they are now.

    Raises:
        CorruptOutput: files are missing or have the wrong size.
        OutputError: it was made from a source with the same headers and other values.
    """
    published = manifest.read_manifest(out)
    raise_damage(out, published.size_faults())
    if not plan.source.hashed:  # its arrays' checksums are in the fingerprint
        return
    reader, known = plan.source.open(), published.raw["source"]["shards"]
    try:
        for shard in plan.source.shards:
            facts = known.get(shard.name, {})
            if shard.sha256 is None and facts.get("stamp") != shard.stamp:  # another file, perhaps of the same content
                yield RunProgress(0, plan.source_bytes, 0, "compare")
                if facts.get("sha256") is None or reader.sha256(shard.name) != facts["sha256"]:
                    raise OutputError(
                        f"{out} exists already, and was not made from {plan.source.folder / shard.name} as it is now",
                        hint="choose another OUT, or give --overwrite to replace it",
                    )
    finally:
        reader.close()


STAMPS_ENTRY = {"stamps": Each(str)}


def _forget_changed(plan: Plan, journal: Journal) -> bool:
    """Marks as not done what an earlier run made from files that were replaced or changed since, unless they had the
    promised hash. All of these files are hashed again. Returns whether something was made from other files."""
    now = {shard.name: shard.stamp for shard in plan.source.shards}
    then = (journal.done("stamps", STAMPS_ENTRY) or {"stamps": {}})["stamps"]
    if then == now:
        return False
    others = {i: s for i, s in enumerate(plan.source.shards) if then.get(s.name) != s.stamp}
    changed = {s.name for i, s in others.items() if not (s.sha256 and journal.done(hash_entry(i), HASH_ENTRY))}
    journal.forget(
        ["complete"] * bool(changed)
        + [unit.uid for unit in plan.units if plan.shards_of(unit) & changed]
        + [hash_entry(i) for i in others]
    )
    journal.record("stamps", {"stamps": now})
    return bool(changed)


def _work(plan: Plan, journal: Journal, jobs: int) -> Iterator[RunProgress]:
    target = plan.target
    tree = OrbaxTree(plan.empty, target.has_lists, target.custom_metadata(plan.options.scan_layers))
    store = Store(journal.staging / target.folder, plan.arrays, tree)
    todo = [unit for unit in plan.units if journal.done(unit.uid, UNIT_ENTRY) is None]
    resumed = plan.source_bytes - sum(unit.nbytes for unit in todo)
    _check_disk(plan, journal.out.parent, todo)
    yield RunProgress(resumed, plan.source_bytes, resumed, "convert")
    store.make_folders()
    for done in Workers(plan, journal, store, jobs).run(todo):
        yield RunProgress(resumed + done, plan.source_bytes, resumed, "convert")
    yield RunProgress(plan.source_bytes, plan.source_bytes, resumed, "merge")
    files = {
        manifest.path_in(plan.target.folder, name): hash_bytes(content) for name, content in store.finish().items()
    }
    _write_rest(plan, journal, files)


def _check_disk(plan: Plan, folder: Path, todo: Sequence[WorkUnit]) -> None:
    written = sum(plan.written_bytes(slab) for unit in todo for slab in unit.slabs)
    need = written + written // 100 + sum(facts["bytes"] for facts in plan.source.companions.values()) + 16 * MIB
    disk.check_room(folder, need, "the conversion")


def _write_rest(plan: Plan, journal: Journal, files: dict[str, Any]) -> None:
    """Writes what the output holds besides the arrays, whose small `files` exist. The manifest comes last."""
    checksums: Checksums = {}
    statistics: dict[str, dict[str, float]] = {}
    for unit in plan.units:
        done = journal.done(unit.uid, UNIT_ENTRY) or {"checksums": {}, "figures": {}}
        for name, sums in done["checksums"].items():
            add_sums(checksums, name, (sums["values"], sums["crcs"]))
        for name, found in done["figures"].items():
            manifest.add_statistics(statistics.setdefault(name, {}), found)
    if checksums.keys() != plan.arrays.keys() or statistics.keys() != plan.encoders.keys():
        raise OutputError(
            f"the entries in {journal.folder} are not those of this conversion",
            hint=f"move {journal.folder} away, and run again to begin anew",
        )
    sha256 = {
        s.name: (journal.done(hash_entry(i), HASH_ENTRY) or {"sha256": None})["sha256"]
        for i, s in enumerate(plan.source.shards)
    }
    kept = {STAGED, *(path.partition("/")[0] for path in files)}
    for name in disk.entries(journal.staging):
        if name not in kept:  # of an earlier run: all of them are written now
            disk.remove(journal.staging / name)
    for name, own_facts in plan.source.companions.items():
        target = SOURCE_CARD if name == CARD else name
        plan.source.copy_companion(name, journal.staging / target)
        files[target] = own_facts
    if plan.target.step_item:
        for name, content in step_files(plan.target.step_item).items():
            path = f"{Path(plan.target.folder).parent}/{name}"
            disk.write_file(journal.staging / path, content)
            files[path] = hash_bytes(content)
    facts = describe(plan, sha256, checksums, statistics)
    texts = {CARD: model_card(facts, plan.target)} | (
        {REPORT: plan.quantization.report(facts)} if plan.quantization else {}
    )
    for name, text in texts.items():
        disk.write_file(journal.staging / name, text.encode())
        files[name] = hash_bytes(text.encode())
    disk.write_file(journal.staging / MANIFEST, seal(facts | {"files": files}))
