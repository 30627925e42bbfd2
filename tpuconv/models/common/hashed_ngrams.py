"""Numbers of n-grams by hashes."""

import jax
import jax.numpy as jnp

from tpuconv.models.common.ngram_hash import NGramHash

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
