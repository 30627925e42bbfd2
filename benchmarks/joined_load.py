"""Measures what several processes read of a release that they load together.

    python benchmarks/joined_load.py [--folder DIR] [--rounds N] [--layers N] [--processes N] [--devices N]

Makes a release of the shape of Qwen3-1.7B, and loads it in processes that jax.distributed joins, each with some devices
of the processor: sharded over `tensor`, over `data` (each row divided), and over `data` and `tensor`. "apart" is the
load in which each process reads what its own shards need, "shared" the one in which processes read parts of whole
rows and devices exchange them. Ratios of bytes are to the size of the files, ratios of seconds to "apart" of the same
round.
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from convert import CONFIG, empty_page_cache, make_checkpoint, spread

LOAD = """
import json, sys, time
import jax, numpy as np
from tpuconv.api.models import join_processes, leave_processes
join_processes()
import tpuconv, tpuconv.direct, tpuconv.exchange
from flax import nnx
from tpuconv.sources.reader import SafetensorsReader

folder, shape, apart = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3] == "apart"
tpuconv.exchange.SLOW_DEVICES = ("cpu",) if apart else ()
taken, read = [0], SafetensorsReader._bytes
def counted(self, shard, name, start, stop, *args, **kwargs):
    taken[0] += stop - start
    return read(self, shard, name, start, stop, *args, **kwargs)
SafetensorsReader._bytes = counted
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(list(shape.values())), tuple(shape))
began = time.monotonic()
jax.block_until_ready(jax.tree.leaves(nnx.state(tpuconv.load(folder, mesh=mesh))))
print(f"\\nmeasured {taken[0]} {time.monotonic() - began}", flush=True)
leave_processes()
"""


def run(folder: Path, shape: str, how: str, processes: int) -> tuple[int, float]:
    """Returns the bytes that all processes read, and the seconds of the slowest one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    joined = {"JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", LOAD, str(folder), shape, how],
            env=os.environ | joined | {"JAX_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(processes)
    ]
    lines = [line.split() for process in started for line in process.communicate()[0].splitlines()]
    found = [(int(words[1]), float(words[2])) for words in lines if words[:1] == ["measured"]]
    assert len(found) == processes, "a process failed: see its error above"
    return sum(taken for taken, _ in found), max(seconds for _, seconds in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to work; the release must fit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--devices", type=int, default=2, help="devices of each process")
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.devices}"
    count = args.processes * args.devices
    work = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        total = make_checkpoint(work / "hf", CONFIG | {"num_hidden_layers": args.layers})
        print(f"{total / 1e9:.2f} GB, {args.processes} processes, {args.devices} devices each")
        print()
        print("| mesh | how | bytes read / size | s | s / apart |")
        print("|---|---|---|---|---|")
        for title, shape in (
            (f"tensor={count}", f'{{"tensor": {count}}}'),
            (f"data={count}", f'{{"data": {count}}}'),
            (f"data=2,tensor={count // 2}", f'{{"data": 2, "tensor": {count // 2}}}'),
        ):
            seconds: dict[str, list[float]] = {"apart": [], "shared": []}
            taken = {}
            for _ in range(args.rounds):
                for how, own in seconds.items():
                    empty_page_cache()
                    taken[how], last = run(work / "hf", shape, how, args.processes)
                    own.append(last)
            for how, own in seconds.items():
                ratios = [a / b for a, b in zip(own, seconds["apart"], strict=True)]
                print(f"| {title} | {how} | {taken[how] / total:.2f} | {spread(own)} | {spread(ratios)} |")
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
