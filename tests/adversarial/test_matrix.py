"""The fault matrix: 40 faults, each injected into the real command, with the exit code, the message and the files that
are promised; and three properties of all conversions.

Faults of the disk are injected by strace or a small disk where these are to be had, and everywhere by Python code that
runs in the child before the command.
"""

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from helpers.attacks.counts import count
from helpers.attacks.processes import (
    COMMAND,
    LISTED,
    MEASURED,
    halted_after,
    idle_seconds,
    needs_strace,
    remount,
    small_disk,
    started,
    strace,
    tpuconv,
    used,
)
from helpers.attacks.simulated import contents, copy_tree
from helpers.checkpoints import (
    INDEX,
    qwen3_config,
    random_checkpoint,
    read_tensors,
    write_checkpoint,
    write_safetensors,
)
from helpers.hub_server import HubServer, sha256_of
from helpers.times import HANG, wait_for
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.convert.plan import sizes
from tpuconv.convert.plan.coverage import make_plan
from tpuconv.convert.plan.types import Options
from tpuconv.convert.run.conversion import run
from tpuconv.convert.run.sizing import Limits
from tpuconv.errors import TpuconvError
from tpuconv.models.registry import find_family
from tpuconv.names import MANIFEST
from tpuconv.sources.source import open_source
from tpuconv.storage.journal import Journal
from tpuconv.storage.sealed import STAGED

FIRST, SECOND = (f"model-{i:05d}-of-00002.safetensors" for i in (1, 2))
ONE = "model.safetensors"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
PAGE = "<!DOCTYPE html><html>Sign in</html>"
UP = "model.layers.1.mlp.up_proj.weight"
REPO = "org/tiny"
SECRET = "hf_" + "Secret" * 5
MIDDLE = qwen3_config(vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, head_dim=64)
"""25 MB."""
FIRST_UNIT = "unit-00000"
SMALL_UNITS = "from tpuconv.convert.plan import sizes; sizes.UNIT_BYTES = 2 << 20"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with a source in two files, `hf`, what it is converted to, `orbax`, and another output, `old`."""
    base = tmp_path_factory.mktemp("matrix")
    folder = random_checkpoint(base / "hf", qwen3_config(), shards=2)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text("{}")
    (folder / "README.md").write_text("the original's card")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    tpuconv("convert", folder, base / "orbax")
    tpuconv("convert", folder, base / "old", "--dtype", "float32")
    return base


@pytest.fixture(scope="module")
def middle(tmp_path_factory) -> Path:
    """A source of 25 MB in two files."""
    return random_checkpoint(tmp_path_factory.mktemp("middle") / "hf", MIDDLE, shards=2)


@pytest.fixture
def hf(made: Path, tmp_path: Path) -> Path:
    """A copy of the source, to be spoilt."""
    copy_tree(made / "hf", tmp_path / "hf")
    return tmp_path / "hf"


@pytest.fixture
def orbax(made: Path, tmp_path: Path) -> Path:
    """A copy of the output, to be spoilt."""
    copy_tree(made / "orbax", tmp_path / "orbax")
    return tmp_path / "orbax"


def refused(folder: Path, code: int, *messages: str, options: tuple[object, ...] = ()) -> str:
    """Converts a source that must be refused with a code and messages; nothing of an output is left. What is said."""
    out = folder.parent / "refused" / "out"
    out.parent.mkdir(exist_ok=True)
    err = tpuconv("convert", folder, out, *options, code=code).stderr
    for message in messages:
        assert re.search(message, err), err
    assert not out.exists()
    if any(out.parent.iterdir()):  # what a rerun could go on with
        assert os.listdir(out.parent) == [".out.tpuconv"]
        shutil.rmtree(out.parent)
    count("refused", f"exit {code}")
    return err


def change_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], object], shards: int = 2) -> None:
    """Writes a source again with other tensors."""
    tensors = {name: x.copy() for name, x in read_tensors(folder).items()}
    change(tensors)
    for path in folder.glob("model*"):
        path.unlink()
    write_checkpoint(folder, json.loads((folder / "config.json").read_text()), tensors, shards)


def change_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def write_header(path: Path, header: object, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def flip(path: Path, at: int) -> None:
    """Flips a bit of a file in place."""
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def fail_at(call: str, error: str, at: int) -> str:
    """Code that makes the call with a number, and all after it, fail."""
    return f"""
import errno, itertools, os
calls, real = itertools.count(1), os.{call}
def fail(*args, **kwargs):
    if next(calls) >= {at}:
        raise OSError(errno.{error}, os.strerror(errno.{error}))
    return real(*args, **kwargs)
os.{call} = fail"""


def assert_left(out: Path, *states: dict[str, bytes | None] | None) -> None:
    """What is there now is one of the states; None is nothing."""
    left = contents(out) if os.path.lexists(out) else None
    if left:
        left.pop(STAGED, None)
    assert left in states


# -- 1 to 4: killed ---------------------------------------------------------------------------------------------------


def test_row_01_killed(made, tmp_path):
    """At any moment: test_kill.py kills hundreds of times, test_publishing.py before every call that changes the disk.
    Here one process after its first unit of work."""
    with started("convert", made / "hf", tmp_path / "out", patch=halted_after(FIRST_UNIT)) as process:
        wait_for((tmp_path / ".out.tpuconv" / f"{FIRST_UNIT}.done").exists, process)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    tpuconv("convert", made / "hf", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(made / "orbax")
    assert os.listdir(tmp_path) == ["out"]
    count("matrix", "killed")


@needs_strace
@pytest.mark.parametrize("when", [1, 3, 4])
def test_row_02_killed_at_a_rename(when, made, tmp_path):
    """At every call: test_publishing.py, which needs no strace. The system counts the renames of each thread."""
    out = tmp_path / "out"
    tpuconv("convert", made / "hf", out, command=strace(f"rename:signal=KILL:when={when}"), code=-signal.SIGKILL)
    assert_left(out, None, contents(made / "orbax"))
    tpuconv("convert", made / "hf", out)
    assert contents(out) == contents(made / "orbax")
    assert os.listdir(tmp_path) == ["out"]
    count("matrix", "killed")


KILL_AT_SWAP = """
import os, signal
from tpuconv.storage import disk
real = disk.exchange
def exchange(*paths):
    if {before}:
        os.kill(os.getpid(), signal.SIGKILL)
    real(*paths)
    os.kill(os.getpid(), signal.SIGKILL)
