"""Compares conversions for other programs, and `tpuconv.load`, with a copy and with a plain read of the same bytes.

    python benchmarks/targets.py [--folder DIR] [--pairs N] [--layers N]

Makes a checkpoint of the shape of Qwen3-1.7B (3.4 GB in bfloat16), or one of more layers. In each round, with an empty
page cache (as root):

    copy             cp -r, then sync
    convert          to our own tree
    maxtext          convert --target maxtext --scan-layers
    huggingface      convert --target huggingface
    huggingface int8 convert --target huggingface --quantize int8_weight_only
    read             every byte of our checkpoint, file after file, past the page cache
    import           Python, jax and the modules that `load` needs
    load             tpuconv.load of it
    load by Orbax    the same with Orbax reading the arrays

Prints wall time, its ratio to the copy or to the read of the same round, processor time and private memory.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from against import READ
from convert import CONFIG, Run, empty_page_cache, make_checkpoint, measure, spread

IMPORT = "import jax, tpuconv.restore; jax.devices()"
LOAD = """
import sys, jax, tpuconv
from flax import nnx
from tpuconv import restore
if sys.argv[2:]:
    restore._read = restore._restored
jax.block_until_ready(jax.tree.leaves(nnx.state(tpuconv.load(sys.argv[1]))))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to work; four times the checkpoint must fit")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--layers", type=int, default=28)
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=args.folder))
    source, ckpt, out = work / "hf", work / "ckpt", work / "out"
    convert = [sys.executable, "-m", "tpuconv", "convert", str(source)]
    huggingface = ["--target", "huggingface"]
    writing = {
        "copy": ["sh", "-c", f"cp -r {source} {out} && sync"],
        "convert": [*convert, str(out)],
        "maxtext": [*convert, str(out), "--target", "maxtext", "--scan-layers"],
        "huggingface": [*convert, str(out), *huggingface],
        "huggingface int8": [*convert, str(out), *huggingface, "--quantize", "int8_weight_only"],
    }
    python = [sys.executable, "-c"]
    reading = {
        "read": [*python, READ, str(ckpt)],
        "import": [*python, IMPORT],
        "load": [*python, LOAD, str(ckpt)],
        "load by Orbax": [*python, LOAD, str(ckpt), "orbax"],
    }
    runs: dict[str, list[Run]] = {name: [] for name in (*writing, *reading)}
    try:
        total = make_checkpoint(source, CONFIG | {"num_hidden_layers": args.layers})
        measure([*convert, str(ckpt)])
        for _ in range(args.pairs):
            for name, command in (writing | reading).items():
                shutil.rmtree(out, ignore_errors=True)
                empty_page_cache()
                runs[name].append(measure(command))
                print(f"  {name}: {runs[name][-1].wall:.2f} s", file=sys.stderr)
    finally:
        shutil.rmtree(work)
    print(f"{total / 1e9:.2f} GB, {args.pairs} rounds\n")
    print("| what | wall s | wall, to the copy or the read | cpu s | private MB |\n|---|---|---|---|---|")
    for name, own in runs.items():
        base = runs["copy" if name in writing else "read"]
        ratio = spread([a.wall / b.wall for a, b in zip(own, base, strict=True)])
        seconds, cpu = (spread([getattr(run, key) for run in own]) for key in ("wall", "cpu"))
        print(f"| {name} | {seconds} | {ratio} | {cpu} | {max(run.private for run in own) / 1e6:.0f} |")


if __name__ == "__main__":
    main()
