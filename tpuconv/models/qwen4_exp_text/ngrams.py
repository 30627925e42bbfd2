"""Embeddings of n-grams: each token gets the embeddings of the n-grams that end with it, which hashes number."""

from dataclasses import dataclass
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import CenteredRMSNorm, Einsum, Embed, Keys, normal, normalize
from tpuconv.models.common.recurrence import LayerState, PackedTokens
from tpuconv.models.common.steps import Step
from tpuconv.models.common.streams import by_stream
from tpuconv.models.qwen4_exp_text.family import Config, NGramHash
from tpuconv.notation.letters import with_letters

LEGEND = {"e": "streams", "c": "ngram_width", "h": "ngram_taps"}
"""The words of this module, by the letters of its einsums and arrays."""

TwoWords = tuple[jax.Array, jax.Array]
"""The upper and the lower 32 bits of integers of 64 bits, which JAX does not have by default."""


def wide_product(x: jax.Array, factor: int) -> TwoWords:
    """Returns x, uint32, times a factor of 64 bits, modulo 2^64."""
    low, high = factor & 0xFFFFFFFF, factor >> 32
    x0, x1, f0, f1 = x & 0xFFFF, x >> 16, jnp.uint32(low & 0xFFFF), jnp.uint32(low >> 16)
    middle = ((x0 * f0) >> 16) + ((x0 * f1) & 0xFFFF) + ((x1 * f0) & 0xFFFF)
    carried = x1 * f1 + ((x0 * f1) >> 16) + ((x1 * f0) >> 16) + (middle >> 16)
    return x * jnp.uint32(high) + carried, x * jnp.uint32(low)


def remainders(x: TwoWords, divisors: tuple[int, ...]) -> jax.Array:
    """Returns the remainders [..., n] of x [..., n], or of x [..., 1], by n divisors of less than 32 bits, in uint32.
    The bits of x follow one another, as many at once as the largest divisor leaves room for."""
    room, by = 32 - max(divisors).bit_length(), jnp.array(divisors, jnp.uint32)
    rest = jnp.zeros(len(divisors), jnp.uint32)
    for word in x:
        for left in range(32, 0, -room):
            bits = min(room, left)
            rest = ((rest << bits) | ((word >> (left - bits)) & ((1 << bits) - 1))) % by
    return rest


def ngram_numbers(ids_BS: jax.Array, numbering: NGramHash, end: int, fill: int | None = None) -> jax.Array:
    """Returns the numbers [B, T, n] of the n-grams that end with each token, shorter ones first: the remainders of the
    exclusive or of the products of its tokens and the multipliers.

    Args:
        ids_BS: the tokens, after as many earlier ones as the longest n-gram has besides.
        numbering: the multipliers and hashes.
        end: the token that n-grams do not reach over; it stands for all before it.
        fill: the token whose multiples are taken of `end`; by default `end` itself.
    """
    before = len(numbering.multipliers) - 1
    hashes = len(numbering.sizes) // before
    tokens = ids_BS.shape[1] - before
    mixed, within, numbers = None, jnp.array(True), []
    for back, multiplier in enumerate(numbering.multipliers):
        ids_BT = jnp.where(within, ids_BS[:, before - back : before - back + tokens], end)
        known_BT = ids_BT if fill is None else jnp.where(ids_BT == end, fill, ids_BT)
        high, low = wide_product(known_BT.astype(jnp.uint32), multiplier)
        if mixed is None:
            mixed = high, low
            continue
        mixed, within = (mixed[0] ^ high, mixed[1] ^ low), ids_BT != end
        own = slice((back - 1) * hashes, back * hashes)
        each = mixed[0][..., None], mixed[1][..., None]
        numbers.append(remainders(each, numbering.sizes[own]) + jnp.array(numbering.starts[own], jnp.uint32))
    return jnp.concatenate(numbers, axis=-1).astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NGramState(LayerState):
    """The state of a layer for n-grams: the last tokens, and the last inputs of the convolution in float32."""

    axes: ClassVar[tuple[str, ...]] = ("B ngram_tokens", "B ngram_tokens streams D")

    ids_BP: jax.Array
    x_BPeD: jax.Array

    @classmethod
    def empty(cls, config: Config, *batch: int) -> Self:
        """Returns the state before the first token."""
        sizes, inputs = config.sizes, config.ngram_size * (config.ple_conv_kernel_size - 1)
        ids_BP = jnp.full((*batch, config.ngram_size - 1), config.end_token, jnp.int32)
        return cls(ids_BP, jnp.zeros((*batch, inputs, sizes["streams"], sizes["D"]), jnp.float32))


