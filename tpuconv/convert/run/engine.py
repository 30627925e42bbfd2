"""The engine of all work that makes an output: it begins or resumes, has this process's part done, and publishes.

What is made is a `Work`: the conversion of a plan (`tpuconv.convert.run.conversion`), safetensors
(`tpuconv.convert.export.export`), an adapter (`tpuconv.convert.export.lora.work`) or chunks of another size
(`tpuconv.convert.reshard.work`).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from tpuconv.checkpoint.contents import contents_of
from tpuconv.convert.run.stamps import Stale, check_same_files, forget_changed
from tpuconv.errors import OutputError, UsageError
from tpuconv.hosts import ProcessPart
from tpuconv.location import BucketPath, Location
from tpuconv.progress import Progress
from tpuconv.sources.origins import remember
from tpuconv.storage.bucket_journal import BucketJournal
from tpuconv.storage.entries import RunJournal, State
from tpuconv.storage.journal import Journal
from tpuconv.storage.places import real
from tpuconv.storage.sealed import Sealed, read_sealed
from tpuconv.storage.shared_journal import SharedJournal

WORKING = "work"
"""The stage in which bytes are counted."""
PUBLISHING = "publish"
"""The stage in which all is made, and the last files are written, flushed and published."""
PUBLISHED = "published"
"""The last stage of a run that published the output, or finished its publication."""
ALREADY_THERE = "already there"
"""The last stage where the output was complete before the run."""
ALREADY_ELSEWHERE = "already elsewhere"
"""The last stage where a complete output is not on this disk, but elsewhere."""
PART_DONE = "part done"
"""The last stage of a process whose part is done, where another one is to publish the output."""


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run in bytes, which the work counts; for one of several processes, in bytes of its part.

    Attributes:
        done, total: bytes that are made, and all.
        resumed: bytes of an earlier run.
        stage: WORKING, then PUBLISHING; the last is PUBLISHED, ALREADY_THERE, ALREADY_ELSEWHERE or
            PART_DONE. "calibrate" and "compare"
            before them.
        layer: the layer that is being calibrated, before anything is made.
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
        if self.stage in (PUBLISHING, PUBLISHED):
            return Progress("publishing")
        if self.fetching[0] < self.fetching[1]:  # which takes longer
            return Progress(f"fetching and {stage}", *self.fetching)
        return Progress(stage, self.done, self.total)


class Work(Protocol):
    """Work that makes an output, in parts that are recorded one by one.

    Attributes:
        source: the folder that is read.
        nbytes: the bytes of all parts, as the progress counts them.
        fingerprint: equal for two works that make the same output.
        facts: what the fingerprint is made of, by name.
    """

    source: Location
    nbytes: int
    fingerprint: str
    facts: Mapping[str, Any]

    @property
    def names(self) -> Collection[str]:
        """Every file that may be written into the output. No others are ever removed there."""

    @property
    def stamps(self) -> Mapping[str, str]:
        """A stamp for each file of the source, which shows that it was changed or replaced. Empty if the fingerprint
        shows it."""

    @property
    def stamps_for_hosts(self) -> Mapping[str, str]:
        """The same, equal on all hosts that see the files."""

    @property
    def entries(self) -> Sequence[str]:
        """The entries of the journal in which all parts are done, of all processes."""

    def stale(self, journal: RunJournal, changed: set[str]) -> Stale:
        """Returns what was made from these files of the source."""

    def check_made(self, out: Location, elsewhere: Sealed | None = None) -> Iterator[RunProgress]:
        """Checks that a published output of this work is complete, and made of the source as it is now. Yields
        progress before a file is read completely. The files of an output `elsewhere`, which has this manifest, were
        compared before.

        Raises:
            CorruptOutput: files are missing or have the wrong size.
            OutputError: it was made from a source with the same headers and other values.
        """

    def opened(self, journal: RunJournal) -> AbstractContextManager[None]:
        """Returns what lasts from before the first part until the output is published."""

    def do(self, journal: RunJournal, part: ProcessPart | None) -> Iterator[RunProgress]:
        """Does what is left of this process's part, and yields progress."""

    def write_rest(self, journal: RunJournal) -> None:
        """Writes what the output holds besides, when all parts are done; the manifest last."""


