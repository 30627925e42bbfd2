"""The journal of a conversion into a bucket, where nothing can be renamed. A killed conversion resumes from it, and no
reader takes a part of an output for a complete one.

The work objects of OUT lie beside it, under `OUT.tpuconv/`:

    claim          which plan writes OUT, and which process: created if absent, later replaced by compare-and-swap only
    plan.done      the work has begun; says whether files are written to OUT itself or, to replace an output, to new/
    UNIT.done      a part of the work is done
    new/           what becomes OUT when an output is replaced
    complete.done  new/ is complete; holds the identity of its manifest

Objects are written to OUT under their final names. The two marks of a complete output come last, when the claim was
read again: `commit_success.txt`, without which Orbax restores nothing from a bucket, then the manifest, without which
there is no checkpoint for tpuconv. To replace an output, its marks are deleted first, the manifest before the other
one; then the store copies new/ over it. A run continues from what it finds:

    complete.done, OUT without a manifest  -> copying goes on, whichever plan the run is of
    the manifest of OUT is that of the plan -> it is published; the work objects are deleted, the claim last
    plan.done                               -> units without an entry are done
    nothing                                 -> the work begins

Two processes of one plan write the same bytes. The second one takes the claim, and the first one stops when it finds
that out. A process of another plan is refused; with --overwrite it waits until the claim is LAPSED_SECONDS old.
"""

import json
import re
import secrets
import threading
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from tpuconv import buckets
from tpuconv.buckets import ABSENT_OBJECT, ConditionLost
from tpuconv.errors import BucketError, OutputError, TpuconvError, UsageError
from tpuconv.jsonfile import MIB, check, parse
from tpuconv.location import BucketPath
from tpuconv.names import MANIFEST
from tpuconv.storage import sealed
from tpuconv.storage.journal import ENTRY_SCHEMAS, JournalEntries, State
from tpuconv.storage.refusals import exists_already, unfinished
from tpuconv.storage.sinks import BucketSink, is_mark

HEARTBEAT_SECONDS = 60
LAPSED_SECONDS = 300
"""Age of a claim after which its process is taken for dead."""
CLOCK_ATTEMPTS = 3
"""A process that publishes clears the work, with the clocks of others."""

CLAIM = "claim"
CLAIM_SCHEMA = {"fingerprint": str, "process": str, "by": str}
BY = "tpuconv"


