"""The schedule of a remote source: the segments to fetch, their order, and the bytes that are on the disk at a time.

Files are fetched in segments, one after the other in the order in which steps read them. A segment stays until the
last step that reads it is finished. Of tensors that wide steps need, of which every file may have a few bytes, a copy
is kept beside: the wide part of a segment.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

SEGMENT_BYTES = 64 << 20
"""Fetched by one request, and again if it breaks for good."""
CONNECTIONS = 4
AHEAD_SEGMENTS = 2 * CONNECTIONS
"""Fetched beyond what the work needs at once, so that the network never waits for it."""

Extent = tuple[str, int, int]
"""A file and bytes of it: first, and behind the last."""


@dataclass(frozen=True)
class ReadStep:
    """A part of the work, in the order in which it is done.

    Attributes:
        name: of the step.
        reads: what it reads.
        is_wide: whether copies of what it reads are kept beside, until it is done at the end.
        proves: the file whose hash is made in this step, which needs all of it.
        is_promised: whether the hash is compared with a promised one. Then steps that read the file are finished only
            when it is proved; else a segment that was hashed is not needed for it any more.
    """

    name: str
    reads: tuple[Extent, ...] = ()
    is_wide: bool = False
    proves: str | None = None
    is_promised: bool = True


@dataclass(eq=False)
class Segment:
    """Consecutive bytes of a file. `wide` are the ranges of its wide part, counted from the start of the file.

    `users` are the steps that need it, or the bytes beside it, and are not finished yet.
    """

    file: str
    number: int
    start: int
    stop: int
    wide: tuple[tuple[int, int], ...] = ()
    users: set[str] = field(default_factory=set)
    wide_users: set[str] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.stop - self.start

    @property
    def wide_bytes(self) -> int:
        """The size of its wide part."""
        return sum(stop - start for start, stop in self.wide)

    def wide_place(self, start: int, stop: int) -> int | None:
        """Where bytes of the file begin in the wide part; None if they are not in it."""
        place = 0
        for first, end in self.wide:
            if first <= start and stop <= end:
                return place + start - first
            place += end - first
        return None


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges in order; those that touch are one."""
    out: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], stop)
        else:
            out.append((start, stop))
    return out


class FetchSchedule:
    """The segments that steps need, in the order in which they are fetched, and the bytes that they take.

    Args:
        sizes: of the files that are fetched.
        steps: what is left to do, in order.
        wide: the ranges that wide steps read, of these and of those that are done: by file, sorted and apart.
    """

    def __init__(self, sizes: Mapping[str, int], steps: Sequence[ReadStep], wide: Mapping[str, list[tuple[int, int]]]):
        self.steps = steps
        self.segments: dict[str, dict[int, Segment]] = {name: {} for name in sizes}
        self._sizes, self._wide = sizes, wide
        self.proofs = {step.proves: i for i, step in enumerate(steps) if step.proves in sizes}
        """By file that is hashed, the number of the step."""
        first = {name: len(steps) for name in sizes}
        for number, step in enumerate(steps):
            for name in [step.proves, *(extent[0] for extent in step.reads)]:
                if name in first and name is not None:
                    first[name] = min(first[name], number)
            if step.proves in sizes and step.proves is not None:
                self._use((step.proves, 0, sizes[step.proves]), step if step.is_promised else None)
            for extent in step.reads:
                if extent[0] in sizes:
                    self._use(extent, step)
        self.order = [
            self.segments[name][n]
            for name in sorted(first, key=lambda f: first[f])
            for n in sorted(self.segments[name])
        ]
        self.wide_bytes = sum(segment.wide_bytes for segment in self.order if segment.wide_users)
        self.budget = self._peak() + AHEAD_SEGMENTS * max((segment.nbytes for segment in self.order), default=0)
        self.budget = min(self.budget, sum(segment.nbytes for segment in self.order))

    @property
    def peak_bytes(self) -> int:
        """The most that is on the disk at a time."""
        return self.budget + self.wide_bytes

    def segments_of(self, name: str, start: int, stop: int) -> list[Segment]:
        """The segments that hold bytes of a file."""
        found = self.segments[name]
        return [found[number] for number in range(start // SEGMENT_BYTES, -(-stop // SEGMENT_BYTES))]

    def _use(self, extent: Extent, step: ReadStep | None) -> None:
        """Adds the segments of an extent. They stay until a step is finished; for no step they only come."""
        name, start, stop = extent
        found, size = self.segments[name], self._sizes[name]
        for number in range(start // SEGMENT_BYTES, -(-stop // SEGMENT_BYTES)):
            if number not in found:
                first, end = number * SEGMENT_BYTES, min((number + 1) * SEGMENT_BYTES, size)
                found[number] = Segment(name, number, first, end, self._wide_within(name, first, end))
            if step is not None:
                (found[number].wide_users if step.is_wide else found[number].users).add(step.name)

    def _wide_within(self, name: str, first: int, end: int) -> tuple[tuple[int, int], ...]:
        ranges = self._wide.get(name, [])
        begin = max(0, bisect_right(ranges, (first, first)) - 1)
        out = []
        for start, stop in ranges[begin:]:
            if start >= end:
                break
            if stop > first:
                out.append((max(start, first), min(stop, end)))
        return tuple(out)

    def _peak(self) -> int:
        """The bytes of segments that are there at once, if every step is done as soon as all of it and of the steps
        before are there. Steps of a run with several threads begin in this order, so that at least those are done when
        the next segment must wait for room: with this much room no step waits for ever."""
        numbers = {step.name: i for i, step in enumerate(self.steps)}
        needs = [-1] * len(self.steps)
        files: list[set[str]] = [set() for _ in self.steps]
        for i, segment in enumerate(self.order):
            for name in segment.users | segment.wide_users:
                needs[numbers[name]] = i
                files[numbers[name]].add(segment.file)
            if segment.file in self.proofs:
                needs[self.proofs[segment.file]] = i
        proofs = {file: i for file, i in self.proofs.items() if self.steps[i].is_promised}
        ends = [max([i, *(proofs[file] for file in files[i] if file in proofs)]) for i in range(len(needs))]
        live = peak = done = 0
        waiting: dict[int, int] = {}
        for i, segment in enumerate(self.order):
            live += segment.nbytes
            peak = max(peak, live)
            last = max((ends[numbers[name]] for name in segment.users), default=-1)
            waiting[last] = waiting.get(last, 0) + segment.nbytes
            while done < len(needs) and needs[done] <= i:
                done += 1
            for last in [last for last in waiting if last < done]:
                live -= waiting.pop(last)
        return peak
