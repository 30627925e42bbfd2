"""Publishes an output in a bucket: the store copies its objects from the work folder to OUT. See docs/publishing.md.

Nothing is ever sent to OUT: a copy fails once its source is deleted, so that a process that wakes up late changes
nothing there. Every step can be begun again, by any process that holds the claim.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath

from tpuconv import buckets
from tpuconv.bucket_errors import ConditionLost
from tpuconv.buckets import ABSENT_OBJECT, COPIES, ObjectFacts, SourceGone, is_same
from tpuconv.errors import BucketError, OutputError, TpuconvError, UsageError, shorten
from tpuconv.location import BucketPath
from tpuconv.names import MANIFEST
from tpuconv.storage.claim import CLOCK, RANDOM_ID, Claim
from tpuconv.storage.disk import PARTIAL
from tpuconv.storage.ownership import objects_in
from tpuconv.storage.sinks import Staged

MARKS = (
    "_METADATA",
    "config.json",
    "model.safetensors.index.json",
    "model.safetensors",
    "commit_success.txt",
    MANIFEST,
)
"""The last parts of the names of objects that readers open first, in the order in which they are copied: last, when
all else is there. The manifest is the last of all."""
COMMIT_MARK = MARKS[-2]
"""By which Orbax tells, in Google's buckets, that a checkpoint is complete."""
NOTE, RUNS = "note", "runs"
"""The object that a process writes under its prefix besides the output: see `tpuconv.storage.bucket_journal`."""
TRIAL = MANIFEST + PARTIAL
"""The object of a trial in OUT, before the old output is touched."""
PROBES = ("probe", "probe-copy")
ENDS = ("plan.done", "complete.done")
"""The object that is deleted last: without it nobody knows which other objects are ours."""
COMPARED_BYTES = 1 << 20
"""Objects of at most this size are compared byte by byte where versions tell nothing."""


@dataclass(frozen=True)
class Abilities:
    """The abilities of a store besides conditional writes, as found by a probe.

    Attributes:
        keeps_etags: a copy has the ETag of its source.
        deletes_by_version: a delete with a condition is refused if it does not hold.
        has_unique_versions: two writes never have the same version; else it is a hash of the bytes.
        creates_by_copy: a copy may be told not to overwrite.
    """

    keeps_etags: bool
    deletes_by_version: bool
    has_unique_versions: bool
    creates_by_copy: bool


def probe(folder: BucketPath, claim: Claim) -> Abilities:
    """Finds out, by a few small requests in a folder that nobody else uses, what a store can do.

    Raises:
        UsageError: it ignores conditions of writes.
        BucketError: it refuses to write, to copy or to delete.
        ClaimLost: another process has taken the claim, and deletes what is tried.
    """
    try:
        return _tried(folder)
    except (TpuconvError, ConditionLost, SourceGone):
        claim.check_held()
        raise


def _tried(folder: BucketPath) -> Abilities:
    one, other, name = folder / PROBES[0], folder / PROBES[1], folder.root
    with suppress(ConditionLost):
        buckets.put_object(one, b"1", only_if=ABSENT_OBJECT)
    first = _facts(one).version
    second = _probe_conditions(one, first, name)
    buckets.copy_object(one, other)
    copied = _facts(other).version
    has_unique_versions = not is_same(buckets.put_object(one, b"2", only_if=second), second)
    creates = _refuses(lambda: buckets.copy_object(one, other, overwrite=False))
    keeps, now = copied.get("e_tag") == second.get("e_tag"), _facts(one).version
    deletes = buckets.delete_object(one, first) is False and buckets.delete_object(one, now) is True
    buckets.remove_objects(folder, [one.name, other.name])
    if left := {*PROBES} & buckets.listing(folder).keys():
        raise BucketError(
            f"{folder / min(left)} was deleted and still exists",
            hint="ask for the right to delete, or for a bucket without a retention policy",
        )
    return Abilities(keeps, deletes, has_unique_versions, creates)


def _probe_conditions(path: BucketPath, first: buckets.Version, store: str) -> buckets.Version:
    """The version of an object that was changed by compare-and-swap."""
    try:
        if _refuses(lambda: buckets.put_object(path, b"1", only_if=ABSENT_OBJECT)):
            version = buckets.put_object(path, b"2", only_if=first)
            if _refuses(lambda: buckets.put_object(path, b"3", only_if=first)):
                return version
    except UsageError:
        pass
    buckets.remove_objects(path.parent, [path.name])
    raise UsageError(
        f"{store} cannot hold outputs: its store ignores conditions of writes (If-None-Match, If-Match)",
        hint="write to a local disk, and copy the output",
    )


