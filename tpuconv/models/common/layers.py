"""Layers that the families share. Names of arrays end in the letters of their axes, which are in
`tpuconv.notation.letters.LETTERS`."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.cache import KV
from tpuconv.models.common.mrope import Mrope
from tpuconv.models.common.observe import observed
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
        observed(self, equation, x)
        return jnp.einsum(equation, x, self.kernel[...]).astype(x.dtype)


def exact_product(equation: str, x: jax.Array, kernel: Any) -> jax.Array:
    """Returns the product of `x` with a kernel in float32, at the highest precision. The kernel is not cast before: the
    product promotes it, and a quantized kernel is not an array."""
    return jnp.einsum(equation, x.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST)


class Embed(nnx.Module):
    """The embedding matrix. `attend` is the output head of a model with tied embeddings.

    Class attribute: `tables` names the parameters of which each token reads a row.
    """

    tables: ClassVar[tuple[str, ...]] = ("embedding",)

    def __init__(self, sizes: Mapping[str, int], *, dtype: DTypeLike, keys: Keys):
        self.embedding = nnx.Param(normal(keys(), (sizes["V"], sizes["D"]), dtype))

    def __call__(self, ids_BT: jax.Array) -> jax.Array:
        """Returns the vectors [B, T, D] of token ids. An id outside the vocabulary gives NaN."""
        return jnp.take(self.embedding[...], ids_BT, axis=0, mode="fill")

    def in_text(self, ids_BT: jax.Array, pos_BT: jax.Array, cache: Any | None) -> jax.Array:
        """Returns the vectors [B, T, D] of the tokens of a call, whose positions are -1 for padding. An embedding that
        reads the tokens before a token overrides this: the `Cache` of a call has them, with these (`ids_BS`)."""
        return self(ids_BT)

    def attend(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the logits [B, T, V]."""
        return jnp.einsum("BTD,VD->BTV", x_BTD, self.embedding[...])


def normalize(x: jax.Array, axes: int, eps: float) -> jax.Array:
    """Returns x / sqrt(mean(x^2) + eps) in float32, with the mean over the last `axes` axes."""
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x), axis=tuple(range(-axes, 0)), keepdims=True)
    return x * jax.lax.rsqrt(mean_square + eps)


