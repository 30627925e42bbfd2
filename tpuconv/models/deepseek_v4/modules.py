"""DeepSeek V4: few keys for each token, compressed ones for those further back, and several residual streams."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import mtp
from tpuconv.models.common.blocks import ClampedMLP, clamped
from tpuconv.models.common.cache import Cache
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import MASKED_SCORE, Einsum, Keys, ScaledRMSNorm, rope_cos_sin
from tpuconv.models.common.moe import GatedExperts
from tpuconv.models.common.placement import placed
from tpuconv.models.common.recurrence import PackedTokens
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.selection import among_best, indexer_scores
from tpuconv.models.common.sinks import softmax_with_sinks
from tpuconv.models.common.steps import Step
from tpuconv.models.common.streams import JoinedNorm, Streams, StreamsDecoder, by_stream
from tpuconv.models.deepseek_v4.family import HASHED, HEAVY, SLIDING, SPARSE_SERIES, Config, StreamsConfig
from tpuconv.notation.letters import with_letters

LEGEND = {"n": "index_heads", "x": "index_dim", "g": "output_groups", "G": "group_heads", "c": "group_dim"}
"""The words of this module, by the letters of its einsums and arrays."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Compressed:
    """The state of a compressor: its entries, and the values of the last tokens from which the next entries are made.
    `axes` are the letters and words of each array: H is the width of an entry, S counts entries. In names of arrays, P
    are the last tokens, X the series."""

    axes: ClassVar[tuple[str, ...]] = ("B S H", "B last_tokens series H", "B last_tokens series H")

    entries_BSH: jax.Array
    kv_BPXH: jax.Array
    gate_BPXH: jax.Array

    @classmethod
    def empty(cls, shape: tuple[int, ...], width: int, series: int, rate: int, dtype: DTypeLike) -> Self:
        """Returns zeros; `shape` is [B, S], of tokens."""
        last = (*shape[:-1], series * rate - 1, series, width)
        entries = (*shape[:-1], max(1, shape[-1] // rate), width)
        return cls(jnp.zeros(entries, dtype), jnp.zeros(last, dtype), jnp.zeros(last, dtype))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WindowKeys:
    """The cache of a layer: the key of each token of the window, which is its value too. `axes` are the letters of each
    array."""

    axes: ClassVar[tuple[str, ...]] = ("B last_tokens H",)

    kv_BPH: jax.Array

    @classmethod
    def empty(cls, config: StreamsConfig, shape: tuple[int, ...], dtype: DTypeLike) -> Self:
        """Returns zeros; `shape` is [B, S]."""
        return cls(jnp.zeros((*shape[:-1], config.sliding_window - 1, config.sizes["H"]), dtype))


def empty_cache(config: Config, kind: str, shape: tuple[int, ...], dtype: DTypeLike) -> tuple[Any, ...]:
    """Returns the empty cache of a layer of this kind; `shape` is [B, S]."""
    sizes = config.sizes
    local = WindowKeys.empty(config, shape, dtype)
    if kind == SLIDING:
        return (local,)
    if kind == HEAVY:
        return local, Compressed.empty(shape, sizes["H"], 1, sizes["heavy_tokens"], dtype)
    rate, widths = sizes["sparse_tokens"], (sizes["H"], sizes["index_dim"])
    return local, *(Compressed.empty(shape, width, 2, rate, dtype) for width in widths)


@dataclass(frozen=True)
class Tokens:
    """The tokens of a call, with padding at the end of each row: their positions [B, T], how many were before, and how
    many there are."""

    pos_BT: jax.Array
    seen_B: jax.Array
    length_B: jax.Array

    @classmethod
    def of(cls, packed: PackedTokens, step: Step) -> Self:
        """Returns the positions of packed tokens."""
        seen_B = step.pos_BS.max(axis=1) + 1 - packed.length_B
        return cls(seen_B[:, None] + jnp.arange(packed.x_BTD.shape[1]), seen_B, packed.length_B)

    def last(self, x: jax.Array, count: int) -> jax.Array:
        """Returns what belongs to the last `count` tokens of x [B, count + T, ...]."""
        at = self.length_B[:, None] + jnp.arange(count)
        return jnp.take_along_axis(x, at.reshape(*at.shape, *[1] * (x.ndim - 2)), axis=1)


def turned(x_BTNH: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (2i, 2i + 1) of the last R dimensions of each head, and leaves their order as it is."""
    cos, sin = (each.astype(x_BTNH.dtype).astype(jnp.float32) for each in cos_sin)
    rest, x = jnp.split(x_BTNH, [x_BTNH.shape[-1] - 2 * cos.shape[-1]], axis=-1)
    a, b = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    pairs = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
    return jnp.concatenate([rest, pairs.astype(x_BTNH.dtype)], axis=-1)


class Series(nnx.Module):
    """Vectors of tokens that entries are weighted sums of, and the logits of their weights. `bias` is added by a
    token's place among the tokens of an entry."""

    def __init__(self, width: str, tokens: str, sizes: Any, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(sizes, {"H": width})
        self.kv = Einsum("BTD,DH->BTH", sizes, dtype=dtype, keys=keys)
        self.gate = Einsum("BTD,DH->BTH", sizes, dtype=dtype, keys=keys)
        self.bias = nnx.Param(jnp.zeros((sizes[tokens], sizes["H"]), jnp.float32))


class Compressor(nnx.Module):
    """One entry for so many `tokens`, x [B, T, D] to entries of this `width`. Each channel of an entry has weights of
    its own. With two series, an entry is made of one of its own tokens, and the other of the tokens before them."""

    def __init__(self, config: Config, width: str, tokens: str, series: int, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        self.rate, self.rope, self.rope_dim = sizes[tokens], config.compress_rope, config.rope_dim
        if series == 2:
            self.before = Series(width, tokens, sizes, dtype=dtype, keys=keys)
        self.current = Series(width, tokens, sizes, dtype=dtype, keys=keys)
        self.norm = ScaledRMSNorm("H", with_letters(sizes, {"H": width}), config.rms_norm_eps, dtype=dtype)
        self.series = SPARSE_SERIES[-series:]

    def __call__(self, x_BTD: jax.Array, tokens: Tokens, state: Compressed) -> Compressed:
        rate, T = self.rate, x_BTD.shape[1]
        parts: list[Series] = [getattr(self, name) for name in self.series]
        count = len(parts) * rate - 1
        kv_BSXH = jnp.concatenate([state.kv_BPXH, jnp.stack([part.kv(x_BTD) for part in parts], axis=2)], axis=1)
        gate_BSXH = jnp.concatenate([state.gate_BPXH, jnp.stack([part.gate(x_BTD) for part in parts], axis=2)], axis=1)
        # As many entries as may be complete with these tokens; numbers and first tokens differ by row.
        entry_BS = tokens.seen_B[:, None] // rate + jnp.arange(-(-T // rate))
        kvs, gates = [], []
        for i, part in enumerate(parts):
            first_BS = (entry_BS - (len(parts) - 1 - i)) * rate
            pos_BSc = first_BS[..., None] + jnp.arange(rate)
            at_BS1 = (pos_BSc - tokens.seen_B[:, None, None] + count).reshape(len(x_BTD), -1, 1)
            shape = (*pos_BSc.shape, -1)
            kv, gate = (jnp.take_along_axis(x[:, :, i], at_BS1, axis=1, mode="clip") for x in (kv_BSXH, gate_BSXH))
            gate = gate.reshape(shape).astype(jnp.float32) + part.bias[...].astype(jnp.float32)
            kvs.append(kv.reshape(shape))
            gates.append(jnp.where(pos_BSc[..., None] >= 0, gate, MASKED_SCORE))
        kv, gate = (jnp.concatenate(each, axis=2) for each in (kvs, gates))
        entries_BSH = self.norm((kv * nnx.softmax(gate, axis=2).astype(kv.dtype)).sum(axis=2))
        cos_sin = rope_cos_sin(self.rope, self.rope_dim, entry_BS * rate)
        entries_BSH = turned(entries_BSH[:, :, None], cos_sin)[:, :, 0]
        is_complete = (entry_BS + 1) * rate <= (tokens.seen_B + tokens.length_B)[:, None]
        slots = jnp.where(is_complete, entry_BS, state.entries_BSH.shape[1])
        rows = jnp.arange(len(x_BTD))[:, None]
        entries = state.entries_BSH.at[rows, slots].set(entries_BSH.astype(state.entries_BSH.dtype), mode="drop")
        return Compressed(entries, tokens.last(kv_BSXH, count), tokens.last(gate_BSXH, count))


class EntryIndexer(nnx.Module):
    """Selects for each token the `index_topk` entries with the highest scores, as DeepSeek V3.2 does for tokens. It has
    narrower entries of its own."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, LEGEND)
        self.count = config.index_topk
        self.q = Einsum("BTQ,Qnx->BTnx", sizes, dtype=dtype, keys=keys)
        self.router = Einsum("BTD,Dn->BTn", sizes, dtype=dtype, keys=keys)
        self.compressor = Compressor(config, "index_dim", "sparse_tokens", 2, dtype=dtype, keys=keys)

    def __call__(
        self, x_BTD: jax.Array, x_BTQ: jax.Array, cos_sin: Any, entries_BSx: jax.Array, visible_BTS: jax.Array
    ) -> jax.Array:
        """Returns the mask [B, T, S] of the selected entries among the visible ones."""
        q_BTnx = turned(self.q(x_BTQ), cos_sin)
        weights_BTn = self.router(x_BTD).astype(jnp.float32) * (q_BTnx.shape[2] * q_BTnx.shape[3]) ** -0.5
        if visible_BTS.shape[-1] <= self.count:
            return visible_BTS
        return among_best(indexer_scores(q_BTnx, weights_BTn, entries_BSx), self.count, visible_BTS)


class WindowAttention(nnx.Module):
    """Attention of N heads to one key for each token of the window, and to further entries. Keys are values too; so
    their rotary positions are taken off the output again. Each head has a score without a value, and each group of
    heads a projection of its own. `rope` are the rotary positions of the layer."""

    def __init__(self, config: Any, rope: Rope, *, dtype: DTypeLike, keys: Keys):
        sizes, eps = with_letters(config.sizes, LEGEND), config.rms_norm_eps
        self.config, self.rope, self.dtype = config, rope, dtype
        self.q_a = Einsum("BTD,DQ->BTQ", sizes, dtype=dtype, keys=keys)
        self.q_a_norm = ScaledRMSNorm("Q", sizes, eps, dtype=dtype)
        self.q = Einsum("BTQ,QNH->BTNH", sizes, dtype=dtype, keys=keys)
        self.kv = Einsum("BTD,DH->BTH", sizes, dtype=dtype, keys=keys)
        self.kv_norm = ScaledRMSNorm("H", sizes, eps, dtype=dtype)
        self.o_a = Einsum("BTgGH,gGHc->BTgc", sizes, dtype=dtype, keys=keys)
        self.o_b = Einsum("BTgc,gcD->BTD", sizes, dtype=dtype, keys=keys)
        self.sinks = nnx.Param(jnp.zeros(sizes["N"], jnp.float32))

    def cos_sin(self, pos_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns cosine and sine of the rotary angles at these positions."""
        return rope_cos_sin(self.rope, self.config.rope_dim, pos_BT)

    def window_keys(
        self, x_BTD: jax.Array, tokens: Tokens, window: jax.Array | int, before: WindowKeys
    ) -> tuple[jax.Array, jax.Array, WindowKeys]:
        """Returns the keys [B, S, H] of the window and of these tokens, the mask [B, T, S] of those that each token
        sees, and the cache with these tokens."""
        new_BTH = turned(self.kv_norm(self.kv(x_BTD))[:, :, None], self.cos_sin(tokens.pos_BT))[:, :, 0]
        count = before.kv_BPH.shape[1]
        kv_BSH = jnp.concatenate([before.kv_BPH.astype(x_BTD.dtype), new_BTH], axis=1)
        pos_BS = tokens.seen_B[:, None] - count + jnp.arange(kv_BSH.shape[1])
        distance_BTS = tokens.pos_BT[:, :, None] - pos_BS[:, None]
        visible_BTS = (pos_BS[:, None] >= 0) & (distance_BTS >= 0) & (distance_BTS < window)
        return kv_BSH, visible_BTS, WindowKeys(tokens.last(kv_BSH, count))

    def attend(self, q_BTNH: jax.Array, kv_BSH: jax.Array, visible_BTS: jax.Array, cos_sin: Any) -> jax.Array:
        """Returns the output [B, T, D] of attention to the visible keys."""
        y_BTNH = turned(self._weighted(q_BTNH, kv_BSH, visible_BTS), (cos_sin[0], -cos_sin[1]))
        sizes = self.config.sizes
        y_BTgGH = y_BTNH.reshape(*y_BTNH.shape[:2], sizes["output_groups"], sizes["group_heads"], sizes["H"])
        return self.o_b(self.o_a(y_BTgGH))

    def _weighted(self, q_BTNH: jax.Array, kv_BSH: jax.Array, visible_BTS: jax.Array) -> jax.Array:
        scores_BNTS = jnp.einsum("BTNH,BSH->BNTS", q_BTNH, kv_BSH, preferred_element_type=jnp.float32)
        scores_BNTS = jnp.where(visible_BTS[:, None], scores_BNTS * q_BTNH.shape[-1] ** -0.5, MASKED_SCORE)
        weights_BNTS = softmax_with_sinks(scores_BNTS, self.sinks[...][:, None, None])
        return jnp.einsum("BNTS,BSH->BTNH", weights_BNTS.astype(kv_BSH.dtype), kv_BSH)


class Attention(WindowAttention):
    """Attention to the window and to the compressed entries of all tokens before, x [B, T, D] to [B, T, D]. Queries are
    normalized."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        self.kind = config.kind_of(layer)
        rope = config.rope if self.kind == SLIDING else config.compress_rope
        super().__init__(config, rope, dtype=dtype, keys=keys)
        sizes, self.rate = config.sizes, 0
        if self.kind == HEAVY:
            self.rate = sizes["heavy_tokens"]
            self.compressor = Compressor(config, "H", "heavy_tokens", 1, dtype=dtype, keys=keys)
        elif self.kind != SLIDING:
            self.rate = sizes["sparse_tokens"]
            self.compressor = Compressor(config, "H", "sparse_tokens", 2, dtype=dtype, keys=keys)
            self.indexer = EntryIndexer(config, dtype=dtype, keys=keys)

    def __call__(
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, state: tuple[Any, ...] | None
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        if state is None:
            state = empty_cache(self.config, self.kind, x_BTD.shape[:2], x_BTD.dtype)
        packed = PackedTokens.of(x_BTD, step)
        x_BTD, tokens = packed.x_BTD, Tokens.of(packed, step)
        cos_sin = self.cos_sin(tokens.pos_BT)
        x_BTQ = self.q_a_norm(self.q_a(x_BTD))
        q_BTNH = self.q(x_BTQ)
        length = jax.lax.rsqrt(jnp.square(q_BTNH.astype(jnp.float32)).mean(-1, keepdims=True) + self.q_a_norm.eps)
        q_BTNH = placed(turned(q_BTNH * length.astype(q_BTNH.dtype), cos_sin), "B T N H")
        kv_BSH, visible_BTS, new = self.window_keys(x_BTD, tokens, window, state[0])
        caches: list[Any] = [new]
        if self.rate:
            caches += [self.compressor(x_BTD, tokens, state[1])]
            entries_BSH = caches[1].entries_BSH
            complete_BT1 = ((tokens.pos_BT + 1) // self.rate)[..., None]
            seen_BTS = jnp.arange(entries_BSH.shape[1]) < complete_BT1
            if len(state) > 2:
                caches += [self.indexer.compressor(x_BTD, tokens, state[2])]
                seen_BTS = self.indexer(x_BTD, x_BTQ, cos_sin, caches[2].entries_BSH, seen_BTS)
            kv_BSH = jnp.concatenate([kv_BSH, entries_BSH.astype(kv_BSH.dtype)], axis=1)
            visible_BTS = jnp.concatenate([visible_BTS, seen_BTS], axis=2)
        return packed.unpacked(self.attend(q_BTNH, kv_BSH, visible_BTS, cos_sin)), tuple(caches)


class ScoredExperts(GatedExperts):
    """X experts of each token and one that all use, x [B, T, D] to [B, T, D]. Their weights are sqrt(softplus(score)),
    normalized; the experts with the highest weights, after a correction, are chosen."""

    def __init__(self, config: StreamsConfig, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        super().__init__(sizes, dtype=dtype, keys=keys)
        self.config = config
        self.router = Einsum("BTD,DE->BTE", sizes, dtype=dtype, keys=keys)
        self.shared = ClampedMLP(config, "W", dtype=dtype, keys=keys)
        self.correction = nnx.Param(jnp.zeros(sizes["E"], jnp.float32))

    def chosen(self, scores_BTE: jax.Array, ids_BT: jax.Array) -> jax.Array:
        """Returns the experts [B, T, X] of tokens with these ids."""
        wanted_BTE = scores_BTE + self.correction[...].astype(jnp.float32)
        return jax.lax.top_k(wanted_BTE, self.config.num_experts_per_tok)[1]

    def weighted(self, x_BTD: jax.Array, ids_BT: jax.Array) -> jax.Array:
        """Returns the output [B, T, D] for tokens with these ids."""
        scores_BTE = jnp.sqrt(nnx.softplus(placed(self.router(x_BTD), "B T E").astype(jnp.float32)))
        ids_BTX = self.chosen(scores_BTE, ids_BT)
        weights_BTX = jnp.take_along_axis(scores_BTE, ids_BTX, axis=-1)
        weights_BTX /= weights_BTX.sum(axis=-1, keepdims=True) + 1e-20
        y_BTD: jax.Array = self(x_BTD, ids_BTX, weights_BTX * self.config.routed_scaling_factor)
        return y_BTD + self.shared(x_BTD)

    def hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return clamped(gate, up, self.config.swiglu_limit)


class MoE(ScoredExperts):
    """The same. In the first layers the token's id says which experts they are."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        if layer < config.num_hidden_layers and config.mlp_kinds[layer] == HASHED:
            del self.correction
            self.experts_of_token = nnx.Variable(jnp.zeros((config.sizes["V"], config.sizes["X"]), jnp.int32))

    def chosen(self, scores_BTE: jax.Array, ids_BT: jax.Array) -> jax.Array:
        if hasattr(self, "correction"):
            return super().chosen(scores_BTE, ids_BT)
        return self.experts_of_token[...].astype(jnp.int32)[ids_BT]


class Block(nnx.Module):
    """One layer: attention, then experts, each after a norm and between the streams."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        self.count = config.hc_mult
        self.attn_streams = Streams(config, keys=keys)
        self.attn_norm = ScaledRMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.attn = Attention(config, layer, dtype=dtype, keys=keys)
        self.moe_streams = Streams(config, keys=keys)
        self.moe_norm = ScaledRMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.moe = MoE(config, layer, dtype=dtype, keys=keys)

    def __call__(
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, state: tuple[Any, ...] | None
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        x_BTrD = by_stream(x_BTD, self.count)
        y_BTD, post_BTr, mix_BTrw = self.attn_streams(x_BTrD)
        y_BTD, state = self.attn(self.attn_norm(y_BTD), step, window, state)
        x_BTrD = self.attn_streams.written(x_BTrD, y_BTD, post_BTr, mix_BTrw)
        y_BTD, post_BTr, mix_BTrw = self.moe_streams(x_BTrD)
        y_BTD = self.moe.weighted(self.moe_norm(y_BTD), step.input)
        return self.moe_streams.written(x_BTrD, y_BTD, post_BTr, mix_BTrw).reshape(x_BTD.shape), state


class MTPLayer(mtp.MTPLayer, Block):
    """The layer for multi-token prediction. Each stream is joined with the embeddings of the next tokens."""

    norm_type = ScaledRMSNorm

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        self.norm = JoinedNorm(config, dtype=dtype, keys=keys)
        self.window = config.sliding_window

    def joined_inputs(self, next_BTD: jax.Array, x_BTD: jax.Array) -> jax.Array:
        """Returns the streams [B, T, (r D)], made of the embeddings [B, T, D] of the next tokens and of streams."""
        x_BTrD = self.hidden_norm(by_stream(x_BTD, self.count))
        B, T, r, D = x_BTrD.shape
        x_BTrD = self.from_hidden(x_BTrD.reshape(B, T * r, D)).reshape(B, T, r, D)
        return (self.from_embed(self.embed_norm(next_BTD))[:, :, None] + x_BTrD).reshape(x_BTD.shape)


class WindowDecoder(Decoder):
    """A decoder whose layers keep the window alone, and what a compressor makes of other tokens."""

    def without(self, ids_BT: jax.Array, kept_BT: jax.Array, before: Cache, after: Cache) -> Cache:
        """As `Decoder.without`. The window and what a compressor keeps cannot forget a token: if one is not kept, the
        call is repeated."""
        layers = jax.lax.cond(
            kept_BT.all(), lambda: after.layers, lambda: self.run_layers(ids_BT, kept_BT, before)[1].layers
        )
        return replace(super().without(ids_BT, kept_BT, before, after), layers=layers)


class Model(StreamsDecoder, WindowDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block: ClassVar[Any] = Block
    mtp_type = mtp.mtp_module(MTPLayer)
    config: Config

    def __init__(
        self, config: Config, *, dtype: DTypeLike = jnp.bfloat16, rngs: nnx.Rngs | None = None, **options: Any
    ):
        super().__init__(config, dtype=dtype, rngs=rngs, **options)
        self.norm = JoinedNorm(config, dtype=dtype, keys=Keys((rngs or nnx.Rngs(1)).params()))

    def layer_inputs(self, ids_BT: jax.Array, x_BTD: jax.Array) -> Sequence[Any] | None:
        """Returns the token ids, for each layer."""
        return [ids_BT] * self.config.num_hidden_layers

    def mtp_inputs(self, next_BT: jax.Array, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.embed(next_BT), x_BTD

    def cached(self, config: Config, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Returns the empty cache of a layer; `shape` is [B, S]."""
        return empty_cache(config, config.kind_of(layer), shape, dtype)
