"""Several processes make one output, each a part: it is equal to that of one process, to the byte."""

import json
import os
import runpy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.attacks import made
from helpers.attacks.processes import tpuconv
from helpers.attacks.simulated import contents
from helpers.buckets import ROOT, in_memory, objects
from tpuconv import api
from tpuconv.convert.plan import sizes
from tpuconv.convert.run.conversion import run
from tpuconv.convert.run.engine import ALREADY_THERE, PART_DONE
from tpuconv.convert.run.share import share_of
from tpuconv.errors import OutputError, SourceError, UsageError
from tpuconv.hosts import ProcessPart, divided, find_part
from tpuconv.location import Location, to_location
from tpuconv.sources.reader import SafetensorsReader
from tpuconv.storage import disk
from tpuconv.storage.bucket_journal import BucketJournal
from tpuconv.storage.shared_journal import SharedJournal

COUNT = 3
SMALL_UNITS = "from tpuconv.convert.plan import sizes; sizes.SLAB_BYTES, sizes.UNIT_BYTES = 3000, 6000"
PARTS = [ProcessPart(index, COUNT) for index in range(COUNT)]


@pytest.fixture(scope="module", autouse=True)
def small_units() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "CHUNK_BYTES", 1500)
        patch.setattr(sizes, "SLAB_BYTES", 3000)
        patch.setattr(sizes, "UNIT_BYTES", 6000)
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of as many shards as a large model has for each process."""
    return made.source(tmp_path_factory.mktemp("source") / "src", shards=9, num_hidden_layers=6)


def stages(folder: Path, out: Location, part: ProcessPart | None, **options: Any) -> list[str]:
    return [step.stage for step in run(made.plan_of(folder), out, made.LIMITS, part=part, **options)]


@pytest.fixture(scope="module")
def alone(source: Path, small_units: None) -> dict[str, bytes]:
    """What one process makes."""
    made.convert(source, source.parent / "alone")
    return contents(source.parent / "alone")


@pytest.fixture(params=["disk", "bucket"])
def out(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Location:
    if request.param == "bucket":
        in_memory(monkeypatch)
    return tmp_path / "out" if request.param == "disk" else to_location(f"{ROOT}/out")


def found(out: Location) -> dict[str, bytes]:
    return contents(out) if isinstance(out, Path) else objects(str(out))


def leftovers(out: Location) -> list[str]:
    if isinstance(out, Path):
        return [path.name for path in out.parent.glob(".out*")]
    return [*objects(f"{out}.tpuconv")]


# --- converting ----------------------------------------------------------------------------------------------------


def test_three_processes_equal_one(source, alone, out):
    """One after the other: all but the last say that another publishes."""
    ends = [stages(source, out, part)[-1] for part in PARTS]
    assert ends == [PART_DONE, PART_DONE, "published"]
    assert found(out) == alone
    assert not leftovers(out)
    assert [stages(source, out, part) for part in PARTS] == [[ALREADY_THERE]] * COUNT
    assert not leftovers(out)


def test_three_at_once_equal_one(source, alone, out):
    with ThreadPoolExecutor(COUNT) as pool:
        ends = [steps[-1] for steps in pool.map(lambda part: stages(source, out, part), PARTS)]
    assert "published" in ends
    assert found(out) == alone
    assert not leftovers(out)


def test_a_folder_that_another_process_removes_is_no_fault(tmp_path, monkeypatch):
    """The process that publishes removes folders while another one lists them."""
    listdir = os.listdir

    def late(path: Path) -> list[str]:
        if Path(path).name == "tried":
            os.rmdir(path)
        return listdir(path)

    (tmp_path / "tried").mkdir()
    monkeypatch.setattr(os, "listdir", late)
    assert disk.is_leftover(tmp_path / "tried")


def test_work_is_even_and_little_is_read_twice(source, tmp_path, monkeypatch):
    plan = made.plan_of(source)
    shares = [share_of(plan, part) for part in PARTS]
    assert [unit.uid for share in shares for unit in share.units] == [unit.uid for unit in plan.units]
    even = plan.source_bytes / COUNT
    assert all(0.8 * even <= share.nbytes <= 1.2 * even for share in shares)
    assert sorted(shard.name for share in shares for shard in share.shards) == [s.name for s in plan.source.shards]
    read, read_bytes = [0] * COUNT, SafetensorsReader._bytes
    cached = {(i, shard.name): np.zeros(shard.size, bool) for i in range(COUNT) for shard in plan.source.shards}

    def counted(self: Any, file: Any, shard: str, start: int, stop: int, *args: Any, again: bool = False) -> np.ndarray:
        is_cached = cached[part.index, shard][start:stop]
        read[part.index] += stop - start - np.count_nonzero(is_cached)
        is_cached[:] = again  # hashed before it is needed, it stays in the page cache until then
        return read_bytes(self, file, shard, start, stop, *args, again=again)

    monkeypatch.setattr(SafetensorsReader, "_bytes", counted)
    for part in PARTS:
        stages(source, tmp_path / "out", part)
    total = sum(shard.size for shard in plan.source.shards)
    assert total <= sum(read) <= 1.25 * total
    simulate = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "hosts.py"))["simulate"]
    simulated = simulate(total, COUNT, unit=total // len(plan.units), file=plan.source.shards[0].size)
    assert [host.read / total for host in simulated] == pytest.approx([n / total for n in read], abs=0.08)


@pytest.mark.parametrize("others", [None, ProcessPart(1, 2), ProcessPart(0, 1)], ids=str)
def test_another_count_finishes(source, alone, out, others):
    """One process without the option, or processes of another count, do only what is left."""
    assert stages(source, out, PARTS[1])[-1] == PART_DONE
    if others and others.count > 1:
        assert stages(source, out, ProcessPart(0, 2))[-1] == PART_DONE
    steps = list(run(made.plan_of(source), out, made.LIMITS, part=others))
    assert steps[-1].stage == "published"
    assert max(step.resumed for step in steps) > 0
    assert found(out) == alone
    assert not leftovers(out)


def test_an_output_is_replaced_once(source, alone, out, tmp_path):
    """A process that begins after the output of its own run was published leaves it, even with --overwrite."""
    other = made.source(tmp_path / "other", 1, num_hidden_layers=2)
    made.drain(run(made.plan_of(other), out, made.LIMITS))
    old = found(out)
    with pytest.raises(OutputError, match="exists already"):
        stages(source, out, PARTS[0])
    for part in PARTS[:2]:
        assert stages(source, out, part, overwrite=True)[-1] == PART_DONE
        assert found(out) == old
    assert stages(source, out, PARTS[2], overwrite=True)[-1] == "published"
    assert found(out) == alone
    assert stages(source, out, PARTS[1], overwrite=True) == [ALREADY_THERE]
    assert found(out) == alone
    assert not leftovers(out)


def at_work(journal: type, act: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls `act` once, while the first process that gets there is at work on its part."""
    share, calls = journal.share, []

    def shared(self: Any) -> None:
        share(self)
        if not calls:
            calls.append(None)
            act()

    monkeypatch.setattr(journal, "share", shared)