def _refuses(request: Callable[[], object]) -> bool:
    """Returns True if the store checks a condition of a request. A store that does not know the condition counts as one
    that ignores it."""
    try:
        with suppress(UsageError):
            request()
    except ConditionLost:
        return True
    return False


def _facts(path: BucketPath) -> ObjectFacts:
    found = buckets.facts(path)
    if found is None:
        raise BucketError(f"{path} was written, and is not there", hint="run again")
    return found


class Publication:
    """The publication of one work.

    Args:
        claim: held by this process, in the state `publishing`.
        work: the folder of the work.
        new: the objects of the output, by name, staged under `work`.
        old: the objects of the output that is replaced, as they were when the work began.
        can: what the store can do.
    """

    def __init__(
        self,
        claim: Claim,
        work: BucketPath,
        new: Mapping[str, Staged],
        old: Mapping[str, Staged],
        can: Abilities,
    ):
        self.claim, self.out, self.work, self.new, self.old, self.can = claim, claim.out, work, new, old, can
        self.note = work / claim.process / NOTE
        self.text = note_text(work)

    # --- before ----------------------------------------------------------------------------------------------------

    def check(self) -> dict[str, ObjectFacts]:
        """Returns the contents of OUT. Changes nothing.

        Raises:
            OutputError: something in it belongs to others, or to the output that is replaced and was changed since.
        """
        there = objects_in(self.out)
        foreign = [name for name, found in there.items() if not self._is_ours(name, found)]
        if foreign:
            raise OutputError(
                f"{self.out} holds files that were written or changed since this conversion began",
                details=shorten(sorted(foreign)),
                hint="move them away, and run the same command again: it publishes the finished conversion",
            )
        return there

    def _is_ours(self, name: str, found: ObjectFacts) -> bool:
        if name in self.old and self.old[name].size == found.size and is_same(self.old[name].version, found.version):
            return True
        return self._is_new(name, found) or self._is_note(name, found)

    def _is_new(self, name: str, found: ObjectFacts) -> bool:
        """Returns True if an object in OUT belongs to the new output."""
        staged = self.new.get(name)
        if staged is None or staged.size != found.size:
            return False
        if self._has_comparable(staged):
            return is_same(_e_tag(staged.version), _e_tag(found.version))
        if staged.size > COMPARED_BYTES:
            return True
        with suppress(FileNotFoundError):
            return bool(buckets.read(self.out / name) == buckets.read(self.work / staged.key))
        return False

    def _has_comparable(self, staged: Staged) -> bool:
        """Returns True if a copy of an object has its ETag. It has another one if the object was uploaded in parts."""
        return self.can.keeps_etags and "-" not in staged.version.get("e_tag", "-")

    def _is_note(self, name: str, found: ObjectFacts) -> bool:
        with suppress(FileNotFoundError):
            return (
                (name in self.old or name in self.new or name == TRIAL)
                and found.size == len(self.text)
                and bytes(buckets.read(self.out / name)) == self.text
            )
        return False

    # --- publishing ------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Makes the staged objects the output.

        Raises:
            OutputError: OUT holds what belongs to others, or another process took the claim.
        """
        self._revoke(keep_own=True)
        there = self.check()
        if any(name in self.old for name in there):
            self._try_out()
        marks = self._in_order(there.keys() | self.new.keys())
        for name in reversed([name for name in marks if name in there]):
            if not self._is_new(name, there[name]) and not self._is_note(name, there[name]):
                self._copy(self.note, name)
                if name.endswith(COMMIT_MARK):  # Orbax asks whether it is there, and not what it says
                    self._remove_old({name: _facts(self.out / name)})
        self._copy_all([name for name in self.new if name not in marks], there)
        self._remove_old({name: found for name, found in there.items() if name not in self.new})
        self._revoke(keep_own=False)
        self._check_copied(set(marks))
        self.claim.check_held()
        for name in marks:
            if name in self.new:
                self._copy(self.work / self.new[name].key, name)

    def _try_out(self) -> None:
        """Copies an object into OUT, and deletes it again: what is refused there is refused while the old output is
        whole."""
        self._copy(self.note, TRIAL)
        self.claim.check()
        buckets.remove_objects(self.out, [TRIAL])

    def _in_order(self, names: "set[str]") -> list[str]:
        """The marks among these names, in the order in which they are copied: that of a step after that of its item."""
        marks = [name for name in names if PurePosixPath(name).name in MARKS]
        return sorted(marks, key=lambda name: (MARKS.index(PurePosixPath(name).name), -name.count("/"), name))

    def _copy_all(self, names: list[str], there: Mapping[str, ObjectFacts]) -> None:
        def copy(name: str) -> None:
            if name in there and self._is_new(name, there[name]):
                return
            source = self.work / self.new[name].key
            try:
                self._copy(source, name, overwrite=name in there or not self.can.creates_by_copy)
            except ConditionLost:  # somebody was faster, perhaps this process with a request whose answer was lost
                found = buckets.facts(self.out / name)
                if found is None or not self._is_new(name, found):
                    raise self._changed([name]) from None

        buckets.for_each(copy, names, COPIES)

    def _copy(self, source: BucketPath, name: str, *, overwrite: bool = True) -> None:
        self.claim.check()
        try:
            buckets.copy_object(source, self.out / name, overwrite=overwrite)
        except SourceGone:
            raise self.claim.lost() from None

    def _remove_old(self, names: Mapping[str, ObjectFacts]) -> None:
        """Deletes objects of the old output. Where a version is a hash of the bytes, it may come back: there a note is
        put over each first, which no output ever has. A store that does not delete by version keeps these notes."""

        needs_note = not (self.can.has_unique_versions and self.can.deletes_by_version)

        def remove(name: str) -> None:
            if needs_note and not self._is_note(name, names[name]):
                self._copy(self.note, name)
            found = buckets.facts(self.out / name)
            if found is None:
                return
            is_as_seen = not needs_note and is_same(found.version, names[name].version)
            if not (is_as_seen or self._is_note(name, found)):  # a mark of the old output holds a note already
                raise self._changed([name])
            if self.can.deletes_by_version:
                self.claim.check()
                buckets.delete_object(self.out / name, found.version)

        buckets.for_each(remove, list(names))

    def _revoke(self, *, keep_own: bool) -> None:
        """Deletes notes, so that none can be copied any more: first the notes of other processes, then the note of this
        one."""
        notes = [name for name in buckets.listing(self.work) if name.endswith(f"/{NOTE}")]
        own = f"{self.claim.process}/{NOTE}"
        self.claim.check()
        buckets.remove_objects(self.work, [name for name in notes if not (keep_own and name == own)])

    def _check_copied(self, marks: "set[str]") -> None:
        """Compares names, sizes and ETags of all that was copied."""
        there = objects_in(self.out)
        wrong = [
            name
            for name, staged in self.new.items()
            if name not in marks
            and (
                name not in there
                or there[name].size != staged.size
                or (self._has_comparable(staged) and not is_same(_e_tag(staged.version), _e_tag(there[name].version)))
            )
        ]
        others = [name for name, found in there.items() if name not in self.new and not self._is_note(name, found)]
        if wrong or others:
            raise self._changed(wrong + others)

    def _changed(self, names: list[str]) -> OutputError:
        return OutputError(
            f"{self.out} was changed while it was published",
            details=shorten(sorted(names)),
            hint="stop the program that writes there, move its files away, and run the same command again",
        )


def write_note(work: BucketPath, process: str) -> None:
    """Writes the note of a process: before it publishes a work, never while it does."""
    buckets.put_object(work / process / NOTE, note_text(work))


def note_text(work: BucketPath) -> bytes:
    """The text in place of an object while an output is replaced."""
    return f"tpuconv: the output that was here is being replaced (work {work.name})\n".encode()


def _e_tag(version: buckets.Version) -> buckets.Version:
    return {"e_tag": version["e_tag"]} if "e_tag" in version else {}


def check_staged(work: BucketPath, objects: Mapping[str, Staged]) -> None:
    """Checks that staged objects are as they were written.

    Raises:
        OutputError: some are not.
    """
    there = buckets.listing_facts(work)
    wrong = [
        name
        for name, staged in objects.items()
        if (found := there.get(staged.key)) is None
        or found.size != staged.size
        or not is_same(found.version, staged.version)
    ]
    if wrong:
        raise OutputError(
            f"objects in {work} are not as they were written",
            details=shorten(sorted(wrong)),
            hint=f"delete {work}, and run again to begin anew",
        )


def inside_random(name: str) -> str | None:
    """Returns the rest of a name after a random prefix of a work or process; None if the name has no such prefix."""
    prefix, _, inside = name.partition("/")
    return inside if inside and RANDOM_ID.fullmatch(prefix) else None


def clean(work: BucketPath, names: Collection[str], check: Callable[[], None]) -> None:
    """Deletes the objects of a work, those without which nobody knows the others last. What is unknown stays.

    Args:
        work: the folder of the work.
        names: of the objects of the output.
        check: called before each request; raises ClaimLost if the claim is lost.
    """
    known = {*names, NOTE, RUNS, CLOCK, *PROBES}
    while True:
        there = buckets.listing(work)
        staged = [
            name for name in there if RANDOM_ID.fullmatch(name.partition("/")[0]) and name.partition("/")[2] in known
        ]
        entries = [name for name in there if "/" not in name and name.endswith(".done") and name not in ENDS]
        step = staged or entries or [name for name in ENDS if name in there]
        if not step:
            return
        check()
        buckets.remove_objects(work, step)
