"""Tests regular expressions from files in a child process before they are used. Python's `re` backtracks: a pattern
such as `(.*)*!` may take exponential time, and cannot be interrupted within this process.

The child matches each pattern with each name, and is ended after `SECONDS` of processor time. A pattern that passes is
as fast in this process, since it is matched with the same names.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence

from tpuconv.errors import TpuconvError

MAX_LENGTH = 4096
"""The largest length of a pattern."""
SECONDS = 0.7
"""Processor time of the child."""
SECONDS_A_MATCH = 5e-6
"""Added for each pattern and name. A simple match takes a tenth of that; models with experts have 100,000 names."""
WALL_SECONDS = 60.0
"""Wall time after which the child is ended, on a machine that is too loaded to give it its processor time."""

_CHILD = """
import json, re, signal, sys
seconds, method, patterns, names = json.load(sys.stdin)
signal.setitimer(signal.ITIMER_PROF, seconds)
for i, pattern in enumerate(patterns):
    print(i, flush=True)
    try:
        match = getattr(re.compile(pattern), method)
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
    for name in names:
        match(name)
"""


def check_patterns(
    patterns: Sequence[tuple[str, str]],
    names: Iterable[str],
    error: type[TpuconvError],
    *,
    method: str = "fullmatch",
) -> None:
    """Tests every pattern with every name.

    Args:
        patterns: each as (place, pattern); messages begin with the place.
        names: the names that the patterns will be matched with.
        error: the class of errors.
        method: the method of `re.Pattern` that is used.

    Raises:
        error: a pattern is too long, is not a regular expression, or takes too long.
    """
    for where, pattern in patterns:
        if len(pattern) > MAX_LENGTH:
            raise error(f"{where}: a pattern of {len(pattern)} characters, the limit is {MAX_LENGTH}")
    tried, unique_names = list(dict.fromkeys(pattern for _, pattern in patterns)), list(dict.fromkeys(names))
    if not tried:
        return
    seconds = SECONDS + SECONDS_A_MATCH * len(tried) * len(unique_names)
    # -I: the child imports no modules from the current folder or the environment.
    command = [sys.executable, "-I", "-S", "-c", _CHILD]
    request = json.dumps([seconds, method, tried, unique_names]).encode()
    why, is_starved = "", False
    try:
        done = subprocess.run(command, input=request, capture_output=True, timeout=WALL_SECONDS, check=False)
        if done.returncode == 0:
            return
        out, why = done.stdout, done.stderr.decode(errors="replace").strip() if done.returncode > 0 else ""
    except subprocess.TimeoutExpired as e:
        out, is_starved = e.stdout or b"", True
    pattern = tried[max(0, len(out.splitlines()) - 1)]
    where = next(place for place, candidate in patterns if candidate == pattern)
    shown = repr(pattern if len(pattern) <= 200 else f"{pattern[:200]}...")
    if why:
        raise error(
            f"{where}: {shown} is not a regular expression: {why.splitlines()[-1][:200]}",
            hint="write a backslash before a character that is meant as itself",
        )
    if is_starved:
        raise error(
            f"{where}: {shown} could not be tested within {WALL_SECONDS:g} s: the test got too little processor time",
            hint="run the command again when this machine is less busy",
        )
    raise error(
        f"{where}: matching {shown} takes too long",
        hint="avoid nested repetitions: write .* instead of (.*)*",
    )
