"""The common part of all journals: entries for the finished units of a work, and the questions that a run asks."""

import errno
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any, ClassVar, Self

from tpuconv.errors import OutputError, ResourceError
from tpuconv.jsonfile import check, parse, read_bytes
from tpuconv.location import Location
from tpuconv.storage import sealed
from tpuconv.storage.disk import HINTS
from tpuconv.storage.sinks import Sink

MAX_ENTRY_BYTES = 1 << 30
ENTRY_KEY = "entry"
"""Key under which an entry holds its own name."""
ENTRY_SCHEMAS: Mapping[str, Any] = {
    "plan": {"fingerprint": str, "facts": dict},
    "complete": {"fingerprint": str, "identity": str},
    "names": {"names": [str]},
}
"""The schema of the journal's own entries. Whoever records other entries gives their schemas."""


class State(Enum):
    """The state that a run finds: nothing, a part of its work, a complete but unpublished output, its published output,
    its output whose publication had begun and was finished just now, or other processes of the same plan at work."""

    NEW = "new"
    BEGUN = "begun"
    COMPLETE = "complete"
    PUBLISHED = "published"
    FINISHED = "finished"
    JOINED = "joined"


class RunJournal(ABC):
    """The journal of a run: `Journal` on a local disk, `BucketJournal` in a bucket. Its entries are read here, wherever
    they are kept. Within a `with` this process is the writer of the output.

    Attributes:
        out: the output.
        sink: takes the files of the output, once `begin` was called.
    """

    entry_schemas: ClassVar[Mapping[str, Any]] = ENTRY_SCHEMAS
    out: Location
    sink: Sink

    @abstractmethod
    def __enter__(self) -> Self:
        """Makes this process the writer of the output."""

    @abstractmethod
    def __exit__(self, *_: object) -> None:
        """Lets the next process begin; removes the work folder if nothing in it can be resumed."""

    @abstractmethod
    def begin(self) -> State:
        """Returns the state of the work so far.

        Raises:
            OutputError: `out` must not be replaced, or there is unfinished work of another plan.
        """

    @abstractmethod
    def share(self) -> None:
        """Lets other processes of the same plan do their parts, if this is one of several."""

    @abstractmethod
    def gather(self, parts: Collection[str]) -> bool:
        """Returns True if this process should publish the output: all parts are recorded and no other process is
        running. Always True for a single process."""

    @abstractmethod
    def is_published(self) -> bool:
        """Returns True if `out` is a published output of this plan."""

    def is_over(self) -> bool:
        """Returns True if it is known without a lock that `out` is complete and no work on it is left."""
        return False

    @abstractmethod
    def publish(self) -> None:
        """Makes what was written the output. It must be complete and hold its manifest."""

    @property
    @abstractmethod
    def work(self) -> Location:
        """The folder of the entries, beside the output."""

    def done(self, part: str, schema: Any = dict) -> dict[str, Any] | None:
        """Returns the recorded results of a part of the work.

        Args:
            part: the name of the part.
            schema: what the results must look like; see `tpuconv.jsonfile.check`.

        Returns:
            The results, or None if the part is not done.

        Raises:
            OutputError: the entry cannot be read, or was changed.
        """
        if not self._is_recorded(part):
            return None
        path = self._entry_path(part)
        try:
            return dict(check(self._entry(part), self.entry_schemas.get(part, schema), str(path), OutputError))
        except OutputError as e:
            raise self._unreadable(e) from None

    def required(self, part: str, schema: Any = dict) -> dict[str, Any]:
        """Returns the recorded results of a part that is done.

        Raises:
            OutputError: its entry is gone, cannot be read, or was changed.
        """
        if (entry := self.done(part, schema)) is None:
            raise OutputError(
                f"entries in {self.work} are gone: another process took this output over",
                hint="run the same command again, once that has ended",
            )
        return entry

    def _entry_path(self, part: str) -> Location:
        return self.work / f"{part}.done"

    def _entry(self, part: str) -> dict[str, Any]:
        return self._read_entry(self._entry_path(part))

    def _read_entry(self, path: Location) -> dict[str, Any]:
        """Returns the contents of an entry.

        Raises:
            OutputError: it cannot be read, or was changed.
            ResourceError: the disk fails.
        """
        try:
            data = read_bytes(path, MAX_ENTRY_BYTES, OutputError)
            facts: dict[str, Any] = check(parse(data, str(path), OutputError), {ENTRY_KEY: str}, str(path), OutputError)
            if facts[ENTRY_KEY] != path.name.removesuffix(".done") or sealed.seal_of(data) is None:
                raise OutputError(f"{path} was changed, or is of another version of tpuconv")
        except OutputError as e:
            if isinstance(e.__cause__, OSError) and e.__cause__.errno == errno.EIO:
                raise ResourceError(e.message, hint=HINTS[errno.EIO]) from None
            raise self._unreadable(e) from None
        return facts

    def _unreadable(self, error: OutputError) -> OutputError:
        return OutputError(error.message, hint=f"move {self.work} away, and run again to begin anew")

    @abstractmethod
    def record(self, part: str, facts: Mapping[str, Any], files: Collection[str] = ()) -> None:
        """Marks a part as done, with its results. The files that it wrote must be durable already."""

    @abstractmethod
    def _is_recorded(self, part: str) -> bool:
        """Returns True if there is an entry for a part."""

    @abstractmethod
    def forget(self, parts: list[str]) -> None:
        """Marks parts as not done."""
