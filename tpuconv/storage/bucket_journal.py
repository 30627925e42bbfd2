"""The journal of a conversion into a bucket, where nothing can be renamed. A killed conversion resumes from it, and no
reader takes a part of an output for a complete one. docs/publishing.md has the states, and who may do what in each.

The work folder of OUT lies beside it:

    OUT.tpuconv/claim        says which plan is written, in which WORK, and by which process: see `storage.claim`
    WORK/plan.done           the work has begun: its plan, its names, and what was in OUT
    WORK/PROCESS/NAME        an object of the output, staged by one process under a prefix of its own
    WORK/UNIT.done           a part of the work is done: its results, and the staged objects. The first entry counts
    WORK/complete.done       the staged object of each name of the output, and the seal of its manifest
    WORK/PROCESS/note        what stands in OUT while an old output is replaced
    WORK/PROCESS/runs        where this process runs, if it is one of several

WORK and PROCESS are random and never used again. A run goes on from what it finds: a claim in the state `publishing`
is published first, whichever plan it is of; `cleaning` and `dropping` are cleaned. Whoever has lost the claim writes
and deletes nothing.
"""

import json
import re
import secrets
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, ClassVar

from tpuconv import buckets
from tpuconv.bucket_errors import ConditionLost
from tpuconv.buckets import ABSENT_OBJECT, ObjectFacts
from tpuconv.errors import BucketError, OutputError, TpuconvError, UsageError, shorten
from tpuconv.hosts import ProcessPart
from tpuconv.jsonfile import Each, Optional, Size, check, read_bytes
from tpuconv.location import BucketPath
from tpuconv.names import MANIFEST
from tpuconv.storage import claim as claims
from tpuconv.storage import sealed
from tpuconv.storage.bucket_publishing import (
    RUNS,
    Abilities,
    Publication,
    check_staged,
    clean,
    inside_random,
    probe,
    write_note,
)
from tpuconv.storage.claim import ANYBODY, Claim, ClaimLost, ClaimState, Held, is_running, this_machine
from tpuconv.storage.entries import ENTRY_KEY, ENTRY_SCHEMAS, RunJournal, State
from tpuconv.storage.ownership import ContentsOf, listed_files, objects_in, without_markers
from tpuconv.storage.places import CLAIM, work_folder
from tpuconv.storage.refusals import check_not_nested, exists_already, not_replaced, unfinished
from tpuconv.storage.sinks import Staged, StagedSink

POLL_SECONDS = 1.0
"""The time between two looks at the claim of another process of this run, which prepares or publishes."""
STAGED_SCHEMA = Each({"key": str, "bytes": Size, "version": Each(str)})
PLAN_SCHEMA = {**ENTRY_SCHEMAS["plan"], "names": [str], "old": STAGED_SCHEMA}
OBJECTS_SCHEMA = {"objects": Optional(STAGED_SCHEMA), "names": Optional([str])}
COMPLETE_SCHEMA = {**ENTRY_SCHEMAS["complete"], "objects": STAGED_SCHEMA}


