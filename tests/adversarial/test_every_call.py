"""The system itself says which calls of the real commands change the disk, by strace: they are those that `simulated`
counts, so that `test_publishing` stops at every one. And strace makes calls fail, of reading too."""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from helpers.attacks import made
from helpers.attacks.counts import count
from helpers.attacks.simulated import contents, simulated
from tpuconv.cli import tpuconv as command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed"),
]

CALLS = (
    *("open", "openat", "creat", "write", "pwrite64", "writev", "pwritev", "rename", "renameat", "renameat2", "unlink"),
    *("unlinkat", "mkdir", "mkdirat", "rmdir", "fsync", "fdatasync", "ftruncate", "truncate", "link", "linkat"),
    *("symlink", "symlinkat", "chmod", "fchmod", "fchmodat", "chown", "fchown", "utimensat", "fallocate", "mknodat"),
    *("setxattr", "copy_file_range", "sendfile"),
)
NAMES = {"openat": "open", "renameat2": "exchange"}
COMMANDS = {
    "convert": ["convert", "source"],
    "quantize": ["quantize", "ckpt", "--config", "int8_weight_only"],
    "convert --quantize": ["convert", "source", "--quantize", "int8_weight_only"],
    "export": ["export", "ckpt"],
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("inputs")
    made.source(base / "source")
    made.convert(base / "source", base / "ckpt")
    made.convert(made.source(base / "other", 1, rms_norm_eps=1e-5), base / "other-ckpt")
    made.export(base / "other-ckpt", base / "other-export")
    return base


def arguments(name: str, inputs: Path, out: Path) -> list[str]:
    verb, source, *options = COMMANDS[name]
    jobs = [] if verb == "export" else ["--jobs", "1"]
    return [verb, str(inputs / source), str(out), *options, *jobs]


def prepare(name: str, inputs: Path, base: Path, overwrite: bool) -> Path:
    """A folder for one run, with an old output in it or none."""
    shutil.rmtree(base / "work", ignore_errors=True)
    (base / "work").mkdir()
    if overwrite:
        shutil.copytree(inputs / ("other-export" if name == "export" else "other-ckpt"), base / "work/out")
    return base / "work/out"


def strace(options: list[str], own: list[str]) -> "subprocess.CompletedProcess[str]":
    tpuconv = [sys.executable, "-B", "-m", "tpuconv", *own]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        ["strace", "-f", "-y", "-s", "0", *options, *tpuconv], env=env, capture_output=True, text=True, check=False
    )


LINE = re.compile(r"(?:\d+ +)?(\w+)\((.*)\) += (\S+)")


def seen(log: str, parent: Path) -> Counter[tuple[str, str]]:
    """The calls in a log of strace that change what is in a folder, or flush it, and the path of each."""
    out: Counter[tuple[str, str]] = Counter()
    # A call of one thread during which another one made some stands in two lines.
    begun: dict[str, str] = {}
    for line in log.splitlines():
        pid, _, rest = line.partition(" ")
        if rest.endswith("<unfinished ...>"):
            begun[pid] = rest.removesuffix("<unfinished ...>")
            continue
        if match := re.match(r" *<\.\.\. \w+ resumed>(.*)", rest):
            rest = begun.pop(pid) + match[1]
        found = LINE.match(rest.strip())
        if found is None or str(parent) not in found[2]:
            continue
        name, args, _ = found.groups()
        if name in ("open", "openat") and not re.search("O_CREAT|O_TRUNC|O_WRONLY|O_RDWR", args):
            continue
        quoted = re.search(r'"([^"]+)"', args)
        path = quoted[1] if quoted else re.search(r"\d+<([^>]*)>", args)[1]  # type: ignore[index]
        out[NAMES.get(name, name), path] += 1
    return out


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_call_is_missed(name, overwrite, inputs, tmp_path, capsys):
    options = ["--overwrite"] * overwrite
    out, log = prepare(name, inputs, tmp_path, overwrite), tmp_path / "log"
    done = strace(["-e", f"trace={','.join(CALLS)}", "-o", str(log)], arguments(name, inputs, out) + options)
    assert done.returncode == 0, done.stderr
    by_system, right = seen(log.read_text(), out.parent), contents(out)
    out = prepare(name, inputs, tmp_path, overwrite)
    with simulated() as whole:
        command.main(arguments(name, inputs, out) + options, standalone_mode=False)
    assert contents(out) == right
    counted = Counter(whole.calls)
    assert sum(counted.values()) > 50
    assert by_system == counted, (by_system - counted, counted - by_system)
    count("calls that strace saw", f"{name}{' --overwrite' * overwrite}", sum(by_system.values()))


