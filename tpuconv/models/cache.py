"""The keys and values of tokens that were seen, so that a step computes those of its own tokens alone.

Every slot knows its token's position: -1 is a slot that is empty or holds padding. Left padding, right padding, prefill
and decode are thereby one rule (`layers.is_visible`).
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.config import DecoderConfig
from tpuconv.models.placement import placed, sharding
from tpuconv.sharding import ATTENTION


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KV:
    """One layer's keys and values; with a leading axis L those of all layers. `axes` are the letters of each."""

    axes: ClassVar[tuple[str, ...]] = ("B S K H", "B S K H")

    k_BSKH: jax.Array
    v_BSKH: jax.Array

    @classmethod
    def empty(cls, config: DecoderConfig, shape: tuple[int, ...], dtype: DTypeLike) -> Self:
        """Zeros; `shape` is [B, S], or [L, B, S]."""
        heads = (config.axes["K"], config.axes["H"])
        return cls(jnp.zeros(shape + heads, dtype), jnp.zeros(shape + heads, dtype))


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


def remember(kv: KV | None, k_BTKH: jax.Array, v_BTKH: jax.Array, slot: jax.Array | int) -> KV:
    """All keys and values that this step's tokens may look at: the cache's with these written at `slot`, or these."""
    k_BTKH, v_BTKH = (placed(new, KV.axes[0], ATTENTION) for new in (k_BTKH, v_BTKH))
    if kv is None:
        return KV(k_BTKH, v_BTKH)
    at = (0, slot, 0, 0)
    return KV(
        jax.lax.dynamic_update_slice(kv.k_BSKH, k_BTKH.astype(kv.k_BSKH.dtype), at),
        jax.lax.dynamic_update_slice(kv.v_BSKH, v_BTKH.astype(kv.v_BSKH.dtype), at),
    )


def cache_shardings(cache: Cache, mesh: Mesh) -> Cache:
    """Where each array of a cache lies on a mesh, in its place: positions everywhere, keys and values as attention
    divides them. Shapes are enough of the cache."""

    def entry(layer: Any) -> Any:
        leaves, form = jax.tree.flatten(layer)
        stacked = ["L"] if leaves[0].ndim > len(type(layer).axes[0].split()) else []
        axes = (" ".join(stacked + own.split()) for own in type(layer).axes)
        places = [sharding(own, x.shape, mesh, ATTENTION) for own, x in zip(axes, leaves, strict=True)]
        return jax.tree.unflatten(form, places)

    everywhere: Any = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    layers = tuple(map(entry, cache.layers)) if isinstance(cache.layers, tuple) else entry(cache.layers)
    return Cache(layers, everywhere, everywhere)
