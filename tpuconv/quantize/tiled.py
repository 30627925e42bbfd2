"""Products of few tokens with quantized values whose groups have scales, for a TPU.

If they are dequantized first, as in Qwix, the scales of all groups are spread in fast memory, which takes ten times as
long as the product. Here quantized values are multiplied as they are, group by group, and then the scales.
"""

from math import prod
from string import ascii_letters

import jax
import jax.numpy as jnp

from tpuconv.models.kernels.grouped import DEPTH


def is_for(equation: str, x: jax.Array, qvalues: jax.Array, scale: jax.Array) -> bool:
    """Returns True if this product is faster: groups are as deep as the matrix unit, and the sums of a group are
    smaller than its quantized values."""
    left, right, out = _letters(equation)
    summed = [letter for letter in right if letter not in out]
    tiles = {letter: size // count for letter, size, count in zip(right, qvalues.shape, scale.shape, strict=True)}
    rows = prod(size for letter, size in zip(left, x.shape, strict=True) if letter not in summed)
    depth = prod(tiles[letter] for letter in summed)
    is_tiled = any(scale.shape[right.index(letter)] > 1 for letter in summed)
    return is_tiled and depth >= DEPTH and 2 * rows <= depth


def einsum(equation: str, x: jax.Array, qvalues: jax.Array, scale: jax.Array) -> jax.Array:
    """`jnp.einsum` of `x` and of `qvalues` times `scale`, which has one number for each group. Sums are in float32; the
    result has the dtype of `x`."""
    left, right, out = _letters(equation)
    counts = dict(zip(right, scale.shape, strict=True))
    tiled = [letter for letter in right if letter not in out and counts[letter] > 1]
    unused = (letter for letter in ascii_letters if letter not in left + right + out)
    group = dict(zip(tiled, unused, strict=False))  # the letter that counts groups; its own counts elements within one
    numbers = "".join(group.values())

    def split(letters: str, array: jax.Array) -> tuple[str, jax.Array]:
        names, shape = "", []
        for letter, size in zip(letters, array.shape, strict=True):
            names += group.get(letter, "") + letter
            shape += [counts[letter], size // counts[letter]] if letter in tiled else [size]
        return names, array.reshape(shape)

    (left, x_split), (right_split, qvalues_split) = split(left, x), split(right, qvalues)
    sums = jnp.einsum(
        f"{left},{right_split}->{numbers}{out}",
        x_split,
        qvalues_split.astype(x.dtype),
        preferred_element_type=jnp.float32,
    )
    scale = scale.astype(jnp.float32)
    for axis, (letter, size) in enumerate(zip(right, qvalues.shape, strict=True)):
        if letter in out:
            scale = jnp.repeat(scale, size // counts[letter], axis=axis)
    shared = "".join(letter for letter in out if letter in right)
    names = "".join(group.get(letter, letter) for letter in right)
    scale = jnp.einsum(f"{names}->{numbers}{shared}", scale)
    missing = [len(numbers) + axis_ for axis_, letter in enumerate(out) if letter not in shared]
    return jnp.sum(sums * jnp.expand_dims(scale, missing), axis=tuple(range(len(numbers)))).astype(x.dtype)


def _letters(equation: str) -> tuple[str, str, str]:
    operands, out = equation.split("->")
    left, right = operands.split(",")
    return left, right, out
