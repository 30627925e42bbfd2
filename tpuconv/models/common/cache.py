"""The KV cache: keys and values of earlier tokens.

Each slot has the position of its token; -1 marks an empty slot or padding. So one rule (`layers.is_visible`) is enough
for left padding, right padding, prefill and decode.

An int8 or FP8 cache has values of that type and one scale for each vector, or static scales of each layer. Attention
multiplies its scores and weights by the scales; the cache is not dequantized.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.placement import placed, rules_for, sharding

LARGEST_CACHED: Mapping[str, float] = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""The types of a cache with scales, and what the largest value of each vector becomes."""
STATIC_DTYPE = "float8_e4m3fn"
"""The type of a cache with static scales."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KV:
    """The keys and values of one layer, or with a leading axis L of all layers. An int8 or FP8 cache has scales. `axes`
    are the letters of each array."""

    axes: ClassVar[tuple[str, ...]] = ("B S K H", "B S K H", "B S K", "B S K")

    k_BSKH: jax.Array
    v_BSKH: jax.Array
    k_scale_BSK: jax.Array | None = None
    v_scale_BSK: jax.Array | None = None

    @classmethod
    def empty(cls, config: DecoderConfig, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> Self:
        """Returns a cache of zeros for a layer; `shape` is [B, S], or [L, B, S] for all layers."""
        keys = empty_vectors((*shape, config.sizes["K"], config.sizes["H"]), dtype)
        values = empty_vectors((*shape, config.sizes["K"], config.sizes["H"]), dtype)
        return cls(keys[0], values[0], keys[1], values[1])

    def scores(self, q_BTKGH: jax.Array) -> jax.Array:
        """Returns the products of queries and keys [B, K, G, T, S]. They are in float32, since rounding them would
        cause the largest error in attention."""
        k_BSKH = to_compute_dtype(self.k_BSKH, q_BTKGH.dtype)
        scores_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
        return scores_BKGTS if self.k_scale_BSK is None else scores_BKGTS * _by_key(self.k_scale_BSK)

    def weighted_values(self, weights_BKGTS: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Returns the weighted sum of the values [B, T, K, G, H] in `dtype`. The weights are float32, rounded to
        `dtype` for the product."""
        if self.v_scale_BSK is not None:
            weights_BKGTS = weights_BKGTS * _by_key(self.v_scale_BSK)
        return jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS.astype(dtype), to_compute_dtype(self.v_BSKH, dtype))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StaticKV(KV):
    """The FP8 keys and values of one layer with static scales [1, 1, 1], or [1, 1, K] with a scale for each head. The
    scales belong to the layer's attention: a new cache has zeros in their place, and each call of the model sets
    them."""

    axes: ClassVar[tuple[str, ...]] = ("B S K H", "B S K H", "1 1 K", "1 1 K")

    @classmethod
    def of(cls, kv: Any, block: Any) -> Any:
        """Returns an empty cache of a layer with room for the static scales of its block; unchanged if the block has
        none, or the cache is another one."""
        attention: Any = getattr(block, "attn", None)
        if type(kv) is not KV or kv.k_BSKH.dtype != jnp.dtype(STATIC_DTYPE) or not hasattr(attention, "k_scale"):
            return kv
        *stacked, count = attention.k_scale.shape
        zeros = jnp.zeros((*stacked, 1, 1, count), jnp.float32)
        return cls(kv.k_BSKH, kv.v_BSKH, zeros, zeros)

    def written(self, k_BTKH: jax.Array, v_BTKH: jax.Array, slot: jax.Array | int) -> Self:
        """Returns the cache with these keys and values at `slot`. Larger ones than a scale allows are clipped, as
        servers do."""

        def write(old_BSKH: jax.Array, new_BTKH: jax.Array, scale: jax.Array | None) -> jax.Array:
            assert scale is not None
            largest = LARGEST_CACHED[STATIC_DTYPE]
            values = jnp.clip(new_BTKH.astype(jnp.float32) / scale[..., None], -largest, largest)
            return jax.lax.dynamic_update_slice_in_dim(old_BSKH, values.astype(old_BSKH.dtype), slot, 1)

        return replace(
            self,
            k_BSKH=write(self.k_BSKH, k_BTKH, self.k_scale_BSK),
            v_BSKH=write(self.v_BSKH, v_BTKH, self.v_scale_BSK),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class IndexKeys:
    """The keys of an indexer, beside the keys of attention, in the model's dtype: rounded ones would select other
    tokens. `axes` are the letters of each array."""

    axes: ClassVar[tuple[str, ...]] = ("B S index_dim",)

    i_BSx: jax.Array

    @classmethod
    def empty(cls, config: DecoderConfig, shape: tuple[int, ...], dtype: DTypeLike) -> Self:
        """Returns zeros; `shape` is [B, S], or [L, B, S] for all layers."""
        return cls(jnp.zeros((*shape, config.sizes["index_dim"]), dtype))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """The cache of a model. A pytree: if it is donated to a jitted function, a step updates it in place.

    Attributes:
        layers: `KV`, or the family's own class, for each layer; or one with a leading axis L for all layers.
        positions_BS: position of the token in each slot, -1 for none.
        used: number of slots in use.
        mtp: the cache of the module for multi-token prediction, in the same slots; None without one.
        delta_B: what the images of earlier tokens add to the rotary positions of later ones; None without images. Of
            another shape than the ids [B, 1] of a step, for which XLA would take its memory.
        ids_BS: the token in each slot; None where no embedding reads tokens before others.
    """

    layers: Any
    positions_BS: jax.Array
    used: jax.Array
    mtp: Any = None
    delta_B: jax.Array | None = None
    ids_BS: jax.Array | None = None

    @classmethod
    def empty(cls, layers: Any, batch: int, length: int, mtp: Any = None) -> Self:
        """Returns a cache of `length` slots, none of them in use."""
        return cls(layers, jnp.full((batch, length), -1, jnp.int32), jnp.zeros((), jnp.int32), mtp)

    def take(self, pos_BT: jax.Array, ids_BT: jax.Array) -> "Cache":
        """Returns the cache with slots reserved for these tokens at these positions. Their keys and values are not yet
        written.

        Raises:
            UsageError: there are too few slots. Only if `used` is not traced.
        """
        slots, tokens = self.positions_BS.shape[1], pos_BT.shape[1]
        known_used = 0 if isinstance(self.used, jax.core.Tracer) else int(self.used)
        if known_used + tokens > slots:
            raise UsageError(f"the cache has {slots} slots, {known_used} of them in use: {tokens} tokens do not fit")

        def written(old_BS: jax.Array, new_BT: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(old_BS, new_BT.astype(old_BS.dtype), self.used, 1)

        ids_BS = None if self.ids_BS is None else written(self.ids_BS, ids_BT)
        return replace(self, positions_BS=written(self.positions_BS, pos_BT), ids_BS=ids_BS, used=self.used + tokens)

    def shifted(self, delta_B1: jax.Array | None) -> "Cache":
        """Returns the cache after images that add this to the rotary positions of later tokens."""
        if delta_B1 is None:
            return self
        delta_B = delta_B1[:, 0]
        return replace(self, delta_B=delta_B if self.delta_B is None else self.delta_B + delta_B)


def has_scales(dtype: DTypeLike) -> bool:
    """Returns whether the vectors of a cache of this dtype have scales."""
    return jnp.dtype(dtype).name in LARGEST_CACHED


def empty_vectors(shape: tuple[int, ...], dtype: DTypeLike) -> tuple[jax.Array, jax.Array | None]:
    """Returns zeros of this shape, whose last axis is the axis of the vectors, and for int8 and FP8 their scales, else
    None."""
    scales = jnp.zeros(shape[:-1], jnp.float32) if has_scales(dtype) else None
    return jnp.zeros(shape, dtype), scales


def quantize_vectors(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Returns the vectors (last axis) of `x` in a dtype of `LARGEST_CACHED`, and their scales in float32: max|x| by the
    largest value."""
    x, dtype = x.astype(jnp.float32), jnp.dtype(dtype)
    scale = jnp.max(jnp.abs(x), axis=-1) / LARGEST_CACHED[dtype.name]
    values = x / jnp.where(scale == 0, 1, scale)[..., None]
    return (jnp.round(values) if jnp.issubdtype(dtype, jnp.integer) else values).astype(dtype), scale


def to_compute_dtype(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns an int8 or FP8 array of a cache in the dtype of the product; XLA fuses the cast into the product. An
    array of another dtype is returned unchanged."""
    return x.astype(dtype) if has_scales(x.dtype) else x


def write_slots(old: Any, new: Any, slot: jax.Array | int) -> Any:
    """Returns a layer's cache `old` with the vectors of `new` written at `slot`. Those of int8 and FP8 arrays are
    quantized first."""

    def update(old: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), slot, 1)

    leaves, treedef = jax.tree.flatten(old)
    scales = []
    vectors = jax.tree.leaves(new)
    for i, vector in enumerate(vectors):  # the leaves of `old` are all values, then the scales of some
        if has_scales(leaves[i].dtype):
            vectors[i], scale = quantize_vectors(vector, leaves[i].dtype)
            scales.append(scale)
    return jax.tree.unflatten(treedef, map(update, leaves, [*vectors, *scales]))


def _by_key(scale_BSK: jax.Array) -> jax.Array:
    """[B, K, 1, 1, S], to multiply scores with."""
    return jnp.transpose(scale_BSK, (0, 2, 1))[:, :, None, None]


def append_kv(kv: KV | None, k_BTKH: jax.Array, v_BTKH: jax.Array, slot: jax.Array | int) -> KV:
    """Returns a layer's cache with the keys and values of this step's tokens written at `slot`. Without a cache (`kv`
    is None) returns these keys and values."""
    k_BTKH, v_BTKH = (placed(new, "B T K H") for new in (k_BTKH, v_BTKH))
    rules = rules_for(KV(k_BTKH, v_BTKH) if kv is None else kv)
    k_BTKH, v_BTKH = (placed(new, "B T K H", rules) for new in (k_BTKH, v_BTKH))
    if kv is None:
        return KV(k_BTKH, v_BTKH)
    if isinstance(kv, StaticKV):
        return kv.written(k_BTKH, v_BTKH, slot)
    out: KV = write_slots(kv, KV(k_BTKH, v_BTKH), slot)
    return out


def scaled_kv(kv: Any, block: Any) -> Any:
    """Returns the cache of a layer with the static scales of its block, if it takes them."""
    if not isinstance(kv, StaticKV):
        return kv
    k_scale, v_scale = (scale[...][None, None] for scale in (block.attn.k_scale, block.attn.v_scale))
    return replace(kv, k_scale_BSK=k_scale, v_scale_BSK=v_scale)


def cache_shardings(cache: Cache, mesh: Mesh) -> Cache:
    """Returns the sharding of each array of a cache, as a `Cache`: keys and values are sharded by the rules of
    attention, `positions_BS` and `used` are replicated. The cache may hold shapes instead of arrays."""

    def entry(layer: Any) -> Any:
        if layer is None:  # a layer that uses the cache of another one
            return None
        if isinstance(layer, tuple):  # all layers, or all parts of a layer
            return tuple(map(entry, layer))
        leaves, treedef = jax.tree.flatten(layer)
        stacked = leaves[0].ndim - len(type(layer).axes[0].split())
        unstacked = [jax.ShapeDtypeStruct(x.shape[stacked:], x.dtype) for x in leaves]  # type: ignore[no-untyped-call]
        rules = rules_for(jax.tree.unflatten(treedef, unstacked), mesh)
        axes = (" ".join([*["L"] * stacked, letters]) for letters in type(layer).axes)
        shardings = [sharding(letters, x.shape, mesh, rules) for letters, x in zip(axes, leaves, strict=False)]
        return jax.tree.unflatten(treedef, shardings)

    replicated: Any = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    delta, ids = (None if x is None else replicated for x in (cache.delta_B, cache.ids_BS))
    return Cache(entry(cache.layers), replicated, replicated, entry(cache.mtp), delta, ids)
