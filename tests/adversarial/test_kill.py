"""The commands, killed or interrupted: an output is complete or absent, and a rerun ends as if nothing was."""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from helpers.attacks.counts import count
from helpers.attacks.processes import UNHURRIED, started, tpuconv
from helpers.attacks.simulated import contents
from helpers.checkpoints import hollow_checkpoint, qwen3_config, random_checkpoint
from helpers.commands import forked
from helpers.times import wait_for
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.verify.checksums import check_checkpoint


def test_interrupted_politely_it_says_how_to_go_on(tmp_path):
    """SIGINT and SIGTERM give 130 and 143, leave no output, and the rerun finds what was done."""
    config = qwen3_config(vocab_size=16_000, hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    folder = hollow_checkpoint(tmp_path / "hf", config)
    words = ["convert", str(folder), str(tmp_path / "out")]
    small_units = "from tpuconv.convert.plan import sizes; sizes.UNIT_BYTES = 4 << 20"
    done = 0
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        with started(*words, patch=small_units + UNHURRIED, stderr=subprocess.PIPE) as process:
            wait_for(lambda done=done: len(list(tmp_path.glob(".out.tpuconv/u*.done"))) > done, process)
            process.send_signal(number)
            _, error = process.communicate()
        assert process.returncode == code, error
        assert "continues from there" in error
        assert "Traceback" not in error
        assert not (tmp_path / "out").exists()
        done = len(list(tmp_path.glob(".out.tpuconv/u*.done")))
    rerun = tpuconv(*words, "--json", patch=small_units)
    assert json.loads(rerun.stdout)["resumed_bytes"] > 0
    assert not [array.name for array in check_checkpoint(read_manifest(tmp_path / "out")) if array.fault]


def kill_often(words: list[str], tmp_path: Path, old: Path | None, times: int, seed: int, name: str) -> None:
    """Kills a command that writes tmp_path/out at random times, as often as it takes, until it was killed `times` times
    after its work had begun; after each end by itself the output is compared and taken away or put back. Its process is
    forked after the imports, in which there is nothing to lose."""
    out, rng, killed = tmp_path / "out", random.Random(seed), 0
    before = contents(old) if old else None

    def restore() -> None:
        subprocess.run(["rm", "-rf", out], check=True)
        if old:
            subprocess.run(["cp", "-r", old, out], check=True)

    restore()
    began = time.monotonic()
    tpuconv(*words)
    seconds, after = time.monotonic() - began, contents(out)
    restore()
    for _ in range(20 * times):
        if killed == times:
            break
        done = forked(words, killed_after=rng.uniform(0, 1.05 * seconds))
        met = (tmp_path / ".out.tpuconv" / "plan.done").exists()  # its work, and neither its beginning nor its end
        killed += done.returncode == -signal.SIGKILL and met
        left = contents(out) if out.exists() else None
        if left:
            left.pop(".tpuconv-staged", None)
        assert left in (before, after)
        if done.returncode == 0:
            assert left == after
        if left == after:
            tpuconv(*words)
            assert contents(out) == after
            restore()
    assert killed == times, f"of {20 * times} kills only {killed} met the work"
    tpuconv(*words)
    assert contents(out) == after
    assert not os.path.lexists(tmp_path / ".out.tpuconv")
    count("killed at random times", name, killed)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    """Sources of 25 MB, and outputs of an older conversion and an older export."""
    base = tmp_path_factory.mktemp("made")
    config = qwen3_config(vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, head_dim=64)
    for name, eps in (("new", 1e-6), ("other", 1e-5)):
        random_checkpoint(base / name, config | {"rms_norm_eps": eps}, shards=2)
        tpuconv("convert", base / name, base / f"{name}-orbax")
    tpuconv("export", base / "other-orbax", base / "other-export")
    return {path.name: path for path in base.iterdir()}


INT8 = ("int8_weight_only",)
KILLS: dict[str, tuple[tuple[str, str, tuple[str, ...]], str | None, int]] = {
    "convert": (("convert", "new", ()), None, 200),
    "convert --overwrite": (("convert", "new", ()), "other-orbax", 200),
    "convert --pathways": (("convert", "new", ("--target", "maxtext", "--pathways")), None, 75),
    "export": (("export", "new-orbax", ()), None, 150),
    "export --overwrite": (("export", "new-orbax", ()), "other-export", 150),
    "quantize": (("quantize", "new-orbax", ("--config", *INT8)), None, 75),
    "quantize --overwrite": (("quantize", "new-orbax", ("--config", *INT8)), "other-orbax", 75),
    "convert --quantize": (("convert", "new", ("--quantize", *INT8)), None, 75),
    "convert --quantize --overwrite": (("convert", "new", ("--quantize", *INT8)), "other-orbax", 75),
    "reshard": (("reshard", "new-orbax", ("--mesh", "tensor=4")), None, 75),
    "reshard --overwrite": (("reshard", "new-orbax", ("--mesh", "tensor=4")), "other-orbax", 75),
}
"""The command, what it reads and its options; what it replaces; how often it is killed."""


def words_for(name: str, made: dict[str, Path], out: Path) -> list[str]:
    (verb, source, options), old, _ = KILLS[name]
    return [verb, str(made[source]), str(out), *options, *["--overwrite"] * (old is not None)]


def test_killed_at_random_times_a_few(made, tmp_path):
    words = words_for("convert --overwrite", made, tmp_path / "out")
    kill_often(words, tmp_path, made["other-orbax"], 4, 0, "convert --overwrite")


@pytest.mark.slow
@pytest.mark.parametrize("name", KILLS)
def test_killed_at_random_times(name, made, tmp_path):
    _, old, times = KILLS[name]
    kill_often(words_for(name, made, tmp_path / "out"), tmp_path, old and made[old], times, 1, name)
