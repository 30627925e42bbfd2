"""Files of tensor-parallel ranks, `NAME-TP-000.safetensors` and so on, as Grok 2 has them. Each has a piece of the same
tensors, under the same names; the files `NAME-TP-common.safetensors` have tensors as a whole. No index names them. Here
a piece has the number of its rank behind its name: `w1.weight.rank.3`."""

import re
from collections import defaultdict
from collections.abc import Collection

from tpuconv.errors import SourceError, shorten
from tpuconv.notation.release import RANK_MARK
from tpuconv.text import format_count

_RANK_FILE = re.compile(r"([^/\\\0]+)-TP-(\d{3}|common)\.safetensors")
COMMON = "common"


def mark_of_rank(shard: str) -> str:
    """Returns what stands here behind the names of a file's tensors; nothing unless the file is one of a rank."""
    found = _RANK_FILE.fullmatch(shard)
    return "" if found is None or found[2] == COMMON else f"{RANK_MARK}{int(found[2])}"


def ranked_files(names: Collection[str]) -> list[str]:
    """Returns the files of ranks among the names of files; none where a checkpoint is not in such files.

    Raises:
        SourceError: a file of a rank is missing.
    """
    ranks: dict[str, set[str]] = defaultdict(set)
    for name in names:
        if found := _RANK_FILE.fullmatch(name):
            ranks[found[1]].add(found[2])
    numbers = {rank for each in ranks.values() for rank in each} - {COMMON}
    wanted = {f"{i:03}" for i in range(max(map(int, numbers), default=-1) + 1)}
    there = {stem: each for stem, each in ranks.items() if each != {COMMON}}
    missing = [f"{stem}-TP-{rank}.safetensors" for stem, each in there.items() for rank in sorted(wanted - each)]
    if missing:
        raise SourceError(
            f"{format_count(len(missing), 'file')} of tensor-parallel ranks {'are' if missing[1:] else 'is'} missing",
            details=shorten(missing),
            hint="each rank has a piece of the same tensors: download all files",
        )
    return sorted(name for name in names if _RANK_FILE.fullmatch(name)) if numbers else []