class BucketJournal(JournalEntries):
    """The work objects of one output; see `Journal` for the arguments."""

    entry_schemas: ClassVar[Mapping[str, Any]] = {**ENTRY_SCHEMAS, "plan": {**ENTRY_SCHEMAS["plan"], "hidden": bool}}

    def __init__(
        self, out: BucketPath, fingerprint: str, facts: Mapping[str, Any] | None = None, *, overwrite: bool = False
    ):
        if not out.key:
            raise UsageError(f"{out} is a bucket", hint=f"give a folder in it, such as {out}/NAME")
        self.out, self.fingerprint, self.overwrite = out, fingerprint, overwrite
        self.facts: dict[str, Any] = json.loads(json.dumps(facts or {}))
        self.sink = BucketSink(out, is_hidden=False)
        self._process = secrets.token_hex(8)
        self._claim = json.dumps({"by": BY, "fingerprint": fingerprint, "process": self._process}).encode()
        self._known: set[str] = set()
        self._version: buckets.Version = ABSENT_OBJECT
        self._lost, self._ended = threading.Event(), threading.Event()
        self._swap = threading.Lock()

    @property
    def work(self) -> BucketPath:
        return self.out.with_name(f"{self.out.name}.tpuconv")

    # --- the claim ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> "BucketJournal":
        self._take_claim()
        self._list_entries()
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def _list_entries(self) -> None:
        self._known = {name for name in buckets.listing(self.work) if re.fullmatch(r"[^/]+\.done", name)}

    def _take_claim(self) -> None:
        try:
            self._version = buckets.put_object(self.work / CLAIM, self._claim, only_if=ABSENT_OBJECT)
        except ConditionLost:
            self._take_over()
            return
        try:  # a store that ignores the condition would let two plans write to one output
            buckets.put_object(self.work / CLAIM, self._claim, only_if=ABSENT_OBJECT)
        except ConditionLost:
            return
        buckets.remove_objects(self.work, [CLAIM])
        raise UsageError(
            f"{self.out.root} cannot hold outputs: its store ignores conditions of writes (If-None-Match)",
            hint="write to a local disk, and copy the output",
        )

    def _take_over(self) -> None:
        """Takes the claim of another process: at once if that is of the same plan, else once it has lapsed."""
        path = self.work / CLAIM
        found = buckets.facts(path)
        if found is None:  # its process has just finished
            self._take_claim()
            return
        held = self._read_claim()
        if held["process"] != self._process and held["fingerprint"] != self.fingerprint:
            self._known = {"plan.done"} if buckets.facts(self.work / "plan.done") else set()
            began = self.done("plan")
            if began is not None and began["fingerprint"] != self.fingerprint and not self.overwrite:
                raise unfinished(self.out, self.work, began, self.facts)
            age = self._now() - found.modified.timestamp()
            if age < LAPSED_SECONDS:
                raise OutputError(
                    f"{self.out} is being written by another process, or was until {age:.0f} s ago",
                    hint=f"wait for it, or for {LAPSED_SECONDS - age:.0f} s if it is dead; or choose another OUT",
                )
        try:
            self._version = buckets.put_object(path, self._claim, only_if=found.version)
        except ConditionLost:
            raise self._other_writer() from None

    def _read_claim(self) -> dict[str, Any]:
        path = self.work / CLAIM
        try:
            raw = parse(bytes(buckets.read(path, 0))[:MIB], str(path), OutputError)
            claim: dict[str, Any] = check(raw, CLAIM_SCHEMA, str(path), OutputError)
            return claim
        except FileNotFoundError:
            raise self._other_writer() from None
        except OutputError as e:
            raise OutputError(
                f"{self.work} was not made by this version of tpuconv",
                details=[e.message],
                hint="move it away, or choose another OUT",
            ) from None

    def _now(self) -> float:
        """The time of the server, in seconds: clocks of hosts differ."""
        clock = self.work / f"clock-{self._process}"
        for _ in range(CLOCK_ATTEMPTS):
            buckets.put_object(clock, b"")
            found = buckets.facts(clock)
            buckets.remove_objects(self.work, [clock.name])
            if found is not None:
                return found.modified.timestamp()
        raise BucketError(f"{clock} was written, and is not there", hint="run again")

    def _other_writer(self) -> OutputError:
        return OutputError(
            f"another process writes to {self.out}", hint="wait for it; the same command then finds its output"
        )

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            try:
                with self._swap:
                    if self._ended.is_set():
                        return
                    self._renew()
            except (ConditionLost, FileNotFoundError):
                self._lost.set()
                return
            except TpuconvError:  # the network: what it disturbs raises its own error
                continue

    def _renew(self) -> None:
        """Writes the claim again, which so gets younger. Raises ConditionLost if another process has taken it."""
        path = self.work / CLAIM
        try:
            self._version = buckets.put_object(path, self._claim, only_if=self._version)
        except ConditionLost:
            found = buckets.facts(path)
            if found is None or bytes(buckets.read(path)) != self._claim:
                raise
            self._version = found.version  # written by a request whose answer was lost

    def _check_claim(self) -> None:
        """Raises OutputError if another process has taken the claim."""
        if self._lost.is_set() or self._read_claim()["process"] != self._process:
            raise self._other_writer()

    def __exit__(self, *raised: Any) -> None:
        kind: type[BaseException] | None = raised[0] if raised else None
        with self._swap:
            self._ended.set()
        if self._lost.is_set() or self._known - {"plan.done"}:
            return
        if kind is not None and not issubclass(kind, Exception | KeyboardInterrupt):
            return
        try:
            if not (self._known and buckets.listing(self.sink.folder)):  # there is nothing that can be resumed
                self._clear()
                buckets.remove_objects(self.work, [CLAIM])
        except (TpuconvError, OSError):
            if kind is None:
                raise

    # --- entries -----------------------------------------------------------------------------------------------------

    def _is_recorded(self, part: str) -> bool:
        return f"{part}.done" in self._known

    def _write_entry(self, name: str, data: bytes) -> None:
        self._check_claim()
        buckets.put_object(self.work / name, data)
        self._known.add(name)

    def forget(self, parts: list[str]) -> None:
        entries = [name for part in parts if (name := f"{part}.done") in self._known]
        buckets.remove_objects(self.work, entries)
        self._known -= set(entries)

    # --- states ------------------------------------------------------------------------------------------------------

    def begin(self) -> State:
        complete, began = self.done("complete"), self.done("plan")
        if complete is not None:
            if buckets.facts(self.out / MANIFEST) is None:  # it was being replaced: only this makes it complete again
                self._replace()
            if sealed.identity(self.out) == complete["identity"]:
                self._clear(is_replaced=True)
                return State.PUBLISHED if complete["fingerprint"] == self.fingerprint else self._begin_anew()
            if complete["fingerprint"] == self.fingerprint:
                self._check_out()
                self.sink = BucketSink(self.work / "new", is_hidden=True)
                return State.COMPLETE
        is_ours = began is not None and began["fingerprint"] == self.fingerprint
        is_direct = began is not None and not began["hidden"]
        if self.is_published() and (not self.overwrite or (is_ours and is_direct)):
            self._clear()
            return State.PUBLISHED
        if began is not None and not is_ours:
            if not self.overwrite:
                raise unfinished(self.out, self.work, began, self.facts)
            self._abandon(is_direct)
        elif began is not None and not (is_direct and buckets.facts(self.out / MANIFEST)):
            if not is_direct:
                self._check_out()
                self.sink = BucketSink(self.work / "new", is_hidden=True)
            else:  # if the source has changed, files that are marked as complete would be written anew
                buckets.remove_objects(self.out, [name for name in buckets.listing(self.out) if is_mark(name)])
            return State.BEGUN
        return self._begin_anew()

    def _begin_anew(self) -> State:
        is_hidden = self._check_out()
        self._clear()
        if is_hidden:
            self.sink = BucketSink(self.work / "new", is_hidden=True)
        self.record("plan", {"fingerprint": self.fingerprint, "facts": self.facts, "hidden": is_hidden})
        return State.NEW

    def _abandon(self, is_direct: bool) -> None:
        """Deletes what another plan has written. It began where nothing was, so that all of OUT is its own, unless
        there is an output by now."""
        if is_direct and buckets.facts(self.out / MANIFEST) is None:
            buckets.remove_objects(self.out, buckets.listing(self.out).keys())

    def share(self) -> None:
        """See `RunJournal`."""

    def gather(self, parts: Collection[str]) -> bool:
        """See `RunJournal`."""
        return True

    def is_published(self) -> bool:
        """See `RunJournal`."""
        try:
            return bool(sealed.read_sealed(self.out).raw.get("fingerprint") == self.fingerprint)
        except BucketError:
            raise
        except TpuconvError:
            return False

    def _check_out(self) -> bool:
        """Whether there is an output, which may be replaced. Raises OutputError if it may not."""
        if not buckets.names(self.out):
            return False
        if error := exists_already(self.out, self.facts, overwrite=self.overwrite):
            raise error
        return True

    def publish(self) -> None:
        if self.sink.is_hidden:
            if self.done("complete") is None:
                new = sealed.read_sealed(self.work / "new").identity
                self.record("complete", {"fingerprint": self.fingerprint, "identity": new})
            self._check_claim()
            self._check_out()
            self._replace()
        else:
            self._check_claim()
            self.sink.write_marks()
        self._clear(is_replaced=self.sink.is_hidden)

    def _replace(self) -> None:
        """Makes new/ the output. May be called again after it was interrupted."""
        new = self.work / "new"
        names, old = buckets.listing(new), buckets.listing(self.out)
        if MANIFEST not in names:
            raise OutputError(f"{new / MANIFEST} is missing", hint=f"delete {self.work}, and convert again")
        buckets.remove_objects(self.out, [name for name in old if name == MANIFEST])
        buckets.remove_objects(self.out, [name for name in old if is_mark(name) and name != MANIFEST])
        buckets.copy_all(new, self.out, [name for name in names if not is_mark(name)])
        buckets.remove_objects(self.out, [name for name in old if name not in names])
        there = buckets.listing(self.out)
        if faults := [name for name, size in names.items() if not is_mark(name) and there.get(name) != size]:
            raise OutputError(f"{self.out / faults[0]} was changed while it was published", hint="run again")
        self._check_claim()
        buckets.copy_all(new, self.out, [name for name in names if is_mark(name) and name != MANIFEST])
        buckets.copy_all(new, self.out, [MANIFEST])

    def _clear(self, *, is_replaced: bool = False) -> None:
        """Deletes the work objects but the claim, in an order in which no later run resumes a part of them: until all
        else is gone, complete.done says that an output was replaced (`is_replaced`); else nothing says anything."""
        names = set(buckets.listing(self.work)) - {CLAIM}
        order = ["complete.done", "plan.done"]
        rest = sorted(names.difference(order))
        for step in [rest, *([name] for name in reversed(order))] if is_replaced else [*([n] for n in order), rest]:
            buckets.remove_objects(self.work, [name for name in step if name in names])
        self._known = set()
