"""Logits of a model on prompts, and how far two models' logits are from each other."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def forward(model: Any, prompts: Sequence[Sequence[int]], dtype: str) -> Callable[[], list[np.ndarray]]:
    """What gives, with the weights that the model has when it is called, its logits [T, V] in float32 of each prompt.
    Prompts are padded to one length on the right: one compilation."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    length = max(map(len, prompts))
    graph = nnx.graphdef(model)

    @jax.jit  # nnx.jit would give the weights back, a second time in memory
    def logits(state: Any, ids_BT: Any, mask_BT: Any) -> Any:
        return nnx.merge(graph, state)(ids_BT, mask_BT)

    def run() -> list[np.ndarray]:
        state, out = nnx.state(model), []
        # A TPU multiplies float32 in bfloat16 unless told otherwise.
        with jax.default_matmul_precision("highest") if dtype == "float32" else contextlib.nullcontext():
            for ids in prompts:
                ids_BT = jnp.array([[*ids, *[0] * (length - len(ids))]])
                mask_BT = jnp.arange(length)[None] < len(ids)
                out.append(np.asarray(logits(state, ids_BT, mask_BT))[0, : len(ids)])
        return out

    return run


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Of logits [..., V], in float64: in float32 it would be wrong by as much as a small divergence."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))


def divergences(logp: Sequence[np.ndarray], logq: Sequence[np.ndarray]) -> np.ndarray:
    """KL(p || q) in nats of every token of all prompts, from the logarithms [T, V] of each prompt."""
    return np.concatenate([(np.exp(p) * (p - q)).sum(-1) for p, q in zip(logp, logq, strict=True)])
