"""Layers that keep a state instead of keys and values: padding, causal convolutions, and models in which some layers
are such."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import PreNormBlock
from tpuconv.models.common.cache import KV, Cache
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Keys, normal
from tpuconv.models.common.steps import Step

CHUNK = 64
"""Tokens that are computed at once by matrix products. The state is passed from chunk to chunk."""

UNROLLED = 8
"""Tokens of `scan_tokens` that the compiler may fuse. 16 are not faster."""

# By default a TPU multiplies float32 as bfloat16, and errors of the state add up.
exact_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class LayerState:
    """The cache of a layer whose size does not depend on the number of tokens. Its arrays are in float32, whatever the
    dtype of other caches.

    Attributes:
        axes: the letters and words of each array. `taps` are the last inputs of a convolution, one less than its taps.
    """

    axes: ClassVar[tuple[str, ...]]

    @classmethod
    def empty(cls, config: Any, *batch: int) -> Self:
        """Returns a state of zeros."""
        sizes = {**config.sizes, "taps": config.sizes.get("taps", 1) - 1}
        shapes = ([sizes[letter] for letter in axes.split()[1:]] for axes in cls.axes)
        return cls(*(jnp.zeros((*batch, *shape), jnp.float32) for shape in shapes))


class PackedTokens(NamedTuple):
    """The tokens of a call with padding at the end of each row, where it changes no state.

    Attributes:
        x_BTD: the tokens.
        is_real_BT: False for padding.
        length_B: number of tokens of each row.
        order_BT1: column of each token before; None for a single column.
    """

    x_BTD: jax.Array
    is_real_BT: jax.Array
    length_B: jax.Array
    order_BT1: jax.Array | None

    @classmethod
    def of(cls, x_BTD: jax.Array, step: Step) -> Self:
        """Returns the tokens `x_BTD` of a step."""
        is_real_BT = step.pos_BT >= 0
        length_B = is_real_BT.sum(axis=1)
        if x_BTD.shape[1] == 1:
            return cls(x_BTD, is_real_BT, length_B, None)
        order_BT1 = jnp.argsort(~is_real_BT, axis=1, stable=True)[..., None]
        is_real_BT = jnp.arange(x_BTD.shape[1]) < length_B[:, None]
        return cls(jnp.take_along_axis(x_BTD, order_BT1, axis=1), is_real_BT, length_B, order_BT1)

    def placed(self, values_BT: jax.Array) -> jax.Array:
        """Returns values [B, T] of the tokens of a step in the columns of these tokens."""
        return values_BT if self.order_BT1 is None else jnp.take_along_axis(values_BT, self.order_BT1[..., 0], axis=1)

    def unpacked(self, y_BTD: jax.Array) -> jax.Array:
        """Returns the outputs `y_BTD` in the columns of their tokens."""
        if self.order_BT1 is None:
            return y_BTD
        return jnp.take_along_axis(y_BTD, jnp.argsort(self.order_BT1, axis=1), axis=1)


class Convolution(nnx.Module):
    """A causal convolution of each channel along the tokens. `letters` are the letters of the channels; the last tap is
    that of the current token."""

    def __init__(self, letters: str, sizes: Any, *, bias: bool = False, dtype: DTypeLike, keys: Keys):
        shape = tuple(sizes[letter] for letter in letters)
        self.kernel = nnx.Param(normal(keys(), (*shape, sizes["taps"]), dtype))
        self.bias = nnx.Param(jnp.zeros(shape, dtype)) if bias else None

    def __call__(self, x: jax.Array, last: jax.Array, length_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the output for x [B, T, ...], and the last inputs of the first `length_B` tokens [B, c - 1, ...], as
        `last` has them of the tokens before. Sums are in float32."""
        kernel, tokens = self.kernel[...].astype(jnp.float32), x.shape[1]
        taps = kernel.shape[-1]
        inputs = jnp.concatenate([last, x.astype(jnp.float32)], axis=1)
        y = jnp.asarray(sum(inputs[:, tap : tap + tokens] * kernel[..., tap] for tap in range(taps)))
        if self.bias is not None:
            y += self.bias[...].astype(jnp.float32)
        at_Bc = length_B[:, None] + jnp.arange(taps - 1)
        last = jnp.take_along_axis(inputs, at_Bc.reshape(*at_Bc.shape, *[1] * (x.ndim - 2)), axis=1)
        return y.astype(x.dtype), last


