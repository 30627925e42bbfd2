"""One of several processes is killed at a call that changes the disk or the bucket, and started again or not.

At each moment the output is absent or complete; then the same processes, one process, or another count of them end as
if nothing was, to the byte, with nothing left over.
"""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.attacks import made
from helpers.attacks.simulated import Disk, contents
from helpers.attacks.simulated import Killed as DiskKilled
from helpers.buckets import ROOT, Killed, in_memory, objects
from tpuconv.convert.plan import sizes
from tpuconv.convert.run.conversion import run
from tpuconv.hosts import ProcessPart
from tpuconv.location import Location, to_location
from tpuconv.storage import claim, disk

COUNT = 3
RERUNS = {"restarted": COUNT, "one process": None, "two processes": 2, "four processes": 4}
CASES = [(place, rerun) for place in ("disk", "bucket") for rerun in RERUNS]


@pytest.fixture(scope="module", autouse=True)
def small_units() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "CHUNK_BYTES", 1500)
        patch.setattr(sizes, "SLAB_BYTES", 6000)
        patch.setattr(sizes, "UNIT_BYTES", 6000)
        patch.setattr("tpuconv.buckets.REQUESTS", 1)
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.source(tmp_path_factory.mktemp("source") / "src", shards=3, num_hidden_layers=2)


@pytest.fixture(scope="module")
def alone(source: Path, small_units: None) -> dict[str, bytes]:
    made.convert(source, source.parent / "alone")
    return contents(source.parent / "alone")


class Trial:
    """An output that three processes begin, one after the other. The call with the number `at` is the last of its
    process."""

    def __init__(self, place: str, source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.source, self.monkeypatch = source, monkeypatch
        self.out: Location = folder / "out" if place == "disk" else to_location(f"{ROOT}/out")

    def convert(self, part: ProcessPart | None) -> None:
        made.drain(run(made.plan_of(self.source), self.out, made.LIMITS, part=part))

    def begin(self, at: int | None) -> tuple[int, int | None]:
        """Returns the number of calls, and the index of the process that was killed."""
        calls: Any
        if isinstance(self.out, Path):
            attacked = Disk(at)
            self.monkeypatch.setattr(disk, "os", attacked)
            calls = attacked.calls
        else:
            bucket = in_memory(self.monkeypatch)
            bucket.at, calls = at, bucket.log
        victim = None
        for index in range(COUNT):
            try:
                self.convert(ProcessPart(index, COUNT))
            except (Killed, DiskKilled):
                victim = index
                break
        if isinstance(self.out, Path):
            self.monkeypatch.setattr(disk, "os", os)
        else:
            bucket.at = None
        return len(calls), victim

    def found(self) -> dict[str, bytes]:
        """What a reader takes for the output: nothing without its manifest."""
        if isinstance(self.out, Path):
            held = contents(self.out) if self.out.exists() else {}
            held.pop(".tpuconv-staged", None)
            return held
        held = objects(str(self.out))
        return held if held.get("tpuconv.json", b"").startswith(b"{") else {}

    def leftovers(self) -> list[str]:
        if isinstance(self.out, Path):
            return [path.name for path in self.out.parent.iterdir() if path != self.out]
        return [*objects(f"{self.out}.tpuconv")]

    def finish(self, rerun: str, victim: int) -> None:
        count = RERUNS[rerun]
        if rerun != "restarted":  # a claim of a process that never comes back lapses
            self.monkeypatch.setattr(claim, "LAPSED_SECONDS", -1)
        if count is None:
            self.convert(None)
            return
        order = range(count) if rerun != "restarted" else [victim, *(i for i in range(count) if i != victim)]
        for index in order:
            self.convert(ProcessPart(index, count))


def attack(place: str, rerun: str, points: Any, source: Path, alone: Any, base: Path, patch: Any) -> None:
    (base / "counted").mkdir()
    total, _ = Trial(place, source, base / "counted", patch).begin(None)
    for at in points(total):
        folder = base / str(at)
        folder.mkdir()
        trial = Trial(place, source, folder, patch)
        _, victim = trial.begin(at)
        assert victim is not None
        assert trial.found() in ({}, alone), at
        with pytest.MonkeyPatch.context() as own:
            trial.monkeypatch = own
            trial.finish(rerun, victim)
        assert trial.found() == alone, at
        assert not trial.leftovers(), at


@pytest.mark.parametrize(("place", "rerun"), CASES)
def test_killed_at_the_end(place, rerun, source, alone, tmp_path, monkeypatch):
    """While the last process publishes."""
    attack(place, rerun, lambda total: (total - 8, total - 2), source, alone, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "rerun"), CASES)
def test_killed_anywhere(place, rerun, source, alone, tmp_path, monkeypatch):
    rng = random.Random(0)
    attack(place, rerun, lambda total: rng.sample(range(total), min(total, 100)), source, alone, tmp_path, monkeypatch)
