"""The KV cache: keys and values of earlier tokens, so that a step computes those of its own tokens alone.

Every slot has the position of its token; -1 marks a slot that is empty or holds padding. So one rule
(`layers.is_visible`) covers left padding, right padding, prefill and decode.

An int8 cache holds for each vector int8 values and one scale. Attention multiplies scores and weights by the scales, so
that the cache is never dequantized.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.placement import placed, rules_for, sharding


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KV:
    """One layer's keys and values; with a leading axis L those of all layers. `axes` are the letters of each. Scales
    are there where keys and values are int8."""

    axes: ClassVar[tuple[str, ...]] = ("B S K H", "B S K H", "B S K", "B S K")

    k_BSKH: jax.Array
    v_BSKH: jax.Array
    k_scale_BSK: jax.Array | None = None
    v_scale_BSK: jax.Array | None = None

    @classmethod
    def empty(cls, config: DecoderConfig, shape: tuple[int, ...], dtype: DTypeLike) -> Self:
        """Zeros; `shape` is [B, S], or [L, B, S]."""
        keys = empty_vectors((*shape, config.axes["K"], config.axes["H"]), dtype)
        values = empty_vectors((*shape, config.axes["K"], config.axes["H"]), dtype)
        return cls(keys[0], values[0], keys[1], values[1])

    def scores(self, q_BTKGH: jax.Array) -> jax.Array:
        """Products of queries and keys [B, K, G, T, S], in float32: softmax needs them so, and rounding them would cost
        more than any other rounding of attention."""
        k_BSKH = to_compute_dtype(self.k_BSKH, q_BTKGH.dtype)
        scores_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
        return scores_BKGTS if self.k_scale_BSK is None else scores_BKGTS * _by_key(self.k_scale_BSK)

    def weighted_values(self, weights_BKGTS: jax.Array, dtype: DTypeLike) -> jax.Array:
        """The sum of the values [B, T, K, G, H], weighted by `weights_BKGTS`, which is in float32 and is rounded to
        `dtype`."""
        if self.v_scale_BSK is not None:
            weights_BKGTS = weights_BKGTS * _by_key(self.v_scale_BSK)
        return jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS.astype(dtype), to_compute_dtype(self.v_BSKH, dtype))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """A pytree: pass it through `jax.jit` and donate it, then each step writes in place. `used` slots are taken.
    `layers` has an entry for each layer, or one for all: `KV`, or what the family has instead."""

    layers: Any
    positions_BS: jax.Array
    used: jax.Array

    @classmethod
    def empty(cls, layers: Any, batch: int, length: int) -> Self:
        """With no slot taken of `length`."""
        return cls(layers, jnp.full((batch, length), -1, jnp.int32), jnp.zeros((), jnp.int32))

    def take(self, pos_BT: jax.Array) -> "Cache":
        """The cache whose next slots are those of tokens at these positions. Their keys and values are to come."""
        slots, tokens = self.positions_BS.shape[1], pos_BT.shape[1]
        known_used = 0 if isinstance(self.used, jax.core.Tracer) else int(self.used)
        if known_used + tokens > slots:
            raise UsageError(f"the cache has {slots} slots, of which {known_used} are used: {tokens} tokens do not fit")
        positions_BS = jax.lax.dynamic_update_slice(self.positions_BS, pos_BT, (0, self.used))
        return Cache(self.layers, positions_BS, self.used + tokens)


def empty_vectors(shape: tuple[int, ...], dtype: DTypeLike) -> tuple[jax.Array, jax.Array | None]:
    """Empty vectors, the last axis theirs, and their scales."""
    scales = jnp.zeros(shape[:-1], jnp.float32) if jnp.dtype(dtype) == jnp.int8 else None
    return jnp.zeros(shape, dtype), scales


def quantize_vectors(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Vectors as int8 and the scale of each, by its largest element."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127
    return jnp.round(x / jnp.where(scale == 0, 1, scale)[..., None]).astype(jnp.int8), scale


def to_compute_dtype(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Casts an int8 array of a cache to the dtype of the product; XLA fuses the cast, so that int8 is read. An array of
    another dtype is returned as it is."""
    return x.astype(dtype) if x.dtype == jnp.int8 else x


def write_slots(old: Any, new: Any, slot: jax.Array | int) -> Any:
    """A layer's cache with the vectors of new tokens write_slots at `slot`; they are quantized where the cache holds
    int8, and the scales then follow all vectors, in the same order."""

    def one(old: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(old, new.astype(old.dtype), (0, slot, *[0] * (old.ndim - 2)))

    leaves, form = jax.tree.flatten(old)
    vectors = jax.tree.leaves(new)
    if leaves[0].dtype == jnp.int8:
        vectors = [part for parts in zip(*map(quantize_vectors, vectors), strict=True) for part in parts]
    return jax.tree.unflatten(form, map(one, leaves, vectors))


def _by_key(scale_BSK: jax.Array) -> jax.Array:
    """[B, K, 1, 1, S]: beside scores."""
    return jnp.transpose(scale_BSK, (0, 2, 1))[:, :, None, None]


def append_kv(kv: KV | None, k_BTKH: jax.Array, v_BTKH: jax.Array, slot: jax.Array | int) -> KV:
    """Appends the keys and values of this step's tokens to a layer's cache, at `slot`. Without a cache (`kv` is None)
    returns these alone."""
    k_BTKH, v_BTKH = (placed(new, "B T K H") for new in (k_BTKH, v_BTKH))
    rules = rules_for(KV(k_BTKH, v_BTKH) if kv is None else kv)
    k_BTKH, v_BTKH = (placed(new, "B T K H", rules) for new in (k_BTKH, v_BTKH))
    if kv is None:
        return KV(k_BTKH, v_BTKH)
    out: KV = write_slots(kv, KV(k_BTKH, v_BTKH), slot)
    return out


def cache_shardings(cache: Cache, mesh: Mesh) -> Cache:
    """Where each array of a cache lies on a mesh, in its place: positions everywhere, keys and values as attention
    divides them. Shapes are enough of the cache."""

    def entry(layer: Any) -> Any:
        leaves, form = jax.tree.flatten(layer)
        stacked = leaves[0].ndim - len(type(layer).axes[0].split())
        bare = [jax.ShapeDtypeStruct(x.shape[stacked:], x.dtype) for x in leaves]  # type: ignore[no-untyped-call]
        rules = rules_for(jax.tree.unflatten(form, bare), mesh)
        axes = (" ".join([*["L"] * stacked, own]) for own in type(layer).axes)
        places = [sharding(own, x.shape, mesh, rules) for own, x in zip(axes, leaves, strict=False)]
        return jax.tree.unflatten(form, places)

    everywhere: Any = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    layers = tuple(map(entry, cache.layers)) if isinstance(cache.layers, tuple) else entry(cache.layers)
    return Cache(layers, everywhere, everywhere)
