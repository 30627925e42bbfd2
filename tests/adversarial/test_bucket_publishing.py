"""Killed or failed at any request that changes a bucket, a command that publishes loses nothing.

At each moment the output is absent, old and complete, or new and complete, for tpuconv and for Orbax, and the same
command again ends in the last, to the byte, with nothing left over.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tpuconv
from helpers.attacks import made
from helpers.attacks.counts import count
from helpers.buckets import ROOT, Killed, MemoryBucket, in_memory, objects
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.convert.export import export as exporter
from tpuconv.convert.export.array_source import released_config
from tpuconv.convert.plan import sizes
from tpuconv.convert.run.conversion import run
from tpuconv.errors import BucketError, OutputError, TpuconvError, UsageError
from tpuconv.location import BucketPath, to_location
from tpuconv.models.registry import get_family
from tpuconv.storage import bucket_journal
from tpuconv.storage.sealed import read_sealed
from tpuconv.verify.checksums import check_checkpoint, check_export

OUT = to_location(f"{ROOT}/out")
Command = Callable[[bool], None]


@dataclass(frozen=True)
class Sources:
    """What commands read: local, so that only the output is in the bucket."""

    new: Path
    other: Path
    ckpt: Path
    other_ckpt: Path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: Any) -> Sources:
    base = tmp_path_factory.mktemp("sources")
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        found = Sources(*(base / name for name in ("new", "other", "ckpt", "other-ckpt")))
        made.source(found.new)
        made.source(found.other, 1, rms_norm_eps=1e-5, num_hidden_layers=2)
        made.convert(found.new, found.ckpt)
        made.convert(found.other, found.other_ckpt)
    return found


def small(patch: pytest.MonkeyPatch) -> None:
    """Units enough of a small model; one request at a time, so that numbers mean the same in each run."""
    patch.setattr(sizes, "CHUNK_BYTES", 1500)
    patch.setattr(sizes, "SLAB_BYTES", 6000)
    patch.setattr(sizes, "UNIT_BYTES", 12_000)
    patch.setattr("tpuconv.buckets.REQUESTS", 1)


def export(ckpt: Path, overwrite: bool) -> None:
    manifest = read_manifest(ckpt)
    family = get_family(manifest.family)
    config = family.config.from_hf(released_config(manifest))
    made.drain(exporter.export_checkpoint(manifest, family.table, config, OUT, overwrite=overwrite))


def commands(name: str, sources: Sources) -> tuple[Command, Command]:
    """A command, and the one that made its old output."""

    def convert(folder: Path) -> Command:
        return lambda overwrite: made.drain(run(made.plan_of(folder), OUT, made.LIMITS, overwrite=overwrite))

    if name == "export":
        return lambda o: export(sources.ckpt, o), lambda o: export(sources.other_ckpt, o)
    if name == "convert":
        return convert(sources.new), convert(sources.other)
    plan = made.quantization_plan(sources.ckpt)
    return lambda o: made.drain(run(plan, OUT, made.LIMITS, overwrite=o)), convert(sources.other)


def state(bucket: MemoryBucket) -> dict[str, bytes] | None:
    """What a reader finds: nothing, or a complete output. Orbax's mark without a manifest must stand for a complete
    checkpoint too."""
    there = objects(f"{ROOT}/out")
    if "tpuconv.json" not in there:
        return None
    assert isinstance(OUT, BucketPath)
    sealed = read_sealed(OUT)
    is_export = sealed.raw.get("kind") == "safetensors"
    checks = check_export(OUT, sealed) if is_export else check_checkpoint(read_manifest(OUT))
    assert not [(each.name, each.fault) for each in checks if each.fault]
    return there


class Trial:
    """One command in a bucket of its own, with an old output there or none."""

    def __init__(self, name: str, overwrite: bool, sources: Sources, patch: pytest.MonkeyPatch):
        self.name, self.overwrite, self.patch = name, overwrite, patch
        self.command, self.make_old = commands(name, sources)
        bucket = self.reset()
        self.old = state(bucket)
        self.command(overwrite)
        self.new, self.log = objects(f"{ROOT}/out"), bucket.log[:]
        assert state(bucket) == self.new != self.old
        assert set(objects(ROOT)) == {f"out/{name}" for name in self.new}

    def reset(self) -> MemoryBucket:
        bucket = in_memory(self.patch)
        if self.overwrite:
            self.make_old(False)
        bucket.log.clear()
        return bucket

    def check_and_finish(self, bucket: MemoryBucket, at: str) -> None:
        bucket.at = None
        left = state(bucket)
        assert left in (None, self.old, self.new), at
        if left is None and self.overwrite:
            assert "out.tpuconv/complete.done" in objects(ROOT), f"{at}: the old output is gone, the new one not there"
        if left is None and "params/commit_success.txt" in (raw := objects(f"{ROOT}/out")):
            complete = (self.old or {}) if self.overwrite else {}
            kept = {k: v for k, v in raw.items() if k.startswith("params/")}
            assert any(
                kept == {k: v for k, v in whole.items() if k.startswith("params/")} for whole in (complete, self.new)
            ), f"{at}: Orbax takes a part for a checkpoint"
        self.command(self.overwrite)
        assert objects(f"{ROOT}/out") == self.new, at
        assert set(objects(ROOT)) == {f"out/{name}" for name in self.new}, at
        count("stopped at a request to a bucket, and finished", self.name)


FORMS = [
    pytest.param(name, overwrite, step, id=f"{name}{' --overwrite' * overwrite}{' at every request' * (step == 1)}",
                 marks=[pytest.mark.slow] * (step == 1))
    for step in (7, 1)
    for name in ("convert", "export", "quantize")
    for overwrite in (False, True)
    if step == 1 or (name, overwrite) == ("convert", True)
]  # fmt: skip


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("name", "overwrite", "step"), FORMS)
def test_killed_at_a_request(name, overwrite, step, late, sources, monkeypatch):
    trial = Trial(name, overwrite, sources, monkeypatch)
    for at in range(0, len(trial.log), step):
        bucket = trial.reset()
        bucket.at, bucket.late = at, late
        with pytest.raises(Killed):
            trial.command(overwrite)
        trial.check_and_finish(bucket, f"killed {'after' if late else 'before'} {at}: {trial.log[at]}")


@pytest.mark.parametrize(("name", "overwrite", "step"), FORMS)
def test_a_request_that_fails(name, overwrite, step, sources, monkeypatch):
    """A store that refuses a request is exit code 7, at whichever."""
    trial = Trial(name, overwrite, sources, monkeypatch)
    for at in range(0, len(trial.log), step):
        bucket = trial.reset()
        bucket.at, bucket.error = at, BucketError("refused")
        if trial.log[at] != "delete out.tpuconv/claim":  # the last one: all is there
            with pytest.raises(BucketError):
                trial.command(overwrite)
        trial.check_and_finish(bucket, f"failed at {at}: {trial.log[at]}")


def test_another_plan_waits_and_takes_over(sources, monkeypatch):
    """Two plans never mix: the second one is refused, and with --overwrite it begins anew once the claim has lapsed."""
    trial = Trial("convert", False, sources, monkeypatch)
    for at in (len(trial.log) // 2, trial.log.index("put out/tpuconv.json")):
        bucket = trial.reset()
        bucket.at = at
        with pytest.raises(Killed):
            trial.command(False)
        bucket.at = None
        with pytest.raises(OutputError, match="unfinished conversion"):
            trial.make_old(False)
        with pytest.raises(OutputError, match="being written by another process, or was until"):
            trial.make_old(True)
        monkeypatch.setattr(bucket_journal, "LAPSED_SECONDS", -1)
        trial.make_old(True)
        monkeypatch.setattr(bucket_journal, "LAPSED_SECONDS", 300)
        assert state(bucket)
        assert not [name for name in objects(ROOT) if not name.startswith("out/")]


def test_a_plan_finishes_what_another_one_was_replacing(sources, monkeypatch):
    """Killed while a new output replaces an old one: another plan with --overwrite completes that first."""
    trial = Trial("convert", True, sources, monkeypatch)
    at = next(i for i, what in enumerate(trial.log) if what.startswith("copy ")) + 3
    bucket = trial.reset()
    bucket.at = at
    with pytest.raises(Killed):
        trial.command(True)
    bucket.at = None
    assert state(bucket) is None
    monkeypatch.setattr(bucket_journal, "LAPSED_SECONDS", -1)
    start = len(bucket.log)
    trial.make_old(True)
    assert "copy out/tpuconv.json" in bucket.log[start:]
    assert state(bucket) == trial.old


def test_the_second_process_of_a_plan_takes_the_claim(sources, monkeypatch):
    trial = Trial("convert", False, sources, monkeypatch)
    plan = made.plan_of(sources.new)
    journal = bucket_journal.BucketJournal(OUT, plan.fingerprint, plan.facts)
    trial.reset()

    def first() -> None:
        with journal:
            journal.begin()
            trial.command(False)
            journal.publish()

    with pytest.raises(OutputError, match="another process writes") as info:
        first()
    assert info.value.exit_code == 9
    assert objects(f"{ROOT}/out") == trial.new


def test_what_is_not_ours_is_not_touched(sources, monkeypatch):
    bucket = in_memory(monkeypatch)
    convert, _ = commands("convert", sources)
    bucket.put("out/theirs", b"x")
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="exists"):
            convert(overwrite)
    assert objects(ROOT) == {"out/theirs": b"x"}
    bucket = in_memory(monkeypatch)
    bucket.put("out.tpuconv/claim", json.dumps({"a": 1}).encode())
    with pytest.raises(OutputError, match="not made by this version"):
        convert(True)
    assert set(objects(ROOT)) == {"out.tpuconv/claim"}
    with pytest.raises(UsageError, match="is a bucket"):
        made.drain(run(made.plan_of(sources.new), to_location(ROOT), made.LIMITS))


def test_a_store_without_conditions_is_refused(sources, monkeypatch):
    bucket = in_memory(monkeypatch)
    monkeypatch.setattr(bucket, "put", lambda key, data, only_if=None: MemoryBucket.put(bucket, key, data))
    with pytest.raises(UsageError, match="ignores conditions"):
        commands("convert", sources)[0](False)
    assert objects(ROOT) == {}


def test_damage_in_a_bucket_is_found(sources, monkeypatch):
    bucket = in_memory(monkeypatch)
    commands("convert", sources)[0](False)
    shard = next(name for name in objects(ROOT) if "/c." in name)
    for change in (lambda x: x[:9] + bytes([x[9] ^ 1]) + x[10:], lambda x: x[:-1], lambda x: x + b"0"):
        data = objects(ROOT)[shard]
        bucket.put(shard, change(data))
        assert isinstance(OUT, BucketPath)
        assert [each.fault for each in check_checkpoint(read_manifest(OUT)) if each.fault]
        with pytest.raises(TpuconvError) as info:
            tpuconv.load(OUT)
        assert info.value.exit_code == 10
        bucket.put(shard, data)
