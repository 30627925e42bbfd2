"""The command as a child process, the example, and the names and shapes of released models."""

import atexit
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import NamedTemporaryFile

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-qwen3"
SAMPLE = EXAMPLE.parent / "sample.txt"


SERVER = """
import atexit, gc, json, os, signal, sys, time, traceback, warnings
gc.disable()  # while modules are imported
warnings.simplefilter("ignore")  # jax's, of forks: no backend of its own runs here yet, and no thread
import numba, rich.console, rich.progress, rich.table
import jax, qwix, torch, transformers, transformers.models.qwen3.modeling_qwen3
import tpuconv.convert.export.export, tpuconv.convert.run.conversion, tpuconv.convert.run.transpose
import tpuconv.encodings.kernels, tpuconv.models.generate, tpuconv.models.text_generator
import tpuconv.quantize.apply, tpuconv.restore, tpuconv.verify.checksums, tpuconv.verify.logits
import jax.experimental.pallas.tpu, jaxlib.mlir.dialects.mhlo, numba.core.registry
import transformers.models.auto.tokenization_auto, tpuconv.verify.layerwise
from tpuconv.cli import main
from tpuconv.models.registry import all_families
all_families()
for context in (numba.core.registry.cpu_target.typing_context, numba.core.registry.cpu_target.target_context):
    context.refresh()  # imports what compiled functions need
warnings.resetwarnings()
gc.enable()
gc.freeze()
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if not child:
        for number, path in enumerate((os.devnull, job["out"], job["err"])):
            os.dup2(os.open(path, os.O_RDWR), number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        sys.argv = ["tpuconv", *job["args"]]
        os.chdir(job["cwd"])
        os.environ.clear()
        os.environ.update(job["env"])
        code = 1
        try:
            exec(job["patch"], {})
            main()
        except SystemExit as e:
            code = e.code
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    if job["killed_after"] is not None:
        time.sleep(job["killed_after"])
        os.kill(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    print(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime]), flush=True)
"""
"""Forks a child for each command, after the imports, which take longer than most commands of the tests."""


@cache
def _server() -> "subprocess.Popen[str]":
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    atexit.register(server.communicate)  # the end of its input is its own
    return server


class Done(subprocess.CompletedProcess[str]):
    """A command that ended, and the seconds of processor time that it took."""

    seconds: float


def forked(args: Sequence[str], cwd: Path | None = None, patch: str = "", killed_after: float | None = None) -> Done:
    """Runs the command in a process of its own, with this one's environment and after the code `patch`, but without
    the time that a new interpreter takes for its imports. What an environment variable says to a library when it is
    imported was said before. After `killed_after` seconds it is killed, if it has not ended."""
    own = {"encoding": "utf-8", "newline": ""}  # what is written, as it is
    with NamedTemporaryFile("r", **own) as out, NamedTemporaryFile("r", **own) as err:
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        job = {"args": args, "patch": patch, "out": out.name, "err": err.name, "env": dict(os.environ)}
        job |= {"cwd": str(cwd or Path.cwd()), "killed_after": killed_after}
        server.stdin.write(json.dumps(job) + "\n")
        code, seconds = json.loads(server.stdout.readline())
        done = Done(list(args), code, out.read(), err.read())
        done.seconds = seconds
        return done


def tpuconv(*args: object, cwd: Path | None = None, code: int = 0) -> Done:
    """Runs the command in a process of its own; its exit code must be `code`, it never shows a traceback, and an error
    has an id."""
    done = forked(list(map(str, args)), cwd)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert re.findall(r"^(?:\w+Error|CorruptOutput|UnsupportedConfig): .*", done.stderr, re.M) == []
    assert '"id": null' not in done.stdout
    return done


LISTINGS = json.loads((Path(__file__).parent / "listings.json").read_text())


def every_name(pattern: str) -> list[str]:
    """`layers.{0...3,7}.weight` written out."""
    fixed, spans = re.split(r"\{[^}]*\}", pattern), re.findall(r"\{([^}]*)\}", pattern)
    values = []
    for text in spans:
        ends = [(int(span.split("...")[0]), int(span.split("...")[-1])) for span in text.split(",")]
        values.append([str(i) for first, last in ends for i in range(first, last + 1)])
    return ["".join(a + b for a, b in zip(fixed, (*at, ""), strict=True)) for at in product(*values)]
