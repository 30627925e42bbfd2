"""Files of the source that were replaced or changed since an earlier run."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tpuconv.errors import SourceError, shorten
from tpuconv.jsonfile import Each
from tpuconv.location import BucketPath
from tpuconv.sources.shard import CHANGED_HINT
from tpuconv.sources.source import Source
from tpuconv.storage.entries import RunJournal

ENTRY = "stamps"
ENTRY_SCHEMA = {"stamps": Each(str)}


@dataclass(frozen=True)
class Stale:
    """Entries of the journal that do not hold for the files of the source as they are now.

    Attributes:
        made: parts whose output may differ now, and must be made again.
        checked: checks of files with a promised hash, to be repeated; the output is the same if they pass.
    """

    made: list[str]
    checked: list[str] = field(default_factory=list)


def forget_changed(
    journal: RunJournal,
    stamps: Mapping[str, str],
    stale: Callable[[set[str]], Stale],
    for_hosts: Mapping[str, str],
    *,
    is_part: bool,
) -> bool:
    """Marks as not done what an earlier run made from files that were replaced or changed since.

    Args:
        journal: of the run.
        stamps: of the files as they are now, by name.
        stale: what depends on files, by their names.
        for_hosts: stamps of the same files that are equal on all hosts that see them; see `stamps_for_hosts`.
        is_part: whether this is one of several processes, perhaps on other hosts.

    Returns:
        Whether a part must be made again.
    """
    then = (journal.done(ENTRY, ENTRY_SCHEMA) or {"stamps": {}})["stamps"]
    if then in (stamps, for_hosts):
        return False
    found = stale({n for n, stamp in stamps.items() if then.get(n) not in (stamp, for_hosts[n])})
    journal.forget(["complete"] * bool(found.made) + found.made + found.checked)
    journal.record(ENTRY, {"stamps": dict(for_hosts if is_part else stamps)})
    return bool(found.made)


def stamps_for_hosts(source: Source) -> dict[str, str]:
    """Stamps of the shards of a source that hosts agree on: the sha256 that the Hub promises, the version of an object
    in a bucket, else the size and the time of modification. Numbers of devices differ between hosts.

    Raises:
        SourceError: a file cannot be read.
    """
    if isinstance(source.folder, BucketPath):
        return source.stamps
    out = {}
    for shard in source.shards:
        if shard.sha256 is None:
            try:
                status = os.stat(source.folder / shard.name)
            except OSError as e:
                raise SourceError(
                    f"{source.folder / shard.name} cannot be read: {e.strerror}", hint=CHANGED_HINT
                ) from None
            out[shard.name] = f"{status.st_size} bytes of {status.st_mtime_ns}"
        else:
            out[shard.name] = shard.sha256
    return out


def check_same_files(journal: RunJournal, for_hosts: Mapping[str, str]) -> None:
    """Checks that other processes of this run work on the same files.

    Raises:
        SourceError: they do not.
    """
    theirs = (journal.done(ENTRY, ENTRY_SCHEMA) or {"stamps": {}})["stamps"]
    if theirs != for_hosts:
        names = sorted(name for name in {*theirs, *for_hosts} if theirs.get(name) != for_hosts.get(name))
        raise SourceError(
            f"other processes that write to {journal.out} read other files than this process",
            details=shorten(names),
            hint="give all of them the same source, then run again",
        )
