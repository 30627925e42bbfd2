"""Patterns that come from files are tried before they are used: Python's `re` backtracks, so that a pattern such as
`(.*)*!` may take for ever, and within this process nothing could stop it.

They are tried in a child that the system ends after `SECONDS` of its own processor time. What passed there is as fast
here: the same patterns meet the same names.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence

from tpuconv.errors import TpuconvError

MAX_LENGTH = 4096
SECONDS = 0.7
SECONDS_A_MATCH = 5e-6
"""Added for each pattern and name: a plain match takes a tenth of that. Models with experts have 100,000 names."""
WALL_SECONDS = 60.0
"""For a machine so loaded that the child does not get its processor time."""

_CHILD = """
import json, re, signal, sys
seconds, how, patterns, names = json.load(sys.stdin)
signal.setitimer(signal.ITIMER_PROF, seconds)
for i, pattern in enumerate(patterns):
    print(i, flush=True)
    try:
        match = getattr(re.compile(pattern), how)
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
    how: str = "fullmatch",
) -> None:
    """Tries every pattern on every name by a method of `re.Pattern`. With each pattern comes where it stands, which
    errors begin with.

    Raises:
        error: a pattern is too long, is none, or takes for ever on one of the names.
    """
    for where, pattern in patterns:
        if len(pattern) > MAX_LENGTH:
            raise error(f"{where}: a pattern of {len(pattern)} letters, {MAX_LENGTH} at most are read")
    tried, own = list(dict.fromkeys(pattern for _, pattern in patterns)), list(dict.fromkeys(names))
    if not tried:
        return
    seconds = SECONDS + SECONDS_A_MATCH * len(tried) * len(own)
    # Isolated, so that neither the current folder nor the environment says which modules it imports.
    command = [sys.executable, "-I", "-S", "-c", _CHILD]
    question = json.dumps([seconds, how, tried, own]).encode()
    why = ""
    try:
        done = subprocess.run(command, input=question, capture_output=True, timeout=WALL_SECONDS, check=False)
        if done.returncode == 0:
            return
        out, why = done.stdout, done.stderr.decode(errors="replace").strip() if done.returncode > 0 else ""
    except subprocess.TimeoutExpired as e:
        out = e.stdout or b""
    pattern = tried[max(0, len(out.splitlines()) - 1)]
    where = next(where for where, own in patterns if own == pattern)
    shown = repr(pattern if len(pattern) <= 200 else f"{pattern[:200]}...")
    if why:
        raise error(f"{where}: {shown} is no pattern: {why.splitlines()[-1][:200]}")
    raise error(
        f"{where}: matching {shown} takes for ever",
        hint="a repetition inside of a repetition, such as (.*)*, does that: write .* instead",
    )
