"""Measures an installation from wheels on the disk, and the first commands after it.

    python benchmarks/install.py

Builds the wheel, downloads the wheels that it requires, and installs all of them without a network in a new environment
of this Python. The first command is `doctor`, the second `inspect` of the example.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from here import here

ROOT = Path(__file__).parent.parent


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        wheels, place = Path(name) / "wheels", Path(name) / "environment"
        pip = [sys.executable, "-m", "pip"]
        run([sys.executable, "-m", "build", "--wheel", "--outdir", wheels, ROOT])
        (wheel,) = wheels.iterdir()
        run([*pip, "download", "--quiet", "--dest", wheels, "--constraint", ROOT / "constraints.txt", wheel])
        sizes = [path.stat().st_size for path in wheels.iterdir()]
        print(f"{len(sizes)} wheels, {sum(sizes) / 1e6:.0f} MB; {here()}; load {os.getloadavg()[0]:.1f}")
        python = place / "bin" / "python"
        command = place / "bin" / "tpuconv"
        offline = ["install", "--quiet", "--no-index", "--find-links", wheels, "tpuconv"]
        steps = {
            "install": [[sys.executable, "-m", "venv", place], [python, "-m", "pip", *offline]],
            "tpuconv doctor": [[command, "doctor"]],
            "tpuconv inspect": [[command, "inspect", ROOT / "examples" / "tiny-qwen3"]],
        }
        for step, commands in steps.items():
            began, before = time.monotonic(), os.times()
            for each in commands:
                run(each, check=step == "install")  # doctor fails without a network
            used = os.times()
            cpu = used.children_user + used.children_system - before.children_user - before.children_system
            print(f"{step}: {time.monotonic() - began:.1f} s, {cpu:.1f} s of a processor")


def run(command: list[object], *, check: bool = True) -> None:
    """Runs a command without its output."""
    subprocess.run(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=check, cwd="/")


if __name__ == "__main__":
    main()
