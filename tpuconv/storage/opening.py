"""Opens the journal that fits an output: on a disk or in a bucket, of one process or of several."""

from collections.abc import Mapping
from typing import Any

from tpuconv.hosts import ProcessPart
from tpuconv.location import BucketPath, Location
from tpuconv.storage.bucket_journal import BucketJournal
from tpuconv.storage.journal import Journal, RunJournal
from tpuconv.storage.shared_bucket_journal import SharedBucketJournal
from tpuconv.storage.shared_journal import SharedJournal


def open_journal(
    out: Location,
    fingerprint: str,
    facts: Mapping[str, Any] | None = None,
    part: ProcessPart | None = None,
    *,
    overwrite: bool = False,
) -> RunJournal:
    """The journal of an output; see `Journal` and, for a `part`, `SharedJournal`."""
    if isinstance(out, BucketPath):
        if part is not None:
            return SharedBucketJournal(out, fingerprint, facts, part, overwrite=overwrite)
        return BucketJournal(out, fingerprint, facts, overwrite=overwrite)
    if part is not None:
        return SharedJournal(out, fingerprint, facts, part, overwrite=overwrite)
    return Journal(out, fingerprint, facts, overwrite=overwrite)
