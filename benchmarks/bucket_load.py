"""Loads a release from a bucket, and compares the time with that of fetching its bytes.

    python benchmarks/bucket_load.py [--rate BYTES_A_SECOND] [--answer-rate BYTES_A_SECOND] [--devices N] [--rounds N]
                                     [--decode]

The release and the server are those of `benchmarks/streaming.py`. The server sends no more than RATE in all, and
ANSWER-RATE of an answer, as a bucket limits a connection. In each round:

    fetch     every shard, in pieces of 8 MiB over CONNECTIONS connections, into memory
    load      tpuconv.load("gs://bkt/src", encoding="keep"), on N devices that the processor stands for; with --decode
              without `encoding`

Each runs in a process of its own, which takes the time after its imports. Prints the times, the rate, the bytes that
were sent for each byte of the release, and the most answers at a time.
"""

import argparse
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from streaming import make_source, serve

FIRST = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
import jax
import tpuconv, tpuconv.direct
from flax import nnx
from tpuconv import buckets
from tpuconv.location import BucketPath
sizes, connections = eval(sys.argv[1]), int(sys.argv[2])
mesh = jax.make_mesh((jax.device_count(),), ("expert",))
began = time.monotonic()
"""
LAST = "\nprint(time.monotonic() - began)"
STEPS = {
    "fetch": """
PIECE = 8 << 20
pieces = [(name, at, min(at + PIECE, size)) for name, size in sizes.items() for at in range(0, size, PIECE)]
with ThreadPoolExecutor(connections) as pool:
    kept = list(pool.map(lambda x: buckets.read(BucketPath("gs", "bkt", f"src/{x[0]}"), x[1], x[2]), pieces))
""",
    "load": """
model = tpuconv.load("gs://bkt/src", mesh=mesh, encoding=sys.argv[3])
jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
""",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=math.inf)
    parser.add_argument("--answer-rate", type=float, default=math.inf)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--shards", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decode", action="store_true")
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.devices}"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "src"
        total = make_source(source, args.layers, args.shards)
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(source, args.rate, theirs, args.answer_rate), daemon=True
        )
        process.start()
        try:
            from helpers.fake_gcs import environment

            os.environ |= environment(ours.recv())
            print(f"{total / 1e9:.2f} GB, {args.devices} devices, {args.answer_rate / 1e6:.0f} MB/s an answer, "
                  f"{args.rate / 1e6:.0f} MB/s in all")  # fmt: skip
            sizes = {path.name: path.stat().st_size for path in source.glob("*.safetensors")}
            for _ in range(args.rounds):
                for step in STEPS:
                    given = [repr(sizes), str(args.connections), "dequantize" if args.decode else "keep"]
                    print(f"{step}: {run(step, given, ours, total)}", flush=True)
        finally:
            process.kill()


def run(step: str, given: list[str], pipe: Any, total: int) -> str:
    """Runs a step with these arguments; returns what it took."""
    pipe.send(True)
    pipe.recv()
    words = [sys.executable, "-c", FIRST + STEPS[step] + LAST, *given]
    seconds = float(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout)
    pipe.send(True)
    sent, most = pipe.recv()
    return f"{seconds:.2f} s, {total / seconds / 1e6:.0f} MB/s, sent {sent / total:.3f} times, {most} answers at a time"


if __name__ == "__main__":
    main()
