"""Train with optax, and bring the weights into a sampler's tree after each step.

    tpuconv convert examples/tiny-qwen3
    python examples/sync_weights.py tiny-qwen3-orbax

The trainer has one half of the devices and the sampler the other one; of a single device both have it. To try it on a
CPU with four devices, set ``XLA_FLAGS=--xla_force_host_platform_device_count=4``. The text is trained on as bytes,
which are the tokens of ``tiny-qwen3``.
"""

import argparse
import time
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

import tpuconv
from tpuconv import api

TEXT = Path(__file__).parent / "sample.txt"
BATCH, LENGTH = 4, 64


def batches(steps: int) -> np.ndarray:
    """Return the tokens of each step, [steps, B, T]."""
    tokens = np.frombuffer(TEXT.read_bytes(), np.uint8)[: steps * BATCH * LENGTH]
    return tokens.reshape(steps, BATCH, LENGTH).astype(np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a checkpoint of tpuconv, and update a sampler each step.")
    parser.add_argument("checkpoint")
    parser.add_argument("--steps", type=int, default=3, help="training steps (default: %(default)s)")
    parser.add_argument("--target", default="vllm", help="the sampler's tree (default: %(default)s)")
    args = parser.parse_args()

    devices = np.array(jax.devices())
    half = max(1, len(devices) // 2)
    trainers, samplers = (Mesh(each, ("tensor",)) for each in (devices[:half], devices[-half:]))

    graph, params, rest = nnx.split(tpuconv.load(args.checkpoint, mesh=trainers), nnx.Param, ...)
    optimizer = optax.adamw(1e-4)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, ids_BT):
        def loss_of(params):
            logits_BTV = nnx.merge(graph, params, rest)(ids_BT[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, ids_BT[:, 1:]).mean()

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    shards = half if args.target == "vllm" else 1
    there = api.weight_map(args.checkpoint, "nnx", args.target, tensor_parallel=shards)
    places = there.shardings("target", samplers)
    for number, ids_BT in enumerate(batches(args.steps), 1):
        params, state, loss = step(params, state, ids_BT)
        began = time.monotonic()
        # The trainer keeps its weights. Each result is sent off as soon as it is there, as shards of the sampler.
        sampler = there.stream(params, free=False, deliver=lambda name, x: jax.device_put(x, places[name], donate=True))
        jax.block_until_ready(sampler)
        print(f"step {number}: loss {loss:.4f}, {len(sampler)} arrays in {time.monotonic() - began:.3f} s", flush=True)

    back = there.inverse(sampler)
    trained = {".".join(str(getattr(key, "key", "value")) for key in path): x for path, x in flat(params)}
    assert all(np.array_equal(np.asarray(back[name]), np.asarray(x)) for name, x in trained.items())
    print(f"the sampler has the weights of the trainer, on {len(samplers.devices.flat)} devices")


def flat(params):
    return jax.tree_util.tree_flatten_with_path(params)[0]


if __name__ == "__main__":
    main()
