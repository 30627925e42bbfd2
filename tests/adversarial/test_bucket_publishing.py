"""Killed or failed at any request that changes a bucket, a command that publishes loses nothing.

At each moment the output is absent, old and complete, or new and complete, for tpuconv and for Orbax, and the same
command again ends in the last, to the byte, with nothing left over.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

import tpuconv
from helpers.attacks import made
from helpers.attacks.counts import count
from helpers.attacks.publishers import PUBLISHERS, Publishers, publishers, small
from helpers.buckets import ROOT, Killed, MemoryBucket, in_memory, objects
from tpuconv import buckets
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.convert.export import files as export_files
from tpuconv.convert.run.conversion import run
from tpuconv.convert.run.planned import planned_names
from tpuconv.errors import BucketError, OutputError, TpuconvError, UsageError
from tpuconv.location import BucketPath, to_location
from tpuconv.storage import claim as claims
from tpuconv.storage.bucket_journal import BucketJournal
from tpuconv.storage.bucket_publishing import TRIAL
from tpuconv.storage.sealed import read_sealed
from tpuconv.verify.checksums import check_checkpoint, check_export

OUT = to_location(f"{ROOT}/out")
Command = Callable[[bool], None]
ONE_FILE = "export of one file"
"""Then the file itself is what readers open first, else an index."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: Any) -> Publishers:
    """They read what is local, so that only the output is in the bucket."""
    base = tmp_path_factory.mktemp("sources")
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        new = made.source(base / "new")
        return publishers(base, new, made.source(base / "other", 1, rms_norm_eps=1e-5, num_hidden_layers=2))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request at a time, so that numbers mean the same in each run."""
    small(monkeypatch)
    monkeypatch.setattr("tpuconv.buckets.REQUESTS", 1)


def commands(name: str, sources: Publishers) -> tuple[Command, Command]:
    """A command, and the one that makes its old output."""
    key = "export" if name == ONE_FILE else name
    return lambda overwrite: sources.run[key](OUT, overwrite), lambda overwrite: sources.old[key](OUT, overwrite)


def state(bucket: MemoryBucket) -> dict[str, bytes] | None:
    """What a reader finds: nothing, or a complete output. Orbax's mark without a manifest must stand for a complete
    checkpoint too."""
    there = objects(f"{ROOT}/out")
    there.pop(TRIAL, None)
    if not there.get("tpuconv.json", b"").startswith(b"{"):
        return None
    assert isinstance(OUT, BucketPath)
    sealed = read_sealed(OUT)
    is_export = sealed.raw.get("kind") == "safetensors"
    checks = check_export(OUT, sealed) if is_export else check_checkpoint(read_manifest(OUT))
    assert not [(each.name, each.fault) for each in checks if each.fault]
    return there


def can_be_finished() -> bool:
    """Whether all of an output waits in the work folder, to be published by any later run."""
    held = json.loads(objects(f"{ROOT}/out.tpuconv")["claim"])
    work = objects(f"{ROOT}/out.tpuconv/{held['work']}")
    staged = json.loads(work["complete.done"])["objects"].values()
    return held["state"] == "publishing" and all(each["key"] in work for each in staged)


class Trial:
    """One command in a bucket of its own, with an old output there or none."""

    def __init__(self, name: str, overwrite: bool, sources: Publishers, patch: pytest.MonkeyPatch):
        self.name, self.overwrite, self.patch = name, overwrite, patch
        if name == ONE_FILE:
            patch.setattr(export_files, "SHARD_BYTES", 1 << 20)
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
            assert can_be_finished(), f"{at}: the old output is gone, the new one not there"
        raw = objects(f"{ROOT}/out")
        for mark in (name for name in raw if name.endswith("commit_success.txt") and raw[name] == b"ok"):
            inside = mark.rpartition("/")[0] + "/"
            if left is None and raw.get(f"{inside}_METADATA", b"{")[:1] == b"{":  # the folder of a step has none
                complete = (self.old or {}, self.new) if self.overwrite else (self.new,)
                kept, *whole = ({k: v for k, v in each.items() if k.startswith(inside)} for each in (raw, *complete))
                assert kept in whole, f"{at}: Orbax takes a part for a checkpoint"
        self.command(self.overwrite)
        assert objects(f"{ROOT}/out") == self.new, at
        assert set(objects(ROOT)) == {f"out/{name}" for name in self.new}, at
        count("stopped at a request to a bucket, and finished", self.name)


FORMS = [
    pytest.param(name, overwrite, step, id=f"{name}{' --overwrite' * overwrite}{' at every request' * (step == 1)}",
                 marks=[pytest.mark.slow] * (step == 1))
    for step in (31, 1)
    for name in (*PUBLISHERS, ONE_FILE)
    for overwrite in (False, True)
    if step == 1 or (name, overwrite) in (("convert", True), ("convert --quantize", False), ("export", True))
]  # fmt: skip


@pytest.mark.parametrize("name", ["convert --target huggingface", "convert --target maxtext"])
def test_an_output_of_another_layout_is_replaced(name, sources, monkeypatch):
    """It has no marks under the names of those of the old one."""
    Trial(name, True, sources, monkeypatch)


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
        with pytest.raises(BucketError):
            trial.command(overwrite)
        trial.check_and_finish(bucket, f"failed at {at}: {trial.log[at]}")


def test_another_plan_waits_and_takes_over(sources, monkeypatch):
    """Two plans never mix: the second one is refused, and with --overwrite it begins anew once the claim has lapsed."""
    trial = Trial("convert", False, sources, monkeypatch)
    monkeypatch.setattr(claims, "this_machine", lambda: "")  # as on another machine: nobody knows that it is dead
    for at in (len(trial.log) // 2, trial.log.index("copy out/params/_METADATA")):
        bucket = trial.reset()
        bucket.at = at
        with pytest.raises(Killed):
            trial.command(False)
        bucket.at = None
        is_published = "copy" in trial.log[at]
        with pytest.raises(OutputError, match="being written by" if is_published else "unfinished conversion"):
            trial.make_old(False)
        with pytest.raises(OutputError, match=r"being written by a process on .*, or was until"):
            trial.make_old(True)
        monkeypatch.setattr(claims, "LAPSED_SECONDS", -1)
        trial.make_old(True)
        monkeypatch.setattr(claims, "LAPSED_SECONDS", 300)
        assert state(bucket)
        assert not [name for name in objects(ROOT) if not name.startswith("out/")]


def test_a_plan_finishes_what_another_one_was_replacing(sources, monkeypatch):
    """Killed while a new output replaces an old one: another plan with --overwrite completes that first."""
    trial = Trial("convert", True, sources, monkeypatch)
    at = trial.log.index("copy out/tpuconv.json") + 3
    bucket = trial.reset()
    bucket.at = at
    with pytest.raises(Killed):
        trial.command(True)
    bucket.at = None
    assert state(bucket) is None
    start = len(bucket.log)
    trial.make_old(True)
    assert bucket.log[start:].count("copy out/tpuconv.json") == 3  # the new one, and over that a note and the old one
    assert state(bucket) == trial.old


def test_the_second_process_of_a_plan_leaves(sources, monkeypatch):
    """It writes and deletes nothing."""
    trial = Trial("convert", False, sources, monkeypatch)
    plan, bucket = made.plan_of(sources.new_source), trial.reset()
    with BucketJournal(OUT, plan.fingerprint, plan.facts, planned_names(plan)) as journal:
        journal.begin()
        was = {k: v for k, v in objects(ROOT).items() if "/claim" not in k}
        with pytest.raises(OutputError, match="is being written by a process on") as info:
            trial.command(False)
        assert info.value.exit_code == 9
        assert {k: v for k, v in objects(ROOT).items() if "/claim" not in k} == was
    trial.command(False)
    assert objects(f"{ROOT}/out") == trial.new
    assert state(bucket) == trial.new


NEIGHBOURS = ["tpuconv.json", "gemma.tex", "claim", "plan.done", "new/x", "0" * 31 + "/x", "0" * 32]


@pytest.mark.parametrize("name", NEIGHBOURS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_with_the_name_of_our_work_is_not_ours(name, overwrite, sources, monkeypatch):
    bucket = in_memory(monkeypatch)
    convert, make_old = commands("convert", sources)
    if overwrite:
        make_old(False)
    bucket.put(f"out.tpuconv/{name}", b"theirs")
    before = objects(ROOT)
    with pytest.raises(OutputError) as info:
        convert(overwrite)
    assert f"{ROOT}/out.tpuconv" in str(info.value)
    assert objects(ROOT) == before
    count("neighbours of OUT", "convert, bucket")


PLACES = [
    *("thesis.tex", "params/notes.txt", "params/step_40/x", "params/layers.0.norm1.scale/c.9"),
    *("hf/config.json", "llama/tpuconv.json"),
]


@pytest.mark.parametrize("name", PLACES)
def test_files_of_others_in_an_output_stop_its_replacement(name, sources, monkeypatch):
    """At the beginning, and where they come while the new output is made."""
    bucket = in_memory(monkeypatch)
    convert, make_old = commands("convert", sources)
    make_old(False)
    bucket.put(f"out/{name}", b"theirs")
    before = objects(ROOT)
    with pytest.raises(OutputError, match=re.escape(name)):
        convert(True)
    assert objects(ROOT) == before
    bucket.delete([f"out/{name}"])
    complete = BucketJournal._complete
    monkeypatch.setattr(BucketJournal, "_complete", lambda self: (complete(self), bucket.put(f"out/{name}", b"theirs")))
    with pytest.raises(OutputError, match=re.escape(name)):
        convert(True)
    monkeypatch.undo()
    monkeypatch.setitem(buckets.OPEN, ROOT, bucket)
    assert {k: v for k, v in objects(ROOT).items() if k.startswith("out/")} == before
    with pytest.raises(OutputError, match=re.escape(name)):
        convert(True)
    bucket.delete([f"out/{name}"])
    convert(True)
    assert state(bucket) is not None
    count("files of others in OUT", "convert, bucket")


def test_a_file_that_its_owner_rewrote_is_not_replaced(sources, monkeypatch):
    bucket = in_memory(monkeypatch)
    convert, make_old = commands("convert", sources)
    make_old(False)
    shard = next(name for name in objects(f"{ROOT}/out") if "/c." in name)
    for name in ("README.md", "config.json", shard):
        was = objects(f"{ROOT}/out")[name]
        for data in (b"mine", bytes([was[0] ^ 1]) + was[1:]):
            bucket.put(f"out/{name}", data)
            with pytest.raises(OutputError, match=re.escape(f"{name} was changed since tpuconv wrote it")):
                convert(True)
            assert objects(f"{ROOT}/out")[name] == data
        bucket.put(f"out/{name}", was)
    convert(True)


def test_outputs_in_outputs_are_refused(sources, monkeypatch):
    bucket = in_memory(monkeypatch)
    convert, make_old = commands("convert", sources)
    plan = made.plan_of(sources.other_source)
    inner = to_location(f"{ROOT}/out/llama")
    make_old(False)
    with pytest.raises(OutputError, match="lies in another output of tpuconv, gs://bkt/out"):
        made.drain(run(plan, inner, made.LIMITS))
    bucket = in_memory(monkeypatch)
    new = made.plan_of(sources.new_source)
    with BucketJournal(OUT, new.fingerprint, new.facts, planned_names(new)) as journal:
        journal.begin()
        with pytest.raises(OutputError, match="lies in gs://bkt/out, which another process writes"):
            made.drain(run(plan, inner, made.LIMITS))
    made.drain(run(plan, inner, made.LIMITS))
    before = objects(ROOT)
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="llama/"):
            convert(overwrite)
    assert objects(ROOT) == before
    with pytest.raises(UsageError, match="has the name of a folder in which tpuconv keeps unfinished work"):
        made.drain(run(plan, to_location(f"{ROOT}/out.tpuconv"), made.LIMITS))
    assert objects(ROOT) == before
    assert bucket.log


def test_a_staged_object_that_was_changed_is_not_published(sources, monkeypatch):
    bucket = in_memory(monkeypatch)
    convert, _ = commands("convert", sources)
    complete = BucketJournal._complete

    def change(journal: BucketJournal) -> None:
        staged = next(each for name, each in journal.sink.staged.items() if "/c." in name)
        bucket.put(f"{journal._folder.key}/{staged.key}", b"0" * staged.size)
        complete(journal)

    monkeypatch.setattr(BucketJournal, "_complete", change)
    with pytest.raises(OutputError, match="are not as they were written"):
        convert(False)
    assert not objects(f"{ROOT}/out")


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
        made.drain(run(made.plan_of(sources.new_source), to_location(ROOT), made.LIMITS))


@pytest.mark.parametrize("work", ["", "..", "new", "0" * 31, "0" * 31 + "\x1b", f"{'0' * 32}/new"])
def test_the_work_of_a_claim_has_a_name_of_ours(work, sources, monkeypatch):
    bucket = in_memory(monkeypatch)
    convert, _ = commands("convert", sources)
    bucket.put("out.tpuconv/claim", claims.Held("plan", work, "writing", claims.NOBODY, 1, "", "").to_bytes())
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="not made by this version"):
            convert(overwrite)
    assert set(objects(ROOT)) == {"out.tpuconv/claim"}


def test_a_store_without_conditions_is_refused(sources, monkeypatch):
    bucket = in_memory(monkeypatch)
    for ignores in (lambda only_if: True, bool):  # all conditions, or those of compare-and-swap alone
        bucket = in_memory(monkeypatch)

        def put(key, data, only_if=None, bucket=bucket, ignores=ignores):
            return MemoryBucket.put(bucket, key, data, None if ignores(only_if) else only_if)

        monkeypatch.setattr(bucket, "put", put)
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
