"""The base class of the families' models: embedding, blocks, norm and head."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, ClassVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UnsupportedConfig, UsageError
from tpuconv.models.common.cache import KV, Cache, StaticKV, has_scales, scaled_kv
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.explicit import call_on_explicit_mesh, is_explicit
from tpuconv.models.common.handing import Handing
from tpuconv.models.common.ids import Ids, checked_ids, checked_mask
from tpuconv.models.common.layers import Einsum, Embed, Keys, RMSNorm, rope_cos_sin
from tpuconv.models.common.placement import placed
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.scores import Scores
from tpuconv.models.common.seen import Seen, see
from tpuconv.models.common.steps import Block, Entered, Step, Steps, windows_of
from tpuconv.models.common.summary import Summarized


class Decoder(Handing, Summarized):
    """A decoder-only model. A family's `Model` sets these class attributes:

    Attributes:
        block: creates a layer from (config, number of the layer, dtype=, keys=).
        norm_type: class of the last norm; by default `RMSNorm`.
        embed_type: class of the embedding; by default `Embed`.
        cached: creates a layer's empty cache from (config, number of the layer, [B, S], dtype); by default `KV.empty`.
        mtp_type: creates the module for multi-token prediction from (config, dtype=, keys=); None without one.

    Args:
        config: the family's config.
        scan_layers: stack the layers' parameters along a leading axis L and run them with `jax.lax.scan`. The model
            compiles faster, and runs slower on TPU. Layers that repeat with a period are stacked for each place of a
            period, and those after the last complete period are run one by one.
        dtype: of parameters and activations.
        rngs: random keys for the initial weights.

    Raises:
        UnsupportedConfig: the layers of this family cannot be scanned.
    """

    block: ClassVar[Callable[..., Block]]
    norm_type: ClassVar[Callable[..., Any]] = RMSNorm
    embed_type: ClassVar[Callable[..., Any]] = Embed
    cached: ClassVar[Callable[..., Any]] = KV.empty
    mtp_type: ClassVar[Callable[..., Any] | None] = None

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
        self.embed = self.embed_type(config.outer_sizes, dtype=dtype, keys=keys)
        if scan_layers:
            stacks = self.config.stacks
            keys_of_place = [block_keys[i : stacks.rest.start : stacks.period] for i in range(stacks.period)]
            blocks = [nnx.vmap(partial(new_block, i))(place_keys) for i, place_keys in enumerate(keys_of_place)]
            self._set_stacks(blocks, [new_block(layer, block_keys[layer]) for layer in stacks.rest])
        else:
            self.layers = nnx.List(map(new_block, count(), block_keys))
        self.norm = self.norm_type("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        head = partial(Einsum, "BTD,DV->BTV", config.outer_sizes, bias=config.has_head_bias, dtype=dtype, keys=keys)
        self.lm_head = head() if config.has_lm_head else None
        self.score = Scores(config, dtype=dtype, keys=keys) if config.head.labels else None
        for part, own in config.parts.items():
            setattr(self, part, own.encoder_class(own, dtype=dtype, keys=keys))

    @property
    def input_modules(self) -> tuple[str, ...]:
        """The modules that `scaled`, `positioned` and `layer_inputs` use, by their attributes' names."""
        return ()

    @property
    def output_modules(self) -> tuple[str, ...]:
        """The modules that `adjusted` uses, by their attributes' names."""
        return ()

    def _set_stacks(self, blocks: Sequence[Any], rest: Sequence[Any]) -> None:
        """Sets the stacked blocks: one of all layers, or one for each place of a period, and those that stay apart."""
        if self.config.period == 1:
            self.layers = blocks[0]
        else:
            self.layers, self.rest = nnx.List(blocks), nnx.List(rest)

    def stack_layers(self) -> None:
        """Stacks the layers' parameters, as `scan_layers` does."""

        def stacked(blocks: Sequence[Any]) -> Any:
            graphs, states = zip(*map(nnx.split, blocks), strict=True)
            return nnx.merge(graphs[0], jax.tree.map(lambda *arrays: jnp.stack(arrays), *states))

        stacks, blocks = self.config.stacks, list(self.layers)
        by_place = [stacked([blocks[layer] for layer in stacks.at_place(i)]) for i in range(stacks.period)]
        self._set_stacks(by_place, [blocks[layer] for layer in stacks.rest])
        self.scan_layers = True

    def block_of(self, layer: int) -> tuple[Any, str, int | None]:
        """Returns the module that holds a layer, how the names of its arrays begin, and the layer's index on their
        first axis; None if they hold this layer alone."""
        if not self.scan_layers:
            return self.layers[layer], f"layers.{layer}", None
        stacks = self.config.stacks
        prefix, index = stacks.find(layer)
        if layer in stacks.rest:
            return self.rest[layer - stacks.rest.start], prefix, index
        return self.layers if stacks.period == 1 else self.layers[layer % stacks.period], prefix, index

    def add_mtp(self, *, dtype: DTypeLike = jnp.bfloat16, rngs: nnx.Rngs | None = None) -> None:
        """Adds the module for multi-token prediction as `mtp`.

        Raises:
            UnsupportedConfig: the family has none.
        """
        if self.mtp_type is None:
            raise UnsupportedConfig(
                f"multi-token prediction is not implemented for {self.config.model_type}",
                hint="use the model without it",
            )
        self.mtp = self.mtp_type(self.config, dtype=dtype, keys=Keys((rngs or nnx.Rngs(0)).params()))

    def init_cache(self, batch: int, length: int, dtype: DTypeLike | None = None) -> Cache:
        """Returns an empty cache for `batch` sequences of `length` tokens, padding included. `dtype` is int8 or
        float8_e4m3fn, or the model's dtype by default.

        Raises:
            UsageError: the model's cache cannot be int8 or FP8, or the model has no cache.
        """
        if self.config.sees_behind:
            raise UsageError(
                "tokens of this model see the tokens behind them: it has no cache, and writes no text",
                hint="call it without a cache",
            )
        dtype = self.embed.embedding.dtype if dtype is None else dtype
        if has_scales(dtype):
            self.config.check_rounded_cache()

        def empty(layer: int, *stacked: int) -> Any:
            kv = self.cached(self.config, layer, (*stacked, batch, length), dtype)
            return StaticKV.of(kv, self.block_of(layer)[0]) if layer < self.config.num_hidden_layers else kv

        mtp = empty(self.config.num_hidden_layers) if hasattr(self, "mtp") else None
        if not self.scan_layers:
            return Cache.empty(tuple(map(empty, self.config.executed_layers)), batch, length, mtp)
        stacks = self.config.stacks
        by_place = tuple(empty(i, stacks.count) for i in range(stacks.period))
        layers = by_place[0] if stacks.period == 1 else (by_place, tuple(map(empty, stacks.rest)))
        return Cache.empty(layers, batch, length, mtp)

    def see(self, ids_BT: Any, mask_BT: Any | None = None, **features: Any) -> Seen:
        """Runs the encoders of images and sounds.

        Args:
            ids_BT: token ids, with a placeholder for each feature.
            mask_BT: as of a call.
            features: what the release's processor returns, as numpy arrays: `pixel_values`, `image_grid_thw`,
                `input_features`. Images and sounds come in the order of their placeholders, row by row.

        Returns:
            What a call with the same `ids_BT` and `mask_BT` takes as `seen`.

        Raises:
            UsageError: the model has no such encoder, or the features do not fit the placeholders.
        """
        encoders = {part: getattr(self, part) for part in self.config.parts}
        mask_BT = np.ones(np.shape(ids_BT), bool) if mask_BT is None else np.asarray(mask_BT, bool)
        return see(self.config, encoders, np.asarray(ids_BT), mask_BT, features)

    @overload
    def __call__(
        self, ids_BT: Ids, mask_BT: jax.Array | None = None, *, seen: Seen | None = None, first: int = 0
    ) -> jax.Array: ...
    @overload
    def __call__(
        self,
        ids_BT: Ids,
        mask_BT: jax.Array | None = None,
        *,
        cache: Cache,
        seen: Seen | None = None,
        first: int = 0,
    ) -> tuple[jax.Array, Cache]: ...
    def __call__(
        self,
        ids_BT: Any,
        mask_BT: jax.Array | None = None,
        *,
        cache: Cache | None = None,
        seen: Seen | None = None,
        first: int = 0,
    ) -> jax.Array | tuple[jax.Array, Cache]:
        """Runs the model.

        Args:
            ids_BT: token ids, an array or a list of lists.
            mask_BT: True for tokens, False for padding, on the left or on the right. Padding does not count in
                positions.
            cache: the cache of earlier tokens.
            seen: the images and sounds of these tokens, as `see` returns them.
            first: the first column whose logits are returned; -1 for the last column. For a long prompt all logits
                would be the largest array.

        Returns:
            Logits [B, T, V] in float32, of the columns from `first` on; with a cache (logits, cache). If `used` is
            traced and there are too few slots, the logits are NaN.
            Of a classifier the scores [B, O] in float32, of the last token of each text that is not padding, by the
            mask and by `pad_token_id` of config.json, or [B, T, O] of each token; of a model without a head the hidden
            states [B, T, D] after the last norm.

        Raises:
            UsageError: the ids are no whole numbers [B, T], or the mask has another shape; or the cache has too few
                slots, or the model returns no logits to go on with.
        """
        ids_BT = checked_ids(ids_BT)
        if is_explicit(weights := jax.tree.leaves(self.embed.embedding[...])[0]):
            out: jax.Array | tuple[jax.Array, Cache] = call_on_explicit_mesh(
                self, weights, ids_BT, mask_BT, cache, first, seen
            )
            return out
        mask_BT = checked_mask(mask_BT, ids_BT)
        if cache is None:
            x_BTD, _ = self.run_layers(ids_BT, mask_BT, None, seen)
            return self._headless(x_BTD, ids_BT, mask_BT) if self.config.head.kind else self._logits(x_BTD[:, first:])
        if self.config.head.kind:
            raise UsageError(
                f"this model returns {self.config.head.kind}, not logits: there is no next token to keep a cache for",
                hint="call it without a cache",
            )
        x_BTD, new_cache = self.run_layers(ids_BT, mask_BT, cache, seen)
        overrun = new_cache.used > new_cache.positions_BS.shape[1]
        return self._logits(jnp.where(overrun, jnp.nan, x_BTD[:, first:])), new_cache

    def run_layers(
        self,
        ids_BT: jax.Array,
        mask_BT: jax.Array,
        cache: Cache | None,
        seen: Seen | None = None,
        entered: Entered | None = None,
    ) -> tuple[jax.Array, Any]:
        """Returns the hidden states [B, T, D] before the last norm, and the cache with these tokens; arguments are
        those of a call. `entered` takes the hidden states that enter the layers that it has as keys; of a model whose
        layers are stacked it takes none."""
        seen_B1 = 0 if cache is None else cache.positions_BS.max(axis=1, keepdims=True) + 1
        pos_BT = jnp.where(mask_BT, seen_B1 + jnp.cumsum(mask_BT, axis=1, dtype=jnp.int32) - 1, -1)
        ids_BT = self.readable(ids_BT, seen)
        taken = None if cache is None else cache.take(pos_BT, ids_BT)
        x_BTD = self.first_input(self.embed.in_text(ids_BT, pos_BT, taken), pos_BT, seen)
        inputs = self.layer_inputs(ids_BT, x_BTD)
        if cache is None or taken is None:
            steps = Steps.of(self.config, pos_BT, pos_BT, 0, inputs, seen, entered=entered)
            x_BTD, _ = self._run(x_BTD, steps, None)
            steps.enter(self.config.num_hidden_layers, x_BTD)
            return x_BTD, None
        steps = Steps.of(self.config, pos_BT, taken.positions_BS, cache.used, inputs, seen, cache.delta_B, entered)
        x_BTD, layers = self._run(x_BTD, steps, cache.layers)
        steps.enter(self.config.num_hidden_layers, x_BTD)
        taken = taken if seen is None else taken.shifted(seen.delta_B1)
        return x_BTD, replace(taken, layers=layers)

    def draft(
        self, x_BTD: jax.Array, next_BT: jax.Array, cache: Cache, slot: jax.Array | int
    ) -> tuple[jax.Array, Cache]:
        """Runs the module for multi-token prediction on tokens that `run_layers` was called with.

        Args:
            x_BTD: their hidden states, before the last norm.
            next_BT: id of the token after each.
            cache: the cache with these tokens.
            slot: the slot of the first token.

        Returns:
            Hidden states [B, T, D], of which `head` makes the logits of the token after `next_BT`, and the cache.
        """
        pos_BT = jax.lax.dynamic_slice_in_dim(cache.positions_BS, slot, next_BT.shape[1], 1)
        cos_sin = rope_cos_sin(*self.mtp_rope, pos_BT, cache.positions_BS.shape[1])
        step = Step(pos_BT, cache.positions_BS, slot, cos_sin)
        x_BTD, mtp = self.mtp(*self.mtp_inputs(next_BT, x_BTD), step, cache.mtp)
        return x_BTD, replace(cache, mtp=mtp)

    @property
    def mtp_rope(self) -> tuple[Rope | None, int]:
        """The rotary positions of the module for multi-token prediction, and the number of their dimensions: the
        positions of the last layer. Families whose layers differ may override this."""
        return self.config.ropes[-1], self.config.rope_dims[-1]

    def mtp_inputs(self, next_BT: jax.Array, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns what the module for multi-token prediction joins: the embeddings [B, T, D] of the tokens `next_BT`,
        and the hidden states [B, T, D] of those before them, after the last norm. Families whose module reads something
        else override this."""
        return self.scaled(self.embed(next_BT)), self.norm(x_BTD)

    def without(self, ids_BT: jax.Array, kept_BT: jax.Array, before: Cache, after: Cache) -> Cache:
        """Returns the cache `after` a call of `run_layers` with the cache `before`, as if the tokens that are not
        `kept_BT` had been padding."""
        pos_BT = jax.lax.dynamic_slice_in_dim(after.positions_BS, before.used, ids_BT.shape[1], 1)
        pos_BT = jnp.where(kept_BT, pos_BT, -1)
        return replace(
            after, positions_BS=jax.lax.dynamic_update_slice_in_dim(after.positions_BS, pos_BT, before.used, 1)
        )

    def readable(self, ids_BT: jax.Array, seen: Seen | None) -> jax.Array:
        """Returns token ids that all have an embedding: the vocabulary may end before the id of a placeholder."""
        if seen is None or self.config.placeholder_as is None:
            return ids_BT
        return jnp.where(seen.slot_BT < 0, ids_BT, self.config.placeholder_as)

    def first_input(self, x_BTD: jax.Array, pos_BT: jax.Array, seen: Seen | None = None) -> jax.Array:
        """Returns the first layer's input [B, T, D], made of the embeddings of the tokens."""
        x_BTD = self.scaled(x_BTD)
        return self.positioned(x_BTD if seen is None else seen.merged(x_BTD), pos_BT)

    def scaled(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the first layer's input [B, T, D], made of the embeddings of the tokens. Families with a factor
        override this."""
        return x_BTD

    def positioned(self, x_BTD: jax.Array, pos_BT: jax.Array) -> jax.Array:
        """Returns the first layer's input [B, T, D], made of the embeddings and of the features of images and sounds;
        `pos_BT` are the positions of the tokens, -1 for padding. Families with learned positions add them, families
        with residual streams copy the input."""
        return x_BTD

    def layer_inputs(self, ids_BT: jax.Array, x_BTD: jax.Array) -> Sequence[Any] | None:
        """Returns what each layer reads besides the hidden states, made of the token ids and the first layer's input;
        None where layers read nothing else."""
        return None

    def adjusted(self, logits_BTV: jax.Array) -> jax.Array:
        """Returns the logits [B, T, V] of the products with the head. Families with factors or limits override it."""
        return logits_BTV

    def _run(self, x_BTD: jax.Array, steps: Steps, kvs: Any) -> tuple[jax.Array, Any]:
        """Runs all blocks. `kvs` and the second result are the `layers` of a cache, or None."""
        windows = windows_of(self.config)
        if not self.scan_layers:
            return self._run_apart(x_BTD, range(len(windows)), self.layers, steps, windows, kvs)
        stacks = self.config.stacks
        if stacks.period == 1:
            x_BTD, (new,) = self._run_stacked(x_BTD, [self.layers], steps, windows, (kvs,))
            return x_BTD, new
        kvs_by_place, kvs_apart = ((None,) * stacks.period, None) if kvs is None else kvs
        x_BTD, new = self._run_stacked(x_BTD, self.layers, steps, windows, kvs_by_place)
        x_BTD, new_apart = self._run_apart(x_BTD, stacks.rest, self.rest, steps, windows, kvs_apart)
        return x_BTD, (new, new_apart)

    def _run_apart(
        self, x_BTD: jax.Array, layers: range, blocks: Sequence[Any], steps: Steps, windows: Sequence[int], kvs: Any
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Runs blocks one after the other. `kvs` are their caches, or None."""
        new_kvs, latest = [], None
        handed: dict[int, Any] = {}
        for i, layer in enumerate(layers):
            step, kv = steps[layer], None if kvs is None else scaled_kv(kvs[i], blocks[i])
            if (source := self.source_of(layer)) is not None and handed[source] is not None:
                step, given = self.given(step, handed[source])
                kv = kv if given is None else given
            steps.enter(layer, x_BTD)
            x_BTD, result = blocks[i](placed(x_BTD, "B T D"), step, windows[layer], kv)
            x_BTD = steps.deepened(x_BTD, layer)
            if result is not None:  # while a layer is traced others do nothing
                latest = self.handed_on(result)
            handed[layer] = latest
            new_kvs.append(None if result is None else self.kept(layer, result))
        return x_BTD, tuple(new_kvs)

    def _run_stacked(
        self, x_BTD: jax.Array, blocks: Sequence[Any], steps: Steps, windows: Sequence[int], kvs: tuple[Any, ...]
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Runs stacked blocks, one for each place of a period, by a loop over periods. `kvs` are their caches; None for
        a block without one."""
        stacks = self.config.stacks
        graphs, states = zip(*map(nnx.split, blocks), strict=True)
        kinds = [[steps.of_layer[layer] for layer in stacks.at_place(i)] for i in range(len(blocks))]
        cos_sins: Any = None
        if any(len(set(of_place)) > 1 for of_place in kinds):
            cos_sins = jax.tree.map(lambda *kinds: jnp.stack(kinds), *(kind.cos_sin for kind in steps.kinds))

        def run_period(x_BTD: jax.Array, period: Any) -> tuple[jax.Array, tuple[Any, ...]]:
            new_kvs = []
            for graph, of_place, (state, kv, window, kind, layer) in zip(graphs, kinds, period, strict=True):
                step = steps.kinds[of_place[0]]
                if len(set(of_place)) > 1:
                    step = step._replace(cos_sin=jax.tree.map(lambda each, kind=kind: each[kind], cos_sins))
                block = nnx.merge(graph, state)
                x_BTD, new_kv = block(placed(x_BTD, "B T D"), step, window, scaled_kv(kv, block))
                x_BTD = x_BTD if layer is None else steps.deepened(x_BTD, layer)
                new_kvs.append(None if kv is None else new_kv)
            return x_BTD, tuple(new_kvs)

        places = [stacks.at_place(i) for i in range(len(blocks))]
        place_windows = [jnp.asarray([windows[layer] for layer in place]) for place in places]
        numbers = [jnp.asarray(place) if steps.is_deep else None for place in places]
        inputs = zip(states, kvs, place_windows, map(jnp.asarray, kinds), numbers, strict=True)
        return jax.lax.scan(run_period, x_BTD, tuple(inputs))

    def _headless(self, x_BTD: jax.Array, ids_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
        """Returns the hidden states [B, T, D], or the scores that `Scores.of_texts` makes of them."""
        x_BTD = self.norm(placed(x_BTD, "B T D"))
        return x_BTD if self.score is None else self.score.of_texts(x_BTD, ids_BT, mask_BT)

    def _logits(self, x_BTD: jax.Array) -> jax.Array:
        return self.head(self.norm(placed(x_BTD, "B T D")))

    def head(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the logits [B, T, V] in float32 of hidden states after the last norm."""
        logits_BTV = self.embed.attend(x_BTD) if self.lm_head is None else self.lm_head(x_BTD)
        return self.adjusted(placed(logits_BTV, "B T V")).astype(jnp.float32)
