"""Compares time and memory of this checkout with those of another one.

    python benchmarks/against.py OTHER [--folder DIR] [--pairs N] [--plan SRC]...

Makes a checkpoint of the shape of Qwen3-1.7B (3.4 GB in bfloat16). Then runs with OTHER and with this checkout,
alternating: `convert`, `quantize --config int8_weight_only`, and `verify` of the converted checkpoint. The page cache
is emptied before each run (as root). The speed of the disk is measured by reading all files of the checkpoint with
direct I/O. Ratios are this / other for each pair of runs. With `--plan` it compares `convert SRC --dry-run` instead,
for which the headers of the files suffice: SRC may be a model of any size whose weights are holes.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from convert import CONFIG, Run, empty_page_cache, make_checkpoint, measure, spread

READ = """
import mmap, os, sys
buffer = mmap.mmap(-1, 4 << 20)
buffer.madvise(mmap.MADV_HUGEPAGE)
for root, _, names in os.walk(sys.argv[1]):
    for name in names:
        fd = os.open(os.path.join(root, name), os.O_RDONLY | os.O_DIRECT)
        while os.readv(fd, [buffer]) == len(buffer):
            pass
        os.close(fd)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--folder", type=Path, help="where to work; four times the checkpoint must fit")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--plan", type=Path, action="append", metavar="SRC", help="a checkpoint to plan")
    args = parser.parse_args()
    checkouts = {"other": args.other.resolve(), "this": Path(__file__).resolve().parent.parent}
    work = Path(tempfile.mkdtemp(dir=args.folder))
    runs: dict[tuple[str, str], list[Run]] = {}

    def timed(what: str, name: str, command: list[str]) -> None:
        empty_page_cache()
        os.environ["PYTHONPATH"] = str(checkouts.get(name, ""))
        runs.setdefault((what, name), []).append(measure(command))
        print(f"  {what}, {name}: {runs[what, name][-1].wall:.2f} s", file=sys.stderr)

    tpuconv = [sys.executable, "-P", "-m", "tpuconv"]  # without -P the package of the working directory comes first
    try:
        if args.plan:
            for _, src, name in product(range(args.pairs), args.plan, checkouts):
                timed(f"plan of {src.name}", name, [*tpuconv, "convert", str(src), str(work / "out"), "--dry-run"])
            report(runs)
            return
        total = make_checkpoint(work / "hf", CONFIG)
        for _ in range(args.pairs):
            for name in checkouts:
                ckpt, out = work / f"{name}-orbax", work / "out"
                shutil.rmtree(ckpt, ignore_errors=True)
                timed("convert", name, [*tpuconv, "convert", str(work / "hf"), str(ckpt)])
                timed("quantize", name, [*tpuconv, "quantize", str(ckpt), str(out), "--config", "int8_weight_only"])
                shutil.rmtree(out)
                timed("verify", name, [*tpuconv, "verify", str(ckpt)])
            timed("verify", "disk", [sys.executable, "-c", READ, str(work / "this-orbax")])
    finally:
        shutil.rmtree(work)
    print(f"{total / 1e9:.2f} GB, {args.pairs} pairs, this checkout beside {checkouts['other'].name}\n")
    disk = [run.wall for run in runs.pop(("verify", "disk"))]
    report(runs)
    rate = statistics.median(a.wall / b for a, b in zip(runs["verify", "this"], disk, strict=True))
    print(f"\nReading the same bytes past the page cache: {spread(disk)} s; verify takes {rate:.2f} of that.")


def report(runs: Mapping[tuple[str, str], Sequence[Run]]) -> None:
    """Prints a table of the runs by what was timed and in which checkout."""
    print("| what | other s | this s | wall, this / other | cpu, this / other | private MB, other and this |")
    print("|---|---|---|---|---|---|")
    for what in dict.fromkeys(what for what, _ in runs):
        other, this = runs[what, "other"], runs[what, "this"]
        pairs = list(zip(this, other, strict=True))
        walls = spread([a.wall / b.wall for a, b in pairs])
        cpus = spread([a.cpu / b.cpu for a, b in pairs])
        memory = " and ".join(f"{max(run.private for run in own) / 1e6:.0f}" for own in (other, this))
        seconds = " | ".join(spread([run.wall for run in own]) for own in (other, this))
        print(f"| {what} | {seconds} | {walls} | {cpus} | {memory} |")


if __name__ == "__main__":
    main()
