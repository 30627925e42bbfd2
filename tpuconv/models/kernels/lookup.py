"""Rows of a table that is too large to be decoded: the quantizer's provider reads rows of a quantized one."""

import jax
import jax.numpy as jnp


def take_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the rows [..., D] of a table [V, D]. An id outside the table gives NaN."""
    return jnp.take(table, ids, axis=0, mode="fill")
