"""Attention biased by distance in place of positions: ALiBi (arXiv:2108.12409).

A score is reduced by the distance of its key, times a slope of the head. Softmax is the same if a number is added to
all scores of a token, so the position of the key, times the slope, is added instead.
"""

import jax
import jax.numpy as jnp
import numpy as np


def alibi_slopes(heads: int) -> np.ndarray:
    """Returns the slope of each head [N] in float32: from 2^(-8/N) to 2^-8, where N is a power of two. Of another
    number, the heads after the largest power of two have the slopes between the slopes of the first heads."""
    power = 1 << (heads.bit_length() - 1)
    first, between = np.arange(1, power + 1), np.arange(0.5, power)
    slopes: np.ndarray = np.exp2(-8 / power * np.concatenate([first, between]))[:heads].astype(np.float32)
    return slopes


def alibi(pos_BS: jax.Array, heads: int) -> jax.Array:
    """Returns what is added to the scores of each head and key [B, N, 1, S], for keys at these positions."""
    return jnp.asarray(alibi_slopes(heads))[:, None, None] * pos_BS[:, None, None, :].astype(jnp.float32)


def root_alibi(pos_BT: jax.Array, pos_BS: jax.Array, heads: int) -> jax.Array:
    """Returns what is added to scores [B, N, T, S] that are reduced by the root of the distance between a token and a
    key before it, times the slope of the head: no number for each key says the same."""
    distance_BTS = jnp.maximum(pos_BT[:, :, None] - pos_BS[:, None, :], 0).astype(jnp.float32)
    return -jnp.asarray(alibi_slopes(heads))[:, None, None] * jnp.sqrt(distance_BTS)[:, None]
