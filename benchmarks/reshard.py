"""Compares a resharding with a copy of the files.

    python benchmarks/reshard.py [--folder DIR] [--rounds N] [--layers N]

Makes a release of the shape of Qwen3-1.7B (3.4 GB in bfloat16; with more layers it is larger), and converts it with
layers apart. Each round, with an empty page cache before each step (as root):

- cp: `cp -r` of the checkpoint, and `sync` of every file, as `reshard` does (`sync` of a folder writes none);
- fsdp=64: `tpuconv reshard --mesh fsdp=64`;
- scanned: the same with `--scan-layers`;
- apart: `tpuconv reshard --unscan-layers` of that.

Each command runs in a process of its own; its time includes the start of Python. The peak is its resident memory.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from convert import CONFIG, empty_page_cache, make_checkpoint, spread

STEPS = {
    "cp": ("a", "copy", ()),
    "fsdp=64": ("a", "fsdp", ("--mesh", "fsdp=64")),
    "scanned": ("a", "scanned", ("--mesh", "fsdp=64", "--scan-layers")),
    "apart": ("scanned", "apart", ("--unscan-layers",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to work; four times the checkpoint must fit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=args.folder))
    seconds: dict[str, list[float]] = {name: [] for name in STEPS}
    peaks = dict.fromkeys(STEPS, 0)
    try:
        total = make_checkpoint(work / "hf", CONFIG | {"num_hidden_layers": args.layers})
        subprocess.run([sys.executable, "-m", "tpuconv", "convert", "hf", "a", "--json"], cwd=work, check=True)
        shutil.rmtree(work / "hf")
        for _ in range(args.rounds):
            for name, (src, out, words) in STEPS.items():
                is_cold = empty_page_cache()
                began = time.monotonic()
                if name == "cp":
                    copied = f"cp -r {src} {out} && find {out} -type f -exec sync {{}} +"
                    subprocess.run(copied, shell=True, cwd=work, check=True)
                else:
                    command = [sys.executable, "-m", "tpuconv", "reshard", src, out, *words, "--json"]
                    done = subprocess.run(command, cwd=work, check=True, capture_output=True, text=True)
                    peaks[name] = max(peaks[name], json.loads(done.stdout)["peak_memory_bytes"])
                seconds[name].append(time.monotonic() - began)
                print(f"  {name}: {seconds[name][-1]:.2f} s", file=sys.stderr)
                if out != "scanned":
                    shutil.rmtree(work / out)
            shutil.rmtree(work / "scanned")
    finally:
        shutil.rmtree(work)
    print(f"{total / 1e9:.2f} GB, {'cold' if is_cold else 'warm'}")
    print()
    print("| what | s | s / cp | peak, MB |")
    print("|---|---|---|---|")
    for name, each in seconds.items():
        ratios = [a / b for a, b in zip(each, seconds["cp"], strict=True)]
        print(f"| {name} | {spread(each)} | {spread(ratios)} | {peaks[name] // 1_000_000 or '-'} |")


if __name__ == "__main__":
    main()
