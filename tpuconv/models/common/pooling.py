"""Hidden states of a text made one."""

import jax
import jax.numpy as jnp


def weighted_sums(x_BTD: jax.Array, weights_BT: jax.Array) -> jax.Array:
    """Returns the sums [B, D] of hidden states, each times its weight."""
    return jnp.einsum("BTD,BT->BD", x_BTD, weights_BT, precision="highest")


def masked_mean(x_BTD: jax.Array, mask_BT: jax.Array, power: float = 1.0) -> jax.Array:
    """Returns the mean [B, D] of hidden states by a mask of floats: their sum divided by a power of their number."""
    return weighted_sums(x_BTD, mask_BT) / jnp.maximum(mask_BT.sum(1, keepdims=True), 1e-9) ** power


def state_at(x_BTD: jax.Array, place_B: jax.Array) -> jax.Array:
    """Returns the hidden state [B, D] at a place of each text."""
    return jnp.take_along_axis(x_BTD, place_B[:, None, None], axis=1)[:, 0]