def test_two_plans_never_mix(source, alone, out, tmp_path, monkeypatch):
    other = made.source(tmp_path / "other", 1, num_hidden_layers=2)
    refused = []

    def second() -> None:
        for part in (None, PARTS[1], ProcessPart(0, 1)):
            for overwrite in (False, True):
                with pytest.raises(OutputError) as error:
                    stages(other, out, part, overwrite=overwrite)
                refused.append(error.value.message)

    at_work(SharedJournal if isinstance(out, Path) else BucketJournal, second, monkeypatch)
    for part in PARTS:
        stages(source, out, part)
    assert len(refused) == 6
    assert found(out) == alone


def test_the_same_index_twice(source, alone, out, monkeypatch):
    """Refused on a disk; in a bucket both write the same."""

    def second() -> None:
        if isinstance(out, Path):
            with pytest.raises(OutputError, match="process 0 of 3 is running already"):
                stages(source, out, PARTS[0])
        else:
            assert stages(source, out, PARTS[0])[-1] == PART_DONE

    at_work(SharedJournal if isinstance(out, Path) else BucketJournal, second, monkeypatch)
    assert [stages(source, out, part)[-1] for part in PARTS] == [PART_DONE, PART_DONE, "published"]
    assert found(out) == alone


def test_another_count_at_the_same_time_is_refused_on_a_disk(source, alone, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def second() -> None:
        with pytest.raises(OutputError, match="by 3 processes"):
            stages(source, out, ProcessPart(1, 2))
        with pytest.raises(OutputError, match="by another process"):
            stages(source, out, None)

    at_work(SharedJournal, second, monkeypatch)
    assert [stages(source, out, part)[-1] for part in PARTS] == [PART_DONE, PART_DONE, "published"]
    assert contents(out) == alone


def test_hosts_that_read_other_files_are_refused(source, out, tmp_path, monkeypatch):
    """Of the same headers and samples, but written later: no host can tell that they hold the same."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in source.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())

    def second() -> None:
        with pytest.raises(SourceError, match="read other files"):
            stages(copy, out, PARTS[1])

    at_work(SharedJournal if isinstance(out, Path) else BucketJournal, second, monkeypatch)
    assert stages(source, out, PARTS[0])[-1] == PART_DONE


@pytest.mark.slow
def test_quantized_and_exported_by_three(source, out, tmp_path, monkeypatch):
    """`quantize`, `export`, and the one pass to safetensors."""
    ckpt = tmp_path / "ckpt"
    api.convert(source, ckpt, jobs=1)
    monkeypatch.setattr("tpuconv.convert.export.files.SHARD_BYTES", 20_000)
    for number, command in enumerate(
        (
            lambda to, part: api.quantize(ckpt, to, config="int8_weight_only", jobs=1, part=part),
            lambda to, part: api.export(ckpt, to, part=part),
            lambda to, part: api.convert(source, to, dtype="float32", target="huggingface", jobs=1, part=part),
        )
    ):
        to = out.with_name(f"out{number}")
        done = [command(to, part) for part in PARTS]
        assert [each.published for each in done] == [False, False, True]
        assert done[0].to_json()["process"]["index"] == 0
        command(tmp_path / f"one{number}", None)
        assert found(to) == contents(tmp_path / f"one{number}")


@pytest.mark.parametrize("when", ["at work", "at its end"])
def test_a_disk_that_hosts_do_not_share_is_an_error(when, source, alone, tmp_path, monkeypatch):
    """Of a process that others start with. A later run, with all of them on one disk, goes on."""
    monkeypatch.setattr("tpuconv.storage.shared_journal.MEETING_SECONDS", -1 if when == "at work" else 0.3)
    monkeypatch.setattr("tpuconv.storage.shared_journal.MEETING_POLL_SECONDS", 0.05)
    parts = [ProcessPart(index, COUNT, starts_with_others=True) for index in range(COUNT)]
    with pytest.raises(OutputError, match="not on a disk that all hosts share") as error:
        stages(source, tmp_path / "out", parts[0])
    assert "bucket" in str(error.value.hint)
    assert stages(source, tmp_path / "out", PARTS[1])[-1] == PART_DONE
    assert [stages(source, tmp_path / "out", part)[-1] for part in (parts[0], parts[2])] == [PART_DONE, "published"]
    assert contents(tmp_path / "out") == alone


def test_a_calibration_of_several_processes_is_refused_first(tmp_path):
    """Before CKPT is looked at, which is not there."""
    config = tmp_path / "gptq.yaml"
    rule = "{module_path: '.*', weight_qtype: int4, tile_size: 32}"
    config.write_text(f"qwix: {{rules: [{rule}]}}\ncalibration: {{method: gptq}}\n")
    with pytest.raises(UsageError, match="one process") as error:
        api.quantize(tmp_path / "nowhere", tmp_path / "out", part=PARTS[0], config=config)
    assert "`part=`" in str(error.value.hint)


# --- which process this is -----------------------------------------------------------------------------------------


ON_GKE = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b"}


@pytest.mark.parametrize(
    ("environment", "count", "want"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, None, (1, 4)),
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3"}, 3, (2, 3)),
        ({"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2"}, None, (0, 2)),
        (ON_GKE, None, (1, 2)),
        (ON_GKE | {"MEGASCALE_SLICE_ID": "2", "MEGASCALE_NUM_SLICES": "3"}, None, (5, 6)),
        ({"JOB_COMPLETION_INDEX": "7"}, 8, (7, 8)),
    ],
)
def test_clusters_say_which_process_this_is(environment, count, want):
    part = find_part(count, environment)
    assert (part.index, part.count) == want
    assert part.starts_with_others == ("JOB_COMPLETION_INDEX" not in environment)


@pytest.mark.parametrize(
    ("environment", "count", "message"),
    [
        ({"JOB_COMPLETION_INDEX": "7"}, None, "nothing says how many"),
        ({"JOB_COMPLETION_INDEX": "x"}, 8, "no number"),
        ({"JOB_COMPLETION_INDEX": "8"}, 8, "no process 8 of 8"),
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3"}, 4, "this is process 2 of 3"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "3"}, None, "neither the index nor the count"),
    ],
)
def test_what_a_cluster_does_not_say_is_an_error(environment, count, message, monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    with pytest.raises(UsageError, match=message) as error:
        find_part(count, environment)
    assert error.value.hint


def test_runs_of_neighbours():
    assert divided("abcdef", [1] * 6, 3) == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert divided("abc", [1, 98, 1], 3) == [["a"], ["b"], ["c"]]
    assert divided("ab", [1, 1], 4) == [[], ["a"], [], ["b"]]
    assert divided("", [], 2) == [[], []]


def test_the_command_says_what_is_left(source, tmp_path):
    words = ["convert", source, tmp_path / "out", "--process-count", 2]
    assert "go together" in tpuconv(*words, code=2).stderr
    done = tpuconv(*words, "--process-index", 0, patch=SMALL_UNITS)
    assert "process 0 of 2: part done" in done.stdout
    assert not (tmp_path / "out").exists()
    last = json.loads(tpuconv(*words, "--process-index", 1, "--json", patch=SMALL_UNITS).stdout)
    assert last["published"] is True
    assert last["process"]["index"] == 1
    assert last["process"]["bytes"] < last["process"]["of_bytes"]


def test_a_process_without_a_share_says_so(source, tmp_path, monkeypatch):
    """A small model is one unit of work, which is the second process's."""
    monkeypatch.setattr(sizes, "UNIT_BYTES", 1 << 20)
    done = api.convert(source, tmp_path / "out", part=ProcessPart(0, 2))
    assert not done.published
    assert done.to_json()["process"]["bytes"] == 0
    last = api.convert(source, tmp_path / "out", part=ProcessPart(1, 2))
    assert last.part_bytes == last.source_bytes
