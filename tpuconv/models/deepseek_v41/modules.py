"""DeepSeek V4.1: DeepSeek V4 whose layers share compressed keys and their selection, with tables of n-grams, and with
residual streams of which each part of a layer chooses what the next part reads.

Between layers each stream has its weight in the input of the next layer behind its last element, [B, T, (r (D + 1))].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.hashed_ngrams import ngram_numbers
from tpuconv.models.common.layers import Einsum, Embed, Keys, ScaledRMSNorm, normalize
from tpuconv.models.common.placement import placed
from tpuconv.models.common.recurrence import LayerState, PackedTokens
from tpuconv.models.common.steps import Step
from tpuconv.models.common.streams import Streams, by_stream, read_streams, to_streams
from tpuconv.models.deepseek_v4.modules import (
    ScoredExperts,
    Tokens,
    WindowAttention,
    WindowDecoder,
    WindowKeys,
    turned,
)
from tpuconv.models.deepseek_v41.entries import Entries, Handed, LatentPool, LeveledIndexer, PoolState
from tpuconv.models.deepseek_v41.family import Config
from tpuconv.models.kernels.lookup import take_rows
from tpuconv.notation.letters import with_letters

LEGEND = {"e": "streams", "c": "ngram_width"}
"""The words of this module, by the letters of its einsums and arrays."""
NO_TOKEN = -1
"""It stands for the tokens before the first one."""


class LayerInput(NamedTuple):
    """The input of a layer besides the hidden states: the numbers of the tokens for n-grams, and the entries of earlier
    layers."""

    ids_BT: jax.Array
    handed: Handed = Handed()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LastIds(LayerState):
    """The last tokens, which begin the next n-grams."""

    axes: ClassVar[tuple[str, ...]] = ("B ngram_tokens",)

    ids_BP: jax.Array

    @classmethod
    def empty(cls, config: Config, *batch: int) -> Self:
        """Returns the state before the first token."""
        return cls(jnp.full((*batch, config.sizes["ngram_tokens"]), NO_TOKEN, jnp.int32))


class NGramTable(Embed):
    """The vectors of n-grams."""

    def __call__(self, ids_BT: jax.Array) -> jax.Array:
        return take_rows(self.embedding[...], ids_BT)


class StreamScale(nnx.Module):
    """The scale of the norm of each residual stream, [B, T, e, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike):
        self.eps = config.rms_norm_eps
        self.scale = nnx.Param(jnp.ones((config.sizes["streams"], config.sizes["D"]), dtype))

    def __call__(self, x_BTeD: jax.Array) -> jax.Array:
        """Returns the normalized streams in float32."""
        return normalize(x_BTeD, 1, self.eps) * self.scale[...].astype(jnp.float32)


