"""The machine and the commit that numbers are of."""

import os
import platform
import subprocess
from pathlib import Path


def here() -> str:
    """Returns the processors of this machine, the version of Python and the commit."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    cpu = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "")
    processors = f"{cpu.partition(': ')[2]}, {os.cpu_count()} processors"
    return f"{processors}, Python {platform.python_version()}, commit {commit.stdout.strip()}"