class StreamNorm(CenteredRMSNorm):
    """RMS norm of each residual stream, x [B, T, e, D], with a scale of its own that is stored less 1."""

    def __init__(self, config: Config, *, dtype: DTypeLike):
        super().__init__("eD", with_letters(config.sizes, LEGEND), config.rms_norm_eps, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = 1 + self.scale[...].astype(jnp.float32)
        return (normalize(x, 1, self.eps) * scale).astype(x.dtype)


class DilatedConvolution(nnx.Module):
    """A causal convolution of each channel along the tokens. Its taps are `step` tokens apart; the last one belongs to
    the current token."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, LEGEND)
        self.kernel = nnx.Param(normal(keys(), tuple(sizes[letter] for letter in "eDh"), dtype))
        self.step = config.ngram_size

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the output for the last tokens [B, T, e, D] of the inputs, which have as many before as the taps
        reach over. Sums are in float32."""
        kernel = self.kernel[...].astype(jnp.float32)
        taps = kernel.shape[-1]
        tokens = inputs.shape[1] - self.step * (taps - 1)
        starts = range(0, self.step * taps, self.step)
        return jnp.asarray(sum(inputs[:, at : at + tokens] * kernel[..., i] for i, at in enumerate(starts)))


class NGrams(nnx.Module):
    """The values that embeddings of n-grams add to the residual streams, x [B, T, (e D)] to [B, T, (e D)]: a
    value, which each stream weights by its product with a key, and a convolution of the weighted values. Also returns
    the state after these tokens."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, LEGEND)
        self.config, self.numbering = config, config.ngram_hash(layer)
        self.table = Embed({"V": self.numbering.rows, "D": sizes["ngram_dim"]}, dtype=dtype, keys=keys)
        self.key = Einsum("BTc,ceD->BTeD", sizes, dtype=dtype, keys=keys)
        self.value = Einsum("BTc,cD->BTD", sizes, dtype=dtype, keys=keys)
        self.key_norm = StreamNorm(config, dtype=dtype)
        self.query_norm = StreamNorm(config, dtype=dtype)
        self.conv_norm = StreamNorm(config, dtype=dtype)
        self.conv = DilatedConvolution(config, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, state: NGramState | None) -> tuple[jax.Array, NGramState]:
        config = self.config
        state = NGramState.empty(config, len(x_BTD)) if state is None else state
        packed, new_BT1 = PackedTokens.of(x_BTD, step), PackedTokens.of(step.input[..., None], step).x_BTD
        ids_BS = jnp.concatenate([state.ids_BP, new_BT1[..., 0].astype(jnp.int32)], axis=1)
        x_BTC = self.table(ngram_numbers(ids_BS, self.numbering, config.end_token)).reshape(*x_BTD.shape[:2], -1)
        query_BTeD = self.query_norm(by_stream(packed.x_BTD, config.hc_count)).astype(jnp.float32)
        product_BTe1 = (self.key_norm(self.key(x_BTC)) * query_BTeD).sum(axis=-1, keepdims=True)
        product_BTe1 *= config.hidden_size**-0.5
        root_BTe1 = jnp.sign(product_BTe1) * jnp.sqrt(jnp.maximum(jnp.abs(product_BTe1), 1e-6))
        value_BTeD = nnx.sigmoid(root_BTe1).astype(x_BTD.dtype) * self.value(x_BTC)[:, :, None]
        inputs = jnp.concatenate([state.x_BPeD, self.conv_norm(value_BTeD).astype(jnp.float32)], axis=1)
        y_BTeD = value_BTeD + nnx.silu(self.conv(inputs).astype(x_BTD.dtype))
        state = NGramState(_last(ids_BS, state.ids_BP, packed), _last(inputs, state.x_BPeD, packed))
        return packed.unpacked(y_BTeD.reshape(x_BTD.shape)), state


def _last(x: jax.Array, before: jax.Array, packed: PackedTokens) -> jax.Array:
    """As many of the last tokens of x [B, P + T, ...], which begins with those `before`, as these were."""
    at_BP = packed.length_B[:, None] + jnp.arange(before.shape[1])
    return jnp.take_along_axis(x, at_BP.reshape(*at_BP.shape, *[1] * (x.ndim - 2)), axis=1)
