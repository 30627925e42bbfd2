"""Processes that were forked from one in which jax runs."""

import subprocess
import sys

import pytest

from helpers.commands import EXAMPLE

FORKED = """
import multiprocessing, sys, tpuconv, tpuconv.api
from tpuconv.errors import UsageError

def work(source, out):
    tpuconv.api.convert(source, out)
    for use in (lambda: tpuconv.load(out), lambda: tpuconv.api.quantize(out, out + "-int8", config="int8_default")):
        try:
            print(type(use()).__name__, flush=True)
        except UsageError as e:
            print(e.message, flush=True)

if len(sys.argv) > 3:
    import jax.numpy
    jax.numpy.ones(4).sum().block_until_ready()
child = multiprocessing.get_context("fork").Process(target=work, args=sys.argv[1:3])
child.start()
child.join(100)
child.kill()
"""


@pytest.mark.parametrize("jax_runs", [False, True])
def test_a_fork_of_a_process_in_which_jax_runs_is_refused(tmp_path, jax_runs):
    """Instead of a product that waits for threads which the fork does not have; a conversion needs none."""
    args = (EXAMPLE, tmp_path / "ckpt", *["jax"] * jax_runs)
    command = [sys.executable, "-W", "ignore", "-c", FORKED, *map(str, args)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    refused = "this process was forked from one in which jax runs, and jax would wait without end here"
    assert lines == ([refused] * 2 if jax_runs else ["Model", "Conversion"]), lines