ERRORS = ("ENOSPC", "EIO", "EROFS", "EDQUOT")


@pytest.mark.parametrize("name", ["convert", "export", "quantize"])
def test_a_failing_disk(name, inputs, tmp_path):
    """Exit 8 wherever a call fails that changes the disk, and a rerun ends as if nothing was."""
    log = tmp_path / "log"
    out = prepare(name, inputs, tmp_path, True)
    own = [*arguments(name, inputs, out), "--overwrite"]
    assert strace(["-e", f"trace={','.join(CALLS)}", "-o", str(log)], own).returncode == 0
    calls, right = seen(log.read_text(), out.parent), contents(out)
    tried: Counter[str] = Counter()
    paths = [option for path in dict.fromkeys(path for _, path in calls) for option in ("-P", path)]
    for call, system in (("write", "write"), ("fsync", "fsync"), ("rename", "rename"), ("mkdir", "mkdir"),
                         ("open", "openat"), ("unlink", "unlink"), ("exchange", "renameat2")):  # fmt: skip
        total = sum(n for (own_call, _), n in calls.items() if own_call == call)
        steps = {"quantize": 2}.get(name, 5)
        for i, at in enumerate(range(1, total + 1, max(1, total // steps))):
            error = ERRORS[i % len(ERRORS)]
            prepare(name, inputs, tmp_path, True)
            inject = ["-e", f"trace={system}", "-e", f"inject={system}:error={error}:when={at}", "-o", str(log)]
            done = strace([*paths, *inject], own)
            if "(INJECTED)" not in log.read_text():  # strace counts the calls of each thread for itself
                assert done.returncode == 0
                continue
            tried[system] += 1
            assert done.returncode == 8, f"{error} at {system} {at} of {total}: {done.returncode} {done.stderr}"
            rerun = subprocess.run([sys.executable, "-m", "tpuconv", *own], capture_output=True, text=True, check=False)
            assert rerun.returncode == 0, f"after {error} at {system} {at}: {rerun.stderr}"
            assert contents(out) == right
            assert os.listdir(out.parent) == ["out"]
            count("call failed by strace", f"{name}: {system}")
    assert tried.keys() >= {"write", "fsync", "rename", "mkdir", "openat", "unlink", "renameat2"}


@pytest.mark.parametrize(("name", "code"), [("convert", 4), ("export", 10), ("quantize", 10), ("verify", 10)])
def test_what_is_read_fails(name, code, inputs, tmp_path):
    """A source that cannot be read is exit 4, a checkpoint that cannot is exit 10; a rerun ends as if nothing was."""
    out, log = prepare(name, inputs, tmp_path, False), tmp_path / "log"
    own = ["verify", str(inputs / "ckpt")] if name == "verify" else arguments(name, inputs, out)
    files = (
        sorted((inputs / "ckpt/params").glob("*/c*")) if name != "convert" else [inputs / "source/model.safetensors"]
    )
    paths = [option for path in files for option in ("-P", str(path))]
    for system in ("pread64", "preadv"):
        assert strace([*paths, "-e", f"trace={system}", "-o", str(log)], own).returncode == 0
        total = len(re.findall(rf"{system}\(", log.read_text()))
        shutil.rmtree(out, ignore_errors=True)
        steps = {"quantize": 2}.get(name, 6)
        for at in range(1, total + 1, max(1, total // steps)):
            inject = ["-e", f"trace={system}", "-e", f"inject={system}:error=EIO:when={at}", "-o", str(log)]
            done = strace([*paths, *inject], own)
            if "(INJECTED)" not in log.read_text():  # by then it is in the page cache, and fewer calls read it
                continue
            assert "RWF_NOWAIT" in log.read_text() or done.returncode == code, f"{system} {at}: {done.stderr}"
            assert done.returncode in (0, code), f"{system} {at}: {done.stderr}"
            rerun = subprocess.run([sys.executable, "-m", "tpuconv", *own], capture_output=True, text=True, check=False)
            assert rerun.returncode == 0, rerun.stderr
            shutil.rmtree(out, ignore_errors=True)
            count("read failed by strace", f"{name}: {system}")
