"""Compares two ways to compute routed experts for few tokens: gathering the weights of each row, and grouped products.

    python benchmarks/moe.py

Times one layer of experts with the shape of Qwen3-30B-A3B at a quarter of its width, in bfloat16, compiled for jax's
default device. Prints milliseconds for both ways, which alternate, and which one `tpuconv.models.common.moe` uses.
"""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from tpuconv.models.common import moe
from tpuconv.models.common.layers import Keys

E, X, D, M = 128, 8, 512, 192
REPEATS = 9


def compiled(layer: moe.GatedExperts, few: float, *arguments: jax.Array) -> Callable[[], None]:
    moe.GATHER_LIMIT = few
    graph, state = nnx.split(layer)  # nnx.jit would return all weights too
    run = jax.jit(lambda state, *arrays: nnx.merge(graph, state)(*arrays))
    jax.block_until_ready(run(state, *arguments))
    return lambda: jax.block_until_ready(run(state, *arguments))


def main() -> None:
    rule = moe.GATHER_LIMIT
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; E={E} X={X} D={D} M={M}\n")
    print(
        "| tokens | rows / experts | gathered ms | grouped ms | grouped / gathered | taken |\n|---|---|---|---|---|---|"
    )
    layer = moe.GatedExperts({"E": E, "D": D, "M": M}, nnx.silu, dtype=jnp.bfloat16, keys=Keys(jax.random.key(0)))
    for tokens in (1, 2, 4, 8, 16, 32):
        x_BTD = jax.random.normal(jax.random.key(1), (1, tokens, D), jnp.bfloat16)
        ids_BTX = jax.lax.top_k(jax.random.normal(jax.random.key(2), (1, tokens, E)), X)[1]
        arguments = x_BTD, ids_BTX, jnp.ones(ids_BTX.shape)
        ways = [compiled(layer, few, *arguments) for few in (float("inf"), 0.0)]
        seconds: list[list[float]] = [[], []]
        for _ in range(REPEATS):
            for way, own in zip(ways, seconds, strict=True):
                began = time.perf_counter()
                way()
                own.append(time.perf_counter() - began)
        gathered, grouped = (1e3 * statistics.median(own) for own in seconds)
        share = tokens * X / E
        taken = "gathered" if share <= rule else "grouped"
        print(f"| {tokens} | {share:.2f} | {gathered:.2f} | {grouped:.2f} | {grouped / gathered:.1f} | {taken} |")


if __name__ == "__main__":
    main()
