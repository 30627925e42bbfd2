"""The loop of a conversion: does what is left to do, and publishes the output when it is complete."""

import os
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tpuconv.checkpoint import manifest
from tpuconv.convert.plan.quantization import REPORT, CalibrationPass
from tpuconv.convert.plan.types import Plan, WorkUnit
from tpuconv.convert.run.calibrated import CalibrationRun, calibration_run
from tpuconv.convert.run.card import model_card
from tpuconv.convert.run.describe import describe
from tpuconv.convert.run.found import FOUND_STEP, write_found
from tpuconv.convert.run.opening import open_journal
from tpuconv.convert.run.planned import planned_names
from tpuconv.convert.run.results import HASH_ENTRY, UNIT_ENTRY, UnitResult
from tpuconv.convert.run.share import entries_of, share_of
from tpuconv.convert.run.sizing import Limits, jobs
from tpuconv.convert.run.stamps import Stale, check_same_files, forget_changed, stamps_for_hosts
from tpuconv.convert.run.steps import COMPARE_STEP, proof_step
from tpuconv.convert.run.store import OrbaxTree, Store, step_files
from tpuconv.convert.run.workers import Workers
from tpuconv.errors import OutputError, UsageError
from tpuconv.hosts import ProcessPart
from tpuconv.jsonfile import MIB
from tpuconv.location import Location
from tpuconv.names import MANIFEST
from tpuconv.progress import Progress
from tpuconv.sources.companions import CARD, SOURCE_CARD
from tpuconv.sources.damaged import hash_of
from tpuconv.sources.origins import known_stamps, remember
from tpuconv.storage.entries import RunJournal, State
from tpuconv.storage.hashes import known_hash
from tpuconv.storage.places import real
from tpuconv.storage.sealed import Sealed, raise_damage, read_sealed, seal

AHEAD_BYTES = 768 * MIB
"""Bytes of the source that are read while the rules of a quantization are resolved: what a disk delivers
in a second."""


PUBLISHING = "publish"
"""The stage in which all is converted, and the last files are written, flushed and published."""
PART_DONE = "part done"
"""The last stage of a process whose part is done, where another one is to publish the output."""


@dataclass(frozen=True)
class RunProgress:
    """The progress of a conversion in bytes of the source; for one of several processes, in bytes of its share.

    Attributes:
        done, total: bytes that are converted, and all.
        resumed: bytes of an earlier run.
        stage: PUBLISHING once all is converted; the last is "published", or PART_DONE.
        layer: the layer that is being calibrated, before anything is converted.
        fetching: of a source that is fetched, the bytes that have come, and all.
    """

    done: int
    total: int
    resumed: int
    stage: str
    layer: str = ""
    fetching: tuple[int, int] = (0, 0)

    def shown_as(self, stage: str) -> Progress:
        """Returns what a listener is told of work that is called `stage`, such as "converting"."""
        if self.layer:
            return Progress(f"calibrating {self.layer}")
        if self.stage == PUBLISHING or (self.stage == "published" and not self.resumed):
            return Progress("publishing")
        if self.fetching[0] < self.fetching[1]:  # which takes longer
            return Progress(f"fetching and {stage}", *self.fetching)
        return Progress(stage, self.done, self.total)


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


