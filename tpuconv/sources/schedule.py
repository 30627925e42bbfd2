"""The schedule of a remote source: the files to fetch, their order, and the bytes that are on the disk at a time.

Files are fetched whole, one after the other in the order in which steps read them. A file stays until the last step
that reads it is finished. Of tensors that wide steps need, of which every file may have a few bytes, a copy is kept
beside: the wide part of a file.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

AHEAD_FILES = 2
"""Fetched beyond what the work needs at once, so that the network never waits for it; as many at a time."""

Spans = Sequence[tuple[int, int]]
"""Bytes of a file: first, and behind the last; sorted and apart."""


@dataclass(frozen=True)
class ReadStep:
    """A part of the work, in the order in which it is done.

    Attributes:
        name: the name of the step.
        files: the names of the files that it reads.
        is_wide: whether the step is done at the end, and reads wide parts.
        proves: the file whose hash is recorded in this step.
    """

    name: str
    files: Collection[str] = ()
    is_wide: bool = False
    proves: str | None = None


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the ranges in order; those that touch are one."""
    out: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], stop)
        else:
            out.append((start, stop))
    return out


class FetchSchedule:
    """The files that steps need, in the order in which they are fetched, and the bytes that they take.

    Args:
        sizes: the size of each file to fetch, by name.
        steps: the steps that are left to do, in order.
        wide: by file, the ranges that wide steps read, whether they are done or not.

    Attributes:
        order: the names of the files.
        users: by file, the names of the unfinished steps that need the whole file.
        wide_users: by file, the names of the unfinished steps that need only its wide part.
        budget: the most bytes of whole files that are on the disk at a time.
        wide_bytes: the size of all wide parts.
    """

    def __init__(self, sizes: Mapping[str, int], steps: Sequence[ReadStep], wide: Mapping[str, Spans]):
        self._sizes = sizes
        self.users: dict[str, set[str]] = {}
        self.wide_users: dict[str, set[str]] = {}
        reads = [[name for name in step.files if name in sizes] for step in steps]
        for step, names in zip(steps, reads, strict=True):
            for name in sorted(names):
                self.users.setdefault(name, set())
                self.wide_users.setdefault(name, set())
                (self.wide_users if step.is_wide else self.users)[name].add(step.name)
        self.order = list(self.users)
        self.wide_bytes = sum(
            stop - start for name in self.order if self.wide_users[name] for start, stop in wide.get(name, ())
        )
        largest = max((sizes[name] for name in self.order), default=0)
        total = sum(sizes[name] for name in self.order)
        self.budget = min(total, self._peak(steps, reads) + AHEAD_FILES * largest)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are on the disk at a time."""
        return self.budget + self.wide_bytes

    def _peak(self, steps: Sequence[ReadStep], reads: Sequence[Collection[str]]) -> int:
        """Returns the bytes of the files that are there at once, if each step is done as soon as all its files and
        those of the steps before are there. Steps of a run with several threads begin in this order, so that at least
        those are done when the next file must wait for room: with this much room no step waits for ever."""
        place = {name: i for i, name in enumerate(self.order)}
        needs = [max((place[name] for name in names), default=-1) for names in reads]
        last = dict.fromkeys(self.order, -1)
        for number, (step, names) in enumerate(zip(steps, reads, strict=True)):
            if not step.is_wide:
                last |= dict.fromkeys(names, number)
        live = peak = done = 0
        waiting: dict[int, int] = {}
        for i, name in enumerate(self.order):
            live += self._sizes[name]
            peak = max(peak, live)
            waiting[last[name]] = waiting.get(last[name], 0) + self._sizes[name]
            while done < len(needs) and needs[done] <= i:
                done += 1
            for number in [number for number in waiting if number < done]:
                live -= waiting.pop(number)
        return peak
