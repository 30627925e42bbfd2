"""The keys and values of tokens that were seen, so that a step computes those of its own tokens alone.

Every slot knows its token's position: -1 is a slot that is empty or holds padding. Left padding, right padding, prefill
and decode are thereby one rule (`layers.is_visible`).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.config import DecoderConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KV:
    """One layer's keys and values; with a leading axis L those of all layers."""

    k_BSKH: jax.Array
    v_BSKH: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """A pytree: pass it through `jax.jit` and donate it, then each step writes in place. `used` slots are taken."""

    layers: tuple[KV, ...] | KV
    positions_BS: jax.Array
    used: jax.Array

    def take(self, pos_BT: jax.Array) -> "Cache":
        """The cache whose next slots are those of tokens at these positions. Their keys and values are to come."""
        slots, tokens = self.positions_BS.shape[1], pos_BT.shape[1]
        known_used = 0 if isinstance(self.used, jax.core.Tracer) else int(self.used)
        if known_used + tokens > slots:
            raise UsageError(f"the cache has {slots} slots, of which {known_used} are used: {tokens} tokens do not fit")
        positions_BS = jax.lax.dynamic_update_slice(self.positions_BS, pos_BT, (0, self.used))
        return Cache(self.layers, positions_BS, self.used + tokens)


def init_cache(
    config: DecoderConfig, batch: int, length: int, dtype: DTypeLike = jnp.bfloat16, *, scan_layers: bool = False
) -> Cache:
    """An empty cache of `length` tokens, padding included. `scan_layers` as the model that will use it."""
    L, K, H = (config.axes[letter] for letter in "LKH")

    def kv(*layers: int) -> KV:
        shape = (*layers, batch, length, K, H)
        return KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    positions_BS = jnp.full((batch, length), -1, jnp.int32)
    return Cache(kv(L) if scan_layers else tuple(kv() for _ in range(L)), positions_BS, jnp.zeros((), jnp.int32))


def remember(kv: KV | None, k_BTKH: jax.Array, v_BTKH: jax.Array, slot: jax.Array | int) -> KV:
    """All keys and values that this step's tokens may look at: the cache's with these written at `slot`, or these."""
    if kv is None:
        return KV(k_BTKH, v_BTKH)
    at = (0, slot, 0, 0)
    return KV(
        jax.lax.dynamic_update_slice(kv.k_BSKH, k_BTKH.astype(kv.k_BSKH.dtype), at),
        jax.lax.dynamic_update_slice(kv.v_BSKH, v_BTKH.astype(kv.v_BSKH.dtype), at),
    )