def run(
    plan: Plan,
    out: Location,
    limits: Limits,
    *,
    overwrite: bool = False,
    part: ProcessPart | None = None,
    workspace: Path | None = None,
) -> Iterator[RunProgress]:
    """Converts, and yields progress. If it is killed at any moment and run again, it resumes.

    Args:
        plan: what to convert.
        out: the output folder.
        limits: jobs and memory.
        overwrite: replace an existing output of ours.
        part: which of several processes this is. Each does a part of the units; the last one publishes.
        workspace: of `calibration_run`.

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
    check_outside(plan.source.folder, out)
    total, stamps = plan.source_bytes, stamps_for_hosts(plan.source)
    with open_journal(out, plan.fingerprint, plan.facts, planned_names(plan), part, overwrite=overwrite) as journal:
        state = journal.begin()
        if state is State.PUBLISHED:
            yield from _check_published(plan, journal.out)
            yield RunProgress(total, total, total, "published")
            return
        if state is State.JOINED:
            check_same_files(journal, stamps)
        elif forget_changed(
            journal, plan.source.stamps, partial(_made_of, plan, journal), stamps, is_part=part is not None
        ):
            state = State.BEGUN
        calibrating: AbstractContextManager[CalibrationRun | None] = nullcontext()
        if state is not State.COMPLETE and (calibration := _calibration(plan)) is not None:
            calibrating = calibration_run(calibration, journal, plan.fingerprint, workspace)
        with calibrating as calibrated:
            if state is not State.COMPLETE:
                end = yield from _work(plan, journal, calibrated, job_count, part)
                if end is not None:
                    yield end
                    return
            yield RunProgress(total, total, 0, PUBLISHING)
            journal.publish()
            if plan.source.hashed:
                remember(read_sealed(journal.out), plan.source.folder, plan.source.stamps)
    yield RunProgress(total, total, 0, "published")


def check_outside(folder: Location, out: Location) -> None:
    """Raises UsageError if an output is the folder of its source, lies in it, or holds it."""
    inside, target = real(folder), real(out)
    if target == inside or inside in target.parents:
        raise UsageError(f"{out} lies in the source folder", hint="give an OUT outside of it")
    if target in inside.parents:
        raise UsageError(f"{out} holds the source folder, {folder}", hint="give another OUT")


def _check_published(plan: Plan, out: Location) -> Iterator[RunProgress]:
    """Checks that an output of this plan has all its files, in their sizes, and was made from the files of the source
    as they are now.

    Raises:
        CorruptOutput: files are missing or have the wrong size.
        OutputError: it was made from a source with the same headers and other values.
    """
    published = manifest.read_manifest(out)
    raise_damage(out, published.size_faults())
    yield from check_made_of(plan, out, published.sealed)


def check_made_of(plan: Plan, out: Location, made: Sealed) -> Iterator[RunProgress]:
    """Checks that an output, with this manifest, was made from the files of the source as they are now. Yields progress
    before a file is read completely: one that this machine did not convert, or that changed since.

    Raises:
        OutputError: it was made from a source with the same headers and other values.
    """
    source = plan.source
    if not source.hashed:  # its arrays' checksums are in the fingerprint
        return
    known, then = made.raw["source"]["shards"], known_stamps(made, source.folder)
    unpromised = [shard for shard in source.shards if shard.sha256 is None]  # the others are in the fingerprint
    for shard in unpromised:
        facts, path = known.get(shard.name, {}), source.folder / shard.name
        if shard.stamp in (then.get(shard.name), facts.get("version")):  # which older manifests had
            continue
        yield RunProgress(0, plan.source_bytes, 0, "compare")
        promise = known_hash(facts)
        if promise is None:
            raise OutputError(
                f"{out} exists already, and {path} may have changed since: only a part of the file was read then",
                hint="choose another OUT, or give `overwrite=True` to replace it",
            )
        if hash_of(path, promise[0]) != promise[1]:
            raise OutputError(
                f"{out} exists already, and {path} has changed since it was made",
                hint="choose another OUT, or give `overwrite=True` to replace it",
            )
    remember(made, source.folder, {**then, **{shard.name: shard.stamp for shard in unpromised}})


def _made_of(plan: Plan, journal: RunJournal, files: set[str]) -> Stale:
    """Units with tensors of these files, the comparison of copies, and the files' hashes. A file that had its promised
    hash has the same contents still, if it has that hash again."""
    entries = {s.name: proof_step(i) for i, s in enumerate(plan.source.shards) if s.name in files}
    promised = {s.name for s in plan.source.shards if s.sha256 and s.name in files}
    same = {name for name in promised if journal.done(entries[name], HASH_ENTRY)}
    changed = files - same
    units = [unit.uid for unit in plan.units if plan.shards_of(unit) & changed]
    made = [COMPARE_STEP] * bool(changed) + units + [entries[name] for name in changed]
    return Stale(made, [entries[name] for name in same])


def _work(
    plan: Plan, journal: RunJournal, calibrated: CalibrationRun | None, jobs: int, part: ProcessPart | None
) -> Generator[RunProgress, None, RunProgress | None]:
    """Does what is left of this process's part, after the calibration, if there is one. Returns None if the output is
    complete now; if another process is to publish it, or has done so, the last progress."""
    target, share = plan.target, share_of(plan, part)
    tree = OrbaxTree(plan.empty, target.has_lists, target.custom_metadata(plan.options.scan_layers))
    store = Store(journal.sink, target.folder, plan.arrays, tree)
    left = [unit for unit in plan.units if journal.done(unit.uid, UNIT_ENTRY) is None]
    uids = {unit.uid for unit in share.units}
    todo = [unit for unit in left if unit.uid in uids]
    resumed = share.nbytes - sum(unit.nbytes for unit in todo)
    journal.sink.check_room(disk_bytes(plan, left), "the conversion")
    if calibrated is not None:
        for layer in calibrated.layers():
            yield RunProgress(resumed, share.nbytes, resumed, "calibrate", layer)
    yield RunProgress(resumed, share.nbytes, resumed, "convert")
    store.make_folders()
    if calibrated is not None:
        write_found(plan, journal, store, calibrated.found())
    journal.share()
    values = calibrated.values if calibrated is not None else None
    workers = Workers(plan, journal, store, jobs, share, values)
    for done in workers.run(todo):
        yield RunProgress(resumed + done, share.nbytes, resumed, "convert", fetching=workers.reader.fetching)
    if not journal.gather(entries_of(plan)):
        return RunProgress(share.nbytes, share.nbytes, resumed, "published" if journal.is_published() else PART_DONE)
    yield RunProgress(share.nbytes, share.nbytes, resumed, "convert")
    yield RunProgress(share.nbytes, share.nbytes, resumed, PUBLISHING)
    result = _result(plan, journal)
    of_calibration = calibrated.results() if calibrated is not None else {}
    _write_rest(plan, journal, store.finish(result.shard_bytes), result, of_calibration)
    return None


def disk_bytes(plan: Plan, todo: Sequence[WorkUnit]) -> int:
    """Returns about how many bytes of disk the output takes that some units, or all, are left of."""
    written = sum(plan.written_bytes(slab) for unit in todo for slab in unit.slabs)
    return written + written // 100 + companion_bytes(plan) + 16 * MIB


def companion_bytes(plan: Plan) -> int:
    """Returns the size of the files that go with the weights."""
    return sum(facts["bytes"] for facts in plan.source.companions.values())


def _result(plan: Plan, journal: RunJournal) -> UnitResult:
    """Returns the results of all units together."""
    result = UnitResult()
    steps = [*(unit.uid for unit in plan.units), *([FOUND_STEP] if _calibration(plan) is not None else [])]
    for step in steps:
        if (entry := journal.done(step, UNIT_ENTRY)) is not None:
            result.add(UnitResult.from_json(entry))
    compressed = {name: set(array.shard_names()) for name, array in plan.arrays.items() if array.compressed}
    if (
        result.checksums.keys() != plan.arrays.keys()
        or result.statistics.keys() != plan.encoders.keys()
        or {name: set(files) for name, files in result.shard_bytes.items()} != compressed
    ):
        raise OutputError(
            f"the entries in {journal.work} do not belong to this conversion",
            hint=f"move {journal.work} away, and run again to begin anew",
        )
    return result


def _write_rest(
    plan: Plan,
    journal: RunJournal,
    files: dict[str, Any],
    result: UnitResult,
    of_calibration: Mapping[str, Mapping[str, Any]],
) -> None:
    """Writes what the output holds besides the arrays, whose small `files` exist. The manifest comes last."""
    hashes = {
        s.name: (journal.done(proof_step(i), HASH_ENTRY) or {"hash": None})["hash"]
        for i, s in enumerate(plan.source.shards)
    }
    sink = journal.sink
    for name, companion_facts in plan.source.companions.items():
        target = SOURCE_CARD if name == CARD else name
        plan.source.copy_companion(name, sink, target)
        files[target] = companion_facts
    if plan.target.step_item:
        parent, step = Path(plan.target.folder).parent, step_files(plan.target.step_item)
        files |= sink.write_all({f"{parent}/{name}": content for name, content in step.items()})
    facts = describe(plan, hashes, result, of_calibration)
    texts = {CARD: model_card(facts, plan.target)} | (
        {REPORT: plan.quantization.report(facts)} if plan.quantization else {}
    )
    files |= sink.write_all({name: text.encode() for name, text in texts.items()})
    sink.write(MANIFEST, seal(facts | {"files": files}))


def _calibration(plan: Plan) -> CalibrationPass | None:
    return plan.quantization.calibration if plan.quantization else None
