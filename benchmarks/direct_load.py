"""Compares the load of a release with the load of its checkpoint, and with reading the files.

    python benchmarks/direct_load.py [--folder DIR] [--rounds N] [--layers N] [--devices N]

Makes a release of the shape of Qwen3-1.7B (3.4 GB in bfloat16; with fewer layers it is smaller). Each round, with an
empty page cache before each step (as root):

- read: `np.fromfile` of every safetensors file;
- safetensors: its own loader, `safetensors.flax.load_file`, on one device;
- orbax: Orbax v1's loader of safetensors, each tensor sharded over its first axis where the devices divide it;
- direct: `tpuconv.load` of the release;
- convert: `api.convert` of the release;
- load: `tpuconv.load` of the checkpoint.

Each step runs in a process of its own, which takes the time after its imports. With several devices, all of one
process, the model is sharded over `tensor`. Ratios are those of one round, since the machine's speed drifts.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from convert import CONFIG, empty_page_cache, make_checkpoint, spread

FIRST = """
import sys, time
from pathlib import Path
import jax, numpy as np
import tpuconv, tpuconv.convert.run.conversion, tpuconv.convert.run.transpose, tpuconv.direct
import orbax.checkpoint.experimental.v1 as ocp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding
from safetensors.flax import load_file
from tpuconv import api
folder, out = map(Path, sys.argv[1:3])
devices = jax.devices()
mesh = jax.make_mesh((len(devices),), ("tensor",)) if len(devices) > 1 else None
def load(place):
    jax.block_until_ready(jax.tree.leaves(nnx.state(tpuconv.load(place, mesh=mesh))))
def placed(x):
    spec = P("tensor") if mesh and x.shape and x.shape[0] % len(devices) == 0 else P()
    sharding = NamedSharding(mesh, spec) if mesh else SingleDeviceSharding(devices[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
def by_orbax(place):
    with ocp.Context(checkpoint_layout=ocp.options.CheckpointLayout.SAFETENSORS):
        jax.block_until_ready(ocp.load(place, jax.tree.map(placed, ocp.metadata(place).metadata)))
began = time.monotonic()
"""
LAST = "\nprint(time.monotonic() - began)"
STEPS = {
    "read": "for path in folder.glob('*.safetensors'): np.fromfile(path, np.uint8)",
    "safetensors": "kept = [jax.block_until_ready(load_file(path)) for path in folder.glob('*.safetensors')]",
    "orbax": "by_orbax(folder)",
    "direct": "load(folder)",
    "convert": "api.convert(folder, out)",
    "load": "load(out)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to work; twice the release must fit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--devices", type=int, default=1, help="devices that the processor stands for")
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.devices}"
    work = Path(tempfile.mkdtemp(dir=args.folder))
    seconds: dict[str, list[float]] = {name: [] for name in STEPS}
    try:
        total = make_checkpoint(work / "hf", CONFIG | {"num_hidden_layers": args.layers})
        for _ in range(args.rounds):
            shutil.rmtree(work / "out", ignore_errors=True)
            for name, step in STEPS.items():
                is_cold = empty_page_cache()
                words = [sys.executable, "-c", FIRST + step + LAST, str(work / "hf"), str(work / "out")]
                seconds[name].append(float(subprocess.run(words, capture_output=True, text=True, check=True).stdout))
                print(f"  {name}: {seconds[name][-1]:.2f} s", file=sys.stderr)
    finally:
        shutil.rmtree(work)
    seconds["convert + load"] = [sum(pair) for pair in zip(seconds["convert"], seconds["load"], strict=True)]
    print(f"{total / 1e9:.2f} GB, {'cold' if is_cold else 'warm'}, {args.devices} devices")
    print()
    print("| what | s | s / direct |")
    print("|---|---|---|")
    for name, own in seconds.items():
        ratios = [a / b for a, b in zip(own, seconds["direct"], strict=True)]
        print(f"| {name} | {spread(own)} | {spread(ratios)} |")


if __name__ == "__main__":
    main()