disk.exchange = exchange"""


@pytest.mark.parametrize("before", [True, False], ids=["before the swap", "after the swap"])
def test_row_03_killed_while_it_replaces(before, made, tmp_path):
    """The old output is intact until the swap. At every call: test_publishing.py."""
    out = tmp_path / "out"
    copy_tree(made / "old", out)
    args = ("convert", made / "hf", out, "--overwrite")
    tpuconv(*args, patch=(KILL_AT_SWAP.format(before=before)), code=-signal.SIGKILL)
    assert_left(out, contents(made / "old" if before else made / "orbax"))
    tpuconv(*args)
    assert contents(out) == contents(made / "orbax")
    assert os.listdir(tmp_path) == ["out"]
    count("matrix", "killed")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_row_04_interrupted(number, code, made, tmp_path):
    """Amid its work: test_kill.py."""
    words = ("convert", made / "hf", tmp_path / "out")
    with started(*words, patch=halted_after("plan"), stderr=subprocess.PIPE) as process:
        wait_for((tmp_path / ".out.tpuconv" / "plan.done").exists, process)
        process.send_signal(number)
        _, err = process.communicate()
    assert process.returncode == code
    assert "Interrupted. What is done is kept: the same command continues from there." in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


# -- 5 to 8: disk and memory ------------------------------------------------------------------------------------------


def test_row_05_full_while_it_writes(middle, made, tmp_path):
    """On a disk that seems to have room and has not. The old output is kept; with more room a rerun goes on."""
    seems_free = (
        "import shutil; from types import SimpleNamespace; shutil.disk_usage = lambda _: SimpleNamespace(free=1e12)"
    )
    with small_disk(tmp_path / "disk") as disk:
        copy_tree(made / "old", disk / "out")
        args = ("convert", middle, disk / "out", "--overwrite", "--json")
        done = tpuconv(*args, patch=(f"{SMALL_UNITS}\n{seems_free}"), code=8)
        error = json.loads(done.stdout)["error"]
        assert error["message"].startswith(f"the disk of {disk}")
        assert error["message"].endswith("is full")
        assert "it resumes" in error["hint"]
        assert_left(disk / "out", contents(made / "old"))
        remount(disk, "size=60m")
        assert json.loads(tpuconv(*args, patch=(SMALL_UNITS)).stdout)["resumed_bytes"] > 0
        tpuconv("verify", disk / "out")
        assert os.listdir(disk) == ["out"]


def test_row_05_a_file_may_not_grow(middle, made, tmp_path):
    """By a limit on the size of files, which is no full disk."""
    out = tmp_path / "out"
    copy_tree(made / "old", out)
    args = ("convert", middle, out, "--overwrite")
    done = tpuconv(*args, limit=(resource.RLIMIT_FSIZE, 100_000), code=8)
    assert "would be larger than the file size that is allowed" in done.stderr
    assert "ulimit -f" in done.stderr
    assert_left(out, contents(made / "old"))
    tpuconv(*args)
    tpuconv("convert", middle, tmp_path / "undisturbed")
    assert contents(out) == contents(tmp_path / "undisturbed")


def test_row_06_the_plan_says_it(hf, tmp_path):
    """With what fits; where there is room, it says that."""
    need = r"needs [\d.]+ [kM]B of disk for OUT"
    assert re.search(rf"{need}; .* are free", tpuconv("convert", hf, "--dry-run", cwd=tmp_path).stdout)
    little = "import shutil, types; shutil.disk_usage = lambda _: types.SimpleNamespace(free=1000)"
    for words, less in (
        ((), ("in a bucket", "--layers 0-1")),
        (("--layers", "0-1"), ("in a bucket",)),
        (("--target", "huggingface"), ("in a bucket",)),
    ):
        said = " ".join(tpuconv("convert", hf, "out", "--dry-run", *words, cwd=tmp_path, patch=little).stdout.split())
        said, _, ways = said.partition(" It fits with")
        assert re.search(rf"too little disk: the conversion {need}, and .* has 1 kB free\.$", said), said
        assert [way for way in ("in a bucket", "--quantize int8_weight_only", "--layers 0-1") if way in ways] == [*less]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_too_many_open_files(hf, tmp_path):
    """Whatever the call that finds no descriptor any more: exit code 8, and nothing is left."""
    many = write_shards(hf, tmp_path / "many", 60)
    for limit in range(12, 90, 4):
        done = tpuconv("convert", many, tmp_path / "out", limit=(resource.RLIMIT_NOFILE, limit), code=None)
        assert done.returncode in (0, 8), (limit, done.stderr)
        if done.returncode:
            assert "ulimit -n" in done.stderr, (limit, done.stderr)
            assert not (tmp_path / "out").exists()
        count("forty faults", f"limit of open files, exit {done.returncode}")
    tpuconv("convert", many, tmp_path / "out")


def write_shards(source: Path, folder: Path, shards: int) -> Path:
    """The same source with a tensor in each file, as far as that goes."""
    tensors = read_tensors(source)
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    dealt: dict[str, dict[str, np.ndarray]] = {name: {} for name in names}
    for i, (name, x) in enumerate(tensors.items()):
        dealt[names[i % shards]][name] = x
    folder.mkdir()
    shutil.copyfile(source / "config.json", folder / "config.json")
    for name, inside in dealt.items():
        write_safetensors(folder / name, inside)
    weight_map = {tensor: name for name, inside in dealt.items() for tensor in inside}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_row_06_too_small_a_disk_is_foreseen(middle, hf, tmp_path):
    """The files beside the weights count: the second source has 100 kB of weights and 30 MB of tokenizer."""
    (hf / "tokenizer.json").write_text(json.dumps("x" * 30_000_000))
    with small_disk(tmp_path / "disk") as disk:
        for source in (middle, hf):
            err = tpuconv("convert", source, disk / "out", code=8).stderr
            assert re.search(rf"{disk} has 2\d(\.\d)? MB free, the conversion needs \d\d(\.\d)? MB", err), err
            assert not os.listdir(disk)


def test_row_06_foreseen_everywhere(made, tmp_path):
    nearly_full = (
        "import shutil; from types import SimpleNamespace; shutil.disk_usage = lambda _: SimpleNamespace(free=9e6)"
    )
    for args in (("convert", made / "hf"), ("export", made / "orbax")):
        free = nearly_full if args[0] == "convert" else nearly_full.replace("9e6", "9e3")
        err = tpuconv(*args, tmp_path / "out", patch=(free), code=8).stderr
        assert re.search(r"has 9 [Mk]B free, the (conversion|export) needs [\d.]+ [Mk]B", err), err
        assert not os.listdir(tmp_path)


@pytest.mark.parametrize("at", [1, 40, 120])
def test_row_07_a_disk_that_does_not_flush(at, made, tmp_path):
    out = tmp_path / "out"
    err = tpuconv("convert", made / "hf", out, patch=fail_at("fsync", "EIO", at), code=8).stderr
    assert re.search(rf"{tmp_path}\S* cannot be written: Input/output error", err)
    assert not out.exists()
    tpuconv("convert", made / "hf", out)
    assert contents(out) == contents(made / "orbax")


@needs_strace
@pytest.mark.parametrize("call", ["fsync:error=EIO:when=3", "write:error=EIO:when=2"])
def test_row_07_a_disk_that_fails(call, made, tmp_path):
    """By the system itself. Python writes to no file of its own with `write` before ours."""
    out = tmp_path / "out"
    command = strace(call)
    err = tpuconv("convert", made / "hf", out, command=command, code=8).stderr
    assert re.search(rf"{tmp_path}\S* cannot be written: Input/output error", err), err
    assert not out.exists()
    tpuconv("convert", made / "hf", out)
    assert contents(out) == contents(made / "orbax")


def test_row_08_little_memory(made, middle, tmp_path):
    """A limit on addresses ends no command by a signal: it works or is exit code 8."""
    limit = (resource.RLIMIT_AS, 1_500_000_000)
    done = tpuconv("convert", middle, tmp_path / "out", limit=limit, code=None)
    assert done.returncode in (0, 8)
    for args in (
        ("quantize", made / "orbax", tmp_path / "q", "--config", "int8_weight_only"),
        ("generate", made / "orbax", "--prompt", "x"),
    ):
        assert "limited to 1.5 GB" in tpuconv(*args, limit=limit, code=8).stderr
    for size in (150_000_000, 400_000_000, *range(600_000_000, 1_000_000_000, 50_000_000)):
        done = tpuconv("convert", middle, tmp_path / f"{size}", limit=(resource.RLIMIT_AS, size), code=None)
        assert done.returncode in (0, 8), done.stderr
        assert (done.returncode == 0) == (tmp_path / f"{size}").exists()
    err = tpuconv("convert", middle, tmp_path / "budget", "--max-memory", "100MB", code=8).stderr
    assert "--max-memory must be at least" in err
    assert not (tmp_path / "budget").exists()


# -- 9 to 12: two at once, and what changes between runs ---------------------------------------------------------------


def test_row_09_two_at_once(made, tmp_path):
    """The first waits while the second is refused, and then ends as if nothing was."""
    words, go_on = ("convert", made / "hf", tmp_path / "out"), tmp_path / "go-on"
    with started(*words, patch=halted_after("plan", until=go_on), stdout=subprocess.DEVNULL) as first:
        wait_for((tmp_path / ".out.tpuconv" / "plan.done").exists, first)
        began = time.monotonic()
        err = tpuconv(*words, code=9).stderr
        assert time.monotonic() - began < HANG
        assert f"{tmp_path / 'out'} is being written by another process" in err
        go_on.touch()
        assert first.wait() == 0
    tpuconv("verify", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(made / "orbax")
    assert sorted(os.listdir(tmp_path)) == ["go-on", "out"]


def test_row_10_the_lock_of_a_dead_process(made, tmp_path):
    out = tmp_path / "out"
    killed = "import os, signal; os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)"
    tpuconv("convert", made / "hf", out, patch=killed, code=-signal.SIGKILL)
    assert (tmp_path / ".out.tpuconv" / "tpuconv.work").exists()
    tpuconv("convert", made / "hf", out)
    assert contents(out) == contents(made / "orbax")
    assert os.listdir(tmp_path) == ["out"]


def unfinished(*args: object, **kwargs: object) -> None:
    """A command that fails in the middle of its work."""
    tpuconv(*args, patch=fail_at("fsync", "EIO", 40), code=8, **kwargs)  # type: ignore[arg-type]


def test_row_11_resumed_with_other_options(hf, tmp_path):
    out = tmp_path / "out"
    unfinished("convert", hf, out)
    for options, difference in (
        (("--dtype", "float32"), "options.dtype: began with 'auto', now 'float32'"),
        (("--layers", "0-1"), "options.layers: began without, now [0, 1]"),
        (("--quantize", "int8_weight_only"), "quantization: began without, now config 'int8_weight_only'"),
    ):
        err = tpuconv("convert", hf, out, *options, code=9).stderr
        assert "there is an unfinished conversion to out" in err
        assert f"\n  {difference}\n  ->" in err, err
    change_tensors(hf, lambda tensors: tensors[UP].fill(1))
    err = tpuconv("convert", hf, out, code=9).stderr
    assert "\n  source.files of weights: not the same as before\n" in err
    (hf / "config.json").write_text(json.dumps(qwen3_config(rope_theta=5.0)))
    assert "\n  source.config.json: not the same" in tpuconv("convert", hf, out, code=9).stderr
    tpuconv("convert", hf, out, "--overwrite")
    tpuconv("convert", hf, tmp_path / "fresh")
    assert contents(out / "params") == contents(tmp_path / "fresh" / "params")


@pytest.mark.slow
def test_row_11_resumed_with_another_commit(made, hf, tmp_path):
    (hf / "generation_config.json").write_text('{"top_k": 1}')  # of a commit that changes no weight
    with HubServer({REPO: {"main": made / "hf", "next": hf}}) as hub:
        env = environment(hub, tmp_path)
        unfinished("convert", REPO, tmp_path / "out", env=env)
        err = tpuconv("convert", REPO, tmp_path / "out", "--revision", "next", env=env, code=9).stderr
        assert f"source.commit: began with '{hub.commit(REPO)}', now '{hub.commit(REPO, 'next')}'" in err


CHANGES: dict[str, Callable[[Path], object]] = {
    "written to": lambda path: flip(path, 100_000),
    "replaced": lambda path: (shutil.copy(path, f"{path}.new"), flip(Path(f"{path}.new"), 100_000),
                              os.replace(f"{path}.new", path)),
    "deleted": lambda path: path.unlink(),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1000),
}  # fmt: skip


@pytest.mark.parametrize("shard", [FIRST, SECOND])
@pytest.mark.parametrize("change", list(CHANGES))
def test_row_12_a_file_of_the_source_changes_meanwhile(change, shard, tmp_path, monkeypatch):
    """After the first unit is done. Times are set back: what the system says of a change cannot be."""
    config = qwen3_config(vocab_size=4000, num_hidden_layers=1)
    folder, out = random_checkpoint(tmp_path / "hf", config, shards=2), tmp_path / "out"
    before = contents(folder)
    monkeypatch.setattr(sizes, "UNIT_BYTES", 20_000)
    real = Journal.record

    def record(self: Journal, part: str, facts: dict, files=()) -> None:
        real(self, part, facts, files)
        if part == "unit-00000":
            status = (folder / shard).stat()
            CHANGES[change](folder / shard)
            with contextlib.suppress(FileNotFoundError):
                os.utime(folder / shard, ns=(status.st_atime_ns, status.st_mtime_ns))

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "record", record)
        with pytest.raises(TpuconvError) as info:
            convert(folder, out)
    assert info.value.exit_code == 4
    assert shard in str(info.value)
    assert not out.exists()
    if change in ("deleted", "truncated"):
        with pytest.raises(TpuconvError) as info:
            convert(folder, out)
        assert info.value.exit_code == 4
        assert shard in str(info.value)
        (folder / shard).write_bytes(before[shard] or b"")
    convert(folder, out)
    convert(folder, tmp_path / "fresh")
    assert contents(out / "params") == contents(tmp_path / "fresh" / "params")
    count("matrix", "source changed meanwhile")


def convert(folder: Path, out: Path, options: Options = Options(), limits: Limits = Limits(1, 2**30), **kwargs) -> None:  # noqa: B008
    source = open_source(folder)
    family = find_family(source.config)
    plan = make_plan(source, family.name, family.table, family.config.from_hf(source.config), options)
    for _ in run(plan, out, limits, **kwargs):
        pass


# -- 13 to 18: damaged files, and the Hub ------------------------------------------------------------------------------


def environment(hub: HubServer, home: Path, **more: str) -> dict[str, str]:
    """Of a child whose Hub is on the loopback interface."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return own | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hf-home"), "HF_HUB_DISABLE_XET": "1"} | more


