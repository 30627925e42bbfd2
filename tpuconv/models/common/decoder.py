"""What nearly every decoder shares: embedding, blocks, norm, head."""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, ClassVar, NamedTuple, Protocol, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UnsupportedConfig, UsageError
from tpuconv.models.common.cache import KV, Cache
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.layers import Einsum, Embed, Keys, RMSNorm, is_visible, rope_cos_sin
from tpuconv.models.common.placement import placed

NO_WINDOW = 2**31 - 1
"""The window of a layer that has none, and the largest that positions in int32 can tell apart."""


class Step(NamedTuple):
    """What every layer gets to know of the tokens of one call: positions [B, T] of these and [B, S] of all keys, the
    slot of the cache for the first of them, and cosine and sine [B, T, 1, H/2] of their rotary angles."""

    pos_BT: jax.Array
    pos_BS: jax.Array
    slot: jax.Array | int
    cos_sin: tuple[jax.Array, jax.Array]

    def cos_sin_in(self, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine of the rotary angles, which come in float32, rounded to `dtype`."""
        cos, sin = self.cos_sin
        return cos.astype(dtype), sin.astype(dtype)

    def visible(self, window: jax.Array | int) -> jax.Array:
        """Which of the S keys each token sees through a layer's window, [B, T, S]."""
        return is_visible(self.pos_BT, self.pos_BS, window)


class Block(Protocol):
    """One layer: `x_BTD` to `x_BTD`, and what the family caches of all tokens up to these, mostly `KV`."""

    def __call__(
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None
    ) -> tuple[jax.Array, Any]: ...


class Decoder(nnx.Module):
    """A family's Model names its `block`, called as (config, number of the layer, dtype=, keys=), and where they are
    others its `norm_type` and `cached`, which makes a layer's empty entry of a cache from (config, [B, S], dtype).

    `scan_layers` keeps all layers in arrays with a leading axis L and runs them in one loop: it compiles sooner, and
    runs slower on TPU. `dtype` is that of the parameters and of the activations.
    """

    block: ClassVar[Callable[..., Block]]
    norm_type: ClassVar[Callable[..., Any]] = RMSNorm
    cached: ClassVar[Callable[..., Any]] = KV.empty

    def __init__(
        self,
        config: DecoderConfig,
        *,
        scan_layers: bool = False,
        dtype: DTypeLike = jnp.bfloat16,
        rngs: nnx.Rngs | None = None,
    ):
        if scan_layers and config.unscannable:
            raise UnsupportedConfig(
                f"scan_layers is not implemented for {config.model_type}: {config.unscannable}",
                hint="leave scan_layers out",
            )
        keys = Keys((rngs or nnx.Rngs(0)).params())
        block_keys = jax.random.split(keys(), config.num_hidden_layers)

        def new_block(layer: int, key: jax.Array) -> Any:
            return self.block(config, layer, dtype=dtype, keys=Keys(key))

        self.config = config
        self.scan_layers = scan_layers
        self.embed = Embed(config.axes, dtype=dtype, keys=keys)
        one_for_all = nnx.vmap(partial(new_block, 0))
        self.layers = one_for_all(block_keys) if scan_layers else nnx.List(map(new_block, count(), block_keys))
        self.norm = self.norm_type("D", config.axes, config.rms_norm_eps, dtype=dtype)
        self.lm_head = Einsum("BTD,DV->BTV", config.axes, dtype=dtype, keys=keys) if config.has_lm_head else None

    def stack_layers(self) -> None:
        """Makes of separate layers stacked ones. They differ in nothing but their arrays."""
        graphs, states = zip(*map(nnx.split, self.layers), strict=True)
        self.layers = nnx.merge(graphs[0], jax.tree.map(lambda *arrays: jnp.stack(arrays), *states))
        self.scan_layers = True

    def init_cache(self, batch: int, length: int, dtype: DTypeLike | None = None) -> Cache:
        """An empty cache for this model, of `length` tokens, padding included: in int8, or in the model's dtype."""
        L, dtype = self.config.num_hidden_layers, self.embed.embedding.dtype if dtype is None else dtype
        if self.scan_layers:
            return Cache.empty(self.cached(self.config, (L, batch, length), dtype), batch, length)
        layers = tuple(self.cached(self.config, (batch, length), dtype) for _ in range(L))
        return Cache.empty(layers, batch, length)

    @overload
    def __call__(self, ids_BT: jax.Array, mask_BT: jax.Array | None = None) -> jax.Array: ...
    @overload
    def __call__(
        self, ids_BT: jax.Array, mask_BT: jax.Array | None = None, *, cache: Cache, last_only: bool = False
    ) -> tuple[jax.Array, Cache]: ...
    def __call__(
        self,
        ids_BT: jax.Array,
        mask_BT: jax.Array | None = None,
        *,
        cache: Cache | None = None,
        last_only: bool = False,
    ) -> jax.Array | tuple[jax.Array, Cache]:
        """Logits [B, T, V] in float32; with a cache, (logits, cache), and the tokens follow those that it holds. With
        `last_only` the logits are those of the last column, [B, 1, V]: of a long prompt all would be the largest array.

        `mask_BT` is True where a token is real; padding may stand left or right, and positions count real tokens alone.
        Where more tokens than slots cannot be seen in time, because `used` is traced, the logits are NaN.
        """
        mask_BT = jnp.ones(ids_BT.shape, bool) if mask_BT is None else jnp.asarray(mask_BT, bool)
        if mask_BT.shape != ids_BT.shape:
            raise UsageError(
                f"mask_BT is {mask_BT.shape}, ids_BT {ids_BT.shape}: the mask is that of this call's tokens"
            )
        seen_B1 = 0 if cache is None else cache.positions_BS.max(axis=1, keepdims=True) + 1
        pos_BT = jnp.where(mask_BT, seen_B1 + jnp.cumsum(mask_BT, axis=1, dtype=jnp.int32) - 1, -1)
        cos_sin = rope_cos_sin(self.config.rope, self.config.rope_dim, pos_BT)
        x_BTD = self.embed(ids_BT)
        if cache is None:
            x_BTD, _ = self._run(x_BTD, Step(pos_BT, pos_BT, 0, cos_sin), None)
            return self._logits(x_BTD)
        taken = cache.take(pos_BT)
        x_BTD, layers = self._run(x_BTD, Step(pos_BT, taken.positions_BS, cache.used, cos_sin), cache.layers)
        overrun = taken.used > taken.positions_BS.shape[1]
        x_BTD = x_BTD[:, -1:] if last_only else x_BTD
        logits_BTV = self._logits(jnp.where(overrun, jnp.nan, x_BTD))
        return logits_BTV, Cache(layers, taken.positions_BS, taken.used)

    def _run(self, x_BTD: jax.Array, step: Step, kvs: Any) -> tuple[jax.Array, Any]:
        """All blocks. `kvs` and the result are the `layers` of a cache, or None."""
        windows = [min(window or NO_WINDOW, NO_WINDOW) for window in self.config.windows]
        if not self.scan_layers:
            new_kvs = []
            for i, (block, window) in enumerate(zip(self.layers, windows, strict=True)):
                x_BTD, kv = block(placed(x_BTD, "B T D"), step, window, None if kvs is None else kvs[i])
                new_kvs.append(kv)
            return x_BTD, tuple(new_kvs)

        graph, blocks = nnx.split(self.layers)

        def one(x_BTD: jax.Array, layer: Any) -> tuple[jax.Array, KV | None]:
            block, kv, window = layer
            x_BTD, new_kv = nnx.merge(graph, block)(placed(x_BTD, "B T D"), step, window, kv)
            return x_BTD, None if kv is None else new_kv  # without a cache nothing is kept

        layers: Any = (blocks, kvs, jnp.asarray(windows))
        return jax.lax.scan(one, x_BTD, layers)

    def _logits(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = self.norm(placed(x_BTD, "B T D"))
        logits_BTV = self.embed.attend(x_BTD) if self.lm_head is None else self.lm_head(x_BTD)
        return placed(logits_BTV, "B T V").astype(jnp.float32)