def make(
    work: Work,
    out: Location,
    *,
    overwrite: bool = False,
    part: ProcessPart | None = None,
    elsewhere: Sealed | None = None,
) -> Iterator[RunProgress]:
    """Does the work, and yields progress. `out` appears complete or not at all, and an old one stays until it does. If
    the process is killed at any moment and run again, it resumes.

    Args:
        work: what to make.
        out: the output folder.
        overwrite: replace an existing output of ours.
        part: which of several processes this is. Each does a part of the work; the last one publishes.
        elsewhere: the manifest of a complete output that is not on this disk. If this work made it of the
            source as it is now, nothing is done.

    Raises:
        SourceError: the source changed, cannot be read, or holds values that are not finite.
        DamagedDownload: a shard from the Hub does not match its promised sha256.
        CorruptOutput: a checkpoint that is read, or the published output, is damaged.
        ResourceError: there is too little disk space or memory.
        OutputError: `out` exists, is locked, or belongs to other work.
        UsageError: `out` lies in the source folder.
    """
    check_outside(work.source, out)
    total, stamps = work.nbytes, work.stamps_for_hosts
    if elsewhere is not None and elsewhere.raw["fingerprint"] == work.fingerprint:
        with suppress(OutputError):  # its source has changed since
            yield from work.check_made(out, elsewhere)
            yield RunProgress(total, total, total, ALREADY_ELSEWHERE)
            return
    journal = open_journal(out, work.fingerprint, work.facts, work.names, part, overwrite=overwrite)
    if not overwrite and journal.is_over():  # perhaps where nothing can be written
        yield from work.check_made(journal.out)
        yield RunProgress(total, total, total, ALREADY_THERE)
        return
    with journal:
        state = journal.begin()
        if state in (State.PUBLISHED, State.FINISHED):
            yield from work.check_made(journal.out)
            yield RunProgress(total, total, total, ALREADY_THERE if state is State.PUBLISHED else PUBLISHED)
            return
        if state is State.JOINED:
            check_same_files(journal, stamps)
        elif forget_changed(journal, work.stamps, partial(work.stale, journal), stamps, is_part=part is not None):
            state = State.BEGUN
        if state is State.COMPLETE:
            last = RunProgress(total, total, total, PUBLISHING)
            yield last
            _publish(work, journal)
        else:
            with work.opened(journal):
                last = RunProgress(0, total, 0, WORKING)
                for last in work.do(journal, part):
                    yield last
                if not journal.gather(work.entries):
                    yield replace(last, stage=PUBLISHED if journal.is_published() else PART_DONE)
                    return
                yield replace(last, stage=PUBLISHING)
                work.write_rest(journal)
                _publish(work, journal)
    yield replace(last, stage=PUBLISHED)


def _publish(work: Work, journal: RunJournal) -> None:
    journal.publish()
    if work.stamps:
        remember(read_sealed(journal.out), work.source, work.stamps)


def check_outside(folder: Location, out: Location) -> None:
    """Raises UsageError if an output is the folder of its source, lies in it, or holds it."""
    inside, target = real(folder), real(out)
    if target == inside or inside in target.parents:
        raise UsageError(f"{out} lies in the source folder", hint="give an OUT outside of it")
    if target in inside.parents:
        raise UsageError(f"{out} holds the source folder, {folder}", hint="give another OUT")


def open_journal(
    out: Location,
    fingerprint: str,
    facts: Mapping[str, Any],
    names: Collection[str],
    part: ProcessPart | None = None,
    *,
    overwrite: bool = False,
) -> RunJournal:
    """Returns the journal that fits an output: on a disk or in a bucket, of one process or, as a `part`, of several."""
    if isinstance(out, BucketPath):
        return BucketJournal(out, fingerprint, facts, names, part, overwrite=overwrite, contents_of=contents_of)
    if part is not None:
        return SharedJournal(out, fingerprint, facts, names, part, overwrite=overwrite, contents_of=contents_of)
    return Journal(out, fingerprint, facts, names, overwrite=overwrite, contents_of=contents_of)
