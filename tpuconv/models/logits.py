"""Logits of a model on prompts, and the divergence of two models' logits."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def forward(model: Any, prompts: Sequence[Sequence[int]], dtype: str) -> Callable[[], list[np.ndarray]]:
    """Returns a function that computes the model's logits [T, V] in float32 for each prompt, with the weights that the
    model has when the function is called. Prompts are padded on the right to one length, so that it compiles once.

    Args:
        model: a Flax NNX model.
        prompts: token ids of each prompt.
        dtype: of the model's parameters.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    length = max(map(len, prompts))
    graph = nnx.graphdef(model)

    @jax.jit  # nnx.jit would return the weights too, which doubles their memory
    def logits(state: Any, ids_BT: Any, mask_BT: Any) -> Any:
        return nnx.merge(graph, state)(ids_BT, mask_BT)

    def run() -> list[np.ndarray]:
        state, out = nnx.state(model), []
        # By default a TPU multiplies float32 as bfloat16.
        with jax.default_matmul_precision("highest") if dtype == "float32" else contextlib.nullcontext():
            for ids in prompts:
                ids_BT = jnp.array([[*ids, *[0] * (length - len(ids))]])
                mask_BT = jnp.arange(length)[None] < len(ids)
                out.append(np.asarray(logits(state, ids_BT, mask_BT))[0, : len(ids)])
        return out

    return run


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Returns the log-probabilities [..., V] of logits [..., V] in float64. In float32 the error would be as large as a
    small divergence."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))


def divergences(logp: Sequence[np.ndarray], logq: Sequence[np.ndarray]) -> np.ndarray:
    """Returns KL(p || q) in nats for each token of all prompts, given the log-probabilities [T, V] of each prompt."""
    return np.concatenate([(np.exp(p) * (p - q)).sum(-1) for p, q in zip(logp, logq, strict=True)])
