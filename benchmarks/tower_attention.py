"""Measures the peak memory and the time of a tower's attention to many patches.

    python benchmarks/tower_attention.py [--patches N] [--heads N] [--head-dim N] [--dtype NAME] [--images N]
        [--limit BYTES]

Each measurement runs in a process of its own, on the CPU: first with inputs alone, then with attention, then with its
gradients, each block by block and, if it fits into half of the memory, at once. The largest images of Qwen2.5-VL and
Qwen3-VL have 16,384 patches: all scores of 16 heads are 17 GB. Exits with 1 if attention block by block takes more
memory beside its inputs than the limit, by default six times the scores of a block.
"""

import argparse
import os
import subprocess
import sys
import time

from here import here

BLOCKED, AT_ONCE = "block by block", "at once"


def measure(args: argparse.Namespace) -> None:
    """Prints peak memory in bytes and seconds of one call, compiled before."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from tpuconv.memory import peak_memory
    from tpuconv.models.towers import attention

    if args.child == AT_ONCE:
        attention.SCORE_BYTES = 1 << 62
    shape = (1, args.patches, args.heads, args.head_dim)
    q, k, v = (jax.random.normal(key, shape, args.dtype) for key in jax.random.split(jax.random.key(0), 3))
    segment = jnp.asarray(np.arange(args.patches)[None] * args.images // args.patches)

    def total(*qkv):
        return attention.attend(*qkv, segment).astype(jnp.float32).sum()

    run = {"inputs": lambda *qkv: qkv[0].sum(), "forward": total, "gradients": jax.grad(total, (0, 1, 2))}[args.what]
    compiled = jax.jit(run).lower(q, k, v).compile()
    start = time.perf_counter()
    jax.block_until_ready(compiled(q, k, v))
    print(peak_memory(), time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patches", type=int, default=16_384)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=72)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--images", type=int, default=1)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--what", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure(args)
        return 0
    from tpuconv.memory import available_memory
    from tpuconv.models.towers.attention import SCORE_BYTES

    limit = args.limit or 6 * SCORE_BYTES
    scores = 4 * args.heads * args.patches**2
    fits = 4 * scores < available_memory()[0] / 2

    def of_child(how: str, what: str) -> tuple[int, float]:
        command = [sys.executable, __file__, *sys.argv[1:], "--child", how, "--what", what]
        out = subprocess.run(
            command, check=True, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
        )
        peak, seconds = out.stdout.split()
        return int(peak), float(seconds)

    print(here())
    before, _ = of_child(BLOCKED, "inputs")
    print(f"{args.patches:,} patches, {args.heads} heads of {args.head_dim}, {args.dtype}")
    print(f"all scores {scores / 1e6:,.0f} MB")
    print(f"limit beside inputs {limit / 1e6:,.0f} MB; inputs and jax alone take {before / 1e6:,.0f} MB\n")
    print("| what | memory beside inputs, MB | s |\n|---|---|---|")
    too_much = False
    for how in (BLOCKED, AT_ONCE)[: 1 + fits]:
        for what in ("forward", "gradients"):
            peak, seconds = of_child(how, what)
            print(f"| {what}, {how} | {(peak - before) / 1e6:,.0f} | {seconds:.2f} |", flush=True)
            too_much |= how == BLOCKED and peak - before > limit
    return int(too_much)


if __name__ == "__main__":
    sys.exit(main())
