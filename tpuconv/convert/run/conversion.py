"""The conversion of a plan, as work of the engine."""

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tpuconv.checkpoint import manifest
from tpuconv.convert.plan.quantization import REPORT
from tpuconv.convert.plan.types import Plan
from tpuconv.convert.plan.units import WorkUnit
from tpuconv.convert.run.building import FOUND_STEP, write_found
from tpuconv.convert.run.calibrated import CalibrationRun, calibration_run
from tpuconv.convert.run.card import model_card
from tpuconv.convert.run.card_metadata import source_metadata
from tpuconv.convert.run.describe import describe
from tpuconv.convert.run.engine import WORKING, RunProgress, Work, make
from tpuconv.convert.run.planned import planned_names
from tpuconv.convert.run.results import HASH_ENTRY, UNIT_ENTRY, UnitResult
from tpuconv.convert.run.share import entries_of, share_of
from tpuconv.convert.run.sizing import Limits, jobs
from tpuconv.convert.run.stamps import Stale, stamps_for_hosts
from tpuconv.convert.run.steps import COMPARE_STEP, proof_step
from tpuconv.convert.run.store import OrbaxTree, Store, step_files
from tpuconv.convert.run.workers import Workers
from tpuconv.errors import OutputError
from tpuconv.hosts import ProcessPart
from tpuconv.jsonfile import MIB
from tpuconv.location import Location
from tpuconv.names import MANIFEST
from tpuconv.sources.companions import CARD, SOURCE_CARD
from tpuconv.sources.damaged import hash_of
from tpuconv.sources.origins import known_stamps, remember
from tpuconv.storage.entries import RunJournal
from tpuconv.storage.hashes import known_hash
from tpuconv.storage.sealed import Sealed, seal

AHEAD_BYTES = 768 * MIB
"""Bytes of the source that are read while the rules of a quantization are resolved: what a disk delivers
in a second."""


def read_ahead(plan: Plan) -> None:
    """Begins to check a checkpoint's contents and then to load what `run` reads first into the page cache, while other
    work leaves the disk idle. Runs in a thread; errors are left to `run`."""
    checked = plan.source.start_checks()

    def read() -> None:
        wait(checked)
        left = AHEAD_BYTES
        names = dict.fromkeys(name for unit in plan.units for slab in unit.slabs for name in slab.names)
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


