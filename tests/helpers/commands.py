"""The command as a child process, the example, and the names and shapes of released models."""

import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-qwen3"
SAMPLE = EXAMPLE.parent / "sample.txt"


def tpuconv(*args: object, cwd: Path | None = None, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs the command; its exit code must be `code`, and it never shows a traceback."""
    command = [sys.executable, "-m", "tpuconv", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
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
