"""The logits of a model in one pass."""

from typing import Any

import jax
from flax import nnx


@nnx.jit
def forward(model: Any, ids_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    return model(ids_BT, mask_BT)
