"""Measures the search for scales of the least error (`weight_calibration_method: mse`) in a conversion.

    python benchmarks/clipped_scales.py [--layers N] [--rounds N]

Makes a release of the structure of DeepSeek-R1, scaled (see streaming.py), and converts it for servers, alternating, by
`fp8_default`, which copies its values, and by `tpu_v7`, whose experts have such scales. Prints processor seconds, which
other work on the machine changes less than wall time, and resident memory.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from streaming import make_source

CONFIGS = ("fp8_default", "tpu_v7")


def run(command: list[str]) -> tuple[float, float]:
    """Returns the processor seconds and the peak memory, in MB, of a command."""
    child = os.posix_spawn(command[0], command, os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, 1, 0)])
    _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with status {status}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        total = make_source(folder / "src", options.layers, 2)
        print(f"{total / 1e9:.2f} GB\n\n| config | processor s | MB |\n|---|---|---|")
        for config in CONFIGS * options.rounds:
            words = ["convert", str(folder / "src"), str(folder / "out"), "--target", "huggingface"]
            seconds, memory = run([sys.executable, "-m", "tpuconv", *words, "--quantize", config])
            shutil.rmtree(folder / "out")
            print(f"| `{config}` | {seconds:.1f} | {memory:.0f} |", flush=True)


if __name__ == "__main__":
    main()
