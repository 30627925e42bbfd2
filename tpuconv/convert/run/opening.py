"""Opens the journal that fits an output: on a disk or in a bucket, of one process or of several."""

from collections.abc import Collection, Mapping
from typing import Any

from tpuconv.checkpoint.contents import contents_of
from tpuconv.hosts import ProcessPart
from tpuconv.location import BucketPath, Location
from tpuconv.storage.bucket_journal import BucketJournal
from tpuconv.storage.entries import RunJournal
from tpuconv.storage.journal import Journal
from tpuconv.storage.shared_journal import SharedJournal


def open_journal(
    out: Location,
    fingerprint: str,
    facts: Mapping[str, Any],
    names: Collection[str],
    part: ProcessPart | None = None,
    *,
    overwrite: bool = False,
) -> RunJournal:
    """Returns the journal of an output; see `Journal` and, for a `part`, `SharedJournal`."""
    if isinstance(out, BucketPath):
        return BucketJournal(out, fingerprint, facts, names, part, overwrite=overwrite, contents_of=contents_of)
    if part is not None:
        return SharedJournal(out, fingerprint, facts, names, part, overwrite=overwrite, contents_of=contents_of)
    return Journal(out, fingerprint, facts, names, overwrite=overwrite, contents_of=contents_of)