IMPATIENT = "from tpuconv.sources import download; download.BACKOFF_SECONDS = 0.01; download.RETRIES = 2"


def test_row_13_a_truncated_file(hf):
    size = (hf / SECOND).stat().st_size
    os.truncate(hf / SECOND, size - 100)
    refused(hf, 4, rf"{SECOND} is truncated: its header describes {size} bytes, the file has {size - 100}")
    os.truncate(hf / SECOND, 20)
    refused(hf, 4, rf"{SECOND} is truncated: 20 bytes do not hold its header")


def test_row_14_a_file_that_is_truncated_while_it_is_read(middle, tmp_path):
    """Never a signal, as of memory that is mapped."""
    copy_tree(middle, tmp_path / "hf")
    cut = f"""
import os
from tpuconv.sources.reader import SafetensorsReader
real = SafetensorsReader._bytes
def cut(*args, **kwargs):
    os.truncate({str(tmp_path / "hf" / FIRST)!r}, 100_000)
    return real(*args, **kwargs)
SafetensorsReader._bytes = cut"""
    err = tpuconv("convert", tmp_path / "hf", tmp_path / "out", patch=(cut), code=4).stderr
    assert re.search(rf"{FIRST} (became shorter while it was read|changed while it was converted)", err)
    assert not (tmp_path / "out").exists()


def test_row_15_a_flipped_bit(made, tmp_path):
    """Of the Hub it is found by the sha256; of a folder nobody promised one."""
    done = json.loads(tpuconv("convert", made / "hf", tmp_path / "local", "--json").stdout)
    assert done["source_verified"] is False
    assert "unverified" not in tpuconv("convert", made / "hf", tmp_path / "local").stdout
    assert read_manifest(tmp_path / "local").raw["source"]["verified"].startswith("unverified")
    with HubServer({REPO: made / "hf"}) as hub:
        env = environment(hub, tmp_path)
        assert (
            json.loads(tpuconv("convert", REPO, tmp_path / "hub", "--keep-source", "--json", env=env).stdout)[
                "source_verified"
            ]
            is True
        )
        source = read_manifest(tmp_path / "hub").raw["source"]
        assert source["verified"] == "by the hashes that the Hub promises"
        part = json.loads(tpuconv("convert", REPO, tmp_path / "part", "--layers", "0", "--json", env=env).stdout)
        assert part["source_verified"] is False  # no file was read as a whole
        (shard,) = tmp_path.glob(f"hf-home/hub/*/snapshots/*/{SECOND}")
        flip(shard.resolve(), -7)
        err = tpuconv("convert", REPO, tmp_path / "bad", env=env | {"HF_HUB_OFFLINE": "1"}, code=4).stderr
    assert f"{SECOND} is not the file that the Hub promises" in err
    assert f"sha256 promised  {sha256_of(made / 'hf' / SECOND)}" in err
    assert f"sha256 found     {sha256_of(shard)}" in err
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize(
    "what", ["values", pytest.param("values that are not finite", marks=pytest.mark.slow), "header", "size"]
)
def test_row_16_wrong_bytes_are_downloaded_once_again(what, hf, tmp_path):
    """What was made of them is made again."""
    if what == "values that are not finite":  # what all bits turned make of these
        change_tensors(hf, lambda tensors: tensors[UP].view(np.uint16).fill(0x0001))
    tpuconv("convert", hf, tmp_path / "undisturbed")
    with HubServer({REPO: hf}) as hub:
        env = environment(hub, tmp_path)
        if what == "size":
            tpuconv("convert", REPO, tmp_path / "first", "--keep-source", env=env)
            (shard,) = tmp_path.glob(f"hf-home/hub/*/snapshots/*/{SECOND}")
            os.truncate(shard.resolve(), 1000)
        else:
            hub.fail("*.safetensors", times=2, corrupt=True, corrupt_header=what == "header")
        done = tpuconv("convert", REPO, tmp_path / "out", "--keep-source", env=env)
        assert "is not the file that the Hub promises: it is downloaded again" in done.stderr
        tpuconv("verify", tmp_path / "out")
    assert contents(tmp_path / "out" / "params") == contents(tmp_path / "undisturbed" / "params")


