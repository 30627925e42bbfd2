"""kill -9 at any moment: the output is whole or not there, an old one stays whole, and a rerun gives the same result.

The conversion runs in a process of its own, which kills itself at a chosen system call that changes the disk, or is
killed at a random time.
"""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import hollow_checkpoint, qwen3_config, random_checkpoint
from test_convert import assert_same, convert, expected, restore

from tpuconv.convert.manifest import read_manifest
from tpuconv.convert.plan import Options
from tpuconv.verify.weights import check

# What a conversion does to the disk: each is a moment at which a crash leaves another state behind.
WORKER = """
import os, signal, sys, threading
from pathlib import Path
from tpuconv.convert import journal, plan as plan_module, run as run_module
from test_convert import Limits, Options, convert

plan_module.CHUNK_BYTES, plan_module.PIECE_BYTES, plan_module.UNIT_BYTES = 512, 4000, 20_000
fatal, when, count, lock = int(sys.argv[4]), sys.argv[5], 0, threading.Lock()

def counted(function):
    def call(*args, **kwargs):
        global count
        with lock:
            count += 1
            mine = count
        if mine == fatal and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if mine == fatal and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return call

for name in {names}:
    setattr(os, name, counted(getattr(os, name)))
journal._exchange = counted(journal._exchange)
convert(Path(sys.argv[1]), Path(sys.argv[2]), Options(dtype=sys.argv[3]), limits=Limits(2, 2**30), overwrite=True)
print(count)
"""
RENAMES = ("rename",)
ALL_CALLS = ("rename", "mkdir", "unlink", "rmdir", "open", "fsync", "ftruncate")


def worker(names: tuple[str, ...], folder: Path, out: Path, dtype: str, fatal: int, when: str = "before") -> int | None:
    """Runs a conversion that dies at its `fatal`-th call. The number of calls if it came to its end, None if killed."""
    code = WORKER.replace("{names}", repr(names))
    command = [sys.executable, "-c", code, str(folder), str(out), dtype, str(fatal), when]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return int(done.stdout) if done.returncode == 0 else None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return random_checkpoint(tmp_path / "hf", qwen3_config())


def assert_whole(out: Path, folder: Path) -> None:
    dtype = read_manifest(out).raw["options"]["dtype"]
    assert_same(restore(out), expected(folder, Options(dtype=dtype)))
    assert not [array.name for array in check(read_manifest(out)) if array.fault]


def kill_at(calls: tuple[str, ...], moments: list[tuple[int, str]], folder: Path, tmp_path: Path) -> None:
    """At each moment: beside an old output and beside none, then a rerun."""
    old = tmp_path / "old"
    convert(folder, old, Options(dtype="float32"))
    for i, (fatal, when) in enumerate(moments):
        out = tmp_path / f"out{i}"
        replaces = i % 2 == 0
        if replaces:
            subprocess.run(["cp", "-r", old, out], check=True)
        assert worker(calls, folder, out, "auto", fatal, when) is None
        assert out.exists() or not replaces
        if out.exists():
            assert_whole(out, folder)
        assert worker(calls, folder, out, "auto", fatal=0) is not None
        assert read_manifest(out).raw["options"]["dtype"] == "auto"
        assert_whole(out, folder)
        assert not list(tmp_path.glob(f".out{i}*"))
        subprocess.run(["rm", "-r", out], check=True)


def test_killed_at_renames_and_at_other_calls(folder, tmp_path):
    renames = worker(RENAMES, folder, tmp_path / "count", "auto", fatal=0)
    everything = worker(ALL_CALLS, folder, tmp_path / "count2", "auto", fatal=0)
    assert renames is not None
    assert everything is not None
    # The last renames are those of the publication.
    kill_at(RENAMES, [(1, "before"), (renames - 1, "after"), (renames, "before"), (renames, "after")], folder, tmp_path)
    rng = random.Random(0)
    kill_at(
        ALL_CALLS, [(rng.randrange(1, everything), rng.choice(["before", "after"])) for _ in range(6)], folder, tmp_path
    )


@pytest.mark.slow
def test_killed_at_every_rename(folder, tmp_path):
    renames = worker(RENAMES, folder, tmp_path / "count", "auto", fatal=0)
    assert renames is not None
    kill_at(RENAMES, [(n, w) for n in range(1, renames + 1) for w in ("before", "after")], folder, tmp_path)


@pytest.mark.slow
def test_killed_at_random_calls(folder, tmp_path):
    everything = worker(ALL_CALLS, folder, tmp_path / "count", "auto", fatal=0)
    assert everything is not None
    rng = random.Random(1)
    moments = [(rng.randrange(1, everything), rng.choice(["before", "after"])) for _ in range(60)]
    kill_at(ALL_CALLS, moments, folder, tmp_path)


@pytest.mark.slow
def test_killed_at_random_times(tmp_path):
    """The command itself, on 400 MB, killed again and again until it comes to its end by what the killed ones did."""
    config = qwen3_config(vocab_size=32_000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=10)
    folder = random_checkpoint(tmp_path / "hf", config)
    command = [sys.executable, "-m", "tpuconv", "convert", str(folder), str(tmp_path / "out")]
    rng, killed = random.Random(2), 0
    while killed < 40:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.1, 1.2))
        process.kill()
        process.wait()
        killed += 1
        if (tmp_path / "out").exists():
            assert_whole(tmp_path / "out", folder)
            subprocess.run(["rm", "-r", tmp_path / "out"], check=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert_whole(tmp_path / "out", folder)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "out"]


def test_interrupted_politely_it_says_how_to_go_on(tmp_path):
    """SIGINT and SIGTERM give 130 and 143, leave no output, and the rerun finds what was done."""
    config = qwen3_config(vocab_size=64_000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24)
    folder = hollow_checkpoint(tmp_path / "hf", config)
    command = [sys.executable, "-m", "tpuconv", "convert", str(folder), str(tmp_path / "out")]
    done = 0
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 30
        while len(list(tmp_path.glob(".out.tpuconv/u*.done"))) <= done and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(number)
        _, error = process.communicate()
        assert process.returncode == code, error
        assert "goes on from there" in error
        assert "Traceback" not in error
        assert not (tmp_path / "out").exists()
        done = len(list(tmp_path.glob(".out.tpuconv/u*.done")))
    rerun = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(rerun.stdout)["resumed_bytes"] > 0
    assert not [array.name for array in check(read_manifest(tmp_path / "out")) if array.fault]
