"""The journal of several processes that write one output into a bucket, each its part.

They meet in the work objects of `tpuconv.storage.bucket_journal`. The claim says which of them may do what:

    I-of-N-RANDOM   process I prepares the work, or publishes the output; the others wait
    part-of-N       N processes do their parts

Both are changed by compare-and-swap only. The first process prepares the work, then shares the claim. Whoever finds
that all parts are recorded, and swaps the claim back to its own, publishes. A process that died while it prepared or
published is replaced by the next one with its index, or by any other when the claim has lapsed.

Two processes with the same index write the same objects with the same bytes.
"""

import json
import re
import time
from collections.abc import Collection, Mapping
from typing import Any

from tpuconv import buckets
from tpuconv.buckets import ConditionLost
from tpuconv.errors import OutputError
from tpuconv.hosts import ProcessPart
from tpuconv.location import BucketPath
from tpuconv.storage import bucket_journal
from tpuconv.storage.bucket_journal import BY, CLAIM, BucketJournal
from tpuconv.storage.journal import State
from tpuconv.storage.sinks import BucketSink

POLL_SECONDS = 1.0
"""Between two looks at the claim of a process that prepares or publishes."""


class SharedBucketJournal(BucketJournal):
    """The work objects of one output of several processes; see `SharedJournal` for the arguments."""

    def __init__(
        self,
        out: BucketPath,
        fingerprint: str,
        facts: Mapping[str, Any] | None,
        part: ProcessPart,
        *,
        overwrite: bool = False,
    ):
        super().__init__(out, fingerprint, facts, overwrite=overwrite)
        self.part = part
        self._shared = f"part-of-{part.count}"
        self._alone = f"{part.index}-of-{part.count}-{self._process}"
        self._be(self._alone)

    def _be(self, process: str) -> None:
        """Writes claims of this name from now on."""
        self._process = process
        self._claim = json.dumps({"by": BY, "fingerprint": self.fingerprint, "process": process}).encode()

    @property
    def _is_shared(self) -> bool:
        return self._process == self._shared

    def _take_over(self) -> None:
        path = self.work / CLAIM
        while True:
            found = buckets.facts(path)
            if found is None:
                self._take_claim()
                return
            try:
                held = self._read_claim()
            except OutputError:
                if buckets.facts(path) is None:  # published, between the two requests
                    continue
                raise
            if held["fingerprint"] != self.fingerprint:
                super()._take_over()
                return
            if held["process"] == self._shared:
                self._be(self._shared)
                self._version = found.version
                return
            if self._is_of_another(held["process"]) and self._age(found) < bucket_journal.LAPSED_SECONDS:
                time.sleep(POLL_SECONDS)
                continue
            try:
                self._version = buckets.put_object(path, self._claim, only_if=found.version)
                return
            except ConditionLost:
                continue

    def _is_of_another(self, process: str) -> bool:
        """Whether a claim is that of another index of this run, which prepares or publishes."""
        found = re.fullmatch(r"(\d+)-of-(\d+)-[0-9a-f]+", process)
        return found is not None and (int(found[1]), int(found[2])) != (self.part.index, self.part.count)

    def _age(self, found: buckets.ObjectFacts) -> float:
        return self._now() - found.modified.timestamp()

    def _renew(self) -> None:
        """Writes the claim again. A shared one is left alone if another process has done so."""
        if self._is_shared:
            found = buckets.facts(self.work / CLAIM)
            if found is not None and found.version != self._version and self._read_claim()["process"] == self._shared:
                self._version = found.version
                return
        super()._renew()

    def begin(self) -> State:
        """See `RunJournal`. An output of this plan is left as it is, even with `overwrite`: another process of this run
        may have published it."""
        if not self._is_shared:
            is_begun = any(self.done(entry) is not None for entry in ("complete", "plan"))
            if not is_begun and self.is_published():
                self._clear()
                return State.PUBLISHED
            return super().begin()
        began = self.done("plan")
        if began is None or began["fingerprint"] != self.fingerprint:
            raise self._other_writer()
        if began["hidden"]:
            self.sink = BucketSink(self.work / "new", is_hidden=True)
        return State.JOINED

    def share(self) -> None:
        if self._is_shared:
            return
        with self._swap:
            self._be(self._shared)
            try:
                self._renew_alone()
            except ConditionLost:
                raise self._other_writer() from None

    def _renew_alone(self) -> None:
        super()._renew()

    def gather(self, parts: Collection[str]) -> bool:
        """See `RunJournal`."""
        if not self.part.publishes or not self._has_all(parts):
            return False
        with self._swap:
            while True:
                found = buckets.facts(self.work / CLAIM)
                if found is None:
                    return False
                try:
                    held = self._read_claim()["process"]
                except OutputError:
                    return False
                if held == self._alone:  # the answer to the request that wrote it was lost
                    self._be(self._alone)
                    self._version = found.version
                    break
                if held != self._shared:
                    return False
                self._be(self._alone)
                try:
                    self._version = buckets.put_object(self.work / CLAIM, self._claim, only_if=found.version)
                    break
                except ConditionLost:
                    self._be(self._shared)
        return self._has_all(parts)

    def _has_all(self, parts: Collection[str]) -> bool:
        self._list_entries()
        return all(self._is_recorded(part) for part in parts)

    def __exit__(self, *raised: Any) -> None:
        if not self._is_shared:
            super().__exit__(*raised)
            return
        with self._swap:
            self._ended.set()