def test_row_16_wrong_bytes_again_and_again(made, tmp_path):
    with HubServer({REPO: made / "hf"}) as hub:
        hub.fail(SECOND, corrupt=True)
        args = ("convert", REPO, tmp_path / "out", "--keep-source")
        err = tpuconv(*args, env=environment(hub, tmp_path), code=4).stderr
        assert err.count("is not the file that the Hub promises") == 2
        assert "sha256 promised" in err
        assert hub.sent(SECOND) == 2 * (made / "hf" / SECOND).stat().st_size
        assert not (tmp_path / "out").exists()
        hub.mend()
        (rm,) = re.findall(r"^ +(rm /.*)$", err, re.M)
        subprocess.run(rm, shell=True, check=True)
        tpuconv(*args, env=environment(hub, tmp_path))
        assert contents(tmp_path / "out" / "params") == contents(made / "orbax" / "params")


@pytest.mark.parametrize(
    "fault",
    [
        {"break_after": 20_000},
        pytest.param({"break_after": 20_000, "reset": True}, marks=pytest.mark.slow),
        {"status": 500},
        pytest.param({"status": 503}, marks=pytest.mark.slow),
        pytest.param({"status": 429}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_row_17_broken_answers(fault, made, tmp_path):
    """Once: it is tried again. For good: exit code 7, and the next call goes on."""
    with HubServer({REPO: made / "hf"}) as hub:
        env = environment(hub, tmp_path)
        hub.fail(FIRST, times=1, **fault)
        tpuconv("convert", REPO, tmp_path / "out", "--keep-source", env=env, patch=IMPATIENT)
        assert contents(tmp_path / "out" / "params") == contents(made / "orbax" / "params")
        if fault == {"status": 429}:  # the client waits for long: tests/test_hub.py
            return
        shutil.rmtree(tmp_path / "hf-home")
        hub.forget()
        hub.fail(SECOND, **(fault | ({"break_after": 0} if "break_after" in fault else {})))
        err = tpuconv("convert", REPO, tmp_path / "later", "--keep-source", env=env, patch=IMPATIENT, code=7).stderr
        assert "cannot be reached" in err or "500" in err, err
        assert not (tmp_path / "later").exists()
        hub.mend()
        tpuconv("convert", REPO, tmp_path / "later", "--keep-source", env=env, patch=IMPATIENT)
        assert hub.sent("*.safetensors") <= 1.5 * sum(p.stat().st_size for p in (made / "hf").glob("*.safetensors"))


def test_row_18_four_refusals_and_four_messages(made, tmp_path):
    with HubServer({REPO: made / "hf"}) as hub:
        said = []
        for status, header, more in (
            (401, "", {}),
            (401, "", {"HF_TOKEN": SECRET}),
            (403, "GatedRepo", {"HF_TOKEN": SECRET}),
            (None, "", {"HF_HUB_OFFLINE": "1"}),
        ):
            hub.mend()
            if status:
                hub.fail("*", status=status, code=header)
            said.append(
                tpuconv("convert", REPO, tmp_path / "out", env=environment(hub, tmp_path, **more), code=7).stderr
            )
            assert not (tmp_path / "out").exists()
            assert SECRET not in said[-1]
    assert len(set(said)) == 4, said
    for message, err in zip(("log in|HF_TOKEN", "token", "gated", "offline|HF_HUB_OFFLINE"), said, strict=True):
        assert re.search(message, err), err


# -- 19 to 30: sources that are not what they should be ----------------------------------------------------------------


def test_row_19_missing_files(made, hf, tmp_path):
    (hf / SECOND).unlink()
    tensors = [name for name, shard in json.loads((hf / INDEX).read_text())["weight_map"].items() if shard == SECOND]
    err = refused(hf, 4, "1 of 2 shards is missing", rf"\n  {SECOND}\n")
    shown = [line.split("  ")[1] for line in err.splitlines() if line.endswith(("tensor)", "tensors)"))]
    from tpuconv.names import expand

    assert {name for pattern in shown for name in expand(pattern)} >= set(tensors)
    assert any("layers.{" in pattern for pattern in shown)
    with HubServer({REPO: hf}) as hub:
        err = tpuconv("convert", REPO, tmp_path / "out", env=environment(hub, tmp_path), code=4).stderr
    assert "does not have" in err
    assert all(f"  {pattern}  (" in err for pattern in shown)


def test_row_20_an_index_that_is_not_that_of_the_files(hf):
    change_index(hf, lambda names: names.update({"model.more.weight": FIRST}))
    refused(hf, 4, f"model.more.weight is not in {FIRST}, where the index has it")
    change_index(hf, lambda names: (names.pop("model.more.weight"), names.pop(UP)))
    refused(hf, 4, f"{UP} is in .*the index does not name it")


def test_row_21_a_tensor_in_two_files(hf):
    """Even where both are equal."""
    tensors = read_tensors(hf)
    names = list(tensors)
    write_safetensors(hf / SECOND, {name: tensors[name] for name in [*names[1::2], names[0]]})
    refused(hf, 4, f"{re.escape(names[0])} is in {FIRST} and in {SECOND}")


OPENED = """
import sys
def hook(event, args):
    if event == "open" and {outside!r} in str(args[0]):
        print("OPENED", args, file=sys.stderr)
sys.addaudithook(hook)"""


@pytest.mark.parametrize(
    "name",
    ["index ../", "index absolute", FIRST, "config.json", INDEX, "tokenizer.json", "tokenizer.model", "README.md"],
)
def test_row_22_files_outside_of_the_source(name, hf, tmp_path):
    """They are refused and never opened."""
    outside = tmp_path / "outside"
    outside.mkdir()
    target = outside / Path(name.replace("index ../", FIRST).replace("index absolute", FIRST)).name
    if (hf / target.name).exists():
        shutil.copy(hf / target.name, target)
    else:
        target.write_text("secret")
    if name.startswith("index"):
        place = f"../outside/{FIRST}" if "../" in name else str(target)
        change_index(hf, lambda names: names.update(dict.fromkeys((n for n, s in names.items() if s == FIRST), place)))
    else:
        (hf / name).unlink(missing_ok=True)
        (hf / name).symlink_to(target)
    hook = OPENED.format(outside=str(outside))
    err = tpuconv("convert", hf, tmp_path / "out", patch=hook, code=4).stderr
    assert "OPENED" not in err
    assert re.search("is a link out of its folder|not safetensors files in its folder", err)
    assert not (tmp_path / "out").exists()
    count("matrix", "files outside of the source")


def test_row_22_links_within_the_source_and_the_cache_of_the_hub(made, hf, tmp_path):
    (hf / "kept").mkdir()
    for name in (FIRST, "tokenizer.json"):
        (hf / name).rename(hf / "kept" / name)
        (hf / name).symlink_to(Path("kept") / name)
    tpuconv("convert", hf, tmp_path / "out")
    assert contents(tmp_path / "out" / "params") == contents(made / "orbax" / "params")
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()
    with HubServer({REPO: made / "hf"}) as hub:
        tpuconv("convert", REPO, tmp_path / "hub", "--keep-source", env=environment(hub, tmp_path))
    (snapshot,) = tmp_path.glob("hf-home/hub/*/snapshots/*")
    tpuconv("convert", snapshot, tmp_path / "snapshot")
    (snapshot / "tokenizer.model").symlink_to("/etc/hostname")
    assert "is a link out of its folder" in tpuconv("convert", snapshot, tmp_path / "bad", code=4).stderr


def test_row_22_files_that_run_code_are_not_copied(hf, tmp_path):
    """And the modes of what is written are those that the user's mask leaves."""
    for name in ("tokenizer.py", "tokenizer.pkl", "tokenization_x.py", "tekken.json", "tokenizer.model"):
        (hf / name).write_text("{}")
    tpuconv("convert", hf, tmp_path / "out", umask=0o027)
    copied = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"tekken.json", "tokenizer.model"} <= copied
    assert not [name for name in copied if name.endswith((".py", ".pkl"))]
    for path in (tmp_path / "out", *(tmp_path / "out").rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path


def header_of(hf: Path) -> tuple[dict, bytes]:
    data = (hf / FIRST).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def test_row_23_offsets_that_lie(hf):
    header, data = header_of(hf)
    first, second = list(header)[:2]
    start, end = header[second]["data_offsets"]
    for offsets, message in (
        ([start - 2, end - 2], f"{second} overlaps the one before"),
        ([start + 2, end + 2], f"{second} follows a gap"),
        ([start, end + 2], rf"{second}: offsets \[{start}, {end + 2}\] do not hold BF16"),
        ([end, start], f"{second}: offsets"),
        ([start + (1 << 40), end + (1 << 40)], f"{second} follows a gap"),
    ):
        changed = {**header, second: {**header[second], "data_offsets": offsets}}
        write_header(hf / FIRST, changed, data)
        refused(hf, 4, message)
    assert first != second


@pytest.mark.parametrize(
    "bomb", ["100 MB", "2^63", *(pytest.param(x, marks=pytest.mark.slow) for x in ("nested", "crowd"))]
)
def test_row_24_header_bombs(bomb, hf):
    """Little more work than a command takes that does nothing, and 300 MB of memory."""
    if bomb == "100 MB":
        write_header(hf / FIRST, b"{" + b" " * (100 << 20) + b"}")
    elif bomb == "2^63":
        write_header(hf / FIRST, {}, b"x" * 1000, length=1 << 63)
    elif bomb == "nested":
        write_header(hf / FIRST, b'{"a":' + b"[" * (10 << 20))
    else:
        write_header(hf / FIRST, b"{" + b",".join(b'"%d":1' % i for i in range(2_000_000)) + b"}")
    out = hf.parent / "out"
    seconds, memory = used(tpuconv("convert", hf, out, patch=MEASURED, fresh=True, code=4))
    assert seconds < 5 * idle_seconds()
    assert memory < 300e6
    assert not out.exists()


@pytest.mark.parametrize("name", ["../../etc/x", "\x1b[2J", "a\u202eb", "x" * 10_000, "", "a\0b"])
def test_row_25_names_that_are_none(name, hf):
    header, data = header_of(hf)
    header[name] = header.pop(next(iter(header)))
    write_header(hf / FIRST, header, data)
    err = refused(hf, 4, "unsafe tensor name")
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", err)
    assert len(err) < 2000


def test_row_25_a_name_twice(hf):
    header, data = header_of(hf)
    name = next(iter(header))
    text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"
    write_header(hf / FIRST, text.encode(), data)
    refused(hf, 4, f"'{re.escape(name)}' appears twice")


@pytest.mark.parametrize("kind", ["a Git LFS pointer", "a web page"])
def test_row_26_what_stands_in_the_place_of_a_file(kind, hf):
    for name in (FIRST, INDEX, "tokenizer.json", "generation_config.json", "tokenizer_config.json", "tokenizer.model",
                 "config.json"):  # fmt: skip
        kept = (hf / name).read_bytes() if (hf / name).exists() else None
        (hf / name).write_text(LFS if "LFS" in kind else PAGE)
        err = refused(hf, 4, rf"{name} is {kind}, not the file itself")
        assert ("git lfs pull" in err) == ("LFS" in kind)
        (hf / name).unlink() if kept is None else (hf / name).write_bytes(kept)
    (hf / "chat_template.jinja").write_text("<|begin|>{{ x }}")  # a text of its own
    (hf / "vocab.txt").write_text("<unk>\n<html_tag>")
    tpuconv("convert", hf, hf.parent / "out")


def listen(path: Path) -> None:
    """Makes a socket, whose path must be short."""
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):
        server.bind(path.name)


@pytest.mark.parametrize(
    "kind",
    ["FIFO", "device", *(pytest.param(x, marks=pytest.mark.slow) for x in ("folder", "socket", "link to nowhere"))],
)
def test_row_27_what_is_no_file(kind, hf):
    for name in (FIRST, INDEX, "config.json", "tokenizer.json"):
        (hf / name).rename(hf / "kept")
        if kind == "FIFO":
            os.mkfifo(hf / name)
        elif kind == "folder":
            (hf / name).mkdir()
        elif kind == "socket":
            listen(hf / name)
        else:
            (hf / name).symlink_to("/dev/zero" if kind == "device" else "nowhere")
        done = tpuconv("convert", hf, hf.parent / "out", patch=MEASURED, fresh=True, code=4)
        assert used(done)[0] < 5 * idle_seconds()
        assert re.search(rf"{name} (is not a regular file|cannot be read|is missing)", done.stderr), done.stderr
        (hf / name).rmdir() if kind == "folder" else (hf / name).unlink()
        (hf / "kept").rename(hf / name)


def fp8(folder: Path, spoil: Callable[[dict[str, np.ndarray]], object] = lambda tensors: None) -> Path:
    """The source with a matrix in FP8, in blocks of 16 by 16, and something wrong with it."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        for name in [n for n in tensors if n.endswith("_proj.weight")]:
            rows, columns = tensors[name].shape
            tensors[name] = (tensors[name].astype("f4") % 8).astype(ml_dtypes.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = np.full((-(-rows // 16), -(-columns // 16)), 0.5, "f4")
        spoil(tensors)

    described = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps(qwen3_config(quantization_config=described)))
    change_tensors(folder, change)
    return folder


def put(name: str, at: tuple[int, ...], value: float) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda tensors: tensors[name].__setitem__(at, value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_row_28_values_that_are_not_finite(value, hf, tmp_path):
    change_tensors(hf, put(UP, (7, 9), value))
    refused(hf, 4, rf"{UP}\[7, 9\], which is {value} in bfloat16", "give --allow-nonfinite")
    tpuconv("convert", hf, tmp_path / "out", "--allow-nonfinite")
    assert read_manifest(tmp_path / "out").raw["options"]["allow_nonfinite"] is True
    tpuconv("verify", tmp_path / "out")
    tpuconv("export", tmp_path / "out", tmp_path / "back")
    assert read_tensors(tmp_path / "back")[UP].tobytes() == read_tensors(hf)[UP].tobytes()


@pytest.mark.parametrize("encoding", ["dequantize", "keep"])
def test_row_28_scales_that_are_none(encoding, made, tmp_path):
    options = ("--encoding", encoding)
    for value in (0.0, -1.0, np.nan, np.inf):
        folder = tmp_path / f"hf{value}"
        copy_tree(made / "hf", folder)
        fp8(folder, put(f"{UP}_scale_inv", (3, 1), value))
        message = rf"{UP}_scale_inv\[3, 1\](, which)? is {value:g}"
        refused(folder, 4, message, options=options)
    tpuconv("convert", folder, tmp_path / "out", *options, "--allow-nonfinite")
    assert read_manifest(tmp_path / "out").raw["options"]["allow_nonfinite"] is True
    tpuconv("verify", tmp_path / "out")


@pytest.mark.parametrize("encoding", ["dequantize", "keep"])
def test_row_28_codes_that_are_not_finite(encoding, hf):
    fp8(hf, put(UP, (7, 9), np.nan))
    refused(hf, 4, rf"{UP}\[7, 9\], which is nan", options=("--encoding", encoding))


def test_row_29_another_shape_or_dtype_than_the_config_has(made, tmp_path):
    for change, message in (
        (
            lambda t: t.__setitem__(UP, t[UP][:-1]),
            rf"{UP}  BF16 \[79, 32\] \(1 tensor\) should be \[80, 32\] by config",
        ),
        (lambda t: t.__setitem__(UP, t[UP].view(np.int16)), rf"{UP}  I16 .*is not a plain float"),
        (lambda t: t.__setitem__(UP, t[UP].astype(np.complex128).view("f8")), rf"{UP}  F64 .*should be"),
    ):
        copy_tree(made / "hf", tmp_path / "hf")
        change_tensors(tmp_path / "hf", change)
        refused(tmp_path / "hf", 5, message)
    copy_tree(made / "hf", tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(qwen3_config(intermediate_size=64)))
    refused(tmp_path / "hf", 5, r"should be \[64, 32\] by config.json")
    assert not (tmp_path / "refused" / ".out.tpuconv").exists()


def test_row_29_float64(hf, tmp_path):
    """Of one tensor among others, and of all, in several chunks that are transposed."""
    config = qwen3_config(vocab_size=3000, hidden_size=256, intermediate_size=1024, num_hidden_layers=2)
    for name, folder in (
        ("all", random_checkpoint(tmp_path / "all", config, "float64")),
        ("one", random_checkpoint(tmp_path / "one", config)),
    ):
        if name == "one":
            change_tensors(folder, lambda tensors: tensors.__setitem__(UP, tensors[UP].astype("f8")))
        tpuconv("convert", folder, tmp_path / f"{name}-orbax")
        tpuconv("verify", tmp_path / f"{name}-orbax")
        tpuconv("export", tmp_path / f"{name}-orbax", tmp_path / f"{name}-back")
        want, have = read_tensors(folder), read_tensors(tmp_path / f"{name}-back")
        assert have.keys() == want.keys()
        assert all(have[n].tobytes() == x.tobytes() and have[n].dtype == x.dtype for n, x in want.items())


def test_row_30_values_and_scales_that_do_not_belong_together(made, tmp_path):
    for number, (change, message) in enumerate(
        (
            (lambda t: t.pop(f"{UP}_scale_inv"), f"{UP} .* has no weight_scale_inv"),
            (
                lambda t: t.__setitem__("model.x_scale_inv", t[f"{UP}_scale_inv"]),
                "has no values that it belongs to|no row",
            ),
            (lambda t: t.__setitem__(f"{UP}_scale_inv", t[f"{UP}_scale_inv"][:-1]), "by the block size"),
        )
    ):
        copy_tree(made / "hf", tmp_path / f"hf{number}")
        refused(fp8(tmp_path / f"hf{number}", change), 5, message)
    folder = fp8(tmp_path / "hf0")
    (folder / "config.json").write_text(json.dumps(qwen3_config()))  # nothing says that these are codes
    refused(folder, 5, "is not a plain float, and config.json does not say how it is encoded")


# -- 31 to 34: rules ---------------------------------------------------------------------------------------------------

RULES = "qwix:\n  rules:\n    - {{module_path: '.*', weight_qtype: int8{more}}}\n"


def rules_refused(made: Path, tmp_path: Path, text: str, *messages: str) -> None:
    (tmp_path / "rules.yaml").write_text(text)
    args = ("quantize", made / "orbax", tmp_path / "q", "--config", tmp_path / "rules.yaml")
    err = tpuconv(*args, code=6).stderr
    for message in messages:
        assert re.search(message, err), err
    assert os.listdir(tmp_path) == ["rules.yaml"]


def test_row_31_yaml_that_runs_code(made, tmp_path):
    canary = tmp_path / "canary"
    code = f"!!python/object/apply:os.system ['touch {canary}']"
    rules_refused(made, tmp_path, RULES.format(more=f", tile_size: {code}"), "tags are not allowed")
    assert not canary.exists()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: &a [x]\nqwix: {rules: [*a, *a]}\n", "line 1, column 4"),
        ("qwix: " + "[" * 60 + "]" * 60, "line 1, column"),
        ("qwix: {rules: []}\nqwix: {rules: []}\n", "line 2, column 1"),
        (RULES.format(more=", module_path: x"), "line 3, column"),
        (RULES.format(more=", act_static_scale: no"), "line 3, column"),
        (RULES.format(more=", tile_size: 1e-3"), "line 3, column"),
    ],
    ids=["aliases", "nested", "key twice", "key twice in a rule", "no", "1e-3"],
)
def test_row_32_yaml_that_is_ambiguous(text, place, made, tmp_path):
    rules_refused(made, tmp_path, text, place)


def test_row_33_a_pattern_that_is_matched_for_ever(made, tmp_path):
    (tmp_path / "rules.yaml").write_text("qwix: {rules: [{module_path: '(((.+)+)+)+!', weight_qtype: int8}]}")
    args = ("quantize", made / "orbax", tmp_path / "q", "--config", tmp_path / "rules.yaml")
    done = tpuconv(*args, patch=MEASURED, fresh=True, code=6)
    assert "takes too long" in done.stderr
    assert used(done)[0] < 5 * idle_seconds()  # and its child, which may take one second of a processor
    assert not (tmp_path / "q").exists()


@pytest.mark.slow
def test_row_34_rules_that_cannot_be_meant(made, tmp_path):
    rules_refused(made, tmp_path, RULES.format(more="").replace("'.*'", "blocks/.*"), "matches no module")
    shadowed = RULES.format(more="") + "    - {module_path: lm_head, weight_qtype: int4}\n"
    rules_refused(made, tmp_path, shadowed, "line 4", "already matches these modules")


# -- 35 and 40: configs of others --------------------------------------------------------------------------------------


def test_row_35_code_of_a_checkpoint_is_never_imported(hf, tmp_path):
    canary = tmp_path / "canary"
    for name in ("modeling_x.py", "configuration_x.py", "tokenization_x.py", "json.py"):
        (hf / name).write_text(f"open({str(canary)!r}, 'w')")
    auto_map = {"AutoModelForCausalLM": "modeling_x.X", "AutoConfig": "configuration_x.X"}
    (hf / "config.json").write_text(json.dumps(qwen3_config(auto_map=auto_map)))
    for args in (("inspect", hf), ("convert", hf, "--dry-run"), ("convert", hf, tmp_path / "out"),
                 ("inspect", tmp_path / "out"), ("verify", tmp_path / "out")):  # fmt: skip
        tpuconv(*args)
    tpuconv("convert", ".", tmp_path / "there", command=["/usr/bin/env", "--", *safe_command()], cwd=hf)
    assert not canary.exists()


def safe_command() -> list[str]:
    """As the installed script is started: `python -m` itself would look in the current folder first."""
    return [COMMAND[0], "-P", *COMMAND[1:]]


@pytest.mark.slow
def test_row_35_nor_by_the_commands_that_compute(hf, tmp_path):
    canary = tmp_path / "canary"
    for name in ("modeling_x.py", "configuration_x.py"):
        (hf / name).write_text(f"open({str(canary)!r}, 'w')")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (hf / name).unlink()
    auto_map = {"AutoModelForCausalLM": "modeling_x.X", "AutoConfig": "configuration_x.X"}
    (hf / "config.json").write_text(json.dumps(qwen3_config(auto_map=auto_map)))
    tpuconv("convert", hf, tmp_path / "out")
    tpuconv("verify", tmp_path / "out", "--compare-hf", code=None)
    tpuconv("quantize", tmp_path / "out", tmp_path / "q", "--config", "int8_weight_only")
    tpuconv("generate", tmp_path / "out", "--prompt", "x", code=None)
    assert not canary.exists()


# -- 36 to 38: outputs -------------------------------------------------------------------------------------------------


def files_of_every_kind(out: Path) -> dict[str, str]:
    """A file of each kind, and what `verify` calls it."""
    array = "layers.1.mlp.up.kernel"
    (shard,) = (out / "params" / array).glob("c*")
    beside = {path.name: path.name for path in out.iterdir() if path.is_file() and path.name != MANIFEST}
    orbax = {f"params/{path.name}": f"params/{path.name}" for path in (out / "params").iterdir() if path.is_file()}
    own = {f"params/{array}/{shard.name}": array, f"params/{array}/zarr.json": f"params/{array}/zarr.json"}
    return {**beside, **orbax, **own, MANIFEST: MANIFEST}


def test_row_36_a_flipped_bit_of_an_output(orbax):
    rng, kinds = random.Random(0), files_of_every_kind(orbax)
    assert {"config.json", "tokenizer.json", "README.md", "params/_METADATA", MANIFEST} <= set(kinds)
    for name, called in kinds.items():
        path = orbax / name
        good = path.read_bytes()
        if not good:
            continue
        at = rng.randrange(len(good))
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << rng.randrange(8))]) + good[at + 1 :])
        done = tpuconv("verify", orbax, code=None)
        assert done.returncode == 10, (name, at, done.stderr)
        assert called in done.stderr
        path.write_bytes(good)
        count("matrix", "flipped bits of outputs")
    tpuconv("verify", orbax)


def test_row_37_a_file_of_an_output_is_gone_or_cut(orbax):
    for name, called in files_of_every_kind(orbax).items():
        path = orbax / name
        good = path.read_bytes()
        path.unlink()
        done = tpuconv("verify", orbax, code=2 if name == MANIFEST else 10)
        assert called in done.stderr
        if good:
            path.write_bytes(good[: len(good) // 2])
            assert called in tpuconv("verify", orbax, code=10).stderr
        path.write_bytes(good)
        count("matrix", "deleted and cut files of outputs", 2)
    tpuconv("verify", orbax)


def test_row_38_an_output_that_may_not_be_written(made, tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        copy_tree(made / "old", disk / "out")
        before = contents(disk)
        remount(disk, "ro")
        for out in (disk / "new", disk / "out", disk / "deeper" / "new"):
            for args in (("convert", made / "hf"), ("export", made / "orbax")):
                err = tpuconv(*args, out, "--overwrite", code=8).stderr
                assert re.search(rf"{disk}\S* cannot be written: Read-only file system", err), err
                assert "choose another OUT" in err
        assert contents(disk) == before


def test_row_38_a_folder_that_others_own(made, tmp_path):
    """The same by the answer that the system gives to those who are not root."""
    for args in (("convert", made / "hf"), ("export", made / "orbax")):
        err = tpuconv(*args, tmp_path / "out", patch=fail_at("mkdir", "EACCES", 1), code=8).stderr
        assert f"{tmp_path / '.out.tpuconv'} cannot be written: Permission denied" in err
        assert "you may not write there: choose another OUT" in err
    assert not os.listdir(tmp_path)


# -- 39 and 40: what is written of secrets and of foreign text ---------------------------------------------------------


def test_row_39_the_token_is_nowhere(made, tmp_path):
    with HubServer({REPO: made / "hf"}) as hub:
        env = environment(hub, tmp_path, HF_TOKEN=SECRET)
        said = []
        unfinished("convert", REPO, tmp_path / "out", env=env)
        work = contents(tmp_path / ".out.tpuconv")
        for args in (("convert", REPO, tmp_path / "out"), ("convert", REPO, tmp_path / "out", "--json"),
                     ("convert", REPO, "--dry-run"), ("inspect", REPO)):  # fmt: skip
            done = tpuconv(*args, env=env)
            said += [done.stdout, done.stderr]
        hub.fail("*", status=403)
        failed = subprocess.run(
            [*COMMAND, "convert", REPO, str(tmp_path / "x"), "-v"], env=env, capture_output=True, text=True, check=False
        )
        assert failed.returncode == 7
        assert f"Bearer {SECRET}" in {request.token for request in hub.requests}
    written = {**work, **contents(tmp_path)}
    assert "out/README.md" in written
    assert SECRET not in "".join([*said, failed.stdout, failed.stderr])
    assert not [name for name, data in written.items() if SECRET.encode() in (data or b"")]


def test_row_40_templates_and_markup_are_text(hf, tmp_path):
    canary = tmp_path / "canary"
    hostile = (
        "{{ cycler.__init__.__globals__.os.system('touch " + str(canary) + "') }}{% raw %}<script>x</script>[/b]\x1b[2J"
    )
    (hf / "chat_template.jinja").write_text(hostile)
    config = qwen3_config(finetuning_task=hostile, _name_or_path=hostile, transformers_version=hostile)
    (hf / "config.json").write_text(json.dumps(config))
    folder = hf.rename(tmp_path / "<script>x{{7*7}}`*")
    said = tpuconv("convert", folder, tmp_path / "out").stdout + tpuconv("inspect", folder).stdout
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [hostile], "model_type": hostile}))
    said += tpuconv("convert", folder, tmp_path / "bad", code=5).stderr
    assert "\x1b" not in said
    card = (tmp_path / "out" / "README.md").read_text()
    assert "<script>" not in re.sub("(`+).*?\\1", "", card)
    assert "49" not in card
    assert not canary.exists()


@pytest.mark.slow
def test_row_40_in_the_report_of_a_quantization(hf, tmp_path):
    folder = hf.rename(tmp_path / "<script>x{{7*7}}")
    (tmp_path / "<img src=x>.yaml").write_text(RULES.format(more=""))
    tpuconv("convert", folder, tmp_path / "q", "--quantize", tmp_path / "<img src=x>.yaml")
    page = (tmp_path / "q" / "quantization.html").read_text()
    assert "<script>x" not in page
    assert "<img src=x>" not in page


# -- properties --------------------------------------------------------------------------------------------------------


def test_property_what_is_converted_and_exported_is_what_it_was(made, hf, tmp_path):
    """Of every family and every encoding: tests/test_keep.py. Here by the commands, plain and in FP8."""
    fp8(hf)
    for folder, options in ((made / "hf", ()), (made / "hf", ("--scan-layers",)), (hf, ("--encoding", "keep"))):
        tpuconv("convert", folder, tmp_path / "out", "--overwrite", *options)
        tpuconv("export", tmp_path / "out", tmp_path / "back", "--overwrite")
        want, have = read_tensors(folder), read_tensors(tmp_path / "back")
        assert have.keys() == want.keys()
        assert all(have[n].tobytes() == x.tobytes() and have[n].dtype == x.dtype for n, x in want.items())


def test_property_the_output_depends_on_the_tensors_alone(tmp_path, monkeypatch):
    """Not on the number of files, of jobs, on the memory or on where a run was stopped."""
    monkeypatch.setattr(sizes, "CHUNK_BYTES", 2000)
    monkeypatch.setattr(sizes, "SLAB_BYTES", 8000)
    monkeypatch.setattr(sizes, "UNIT_BYTES", 16_000)
    wanted: dict[str, bytes | None] = {}
    for number, (shards, limits) in enumerate(
        ((1, Limits(1, 2**30)), (2, Limits(1, 2**30)), (5, Limits(4, 2**30)), (2, Limits(4, 250 << 20)))
    ):
        folder = random_checkpoint(tmp_path / f"hf{number}", qwen3_config(), shards=shards)
        for stop in (None, 1, 3):
            out = tmp_path / f"out{number}-{stop}"
            if stop is not None:
                stop_after(folder, out, limits, stop)
            convert(folder, out, limits=limits)
            have = contents(out / "params") | {"arrays": json.dumps(read_manifest(out).raw["arrays"]).encode()}
            wanted = wanted or have
            assert have == wanted, (shards, limits, stop)
            count("matrix", "ways to the same output")


def stop_after(folder: Path, out: Path, limits: Limits, units: int) -> None:
    """A conversion that ends with an error once some units are done."""
    real, done = Journal.record, [0]

    def record(self: Journal, part: str, facts: dict, files=()) -> None:
        real(self, part, facts, files)
        done[0] += part.startswith("u")
        if done[0] >= units:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "record", record)
        with pytest.raises(KeyboardInterrupt):
            convert(folder, out, limits=limits)
    assert not out.exists()


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Bytes with a few flipped, removed, repeated or replaced."""
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(data) + 1), rng.choice((1, 2, 8, 40))
        own = bytes(rng.randrange(256) for _ in range(length))
        piece = rng.choice(
            (b"", own, data[at : at + length] * 2, b"null", b"-1", b'"', b"{}", b"1e999", b"[]", b"9" * 30)
        )
        data = data[:at] + piece + data[at + rng.choice((0, 1, length)) :]
    return data


def mutations(made: Path, tmp_path: Path, trials: int, seed: int) -> None:
    """Whatever is changed in a file of a source or of an output, nothing but an error of ours is raised."""
    from tpuconv.verify.checksums import check_checkpoint

    rng, codes = random.Random(seed), set()
    folder, orbax = tmp_path / "hf", tmp_path / "orbax"
    copy_tree(made / "hf", folder)
    copy_tree(made / "orbax", orbax)
    ours = (MANIFEST, "config.json", "params/_METADATA")
    for number in range(trials):
        of_source = number % 3 != 0
        base, name = (folder, rng.choice((FIRST, INDEX, "config.json", "tokenizer.json"))) if of_source else (
            orbax, rng.choice(ours))  # fmt: skip
        good = (base / name).read_bytes()
        head = 8 + int.from_bytes(good[:8], "little") if name == FIRST else len(good)
        (base / name).write_bytes(mutate(good[:head], rng) + good[head:])
        try:
            if of_source:
                convert(folder, tmp_path / "out", overwrite=True)
            else:
                list(check_checkpoint(read_manifest(orbax)))
        except TpuconvError as e:
            codes.add(e.exit_code)
        (base / name).write_bytes(good)
        count("matrix", "mutated files")
    assert codes <= LISTED


def test_property_a_mutated_file_is_an_error_that_is_meant(made, tmp_path):
    mutations(made, tmp_path, 40, 0)


@pytest.mark.slow
def test_property_mutated_files_at_length(made, tmp_path):
    mutations(made, tmp_path, 3000, 1)


# -- verify --compare-hf: is the source still what was converted? ------------------------------------------------------


def test_a_source_that_changed_since_is_told(hf, tmp_path):
    """By stamps where a file is the same, by hashes where it is another."""
    from tpuconv.sources import shard
    from tpuconv.sources.origins import known_stamps

    convert(hf, tmp_path / "out")
    made = read_manifest(tmp_path / "out").sealed
    known = made.raw["source"]["shards"]

    def changed_shards(folder: Path, known: Mapping[str, Any]) -> list[str] | None:
        return shard.changed_shards(folder, known, known_stamps(made, folder))

    assert changed_shards(hf, known) == []
    copy_tree(hf, tmp_path / "copy")
    assert changed_shards(tmp_path / "copy", known) == []
    without = {name: facts | {"xxh3_128": None} for name, facts in known.items()}
    assert changed_shards(hf, without) == []
    assert changed_shards(tmp_path / "copy", without) is None
    flip(hf / SECOND, -3)
    assert changed_shards(hf, known) == [SECOND]
    assert changed_shards(hf, without) is None
    os.truncate(hf / FIRST, 1000)
    assert changed_shards(hf, without) == [FIRST]
    (hf / SECOND).unlink()
    assert changed_shards(hf, known) == [FIRST, SECOND]
    change_index(tmp_path / "copy", lambda names: names.update({"more": "more.safetensors"}))
    assert changed_shards(tmp_path / "copy", known) == ["more.safetensors"]
    old = {
        name: {"bytes": facts["bytes"], "sha256": sha256_of(tmp_path / "copy" / name)} for name, facts in known.items()
    }  # format 1
    copy_tree(tmp_path / "copy", hf)
    change_index(hf, lambda names: names.pop("more"))
    assert changed_shards(hf, old) == []


@pytest.mark.slow
def test_the_comparison_says_so(hf, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (hf / name).unlink()
    tpuconv("convert", hf, tmp_path / "out")
    args = ("verify", tmp_path / "out", "--compare-hf", "--dtype", "float32")
    assert json.loads(tpuconv(*args, "--json").stdout)["source_changed"] is False
    change_tensors(hf, lambda tensors: tensors[UP].fill(1))
    done = tpuconv(*args, code=3)
    assert re.search("source: .*, changed since the conversion: .*safetensors", done.stdout)
    assert "the source changed since the conversion: convert it again" in done.stderr


# -- what no row has ---------------------------------------------------------------------------------------------------


def test_an_output_that_is_a_link_stays_one(made, tmp_path):
    """What it points to is written or replaced; a link to itself is refused."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(Path("elsewhere") / "real")
    tpuconv("convert", made / "hf", tmp_path / "out", "--dtype", "float32")
    tpuconv("convert", made / "hf", tmp_path / "out", "--overwrite")
    assert (tmp_path / "out").is_symlink()
    assert contents(tmp_path / "elsewhere" / "real") == contents(made / "orbax")
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "out"]
    assert os.listdir(tmp_path / "elsewhere") == ["real"]
    (tmp_path / "loop").symlink_to("loop")
    assert "is a link that leads to itself" in tpuconv("convert", made / "hf", tmp_path / "loop", code=2).stderr


@pytest.mark.parametrize("command", ["convert", "export"])
def test_killed_after_its_output_appeared(command, made, tmp_path):
    """The rerun ends the work, and leaves nothing beside the output."""
    kill = f"""
import os, signal
real = os.rename
def rename(path, target):
    real(path, target)
    if str(target) == {str(tmp_path / "out")!r}:
        os.kill(os.getpid(), signal.SIGKILL)
os.rename = rename"""
    args = (command, made / ("hf" if command == "convert" else "orbax"), tmp_path / "out")
    tpuconv(*args, patch=kill, code=-signal.SIGKILL)
    assert (tmp_path / ".out.tpuconv").exists()
    assert "from an earlier run" in tpuconv(*args).stdout
    assert os.listdir(tmp_path) == ["out"]
    tpuconv("verify", tmp_path / "out")


@pytest.mark.parametrize("error", ["EACCES", "EIO"])
@pytest.mark.parametrize("call", ["open", "read"])
def test_a_file_of_the_source_that_the_system_does_not_give(call, error, hf, tmp_path):
    for name in (FIRST, INDEX, "config.json", "tokenizer.json", "README.md"):
        refuse = f"""
import builtins, errno, os
def refuse(path):
    if str(path).endswith({f"hf/{name}"!r}):
        raise OSError(errno.{error}, os.strerror(errno.{error}), str(path))
real, fstat = os.open, os.fstat
def open_(path, *args, **kwargs):
    {"refuse(path)" if call == "open" else "pass"}
    return real(path, *args, **kwargs)
def fstat_(fd):
    refuse(os.readlink(f"/proc/self/fd/{{fd}}"))
    return fstat(fd)
os.open = open_
if {call == "read"}:
    os.fstat = fstat_"""
        done = tpuconv("convert", hf, tmp_path / "out", patch=refuse, code=4)
        assert re.search(rf"{name} cannot be read: (Permission denied|Input/output error)", done.stderr), done.stderr
        assert not (tmp_path / "out").exists()
        count("matrix", "files that cannot be read")


def test_an_output_that_lost_files_is_not_taken_for_complete(made, orbax):
    (shard,) = (orbax / "params" / "lm_head.kernel").glob("c*")
    shard.unlink()
    err = tpuconv("convert", made / "hf", orbax, code=10).stderr
    assert f"params/lm_head.kernel/{shard.name} is missing" in err
    assert "give --overwrite to make it again" in err
    tpuconv("convert", made / "hf", orbax, "--overwrite")
    assert contents(orbax) == contents(made / "orbax")
