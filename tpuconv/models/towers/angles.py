"""Rotary angles of patches in two dimensions (arXiv:2104.09864): each of the H/2 pairs of a head's dimensions turns
with the row or with the column of a patch.

Letters: B rows of patches, P patches, A = H/2 pairs. In the formulas f are the rates theta^(-2j/(H/2)) of H/4 pairs."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from tpuconv.models.common.layers import apply_rope
from tpuconv.models.common.rope import Rope


def rows_then_columns(at_BP2: ArrayLike, head_dim: int, theta: float) -> jax.Array:
    """Returns the angles [B, P, A] (row f, then column f) of patches at these rows and columns (Qwen-VL, GLM-4V)."""
    rates_A, _ = Rope(theta=theta).inverse_frequencies(head_dim // 2)
    angles_BP2A = jnp.asarray(at_BP2, jnp.float32)[..., None] * rates_A
    return angles_BP2A.reshape(*angles_BP2A.shape[:-2], -1)


def columns_then_rows(at_BP2: ArrayLike, head_dim: int, theta: float) -> jax.Array:
    """Returns the angles [B, P, A] (column f, then row f) (Gemma 4, see `apply_rope_by_halves`)."""
    return rows_then_columns(jnp.asarray(at_BP2)[..., ::-1], head_dim, theta)


def from_one(at_BP2: ArrayLike, head_dim: int, theta: float) -> jax.Array:
    """Returns the angles [B, P, A] ((column + 1) f, then (row + 1) f) (Llama 4). A class token is at (-1, -1): it does
    not turn."""
    return columns_then_rows(jnp.asarray(at_BP2) + 1, head_dim, theta)


def interleaved(at_BP2: ArrayLike, head_dim: int, theta: float) -> jax.Array:
    """Returns the angles [B, P, A] (column f[0], row f[0], column f[1], row f[1], ...) (MoonViT)."""
    angles_BPA = columns_then_rows(at_BP2, head_dim, theta)
    return angles_BPA.reshape(*angles_BPA.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(angles_BPA.shape)


def alternating(at_BP2: ArrayLike, head_dim: int, theta: float) -> jax.Array:
    """Returns the angles [B, P, A] (row g[0], row g[2], ..., then column g[1], column g[3], ...) with rates g =
    theta^(-2j/H) of H/2 pairs (Pixtral)."""
    rates_A, _ = Rope(theta=theta).inverse_frequencies(head_dim)
    at = jnp.asarray(at_BP2, jnp.float32)
    return jnp.concatenate([at[..., :1] * rates_A[0::2], at[..., 1:] * rates_A[1::2]], axis=-1)


def cos_sin(angles_BPA: jax.Array, dtype: DTypeLike = jnp.float32) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine [B, P, 1, A] as `apply_rope` takes them. The rotation is in their dtype, or in x's if it
    has more bits: Pixtral and Gemma 4 round them to x's, the others rotate in float32."""
    return jnp.cos(angles_BPA)[..., None, :].astype(dtype), jnp.sin(angles_BPA)[..., None, :].astype(dtype)


def apply_rope_by_halves(x_BPNH: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """`apply_rope` for heads whose halves rotate each by itself, the first by the first half of the angles: the
    pairs (i, i + H/4) (Gemma 4). The result has another order of dimensions, the same for queries and keys."""
    quarters = x_BPNH.reshape(*x_BPNH.shape[:-1], 2, 2, -1).swapaxes(-2, -3)
    return apply_rope(quarters.reshape(x_BPNH.shape), cos_sin)
