"""Layers that the families share. Names of arrays end in the letters of their axes (`tpuconv.layout.LETTERS`)."""

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
"""The attention score of a masked key. Finite, so that a token without visible keys (padding) does not get NaN."""


class Keys:
    """A stream of random keys. `nnx.Rngs` takes 4 s for the keys of 80 layers, since the time of each key grows with
    what was traced before."""

    def __init__(self, key: jax.Array):
        self.key, self.drawn = key, 0

    def __call__(self) -> jax.Array:
        """Returns the next key."""
        self.drawn += 1
        return jax.random.fold_in(self.key, self.drawn)


@partial(jax.jit, static_argnums=(1, 2))  # traced once for each shape, not for each of 80 layers
def normal(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Returns random initial weights of a normal distribution with standard deviation 0.02."""
    return 0.02 * jax.random.normal(key, shape, dtype)


class Einsum(nnx.Module):
    """An einsum with a kernel, such as `Einsum("BTD,DNH->BTNH", sizes)`. The kernel is the second operand. A bias has
    the letters of the output that the first operand lacks; they must be the last."""

    def __init__(self, equation: str, sizes: Mapping[str, int], *, bias: bool = False, dtype: DTypeLike, keys: Keys):
        operands, output = equation.split("->")
        x, kernel = operands.split(",")
        self.equation = equation
        self.kernel = nnx.Param(normal(keys(), tuple(sizes[letter] for letter in kernel), dtype))
        bias_shape = tuple(sizes[letter] for letter in output if letter not in x)
        self.bias = nnx.Param(jnp.zeros(bias_shape, dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the product with the kernel, plus the bias, in the dtype of `x`."""
        y = self.product(self.equation, x)
        return y if self.bias is None else y + self.bias[...]

    def product(self, equation: str, x: jax.Array) -> jax.Array:
        """Returns another product with the same kernel, in the dtype of `x`. Other modules must use this function,
        since a quantized kernel is not an array."""
        return jnp.einsum(equation, x, self.kernel[...]).astype(x.dtype)


class Embed(nnx.Module):
    """The embedding matrix. `attend` is the output head of a model with tied embeddings."""

    def __init__(self, sizes: Mapping[str, int], *, dtype: DTypeLike, keys: Keys):
        self.embedding = nnx.Param(normal(keys(), (sizes["V"], sizes["D"]), dtype))

    def __call__(self, ids_BT: jax.Array) -> jax.Array:
        """Returns the vectors [B, T, D] of token ids. An id outside the vocabulary gives NaN."""
        return jnp.take(self.embedding[...], ids_BT, axis=0, mode="fill")

    def attend(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the logits [B, T, V]."""
        return jnp.einsum("BTD,VD->BTV", x_BTD, self.embedding[...])


def normalize(x: jax.Array, axes: int, eps: float) -> jax.Array:
    """Returns x / sqrt(mean(x^2) + eps) in float32, with the mean over the last `axes` axes."""
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x), axis=tuple(range(-axes, 0)), keepdims=True)
    return x * jax.lax.rsqrt(mean_square + eps)


class RMSNorm(nnx.Module):
    """RMS norm (arXiv:1910.07467) over the last axes, which have these letters. Rounds to the dtype of x, then
    scales."""

    def __init__(self, letters: str, sizes: Mapping[str, int], eps: float, *, dtype: DTypeLike):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(tuple(sizes[letter] for letter in letters), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.scale[...]
        return normalize(x, scale.ndim, self.eps).astype(x.dtype) * scale


class ScaledRMSNorm(RMSNorm):
    """RMS norm that scales in float32, then rounds to the dtype of x."""

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.scale[...]
        return (normalize(x, scale.ndim, self.eps) * scale).astype(x.dtype)


class CenteredRMSNorm(RMSNorm):
    """RMS norm whose scale is stored less 1 (Gemma). Scales by 1 + w in float32, then rounds to the dtype of x."""

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = 1 + self.scale[...].astype(jnp.float32)
        return (normalize(x, scale.ndim, self.eps) * scale).astype(x.dtype)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """Returns the tanh approximation of GELU (arXiv:1606.08415), computed in float32, in the dtype of x."""
    return nnx.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


def soft_capped(x: jax.Array, cap: float | None) -> jax.Array:
    """Returns x, limited to between -cap and cap by a tanh; unchanged without a cap."""
    return x if cap is None else jnp.tanh(x / cap) * cap


def rope_cos_sin(rope: Rope | None, head_dim: int, pos_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine, each [B, T, 1, H/2] in float32, of the rotary angle of each pair of dimensions. `pos_BT`
    are the positions. Without rotary positions (`rope` is None) all angles are 0."""
    if rope is None:
        zeros = jnp.zeros((*pos_BT.shape, 1, head_dim // 2), jnp.float32)
        return jnp.ones_like(zeros), zeros
    rates, factor = rope.inverse_frequencies(head_dim)
    angles = pos_BT[:, :, None, None].astype(jnp.float32) * rates
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rope(x_BTNH: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (i, i + H/2) of each head in the dtype of `cos_sin`. Returns [B, T, N, H] in the dtype of
    `x_BTNH`."""
    cos, sin = cos_sin
    a, b = jnp.split(x_BTNH, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


def deinterleave(x_BTNH: jax.Array) -> jax.Array:
    """Moves the elements (2i, 2i + 1) of each head to (i, i + H/2), for families that rotate adjacent pairs. Returns
    [B, T, N, H]. Scores do not change if queries and keys are both reordered."""
    return jnp.concatenate([x_BTNH[..., 0::2], x_BTNH[..., 1::2]], axis=-1)


def is_visible(pos_BT: jax.Array, pos_BS: jax.Array, window: jax.Array | int) -> jax.Array:
    """Returns the causal mask [B, T, S]: a token sees the keys at its own position and at the `window` - 1 positions
    before it. `pos_BT` are the positions of tokens, `pos_BS` those of keys, -1 for padding, which is not seen."""
    distance_BTS = pos_BT[:, :, None] - pos_BS[:, None, :]
    visible_BTS: jax.Array = (pos_BS[:, None, :] >= 0) & (distance_BTS >= 0) & (distance_BTS < window)
    return visible_BTS


def attention(
    q_BTNH: jax.Array, kv: KV, visible_BTS: jax.Array, *, scale: float | None = None, cap: float | None = None
) -> jax.Array:
    """Returns softmax attention [B, T, N, H]. G = N/K query heads share a key-value head (arXiv:2305.13245), which is
    not repeated in memory. `visible_BTS` is the mask. The products of queries and keys are multiplied by `scale`, by
    default H^-0.5, and limited by a soft `cap`."""
    B, T, N, H = q_BTNH.shape
    K = kv.k_BSKH.shape[2]
    q_BTKGH = placed(q_BTNH.reshape(B, T, K, N // K, H), "B T K G H", rules_for(kv))
    scores_BKGTS = soft_capped(kv.scores(q_BTKGH) * (H**-0.5 if scale is None else scale), cap)
    scores_BKGTS = jnp.where(visible_BTS[:, None, None], scores_BKGTS, MASKED_SCORE)
    y_BTKGH = kv.weighted_values(jax.nn.softmax(scores_BKGTS, axis=-1), q_BTNH.dtype)
    return placed(y_BTKGH.reshape(B, T, N, H), "B T N H").astype(q_BTNH.dtype)
