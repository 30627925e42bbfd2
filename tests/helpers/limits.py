"""Commands under a limit of the process."""

import sys

PROGRAM = """
import os, resource, sys
kind, limit = map(int, sys.argv[1:3])
resource.setrlimit(kind, (limit, limit))
os.execv(sys.argv[3], sys.argv[3:])
"""


def limited(kind: int, limit: int) -> list[str]:
    """What begins a command that runs under a limit, such as resource.RLIMIT_AS. It is set by a program of its own: a
    function between fork and exec is not safe where threads run, as those of jax do."""
    return [sys.executable, "-c", PROGRAM, str(kind), str(limit)]
