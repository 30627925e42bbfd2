"""Leaves that the families share, each with one mathematical meaning. Names end in the letters of their axes."""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.cache import KV
from tpuconv.models.common.placement import placed, rules_for
from tpuconv.models.common.rope import Rope

MASKED_SCORE = -1e38
"""The score of a key that is not visible. Finite, so that a token that sees no key, which is padding, gets no NaN."""


class Keys:
    """A stream of random keys. `nnx.Rngs` searches, at every key, all that was traced before: 4 s for 80 layers."""

    def __init__(self, key: jax.Array):
        self.key, self.drawn = key, 0

    def __call__(self) -> jax.Array:
        self.drawn += 1
        return jax.random.fold_in(self.key, self.drawn)


@partial(jax.jit, static_argnums=(1, 2))  # traced once for each shape, not for each of 80 layers
def normal(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Random initial weights, with a standard deviation of 0.02."""
    return 0.02 * jax.random.normal(key, shape, dtype)


class Einsum(nnx.Module):
    """`Einsum("BTD,DNH->BTNH", sizes)`: the kernel is the second operand. A bias has the output's letters that the
    first operand lacks; they stand last."""

    def __init__(self, equation: str, sizes: Mapping[str, int], *, bias: bool = False, dtype: DTypeLike, keys: Keys):
        operands, output = equation.split("->")
        x, kernel = operands.split(",")
        self.equation = equation
        self.kernel = nnx.Param(normal(keys(), tuple(sizes[letter] for letter in kernel), dtype))
        bias_shape = tuple(sizes[letter] for letter in output if letter not in x)
        self.bias = nnx.Param(jnp.zeros(bias_shape, dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.product(self.equation, x)
        return y if self.bias is None else y + self.bias[...]

    def product(self, equation: str, x: jax.Array) -> jax.Array:
        """Another product with the same kernel, which only this module may touch: quantized, it is no array."""
        return jnp.einsum(equation, x, self.kernel[...]).astype(x.dtype)


class Embed(nnx.Module):
    """The vector of every token; `attend` is the head of a model whose logits share the matrix."""

    def __init__(self, sizes: Mapping[str, int], *, dtype: DTypeLike, keys: Keys):
        self.embedding = nnx.Param(normal(keys(), (sizes["V"], sizes["D"]), dtype))

    def __call__(self, ids_BT: jax.Array) -> jax.Array:
        # An id beyond the vocabulary gives NaN, not another token's vector.
        return jnp.take(self.embedding[...], ids_BT, axis=0, mode="fill")

    def attend(self, x_BTD: jax.Array) -> jax.Array:
        return jnp.einsum("BTD,VD->BTV", x_BTD, self.embedding[...])


def normalize(x: jax.Array, axes: int, eps: float) -> jax.Array:
    """Divides by the root of the mean square over the last `axes` axes; in float32."""
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x), axis=tuple(range(-axes, 0)), keepdims=True)
    return x * jax.lax.rsqrt(mean_square + eps)


class RMSNorm(nnx.Module):
    """Root-mean-square norm (arXiv:1910.07467) over the axes of `letters`: rounded first, then scaled."""

    def __init__(self, letters: str, sizes: Mapping[str, int], eps: float, *, dtype: DTypeLike):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(tuple(sizes[letter] for letter in letters), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.scale[...]
        return normalize(x, scale.ndim, self.eps).astype(x.dtype) * scale


def rope_cos_sin(rope: Rope, head_dim: int, pos_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, each [B, T, 1, H/2] in float32, of every pair's angle at every position."""
    rates, factor = rope.inverse_frequencies(head_dim)
    angles = pos_BT[:, :, None, None].astype(jnp.float32) * rates
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rope(x_BTNH: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (i, i + H/2) of every head [B, T, N, H], in the precision of `cos_sin`; the result has the
    dtype of `x_BTNH`."""
    cos, sin = cos_sin
    a, b = jnp.split(x_BTNH, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


def deinterleave(x_BTNH: jax.Array) -> jax.Array:
    """Brings the pairs (2i, 2i + 1) of every head, which some families turn, to (i, i + H/2), which `apply_rope` does.
    Queries and keys are reordered alike, so that their products stay as they are."""
    return jnp.concatenate([x_BTNH[..., 0::2], x_BTNH[..., 1::2]], axis=-1)


def is_visible(pos_BT: jax.Array, pos_BS: jax.Array, window: jax.Array | int) -> jax.Array:
    """Which keys each token sees, [B, T, S]: none after it, none that is `window` or more before, no padding (-1)."""
    before_BTS = pos_BT[:, :, None] - pos_BS[:, None, :]
    seen_BTS: jax.Array = (pos_BS[:, None, :] >= 0) & (before_BTS >= 0) & (before_BTS < window)
    return seen_BTS


def attention(q_BTNH: jax.Array, kv: KV, visible_BTS: jax.Array) -> jax.Array:
    """Softmax attention [B, T, N, H]; G = N/K query heads share a key-value head, which is not repeated in memory."""
    B, T, N, H = q_BTNH.shape
    K = kv.k_BSKH.shape[2]
    q_BTKGH = placed(q_BTNH.reshape(B, T, K, N // K, H), "B T K G H", rules_for(kv))
    scores_BKGTS = jnp.where(visible_BTS[:, None, None], kv.scores(q_BTKGH) * H**-0.5, MASKED_SCORE)
    y_BTKGH = kv.weighted_values(jax.nn.softmax(scores_BKGTS, axis=-1), q_BTNH.dtype)
    return placed(y_BTKGH.reshape(B, T, N, H), "B T N H").astype(q_BTNH.dtype)
