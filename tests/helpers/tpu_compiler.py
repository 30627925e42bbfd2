"""The TPU's compiler, in a process of its own: what it needs to be told it is told by the environment."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest

from tpuconv import libtpu
from tpuconv.verify.topology.request import ENVIRONMENT

compiler = pytest.mark.skipif(not libtpu.is_installed(), reason="libtpu, the TPU's compiler, is not installed")


def answers_of(code: str, questions: Iterable[Any]) -> list[Any]:
    """What a program that reads a question a line answers to all of them, a line each, both in JSON: one process, since
    starting takes as long as compiling."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        input="".join(json.dumps(question) + "\n" for question in questions),
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return list(map(json.loads, done.stdout.splitlines()))
