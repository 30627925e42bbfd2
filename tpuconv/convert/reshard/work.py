"""A resharding, as work of the engine. Its progress counts bytes of the arrays."""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from math import prod
from pathlib import PurePosixPath
from typing import Any

from tpuconv.checkpoint.manifest import LIBRARIES, PARAMS, check_checkpoint_files
from tpuconv.convert.plan.quantization import REPORT
from tpuconv.convert.plan.types import Skip
from tpuconv.convert.reshard.plan import ReshardPlan, ReshardUnit
from tpuconv.convert.run.building import build_shard
from tpuconv.convert.run.card import model_card
from tpuconv.convert.run.card_metadata import source_metadata
from tpuconv.convert.run.describe import described_arrays
from tpuconv.convert.run.engine import WORKING, RunProgress, Work
from tpuconv.convert.run.planned import written_names
from tpuconv.convert.run.results import UNIT_ENTRY, UnitResult
from tpuconv.convert.run.sizing import BASE_MEMORY, Limits, fitting_jobs
from tpuconv.convert.run.stamps import Stale
from tpuconv.convert.run.store import OrbaxTree, Store, step_files
from tpuconv.hosts import ProcessPart, divided
from tpuconv.jsonfile import MIB
from tpuconv.location import Location
from tpuconv.names import MANIFEST
from tpuconv.progress import TICK_SECONDS
from tpuconv.sources.companions import CARD, SOURCE_CARD
from tpuconv.storage.disk import page_buffer
from tpuconv.storage.entries import RunJournal
from tpuconv.storage.hashes import hash_bytes
from tpuconv.storage.sealed import CHECKPOINT, MANIFEST_FORMAT, Sealed, copy_file, seal


