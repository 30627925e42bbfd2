"""Measures how the time of a prefill grows with its length in layers that keep a state.

    python benchmarks/delta.py

Runs a small model of each family, with random weights and no other layers than those with a state, on jax's default
device. Lengths alternate. Prints processor time per token relative to that of the shortest prompt: 1.0 everywhere is
linear, and 4.0 and 16.0 quadratic.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from tpuconv.models.registry import get_family

LENGTHS = (1024, 4096, 16384)
REPEATS = 3
SIZES = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GATED = {
    "head_dim": 64,
    "layer_types": ["linear_attention"] * 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MODELS = {
    "qwen3_next": {**GATED, "mlp_only_layers": [0, 1]},
    "qwen3_5_text": GATED,
    "kimi_linear": {
        "num_key_value_heads": 4,
        "layer_types": ["linear_attention"] * 2,
        "mlp_layer_types": ["dense"] * 2,
        "linear_head_dim": 64,
        "linear_num_heads": 4,
    },
    "bamba": {"mamba_n_heads": 8, "mamba_d_state": 64},
}


def prefill(name: str) -> Callable[[int], float]:
    """A function that runs a prompt of so many tokens and returns the seconds of processor time that it took."""
    family = get_family(name)
    config = family.config.from_hf({"model_type": name, **SIZES, **MODELS[name]})
    model = family.model_class(config, dtype=jnp.float32)
    run = nnx.jit(lambda model, ids, cache: model(ids, cache=cache, first=-1))

    def seconds(tokens: int) -> float:
        ids, cache = jnp.ones((1, tokens), jnp.int32), model.init_cache(1, tokens)
        began = time.process_time()
        jax.block_until_ready(run(model, ids, cache))
        return time.process_time() - began

    for tokens in LENGTHS:
        seconds(tokens)  # compiles
    return seconds


def main() -> None:
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}\n")
    print(f"| model | {' | '.join(f'{tokens} tokens' for tokens in LENGTHS)} |\n|---|{'---|' * len(LENGTHS)}")
    for name in MODELS:
        seconds = prefill(name)
        taken = [[seconds(tokens) / tokens for tokens in LENGTHS] for _ in range(REPEATS)]
        least = [min(column) for column in zip(*taken, strict=True)]
        print(f"| {name} | {' | '.join(f'{each / least[0]:.2f}' for each in least)} |", flush=True)


if __name__ == "__main__":
    main()