@dataclass
class ConversionWork(Work):
    """The conversion of a plan. Its progress counts bytes of the source.

    Args:
        plan: what to convert.
        limits: jobs and memory.
        workspace: of `calibration_run`.

    Raises:
        MappingError: the plan has faults.
        ResourceError: there is too little memory.
    """

    plan: Plan
    limits: Limits
    workspace: Path | None = None

    def __post_init__(self) -> None:
        self.plan.check()
        self.jobs = jobs(self.plan, self.limits)
        self.source, self.nbytes = self.plan.source.folder, self.plan.source_bytes
        self.fingerprint, self.facts = self.plan.fingerprint, self.plan.facts
        self._calibrated: CalibrationRun | None = None

    @property
    def names(self) -> set[str]:
        """See `Work`."""
        return planned_names(self.plan)

    @property
    def stamps(self) -> dict[str, str]:
        """See `Work`. The checksums of a checkpoint's arrays are in the fingerprint."""
        return self.plan.source.stamps if self.plan.source.hashed else {}

    @property
    def stamps_for_hosts(self) -> dict[str, str]:
        """See `Work`."""
        return stamps_for_hosts(self.plan.source) if self.plan.source.hashed else {}

    @property
    def entries(self) -> list[str]:
        """See `Work`."""
        return entries_of(self.plan)

    def stale(self, journal: RunJournal, changed: set[str]) -> Stale:
        """See `Work`: units with tensors of these files, the comparison of copies, and the files' hashes. A file that
        had its promised hash has the same contents still, if it has that hash again. A calibration, in which each layer
        follows from all before it, begins anew."""
        plan = self.plan
        entries = {s.name: proof_step(i) for i, s in enumerate(plan.source.shards) if s.name in changed}
        promised = {s.name for s in plan.source.shards if s.sha256 and s.name in changed}
        same = {name for name in promised if journal.done(entries[name], HASH_ENTRY)}
        others = changed - same
        calibration = plan.quantization.calibration if plan.quantization and others else None
        calibrated = [*calibration.entries, FOUND_STEP] if calibration else []
        units = [unit.uid for unit in plan.units if calibration or plan.shards_of(unit) & others]
        made = calibrated + [COMPARE_STEP] * bool(others) + units + [entries[name] for name in others]
        return Stale(made, [entries[name] for name in same])

    def check_made(self, out: Location, elsewhere: Sealed | None = None) -> Iterator[RunProgress]:
        """See `Work`."""
        yield from check_made_of(self.plan, out, elsewhere or manifest.check_checkpoint_files(out))

    @contextmanager
    def opened(self, journal: RunJournal) -> Iterator[None]:
        """See `Work`: the results of a calibration."""
        calibration = self.plan.quantization.calibration if self.plan.quantization else None
        if calibration is None:
            yield
            return
        of_files = f"{self.fingerprint} {sorted(self.stamps_for_hosts.items())}"
        with calibration_run(calibration, journal, of_files, self.workspace) as self._calibrated:
            yield

    def do(self, journal: RunJournal, part: ProcessPart | None) -> Iterator[RunProgress]:
        """See `Work`: the calibration, then the units of this process."""
        plan, share, calibrated = self.plan, share_of(self.plan, part), self._calibrated
        store = self._store(journal)
        left = [unit for unit in plan.units if journal.done(unit.uid, UNIT_ENTRY) is None]
        uids = {unit.uid for unit in share.units}
        todo = [unit for unit in left if unit.uid in uids]
        resumed = share.nbytes - sum(unit.nbytes for unit in todo)
        journal.sink.check_room(disk_bytes(plan, left), "the conversion")
        if calibrated is not None:
            for layer in calibrated.layers():
                yield RunProgress(resumed, share.nbytes, resumed, "calibrate", layer)
        yield RunProgress(resumed, share.nbytes, resumed, WORKING)
        store.make_folders()
        if calibrated is not None:
            write_found(plan, journal, store, calibrated.found())
        journal.share()
        values = calibrated.values if calibrated is not None else None
        workers = Workers(plan, journal, store, self.jobs, share, values)
        for done in workers.run(todo):
            yield RunProgress(resumed + done, share.nbytes, resumed, WORKING, fetching=workers.reader.fetching)
        yield RunProgress(share.nbytes, share.nbytes, resumed, WORKING)

    def _store(self, journal: RunJournal) -> Store:
        plan, target = self.plan, self.plan.target
        tree = OrbaxTree(plan.empty, target.has_lists, plan.custom_metadata)
        return Store(journal.sink, target.folder, plan.arrays, tree)

    def write_rest(self, journal: RunJournal) -> None:
        """See `Work`: the companions, the report, the card and the manifest."""
        plan, sink, result = self.plan, journal.sink, self._result(journal)
        of_calibration = self._calibrated.results() if self._calibrated is not None else {}
        files = self._store(journal).finish(result.shard_bytes)
        hashes = {
            s.name: (journal.done(proof_step(i), HASH_ENTRY) or {"hash": None})["hash"]
            for i, s in enumerate(plan.source.shards)
        }
        for name, companion in plan.source.companions.items():
            target = SOURCE_CARD if name == CARD else name
            plan.source.copy_companion(name, sink, target)
            files[target] = dict(companion)
        if plan.target.step_item:
            parent, step = Path(plan.target.folder).parent, step_files(plan.target.step_item, plan.custom_metadata)
            files |= sink.write_all({f"{parent}/{name}": content for name, content in step.items()})
        facts = describe(plan, hashes, result, of_calibration)
        texts = {CARD: model_card(facts, plan.target, source_metadata(plan.source.folder, plan.source.companions))} | (
            {REPORT: plan.quantization.report(facts)} if plan.quantization else {}
        )
        files |= sink.write_all({name: text.encode() for name, text in texts.items()})
        sink.write(MANIFEST, seal(facts | {"files": files}))

    def _result(self, journal: RunJournal) -> UnitResult:
        """Returns the results of all units together."""
        plan, result = self.plan, UnitResult()
        steps = [*(unit.uid for unit in plan.units), *([FOUND_STEP] if self._calibrated is not None else [])]
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


def run(
    plan: Plan,
    out: Location,
    limits: Limits,
    *,
    overwrite: bool = False,
    part: ProcessPart | None = None,
    workspace: Path | None = None,
    elsewhere: Sealed | None = None,
) -> Iterator[RunProgress]:
    """Converts, and yields progress; see `ConversionWork` and `make`."""
    work = ConversionWork(plan, limits, workspace)
    return make(work, out, overwrite=overwrite, part=part, elsewhere=elsewhere)


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


def disk_bytes(plan: Plan, todo: Sequence[WorkUnit]) -> int:
    """Returns about how many bytes of disk the output takes that some units, or all, are left of."""
    written = sum(plan.written_bytes(slab) for unit in todo for slab in unit.slabs)
    return written + written // 100 + companion_bytes(plan) + 16 * MIB


def companion_bytes(plan: Plan) -> int:
    """Returns the size of the files that go with the weights."""
    return sum(facts["bytes"] for facts in plan.source.companions.values())