def in_chunks(x: jax.Array, size: int) -> jax.Array:
    """Returns x [B, T, ...] as chunks [T / size, B, size, ...] of tokens, with zeros after the last token."""
    batch, tokens = x.shape[:2]
    count = -(-tokens // size)
    x = jnp.pad(x, [(0, 0), (0, count * size - tokens), *[(0, 0)] * (x.ndim - 2)])
    return jnp.moveaxis(x.reshape(batch, count, size, *x.shape[2:]), 1, 0)


def from_chunks(x: jax.Array, tokens: int) -> jax.Array:
    """Returns the first `tokens` tokens [B, T, ...] of chunks, the inverse of `in_chunks`."""
    count, batch, size = x.shape[:3]
    return jnp.moveaxis(x, 0, 1).reshape(batch, count * size, *x.shape[3:])[:, :tokens]


def scan_chunks(
    run_chunk: Callable[..., tuple[jax.Array, jax.Array]],
    inputs: tuple[jax.Array, ...],
    s: jax.Array,
    size: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs [B, T, ...] and the state after these tokens.

    Args:
        run_chunk: returns the state [B, ...] after the tokens of a chunk and their outputs [B, t, ...], of the state
            before them and their inputs [B, t, ...]. Inputs that are 0 leave the state as it is.
        inputs: arrays [B, T, ...].
        s: the state before these tokens.
        size: tokens of a chunk.
    """
    tokens = inputs[0].shape[1]
    chunks = tuple(in_chunks(x, min(size, tokens)) for x in inputs)
    s, y = jax.lax.scan(lambda s, chunk: run_chunk(s, *chunk), s, chunks)
    return from_chunks(y, tokens), s


def decays(rate_Bnrt: jax.Array) -> jax.Array:
    """Returns the decay [B, n, r, t, s] of a state from after token s until token t of a chunk, 0 where s is later.
    `rate_Bnrt` are the logarithms of each token's decay.

    Sums run from token to token: differences of sums from the first token on would lose small rates among large
    ones."""
    tokens = rate_Bnrt.shape[-1]
    earlier = jnp.tril(jnp.ones((tokens, tokens), bool))
    sums_Bnrts = jnp.cumsum(jnp.where(jnp.tril(earlier, -1), rate_Bnrt[..., None], 0), axis=-2)
    return jnp.where(earlier, jnp.exp(sums_Bnrts), 0)


def scan_tokens(
    step: Callable[..., tuple[jax.Array, jax.Array]], inputs: tuple[jax.Array, ...], s: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs [B, T, ...] and the state after these tokens of a state that has no form by matrix products,
    since each of its elements decays at a rate of its own.

    The TPU compiler fuses a few tokens of the loop, so that the state is read and written once for them. An associative
    scan of 64 tokens writes the states of all of them several times: five times the bytes for Mamba-1, and three times
    the estimated time (docs/log.md).

    Args:
        step: returns the state [B, ...] after a token and the output [B, ...], of the state before it and the inputs
            [B, ...] of the token. Inputs that are 0 leave the state as it is.
        inputs: arrays [B, T, ...] in float32.
        s: the state before these tokens, in float32.
    """

    def run_chunk(s: jax.Array, *chunk: jax.Array) -> tuple[jax.Array, jax.Array]:
        outputs = []
        for token in range(chunk[0].shape[1]):
            s, y = step(s, *(x[:, token] for x in chunk))
            outputs.append(y)
        return s, jnp.stack(outputs, axis=1)

    if inputs[0].shape[1] == 1:
        s, y = run_chunk(s, *inputs)
        return y, s
    return scan_chunks(run_chunk, inputs, s, UNROLLED)


class HybridBlock(PreNormBlock):
    """One layer: attention or, in `state_layers`, a part with a state; then an MLP or experts, each after a norm, with
    residual connections.

    Attributes:
        mixer_type: the class of the part with a state.
    """

    mixer_type: ClassVar[Callable[..., Any]]

    def new_attention(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
        if layer in config.layer_sets["state_layers"]:
            return self.new_mixer(config, layer, dtype=dtype, keys=keys)
        return self.attention_type(config, dtype=dtype, keys=keys)

    def new_mixer(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
        """Returns the part with a state."""
        return self.mixer_type(config, dtype=dtype, keys=keys)


class HybridDecoder(Decoder):
    """A decoder in which `state_layers` keep a state instead of keys and values.

    Attributes:
        state_type: the class of the state.
    """

    state_type: ClassVar[Any]

    def cached(self, config: Any, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Returns the empty cache of a layer; `shape` is [B, S]."""
        if layer in config.layer_sets["state_layers"]:
            return self.state_type.empty(config, *shape[:-1])
        return self.cached_keys(config, layer, shape, dtype)

    def without(self, ids_BT: jax.Array, kept_BT: jax.Array, before: Cache, after: Cache) -> Cache:
        """As `Decoder.without`. A state cannot forget a token: if one is not kept, the call is repeated with the
        states before it."""

        def is_state(layer: Any) -> bool:
            return isinstance(layer, self.state_type)

        def repeated() -> Any:
            layers = jax.tree.map(
                lambda old, new: old if is_state(old) else new, before.layers, after.layers, is_leaf=is_state
            )
            return self.run_layers(ids_BT, kept_BT, replace(before, layers=layers))[1].layers

        layers = jax.lax.cond(kept_BT.all(), lambda: after.layers, repeated)
        return replace(super().without(ids_BT, kept_BT, before, after), layers=layers)

    def cached_keys(self, config: Any, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Returns the empty cache of a layer with attention."""
        return KV.empty(config, layer, shape, dtype)