def times(x: jax.Array, factor: float) -> jax.Array:
    """Returns x times a number that is not rounded to the dtype of x before, in the dtype of x."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


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


class GroupedRMSNorm(ScaledRMSNorm):
    """RMS norm of each of the `norm_groups` groups of a hidden state's dimensions, or of each head where `letters` has
    heads: x [B, T, D] or [B, T, N, H]. Scales in float32, then rounds to the dtype of x."""

    def __init__(self, letters: str, sizes: Mapping[str, int], eps: float, *, dtype: DTypeLike):
        super().__init__(letters, sizes, eps, dtype=dtype)
        self.groups = sizes["norm_groups"] if letters == "D" else 1

    def __call__(self, x: jax.Array) -> jax.Array:
        groups = x.reshape(*x.shape[:-1], self.groups, -1)
        return (normalize(groups, 1, self.eps).reshape(x.shape) * self.scale[...]).astype(x.dtype)


class CenteredRMSNorm(RMSNorm):
    """RMS norm whose scale is stored less 1 (Gemma). Scales by 1 + w in float32, then rounds to the dtype of x."""

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = 1 + self.scale[...].astype(jnp.float32)
        return (normalize(x, scale.ndim, self.eps) * scale).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer norm (arXiv:1607.06450) over the last axes, which have these letters. Scales and adds the bias, if any, in
    float32, then rounds to the dtype of x."""

    def __init__(self, letters: str, sizes: Mapping[str, int], eps: float, *, bias: bool = True, dtype: DTypeLike):
        shape = tuple(sizes[letter] for letter in letters)
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(shape, dtype))
        self.bias = nnx.Param(jnp.zeros(shape, dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        centered = x.astype(jnp.float32)
        centered -= jnp.mean(centered, axis=tuple(range(-self.scale.ndim, 0)), keepdims=True)
        y = normalize(centered, self.scale.ndim, self.eps) * self.stretch().astype(jnp.float32)
        return (y if self.bias is None else y + self.bias[...].astype(jnp.float32)).astype(x.dtype)

    def stretch(self) -> jax.Array:
        """Returns what the normalized x is multiplied by."""
        return self.scale[...]


class HeadLayerNorm(LayerNorm):
    """Layer norm of each head, whose scale has other values for each head: x [B, T, N, H] to [B, T, N, H]."""

    def __call__(self, x: jax.Array) -> jax.Array:
        centered = x.astype(jnp.float32)
        centered -= centered.mean(axis=-1, keepdims=True)
        return (normalize(centered, 1, self.eps) * self.stretch().astype(jnp.float32)).astype(x.dtype)


class CenteredLayerNorm(LayerNorm):
    """Layer norm whose scale is stored less 1. The sum is rounded to the dtype of the stored scale."""

    def stretch(self) -> jax.Array:
        return self.scale[...] + 1


class PlainLayerNorm(nnx.Module):
    """Layer norm (arXiv:1607.06450) over the last axis, without scale and bias."""

    def __init__(self, letters: str, sizes: Mapping[str, int], eps: float, *, dtype: DTypeLike):
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        centered = x.astype(jnp.float32)
        centered -= centered.mean(axis=-1, keepdims=True)
        return normalize(centered, 1, self.eps).astype(x.dtype)


class PlainRMSNorm(nnx.Module):
    """RMS norm (arXiv:1910.07467) over the last axis, without a scale."""

    def __init__(self, letters: str, sizes: Mapping[str, int], eps: float, *, dtype: DTypeLike):
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return normalize(x, 1, self.eps).astype(x.dtype)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """Returns the tanh approximation of GELU (arXiv:1606.08415), computed in float32, in the dtype of x."""
    x_32 = x.astype(jnp.float32)
    # (1 + tanh(y)) / 2 is sigmoid(2 y), which does not lose digits where tanh is near -1.
    return (x_32 * nnx.sigmoid(math.sqrt(8 / math.pi) * (x_32 + 0.044715 * x_32**3))).astype(x.dtype)


def gelu(x: jax.Array) -> jax.Array:
    """Returns GELU (arXiv:1606.08415), computed in float32, in the dtype of x."""
    return nnx.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype)


def relu2(x: jax.Array) -> jax.Array:
    """Returns the square of the positive part (arXiv:2109.08668)."""
    return jnp.square(nnx.relu(x))


def soft_capped(x: jax.Array, cap: jax.Array | float | None) -> jax.Array:
    """Returns x, limited to between -cap and cap by a tanh; unchanged without a cap."""
    return x if cap is None else jnp.tanh(x / cap) * cap


def rope_cos_sin(
    rope: Rope | None, rope_dim: int, pos_BT: jax.Array, slots: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine, each [B, T, 1, R/2] in float32, of the rotary angle of each pair of the R dimensions
    that have rotary positions.

    Args:
        rope: the rotary positions; without (None) all angles are 0.
        rope_dim: R.
        pos_BT: positions of the tokens, -1 for padding.
        slots: length of the cache, None without one. Where rates depend on the length of a sequence, this is the
            length: keys in the cache cannot be turned again when the sequence grows.
    """
    if rope is None:
        zeros = jnp.zeros((*pos_BT.shape, 1, rope_dim // 2), jnp.float32)
        return jnp.ones_like(zeros), zeros
    rates, factor = rope.inverse_frequencies(rope_dim)
    if rope.depends_on_length:
        length_B111 = jnp.max(pos_BT, axis=1)[:, None, None, None] + 1 if slots is None else slots
        angles = pos_BT[:, :, None, None].astype(jnp.float32) * _rates_of_length(rope, rope_dim, length_B111)
    else:
        angles = pos_BT[:, :, None, None].astype(jnp.float32) * rates
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def mrope_cos_sin(
    rope: Rope | None, rope_dim: int, at_ABT: jax.Array, mrope: Mrope | None
) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine as `rope_cos_sin`, of positions by time, row and column (mrope, arXiv:2409.12191): each
    pair of dimensions turns by one of the three. `MropeOfDimensions` gives each dimension an angle [B, T, 1, R]."""
    assert rope is not None
    assert mrope is not None
    rates, factor = rope.inverse_frequencies(rope_dim)
    at_BTR = jnp.moveaxis(at_ABT[np.asarray(mrope.axis_of_angles(rope_dim // 2))], 0, -1)
    angles = at_BTR[:, :, None].astype(jnp.float32) * np.resize(rates, at_BTR.shape[-1])
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def sinusoids(pos_BT: jax.Array, width: int, *, open_ended: bool = False) -> jax.Array:
    """Returns the sines, then the cosines [B, T, D] of the angles of positions (arXiv:1706.03762, section 3.5), with
    rates from 1 to 1/10000, in float32. `open_ended` rates end one before 1/10000, as in the paper."""
    half = width // 2
    rates = np.exp(np.arange(half) * (-np.log(10000) / (half - 1 + open_ended))).astype(np.float32)
    angles = pos_BT[..., None].astype(jnp.float32) * rates
    sines = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return jnp.pad(sines, ((0, 0), (0, 0), (0, width % 2)))


def _rates_of_length(rope: Rope, rope_dim: int, length: Any) -> jax.Array:
    """Returns the rates [R/2] for sequences of a length that may not be known before the model runs."""
    short, _ = rope.inverse_frequencies(rope_dim)
    original = rope.original_max_position_embeddings
    if rope.type == "longrope":
        long, _ = rope.inverse_frequencies(rope_dim, original + 1)
        return jnp.where(length > original, long, short)
    growth = rope.growth(jnp.maximum(jnp.asarray(length, jnp.float32), original))
    exponents = np.arange(0, rope_dim, 2, dtype=np.float32) / np.float32(rope_dim - 2)
    return jnp.asarray(short) * jnp.exp(-exponents * jnp.log(growth))


def apply_rope(x_BTNH: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (i, i + R/2) of the first R dimensions of each head in the dtype of `cos_sin`, which has R/2
    angles. Returns [B, T, N, H] in the dtype of `x_BTNH`."""
    cos, sin = cos_sin
    R = 2 * cos.shape[-1]
    a, b = x_BTNH[..., : R // 2], x_BTNH[..., R // 2 : R]
    rest = [x_BTNH[..., R:]] if x_BTNH.shape[-1] > R else []
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, *rest], axis=-1).astype(x_BTNH.dtype)


def apply_rope_to_neighbours(x_BTNH: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """`apply_rope` for families that rotate the pairs (2i, 2i + 1) of the first R dimensions. The result has another
    order of these dimensions, the same for queries and keys."""
    R = 2 * cos_sin[0].shape[-1]
    return apply_rope(jnp.concatenate([deinterleave(x_BTNH[..., :R]), x_BTNH[..., R:]], axis=-1), cos_sin)


def deinterleave(x_BTNH: jax.Array) -> jax.Array:
    """Moves the elements (2i, 2i + 1) of each head to (i, i + H/2), for families that rotate adjacent pairs. Returns
    [B, T, N, H]. Scores do not change if queries and keys are both reordered."""
    return jnp.concatenate([x_BTNH[..., 0::2], x_BTNH[..., 1::2]], axis=-1)


def is_visible(
    pos_BT: jax.Array, pos_BS: jax.Array, window: jax.Array | int, *, both_ways: jax.Array | bool = False
) -> jax.Array:
    """Returns the causal mask [B, T, S]: a token sees the keys at its own position and at the `window` - 1 positions
    before it, with `both_ways` also at the `window` - 1 positions behind it. `pos_BT` are the positions of tokens,
    `pos_BS` the positions of keys, -1 for padding, which is not seen."""
    distance_BTS = pos_BT[:, :, None] - pos_BS[:, None, :]
    if both_ways is not False:  # true, or traced
        distance_BTS = jnp.where(both_ways, jnp.abs(distance_BTS), distance_BTS)
    visible_BTS: jax.Array = (pos_BS[:, None, :] >= 0) & (distance_BTS >= 0) & (distance_BTS < window)
    return visible_BTS


def attention(
    q_BTNH: jax.Array,
    kv: KV,
    visible_BTS: jax.Array,
    *,
    scale: jax.Array | float | None = None,
    cap: jax.Array | float | None = None,
    bias_BNTS: jax.Array | None = None,
) -> jax.Array:
    """Returns softmax attention [B, T, N, H]. G = N/K query heads share a key-value head (arXiv:2305.13245), which is
    not repeated in memory. `visible_BTS` is the mask. The products of queries and keys are multiplied by `scale`, by
    default H^-0.5, and limited by a soft `cap`, both perhaps of each query [B, 1, 1, T, 1]; then `bias_BNTS` is added,
    which may have one row for all tokens T."""
    B, T, N, H = q_BTNH.shape
    K = kv.k_BSKH.shape[2]
    q_BTKGH = placed(q_BTNH.reshape(B, T, K, N // K, H), "B T K G H", rules_for(kv))
    scores_BKGTS = soft_capped(kv.scores(q_BTKGH) * (H**-0.5 if scale is None else scale), cap)
    if bias_BNTS is not None:
        scores_BKGTS += bias_BNTS.reshape(B, K, N // K, *bias_BNTS.shape[2:])
    scores_BKGTS = jnp.where(visible_BTS[:, None, None], scores_BKGTS, MASKED_SCORE)
    y_BTKGH = kv.weighted_values(jax.nn.softmax(scores_BKGTS, axis=-1), q_BTNH.dtype)
    return placed(y_BTKGH.reshape(B, T, N, -1), "B T N H").astype(q_BTNH.dtype)