class ReshardWork(Work):
    """Writes the arrays of a checkpoint in other chunks.

    Args:
        plan: what is written.
        skipped: arrays of the checkpoint that are not written.
        limits: jobs and memory.

    Raises:
        ResourceError: the memory does not suffice for one job.
    """

    def __init__(self, plan: ReshardPlan, skipped: tuple[Skip, ...], limits: Limits):
        self.plan, self.skipped = plan, skipped
        manifest = plan.source.manifest
        self.source, self.nbytes, self.units = manifest.folder, plan.nbytes, plan.units
        self.facts: Mapping[str, Any] = {
            "format": MANIFEST_FORMAT,
            "kind": CHECKPOINT,
            "checkpoint": manifest.sealed.identity,
            "table": plan.table.fingerprint,
            "mesh": dict(plan.mesh),
            "scan_layers": plan.scan_layers,
            **({"pathways": True} if plan.pathways else {}),
        }
        files = {name: [array.shards, array.chunks] for name, array in plan.arrays.items()}
        self.fingerprint = hash_bytes(json.dumps([self.facts, files]).encode())["xxh3_128"]
        self._shard_bytes = max((array.shard_bytes for array in plan.arrays.values()), default=0)
        # A layer is read apart from the array that it is put into.
        job_bytes = 2 * plan.most_bytes + self._shard_bytes + manifest.chunk_memory
        self.jobs = fitting_jobs(
            f"resharding {manifest.folder.name}", limits, job_bytes, BASE_MEMORY + plan.source.memory
        )

    @property
    def names(self) -> set[str]:
        """See `Work`."""
        return written_names(self.plan.target, self.plan.arrays.values(), self.plan.source.companions)

    @property
    def stamps(self) -> dict[str, str]:
        """See `Work`."""
        return self.plan.source.stamps

    @property
    def stamps_for_hosts(self) -> dict[str, str]:
        """See `Work`."""
        return self.plan.source.stamps_for_hosts

    @property
    def entries(self) -> list[str]:
        """See `Work`."""
        return [unit.uid for unit in self.units]

    def stale(self, journal: RunJournal, changed: set[str]) -> Stale:
        """See `Work`: all units."""
        return Stale([uid for uid in self.entries if journal.done(uid, UNIT_ENTRY)])

    def check_made(self, out: Location, elsewhere: Sealed | None = None) -> Iterator[RunProgress]:
        """See `Work`."""
        yield from self.plan.source.check_made(out, elsewhere or check_checkpoint_files(out))

    def opened(self, journal: RunJournal) -> AbstractContextManager[None]:
        """See `Work`: nothing."""
        return nullcontext()

    def do(self, journal: RunJournal, part: ProcessPart | None) -> Iterator[RunProgress]:
        """See `Work`: the units of this process."""
        sizes = [unit.nbytes for unit in self.units]
        share = self.units if part is None else divided(self.units, sizes, part.count)[part.index]
        todo = [unit for unit in share if journal.done(unit.uid, UNIT_ENTRY) is None]
        total = sum(unit.nbytes for unit in share)
        resumed = done = total - sum(unit.nbytes for unit in todo)
        companions = sum(facts["bytes"] for facts in self.plan.source.companions.values())
        left = total - resumed
        journal.sink.check_room(left + left // 100 + companions + 16 * MIB, "the resharded checkpoint")
        self.plan.source.check()
        store = self._store(journal)
        store.make_folders()
        journal.share()
        yield RunProgress(done, total, resumed, WORKING)
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                waiting: set[Future[int]] = {pool.submit(self._make, unit, journal, store) for unit in todo}
                while waiting:
                    finished, waiting = wait(waiting, TICK_SECONDS, FIRST_COMPLETED)
                    done += sum(future.result() for future in finished)
                    yield RunProgress(done, total, resumed, WORKING)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _make(self, unit: ReshardUnit, journal: RunJournal, store: Store) -> int:
        """Writes the shards of a unit, and records it. Returns the bytes of their values."""
        plan, result = self.plan, UnitResult()
        memory = page_buffer(self._shard_bytes)
        written = []
        for name, box, values in plan.values(unit):
            shard = build_shard(plan.arrays[name], box, values, memory, result)
            written.append(store.write(name, shard))
        store.sync(written)
        journal.record(unit.uid, result.to_json(), written)
        return unit.nbytes

    def _store(self, journal: RunJournal) -> Store:
        plan, target = self.plan, self.plan.target
        empty = [f"{target.root}{name}" for name, is_empty in target.empty.items() if is_empty(plan.config)]
        tree = OrbaxTree(empty, target.has_lists, target.custom_metadata(plan.scan_layers))
        return Store(journal.sink, target.folder, plan.arrays, tree)

    def write_rest(self, journal: RunJournal) -> None:
        """See `Work`: the companions, the report, the card and the manifest."""
        plan, sink, target = self.plan, journal.sink, self.plan.target
        result = UnitResult()
        for unit in self.units:
            result.add(UnitResult.from_json(journal.required(unit.uid, UNIT_ENTRY)))
        files = self._store(journal).finish(result.shard_bytes)
        for name, facts in plan.source.companions.items():
            copied = SOURCE_CARD if name == CARD else name
            plan.source.copy_companion(name, sink, copied)
            files[copied] = dict(facts)
        manifest = plan.source.manifest
        if (report := manifest.sealed.files.get(REPORT)) is not None:
            copy_file(manifest.folder / REPORT, sink, REPORT, report)
            files[REPORT] = dict(report)
        if target.step_item:
            parent = PurePosixPath(target.folder).parent
            step = step_files(target.step_item, target.custom_metadata(plan.scan_layers))
            files |= sink.write_all({f"{parent}/{name}": content for name, content in step.items()})
        facts = self._described(plan.source.finish({}), result)
        card = model_card(facts, target, source_metadata(plan.source.companions_folder, plan.source.companions))
        files |= sink.write_all({CARD: card.encode()})
        sink.write(MANIFEST, seal(facts | {"files": files}))

    def _described(self, source: Mapping[str, Any], result: UnitResult) -> dict[str, Any]:
        """Returns the manifest of the checkpoint with the arrays as they are now."""
        plan, raw = self.plan, self.plan.source.manifest.raw
        arrays, options = plan.arrays.values(), {**raw["options"], "scan_layers": plan.scan_layers}
        if plan.pathways:
            options = {key: value for key, value in options.items() if key != "compress"} | {"pathways": True}
        facts = {
            "format": MANIFEST_FORMAT,
            "kind": CHECKPOINT,
            "fingerprint": self.fingerprint,
            "source": dict(source),
            "family": raw["family"],
            "table": plan.table.fingerprint,
            **{key: raw[key] for key in ("release", "returns", "parts", "variant") if raw.get(key)},
            "options": options,
            **({"folder": plan.target.folder} if plan.target.folder != PARAMS else {}),
            "versions": {library: version(library) for library in LIBRARIES},
            "mesh": dict(plan.mesh),
            "parameters": sum(prod(array.shape) for array in arrays if not array.buffer),
            "bytes": plan.nbytes,
            "skipped": [*raw.get("skipped", ()), *(vars(skip) for skip in self.skipped)],
            **described_arrays(plan.arrays, result, lambda array: array.sources),
        }
        return facts | ({"quantization": raw["quantization"]} if raw.get("quantization") else {})