class BucketJournal(RunJournal):
    """The work objects of one output; see `Journal` and, for a `part`, `SharedJournal` for the arguments."""

    entry_schemas: ClassVar[Mapping[str, Any]] = {"plan": PLAN_SCHEMA, "complete": COMPLETE_SCHEMA}
    out: BucketPath
    sink: StagedSink

    def __init__(
        self,
        out: BucketPath,
        fingerprint: str,
        facts: Mapping[str, Any] | None = None,
        names: Collection[str] = (),
        part: ProcessPart | None = None,
        *,
        overwrite: bool = False,
        contents_of: ContentsOf = listed_files,
    ):
        if not out.key:
            raise UsageError(f"{out} is a bucket", hint=f"give a folder in it, such as {out}/NAME")
        self.out, self.fingerprint, self.part, self.overwrite = out, fingerprint, part, overwrite
        self.names, self.contents_of = frozenset(names), contents_of
        self.facts: dict[str, Any] = json.loads(json.dumps(facts or {}))
        self.claim = Claim(out, self.work)
        self._can: Abilities | None = None
        self._entries: dict[str, dict[str, Any]] = {}
        self._known: set[str] = set()
        self._state, self._has_staged = State.NEW, False

    @property
    def work(self) -> BucketPath:
        return self.out.parent / work_folder(self.out).name

    @property
    def _folder(self) -> BucketPath:
        assert self.claim.held is not None
        return self.work / self.claim.held.work

    # --- the claim -------------------------------------------------------------------------------------------------

    def __enter__(self) -> "BucketJournal":
        check_not_nested(self.out)
        try:
            while not self._enter():
                pass
            if self.claim.held is not None:
                self.sink = StagedSink(self._folder, self.claim.process, self.claim.check, self.claim.check_held)
                self._list_entries()
                if self.part is not None:
                    self._sign_in()
        except BaseException:
            self.claim.end()
            raise
        return self

    def _enter(self) -> bool:
        """Takes the claim, or what another process left behind. Returns whether there is something to do, or nothing is
        left to do."""
        self._check_folder()
        found = self.claim.read()
        if found is None or found[0].state == ClaimState.FREE:
            return self._take_free(found)
        held = found[0]
        is_ours = held.plan == self.fingerprint
        if is_ours and held.state == ClaimState.WRITING and held.holder == ANYBODY and self.part is not None:
            self.claim.join(found)
            self._state = State.JOINED
            return True
        if not self._is_dead(*found):
            if is_ours and self.part is not None:  # another process of this run prepares, or publishes
                time.sleep(POLL_SECONDS)
                return False
            raise self._busy(*found)
        return self._take_over(*found)

    def _is_dead(self, held: Held, found: ObjectFacts) -> bool:
        """Returns True if the process that holds a claim is dead, or all processes that share it."""
        if held.holder == ANYBODY:
            here = self.work / held.work
            processes = [name.partition("/")[0] for name in buckets.listing(here) if inside_random(name) == RUNS]
            with suppress(FileNotFoundError):  # who cleans up was faster
                machines = [bytes(buckets.read(here / process / RUNS)).decode() for process in processes]
                if machines and all(is_running(*each) is False for each in zip(machines, processes, strict=True)):
                    return True
        return self.claim.is_dead(held, found)

    def _sign_in(self) -> None:
        """Says which process takes part, so that others on this machine find out whether it runs."""
        buckets.put_object(self.sink.folder / RUNS, this_machine().encode())

    def _take_free(self, found: tuple[Held, ObjectFacts] | None) -> bool:
        if self.is_published() and (not self.overwrite or self.part is not None):
            self._state = State.PUBLISHED
            if found is not None:
                self.claim.remove(found[1].version)
            return True
        self._look()
        try:
            self.claim.take(self.fingerprint, secrets.token_hex(16), ClaimState.WRITING, found)
        except ClaimLost:
            if self.part is not None:
                self._start_again()
                return False
            raise
        return True

    def _take_over(self, held: Held, facts: ObjectFacts) -> bool:
        """Goes on with the work of a process that is dead."""
        is_ours, state = held.plan == self.fingerprint, held.state
        if not is_ours and state == ClaimState.WRITING:
            if not self.overwrite:
                raise self._unfinished(held)
            state = ClaimState.DROPPING
        if state == ClaimState.PUBLISHING:  # the old output may be gone already, and a note must be there before
            write_note(self.work / held.work, self.claim.process)
        try:
            self.claim.take(held.plan, held.work, state, (held, facts))
        except ClaimLost:
            if self.part is not None:
                self._start_again()
                return False
            raise
        self._state = State.BEGUN
        if state == ClaimState.WRITING:
            return True
        self._list_entries()
        if state == ClaimState.PUBLISHING:
            self._publication().publish()
            self.claim.change(ClaimState.CLEANING)
        self._clean()
        self.claim.free()
        self._start_again()
        if is_ours and state in (ClaimState.PUBLISHING, ClaimState.CLEANING):
            self._state = State.FINISHED if state == ClaimState.PUBLISHING else State.PUBLISHED
            return True
        return False

    def _start_again(self) -> None:
        """After work that was finished or dropped, or a claim that another process of this run was faster to take."""
        self.claim.end()
        self.claim = Claim(self.out, self.work)
        self._entries, self._known, self._state = {}, set(), State.NEW

    def _check_folder(self) -> None:
        """Raises OutputError if the work folder holds objects of others. Late requests leave random prefixes."""
        foreign = [name for name in objects_in(self.work) if name != CLAIM and inside_random(name) is None]
        if foreign:
            raise OutputError(
                f"{self.work}, the work folder of {self.out.name}, holds files that tpuconv did not write",
                details=shorten(sorted(foreign)),
                hint="move them away, or choose another OUT",
            )

    def _probe(self) -> Abilities:
        if self._can is None:
            self._can = probe(self._folder / self.claim.process, self.claim)
        return self._can

    def _busy(self, held: Held, found: ObjectFacts) -> OutputError:
        if held.plan != self.fingerprint and held.state == ClaimState.WRITING and not self.overwrite:
            return self._unfinished(held)
        age = self.claim.age(held, found)
        who = f"a process on {held.host}" if held.holder != ANYBODY else "several processes"
        return OutputError(
            f"{self.out} is being written by {who}, or was until {age:.0f} s ago",
            hint=f"wait for it, or for {claims.LAPSED_SECONDS - age:.0f} s if it is dead; or choose another OUT",
        )

    def _unfinished(self, held: Held) -> OutputError:
        try:
            began = self._read_entry(self.work / held.work / "plan.done")
        except OutputError:
            began = {"facts": self.facts}
        return unfinished(self.out, self.work, began, self.facts)

    def __exit__(self, kind: Any = None, /, *_: Any) -> None:
        try:
            held, is_orderly = self.claim.held, kind is None or issubclass(kind, Exception | KeyboardInterrupt)
            if held is None or held.holder != self.claim.process or not is_orderly:
                return
            if held.state == ClaimState.WRITING and not self._has_staged and self._state is State.NEW:
                self.claim.change(ClaimState.DROPPING)  # there is nothing that can be resumed
                self._clean()
                self.claim.free()
            elif kind is not None:
                self.claim.leave()
        except ClaimLost:  # another process goes on, and cleans up
            pass
        except (TpuconvError, OSError):
            if kind is None:
                raise
        finally:
            self.claim.end()

    # --- entries ---------------------------------------------------------------------------------------------------

    def _list_entries(self) -> None:
        self._known = {name for name in buckets.names(self._folder) if re.fullmatch(r"[^/]+\.done", name)}

    def _is_recorded(self, part: str) -> bool:
        return f"{part}.done" in self._known

    def _entry_path(self, part: str) -> BucketPath:
        return self._folder / f"{part}.done"

    def _entry(self, part: str) -> dict[str, Any]:
        if part not in self._entries:
            facts, path = super()._entry(part), self._entry_path(part)
            check(facts, OBJECTS_SCHEMA, str(path), OutputError)
            if any(inside_random(staged["key"]) is None for staged in facts.get("objects", {}).values()):
                raise OutputError(f"{path} names objects that no process staged")
            self._entries[part] = facts
        return self._entries[part]

    def record(self, part: str, facts: Mapping[str, Any], files: Collection[str] = ()) -> None:
        """See `RunJournal`. Of two processes that did a part the first entry counts, and the second one takes back what
        it staged."""
        objects = {name: self.sink.staged[name].to_json() for name in files}
        self._put_entry(part, {**facts, "objects": objects}, is_first=bool(objects))
        self._has_staged = self._has_staged or bool(objects)

    def _put_entry(self, part: str, facts: Mapping[str, Any], *, is_first: bool) -> None:
        self.claim.check_held()
        path, data = self._folder / f"{part}.done", sealed.seal({ENTRY_KEY: part, **facts})
        try:
            buckets.put_object(path, data, only_if=ABSENT_OBJECT if is_first else None)
            self._entries[part] = json.loads(data)
        except ConditionLost:
            found = self._entry(part)
            theirs = found.get("objects", {})
            lost = [name for name, own in facts["objects"].items() if theirs.get(name) != own]
            self._take_back(lost, theirs)
        self._known.add(path.name)

    def _take_back(self, names: Collection[str], theirs: Mapping[str, Any]) -> None:
        buckets.remove_objects(self.sink.folder, list(names))
        self.sink.staged |= {name: Staged.from_json(theirs[name]) for name in names if name in theirs}

    def forget(self, parts: list[str]) -> None:
        """See `RunJournal`. Where a part has objects the work begins anew under another name: a late process might
        record the same part as it was."""
        known = [part for part in parts if self._is_recorded(part)]
        self._load(known)
        if any(self._entries[part].get("objects") for part in known):
            self._begin_anew()
            return
        buckets.remove_objects(self._folder, [f"{part}.done" for part in known])
        for part in known:
            self._known.discard(f"{part}.done")
            self._entries.pop(part, None)

    def _load(self, parts: Collection[str]) -> None:
        """Reads entries, several at a time."""
        buckets.for_each(self._entry, [part for part in parts if part not in self._entries])

    def _begin_anew(self) -> None:
        self.claim.change(ClaimState.DROPPING)
        self._clean()
        self.claim.change(ClaimState.WRITING, work=secrets.token_hex(16))
        self.sink = StagedSink(self._folder, self.claim.process, self.claim.check, self.claim.check_held)
        self._entries, self._known = {}, set()
        self._record_plan()

    # --- states ----------------------------------------------------------------------------------------------------

    def begin(self) -> State:
        if self._state in (State.PUBLISHED, State.FINISHED):
            return self._state
        if self.done("complete") is not None:
            return State.COMPLETE
        if self._state is State.JOINED:
            if self.done("plan") is None:
                raise self.claim.lost()
        elif self.done("plan") is None:
            self._record_plan()
            self._state = State.NEW
        return self._state

    def _record_plan(self) -> None:
        self._probe()
        self._put_entry(
            "plan",
            {
                "fingerprint": self.fingerprint,
                "facts": self.facts,
                "names": sorted(self.names),
                "old": {name: Staged(name, f.size, f.version).to_json() for name, f in self._look().items()},
                "objects": {},
            },
            is_first=True,
        )

    def _look(self) -> dict[str, ObjectFacts]:
        """What lies in OUT, and may be replaced. Raises OutputError if it may not."""
        listed = buckets.listing_facts(self.out)
        there = without_markers(listed)
        if there and (error := exists_already(self.out, self.facts, self.contents_of, overwrite=self.overwrite)):
            raise error
        if clashing := sorted(self.names & (listed.keys() - there.keys())):
            raise not_replaced(self.out, [f"it holds {name}" for name in clashing], overwrite=self.overwrite)
        return there

    def share(self) -> None:
        if self.part is not None and self._state is not State.JOINED:
            self.claim.change(ClaimState.WRITING, holder=ANYBODY)

    def gather(self, parts: Collection[str]) -> bool:
        """See `RunJournal`."""
        if self.part is not None and not (self.part.publishes and self._has_all(parts) and self._take_back_claim()):
            return False
        self._list_entries()
        entries = [name.removesuffix(".done") for name in self._known]
        self._load(entries)
        for entry in entries:
            objects = self._entries[entry].get("objects", {})
            self.sink.staged |= {name: Staged.from_json(facts) for name, facts in objects.items()}
        return True

    def _has_all(self, parts: Collection[str]) -> bool:
        self._list_entries()
        return all(self._is_recorded(part) for part in parts)

    def _take_back_claim(self) -> bool:
        """Returns True if this process, of several, should publish."""
        while True:
            held, found = self.claim.held, self.claim.read()
            if found is None or held is None or (found[0].work, found[0].state) != (held.work, ClaimState.WRITING):
                return False
            if found[0].holder != ANYBODY and not self._is_dead(*found):
                return found[0].holder == self.claim.process
            try:
                self.claim.take(held.plan, held.work, ClaimState.WRITING, found)
                return True
            except ClaimLost:
                continue

    def is_published(self) -> bool:
        """See `RunJournal`."""
        try:
            return bool(sealed.read_sealed(self.out).raw.get("fingerprint") == self.fingerprint)
        except BucketError:
            raise
        except TpuconvError:
            return False

    def publish(self) -> None:
        self.claim.check_held()
        if self.done("complete") is None:
            self._complete()
        publication = self._publication()
        publication.check()
        write_note(self._folder, self.claim.process)
        self.claim.change(ClaimState.PUBLISHING)
        publication.publish()
        with suppress(ClaimLost):  # whoever has it by now cleans up
            self.claim.change(ClaimState.CLEANING)
            self._clean()
            self.claim.free()

    def _complete(self) -> None:
        """Records what the output consists of, once every object was compared with its entry."""
        objects = self.sink.staged
        check_staged(self._folder, objects)
        manifest = read_bytes(self._folder / objects[MANIFEST].key, sealed.MAX_MANIFEST_BYTES, OutputError)
        facts = {"fingerprint": self.fingerprint, "identity": sealed.seal_of(manifest) or ""}
        self._put_entry("complete", {**facts, "objects": {n: s.to_json() for n, s in objects.items()}}, is_first=True)

    def _publication(self) -> Publication:
        plan, complete = self.done("plan"), self.done("complete")
        if plan is None or complete is None:
            raise self.claim.lost()
        new, old = (
            {n: Staged.from_json(facts) for n, facts in each.items()} for each in (complete["objects"], plan["old"])
        )
        return Publication(self.claim, self._folder, new, old, self._probe())

    def _clean(self) -> None:
        """Deletes the objects of this work, those without which nobody knows the others last. What is unknown stays."""
        self._list_entries()
        entries = [name.removesuffix(".done") for name in self._known]
        names = set(self.names)

        def add(entry: str) -> None:
            with suppress(OutputError):  # it was damaged; what it names has the names of the plan
                facts = self._entry(entry)
                names.update(facts.get("objects", ()), facts.get("names", ()))

        buckets.for_each(add, entries)
        clean(self._folder, names, self.claim.check)
