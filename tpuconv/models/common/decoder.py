"""The base class of the families' models: embedding, blocks, norm and head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
"""The window of a layer without a sliding window: the largest int32, the dtype of positions."""


class Step(NamedTuple):
    """The inputs of a layer besides the hidden states. All but `cos_sin` are the same for all layers of one call.

    Attributes:
        pos_BT: positions of the call's tokens, -1 for padding.
        pos_BS: positions of all keys, those of the cache included.
        slot: slot of the cache for the first token.
        cos_sin: cosine and sine [B, T, 1, H/2] of the tokens' rotary angles in this layer, in float32.
        input: what this layer reads besides the hidden states; None in most families.
    """

    pos_BT: jax.Array
    pos_BS: jax.Array
    slot: jax.Array | int
    cos_sin: tuple[jax.Array, jax.Array]
    input: Any = None

    def cos_sin_in(self, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
        """Returns `cos_sin`, rounded to `dtype`."""
        cos, sin = self.cos_sin
        return cos.astype(dtype), sin.astype(dtype)

    def visible(self, window: jax.Array | int) -> jax.Array:
        """Returns the causal mask [B, T, S] of a layer with this window."""
        return is_visible(self.pos_BT, self.pos_BS, window)


@dataclass(frozen=True)
class Steps:
    """The inputs of all layers: `of_layer` says for each layer which of `kinds` it gets, `inputs` has its own."""

    kinds: Sequence[Step]
    of_layer: Sequence[int]
    inputs: Sequence[Any] | None = None

    @classmethod
    def of(
        cls,
        config: DecoderConfig,
        pos_BT: jax.Array,
        pos_BS: jax.Array,
        slot: jax.Array | int,
        inputs: Sequence[Any] | None = None,
    ) -> "Steps":
        """Returns the inputs of the layers of a model; the arguments are those of `Step`, and the `input` of each
        layer. Without a cache `pos_BS` is `pos_BT` itself."""
        slots = None if pos_BS is pos_BT else pos_BS.shape[1]
        rotations = list(zip(config.ropes, config.rope_dims, strict=True))
        kinds = list(dict.fromkeys(rotations))
        steps = [Step(pos_BT, pos_BS, slot, rope_cos_sin(rope, dim, pos_BT, slots)) for rope, dim in kinds]
        return cls(steps, [kinds.index(rotation) for rotation in rotations], inputs)

    def __getitem__(self, layer: int) -> Step:
        step = self.kinds[self.of_layer[layer]]
        return step if self.inputs is None else step._replace(input=self.inputs[layer])


class Block(Protocol):
    """One layer. Returns its output [B, T, D] and its cache with this call's tokens (`KV`, or the family's own
    class)."""

    def __call__(
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None
    ) -> tuple[jax.Array, Any]: ...


class Decoder(nnx.Module):
    """A decoder-only model. A family's `Model` sets these class attributes:

    Attributes:
        block: creates a layer from (config, number of the layer, dtype=, keys=).
        norm_type: class of the last norm; by default `RMSNorm`.
        cached: creates a layer's empty cache from (config, number of the layer, [B, S], dtype); by default `KV.empty`.

    Args:
        config: the family's config.
        scan_layers: stack the layers' parameters along a leading axis L and run them with `jax.lax.scan`. The model
            compiles faster, and runs slower on TPU.
        dtype: of parameters and activations.
        rngs: random keys for the initial weights.

    Raises:
        UnsupportedConfig: the layers of this family cannot be scanned.
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
        stacked_blocks = nnx.vmap(partial(new_block, 0))
        self.layers = stacked_blocks(block_keys) if scan_layers else nnx.List(map(new_block, count(), block_keys))
        self.norm = self.norm_type("D", config.axes, config.rms_norm_eps, dtype=dtype)
        self.lm_head = Einsum("BTD,DV->BTV", config.axes, dtype=dtype, keys=keys) if config.has_lm_head else None

    def stack_layers(self) -> None:
        """Stacks the layers' parameters, as `scan_layers` does. The layers must differ in their arrays only."""
        graphs, states = zip(*map(nnx.split, self.layers), strict=True)
        self.layers = nnx.merge(graphs[0], jax.tree.map(lambda *arrays: jnp.stack(arrays), *states))
        self.scan_layers = True

    def init_cache(self, batch: int, length: int, dtype: DTypeLike | None = None) -> Cache:
        """Returns an empty cache for `batch` sequences of `length` tokens, padding included. `dtype` is int8, or the
        model's dtype by default."""
        L, dtype = self.config.num_hidden_layers, self.embed.embedding.dtype if dtype is None else dtype
        if self.scan_layers:
            return Cache.empty(self.cached(self.config, 0, (L, batch, length), dtype), batch, length)
        layers = tuple(self.cached(self.config, layer, (batch, length), dtype) for layer in range(L))
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
        """Runs the model.

        Args:
            ids_BT: token ids.
            mask_BT: True for tokens, False for padding, on the left or on the right. Padding does not count in
                positions.
            cache: the cache of earlier tokens.
            last_only: with a cache, return the logits of the last column only. For a long prompt all logits would be
                the largest array.

        Returns:
            Logits [B, T, V] in float32; with a cache (logits, cache), and with `last_only` logits [B, 1, V]. If `used`
            is traced and there are too few slots, the logits are NaN.

        Raises:
            UsageError: the mask has another shape than the ids, or the cache has too few slots.
        """
        mask_BT = jnp.ones(ids_BT.shape, bool) if mask_BT is None else jnp.asarray(mask_BT, bool)
        if mask_BT.shape != ids_BT.shape:
            raise UsageError(
                f"mask_BT has shape {mask_BT.shape}, ids_BT {ids_BT.shape}: give the mask of this call's tokens only"
            )
        seen_B1 = 0 if cache is None else cache.positions_BS.max(axis=1, keepdims=True) + 1
        pos_BT = jnp.where(mask_BT, seen_B1 + jnp.cumsum(mask_BT, axis=1, dtype=jnp.int32) - 1, -1)
        x_BTD = self.scaled(self.embed(ids_BT))
        inputs = self.layer_inputs(ids_BT, x_BTD)
        if cache is None:
            x_BTD, _ = self._run(x_BTD, Steps.of(self.config, pos_BT, pos_BT, 0, inputs), None)
            return self._logits(x_BTD)
        taken = cache.take(pos_BT)
        steps = Steps.of(self.config, pos_BT, taken.positions_BS, cache.used, inputs)
        x_BTD, layers = self._run(x_BTD, steps, cache.layers)
        overrun = taken.used > taken.positions_BS.shape[1]
        x_BTD = x_BTD[:, -1:] if last_only else x_BTD
        logits_BTV = self._logits(jnp.where(overrun, jnp.nan, x_BTD))
        return logits_BTV, Cache(layers, taken.positions_BS, taken.used)

    def scaled(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the first layer's input [B, T, D], made of the embeddings of the tokens. Families with a factor
        override this."""
        return x_BTD

    def layer_inputs(self, ids_BT: jax.Array, x_BTD: jax.Array) -> Sequence[Any] | None:
        """Returns what each layer reads besides the hidden states, made of the token ids and the first layer's input;
        None where layers read nothing else."""
        return None

    def adjusted(self, logits_BTV: jax.Array) -> jax.Array:
        """Returns the logits [B, T, V], made of the products with the head. Families with a factor or a limit override
        this."""
        return logits_BTV

    def _run(self, x_BTD: jax.Array, steps: Steps, kvs: Any) -> tuple[jax.Array, Any]:
        """Runs all blocks. `kvs` and the second result are the `layers` of a cache, or None."""
        windows = [min(window or NO_WINDOW, NO_WINDOW) for window in self.config.windows]
        if not self.scan_layers:
            new_kvs = []
            for i, (block, window) in enumerate(zip(self.layers, windows, strict=True)):
                x_BTD, kv = block(placed(x_BTD, "B T D"), steps[i], window, None if kvs is None else kvs[i])
                new_kvs.append(kv)
            return x_BTD, tuple(new_kvs)

        graph, blocks = nnx.split(self.layers)
        step, *others = steps.kinds
        cos_sins = jax.tree.map(lambda *kinds: jnp.stack(kinds), *(kind.cos_sin for kind in steps.kinds))

        def run_block(x_BTD: jax.Array, layer: Any) -> tuple[jax.Array, KV | None]:
            block, kv, window, kind = layer
            own = step._replace(cos_sin=jax.tree.map(lambda kinds: kinds[kind], cos_sins)) if others else step
            x_BTD, new_kv = nnx.merge(graph, block)(placed(x_BTD, "B T D"), own, window, kv)
            return x_BTD, None if kv is None else new_kv

        layers: Any = (blocks, kvs, jnp.asarray(windows), jnp.asarray(steps.of_layer))
        return jax.lax.scan(run_block, x_BTD, layers)

    def _logits(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = self.norm(placed(x_BTD, "B T D"))
        logits_BTV = self.embed.attend(x_BTD) if self.lm_head is None else self.lm_head(x_BTD)
        return self.adjusted(placed(logits_BTV, "B T V")).astype(jnp.float32)