class Engram(nnx.Module):
    """Adds to each residual stream, x [B, T, e, D], the value of the n-grams that end with the token, by a gate: the
    root of the product of the stream and a key."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, LEGEND)
        self.config, self.numbering = config, config.ngram_hash(layer)
        self.table = NGramTable({"V": self.numbering.rows, "D": sizes["engram_dim"]}, dtype=dtype, keys=keys)
        self.key = Einsum("BTc,ceD->BTeD", sizes, dtype=dtype, keys=keys)
        self.value = Einsum("BTc,cD->BTD", sizes, dtype=dtype, keys=keys)
        self.query_norm = StreamScale(config, dtype=dtype)
        self.key_norm = StreamScale(config, dtype=dtype)

    def __call__(self, x_BTeD: jax.Array, step: Step, state: LastIds) -> tuple[jax.Array, LastIds]:
        ids_BT: jax.Array = step.input.ids_BT
        packed = PackedTokens.of(ids_BT[..., None], step)
        ids_BS = jnp.concatenate([state.ids_BP, packed.x_BTD[..., 0].astype(jnp.int32)], axis=1)
        state = LastIds(Tokens.of(packed, step).last(ids_BS, state.ids_BP.shape[1]))
        numbers_BTn = ngram_numbers(ids_BS, self.numbering, NO_TOKEN, self.config.pad_number)
        x_BTC = self.table(packed.unpacked(numbers_BTn)).reshape(*ids_BT.shape, -1).astype(x_BTeD.dtype)
        product_BTe1 = (self.query_norm(x_BTeD) * self.key_norm(self.key(x_BTC))).sum(axis=-1, keepdims=True)
        product_BTe1 *= self.config.hidden_size**-0.5
        root_BTe1 = jnp.sqrt(jnp.maximum(jnp.abs(product_BTe1), 1e-6))
        gate_BTe1 = nnx.sigmoid(jnp.where(product_BTe1 < 0, -root_BTe1, root_BTe1))
        value_BT1D = self.value(x_BTC).astype(jnp.float32)[:, :, None]
        return (x_BTeD.astype(jnp.float32) + gate_BTe1 * value_BT1D).astype(x_BTeD.dtype), state


class Attention(WindowAttention):
    """Attention to the window and to selected entries of all tokens before, x [B, T, D] to [B, T, D]. The layer, or one
    before it, makes the entries, and the layer or one before it selects them. Returns beside its caches what it hands
    on."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        self.ratio = config.compress_ratios[layer]
        rope = config.compress_rope if self.ratio else config.rope
        super().__init__(config, rope, dtype=dtype, keys=keys)
        if layer in config.entry_layers:
            self.compressor = LatentPool(config, self.ratio, dtype=dtype, keys=keys)
        if layer in config.selecting_layers:
            self.indexer = LeveledIndexer(config, layer, dtype=dtype, keys=keys)

    def __call__(
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, state: Sequence[Any]
    ) -> tuple[jax.Array, tuple[tuple[Any, ...], Handed]]:
        packed, handed = PackedTokens.of(x_BTD, step), step.input.handed.cut()
        x_BTD, tokens = packed.x_BTD, Tokens.of(packed, step)
        cos_sin = self.cos_sin(tokens.pos_BT)
        x_BTQ = self.q_a_norm(self.q_a(x_BTD))
        q_BTNH = placed(turned(self.q(x_BTQ), cos_sin), "B T N H")
        kv_BSH, visible_BTS, new = self.window_keys(x_BTD, tokens, window, state[0])
        caches: tuple[Any, ...] = (new,)
        if hasattr(self, "compressor"):
            entries, *pool = self.with_entries(x_BTD, tokens, *state[1:])
            caches, handed = (new, entries, *pool), handed._replace(entries=entries)
        if self.ratio:
            assert handed.entries is not None
            complete_BT1 = ((tokens.pos_BT + 1) // self.ratio)[..., None]
            complete_BTS = jnp.arange(handed.entries.kv_BSH.shape[1]) < complete_BT1
            if hasattr(self, "indexer"):
                handed = self.indexer(x_BTD, x_BTQ, cos_sin, complete_BTS, handed)
            kv_BSH = jnp.concatenate([kv_BSH, handed.entries.kv_BSH.astype(kv_BSH.dtype)], axis=1)
            visible_BTS = jnp.concatenate([visible_BTS, handed.selected_BTS], axis=2)
        return packed.unpacked(self.attend(q_BTNH, kv_BSH, visible_BTS, cos_sin)), (caches, handed)

    def with_entries(
        self, x_BTD: jax.Array, tokens: Tokens, entries: Entries, pool: PoolState | None = None
    ) -> tuple[Any, ...]:
        """Returns the entries with those that these tokens complete, and the state of the compressor, if it has
        one."""
        latents_BSH, number_BS, pool = self.compressor(x_BTD, tokens, pool)
        is_complete = (number_BS + 1) * self.ratio <= (tokens.seen_B + tokens.length_B)[:, None]
        slots_BS = jnp.where(is_complete, number_BS, entries.kv_BSH.shape[1])
        entries = entries.written(self.indexer.made(latents_BSH, number_BS, self.ratio), slots_BS)
        return (entries,) if pool is None else (entries, pool)


def empty_parts(config: Config, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> tuple[Any, ...]:
    """Returns the empty cache of a layer; `shape` is [B, S]."""
    parts: list[Any] = [WindowKeys.empty(config, shape, dtype)]
    ratio = config.compress_ratios[layer]
    if layer in config.entry_layers:
        parts.append(Entries.empty(config, shape, ratio, dtype))
        if ratio > 1:
            parts.append(PoolState.of(config, ratio, *shape[:-1]))
    if layer in config.ngram_layers:
        parts.append(LastIds.empty(config, *shape[:-1]))
    return tuple(parts)


class Block(nnx.Module):
    """One layer: n-grams in some, then attention, then experts, each after a norm and between the streams. The streams'
    weights in the input of a part are those that the part before computed. Returns beside its cache what it hands
    on."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        self.config, self.layer = config, layer
        if layer in config.ngram_layers:
            self.engram = Engram(config, layer, dtype=dtype, keys=keys)
        self.attn_streams = Streams(config, keys=keys)
        self.attn_norm = ScaledRMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.attn = Attention(config, layer, dtype=dtype, keys=keys)
        self.moe_streams = Streams(config, keys=keys)
        self.moe_norm = ScaledRMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.moe = ScoredExperts(config, dtype=dtype, keys=keys)

    def __call__(
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, state: tuple[Any, ...] | None
    ) -> tuple[jax.Array, tuple[tuple[Any, ...], Handed]]:
        if state is None:
            state = empty_parts(self.config, self.layer, step.pos_BT.shape, x_BTD.dtype)
        ngrams: tuple[Any, ...] = ()
        of_attention: Sequence[Any] = state
        x_BTrD, pre_BTr = apart(x_BTD, self.config.hc_mult)
        if hasattr(self, "engram"):
            *of_attention, last = state
            x_BTrD, last = self.engram(x_BTrD, step, last)
            ngrams = (last,)
        y_BTD = read_streams(x_BTrD, pre_BTr)
        pre_BTr, post_BTr, mix_BTrw = self.attn_streams.weights(x_BTrD)
        y_BTD, (caches, handed) = self.attn(self.attn_norm(y_BTD), step, window, of_attention)
        x_BTrD = self.attn_streams.written(x_BTrD, y_BTD, post_BTr, mix_BTrw)
        y_BTD = read_streams(x_BTrD, pre_BTr)
        pre_BTr, post_BTr, mix_BTrw = self.moe_streams.weights(x_BTrD)
        y_BTD = self.moe.weighted(self.moe_norm(y_BTD), step.input.ids_BT)
        x_BTrD = self.moe_streams.written(x_BTrD, y_BTD, post_BTr, mix_BTrw)
        return with_gates(x_BTrD, pre_BTr), ((*caches, *ngrams), handed)


def with_gates(x_BTrD: jax.Array, pre_BTr: jax.Array) -> jax.Array:
    """Returns streams and their weights as one array [B, T, (r (D + 1))]."""
    x_BTrD = jnp.concatenate([x_BTrD, pre_BTr[..., None].astype(x_BTrD.dtype)], axis=-1)
    return x_BTrD.reshape(*x_BTrD.shape[:2], -1)


def apart(x_BTD: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the streams [B, T, r, D] and their weights [B, T, r], the inverse of `with_gates`."""
    x_BTrD = by_stream(x_BTD, count)
    return x_BTrD[..., :-1], x_BTrD[..., -1].astype(jnp.float32)


class LaggedNorm(ScaledRMSNorm):
    """The last norm: of the sum of the streams with the weights that the last layer computed, x [B, T, (r (D + 1))] to
    [B, T, D]."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(read_streams(*apart(x, x.shape[-1] // (self.scale.shape[0] + 1))))


class Model(WindowDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block: ClassVar[Any] = Block
    norm_type = LaggedNorm
    config: Config

    def positioned(self, x_BTD: jax.Array, pos_BT: jax.Array) -> jax.Array:
        """Returns the streams of the first layer, copies of its input of which it reads the first one."""
        count = self.config.hc_mult
        x_BTrD = by_stream(to_streams(x_BTD, count), count)
        return with_gates(x_BTrD, jnp.broadcast_to(jnp.arange(count) == 0, x_BTrD.shape[:3]))

    def layer_inputs(self, ids_BT: jax.Array, x_BTD: jax.Array) -> Sequence[Any] | None:
        """Returns for each layer the numbers of the tokens for n-grams."""
        if self.config.joined:
            ids_BT = jnp.asarray(np.frombuffer(self.config.joined, np.int32))[ids_BT]
        return [LayerInput(ids_BT)] * self.config.num_hidden_layers

    def cached(self, config: Config, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Returns the empty cache of a layer; `shape` is [B, S]."""
        return empty_parts(config, layer, shape, dtype)

    def source_of(self, layer: int) -> int | None:
        """Returns the layer before, after the first layer that makes entries: each hands on what it was given too."""
        return layer - 1 if layer > min(self.config.entry_layers, default=layer) else None

    def handed_on(self, result: Any) -> Any:
        """Returns the entries for later layers, without the cache."""
        return result[1]

    def by_token(self, handed: Any) -> Any:
        """Returns the entries, of which the last ones are zeros."""
        return handed.padded()

    def kept(self, layer: int, result: Any) -> Any:
        return result[0]

    def given(self, step: Step, handed: Any) -> tuple[Step, Any]:
        """Returns the step with what the layer before handed on."""
        return step._replace(input=step.input._replace(handed=handed)), None
