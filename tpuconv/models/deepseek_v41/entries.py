"""Compressed keys (entries) of DeepSeek V4.1, and the two levels of their selection. Some layers make entries, some
select them; the layers after them read what they made and selected.

In names of arrays S counts entries, P are the last tokens.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import MASKED_SCORE, Einsum, Keys, ScaledRMSNorm, rope_cos_sin
from tpuconv.models.common.recurrence import LayerState
from tpuconv.models.common.selection import among_best, indexer_scores
from tpuconv.models.deepseek_v4.modules import Tokens, turned
from tpuconv.models.deepseek_v41.family import Config
from tpuconv.notation.letters import with_letters

LEGEND = {"n": "index_heads", "x": "index_dim"}
"""The words of this module, by the letters of its einsums and arrays."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Entries:
    """The entries of all tokens so far, and their keys for indexers. `axes` are the letters of each array."""

    axes: ClassVar[tuple[str, ...]] = ("B S H", "B S index_dim")

    kv_BSH: jax.Array
    index_BSx: jax.Array

    @classmethod
    def empty(cls, config: Config, shape: tuple[int, ...], ratio: int, dtype: DTypeLike) -> Self:
        """Returns zeros; `shape` is [B, S], of tokens, of which `ratio` make an entry."""
        counts = (*shape[:-1], max(1, shape[-1] // ratio))
        return cls(*(jnp.zeros((*counts, config.sizes[width]), dtype) for width in ("H", "index_dim")))

    def written(self, entries: "Entries", slots_BS: jax.Array) -> Self:
        """Returns these with further entries at their slots; slots behind the last one are dropped."""
        rows = jnp.arange(len(slots_BS))[:, None]

        def write(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[rows, slots_BS].set(new.astype(old.dtype), mode="drop")

        return type(self)(write(self.kv_BSH, entries.kv_BSH), write(self.index_BSx, entries.index_BSx))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PoolState(LayerState):
    """The values and the logits of the weights of the last tokens, of which the next entry is made."""

    axes: ClassVar[tuple[str, ...]] = ("B pool_keys H", "B pool_keys H")

    kv_BPH: jax.Array
    gate_BPH: jax.Array

    @classmethod
    def of(cls, config: Config, ratio: int, *batch: int) -> Self:
        """Returns zeros, for layers whose entries are made of `ratio` tokens."""
        shape = (*batch, ratio - 1, config.sizes["H"])
        return cls(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))


class Handed(NamedTuple):
    """The entries that layers hand on, the mask [B, T, S] of the entries that tokens attend to, and the mask of the
    entries that later layers may select. Each is None before the layer that makes it."""

    entries: Entries | None = None
    selected_BTS: jax.Array | None = None
    candidates_BTS: jax.Array | None = None

    def padded(self) -> "Handed":
        """Returns the same with as many entries as tokens; further ones are zeros."""
        assert self.selected_BTS is not None
        tokens, count = self.selected_BTS.shape[1:]
        pad = ((0, 0), (0, tokens - count), (0, 0))
        return self._replace(entries=jax.tree.map(lambda x: jnp.pad(x, pad), self.entries))

    def cut(self) -> "Handed":
        """Returns the inverse of `padded`, or the same if it is not padded."""
        if self.selected_BTS is None:
            return self
        count = self.selected_BTS.shape[2]
        return self._replace(entries=jax.tree.map(lambda x: x[:, :count], self.entries))


class LatentPool(nnx.Module):
    """One entry for `ratio` tokens, x [B, T, D] to entries without rotary positions. Each channel of an entry has
    weights of its own. An entry of one token is a product alone. Several tokens are joined in float32."""

    def __init__(self, config: Config, ratio: int, *, dtype: DTypeLike, keys: Keys):
        sizes, self.ratio = config.sizes, ratio
        self.kv = Einsum("BTD,DH->BTH", sizes, dtype=dtype, keys=keys)
        if ratio > 1:
            self.gate = Einsum("BTD,DH->BTH", sizes, dtype=dtype, keys=keys)
        self.norm = ScaledRMSNorm("H", sizes, config.rms_norm_eps, dtype=dtype)

    def __call__(
        self, x_BTD: jax.Array, tokens: Tokens, state: PoolState | None
    ) -> tuple[jax.Array, jax.Array, PoolState | None]:
        """Returns the entries [B, S, H] that these tokens may complete, their numbers [B, S], and the state after these
        tokens."""
        ratio = self.ratio
        number_BS = tokens.seen_B[:, None] // ratio + jnp.arange(-(-x_BTD.shape[1] // ratio))
        if state is None:
            return self.norm(self.kv(x_BTD)), number_BS, None
        wide_BTD = x_BTD.astype(jnp.float32)
        kv_BSH = jnp.concatenate([state.kv_BPH, self.kv(wide_BTD)], axis=1)
        gate_BSH = jnp.concatenate([state.gate_BPH, self.gate(wide_BTD)], axis=1)
        pos_BSP = number_BS[..., None] * ratio + jnp.arange(ratio)
        at_BS1 = (pos_BSP - tokens.seen_B[:, None, None] + ratio - 1).reshape(len(x_BTD), -1, 1)
        values, logits = (
            jnp.take_along_axis(each, at_BS1, axis=1, mode="clip").reshape(*pos_BSP.shape, -1)
            for each in (kv_BSH, gate_BSH)
        )
        entries_BSH = self.norm((values * nnx.softmax(logits, axis=2)).sum(axis=2).astype(x_BTD.dtype))
        return entries_BSH, number_BS, PoolState(tokens.last(kv_BSH, ratio - 1), tokens.last(gate_BSH, ratio - 1))


class LeveledIndexer(nnx.Module):
    """Selects for each token the `index_topk` entries with the highest scores, as DeepSeek V3.2 does for tokens
    (arXiv:2512.02556, section 2.1). A layer that makes entries makes their keys too. After the layer
    `candidate_source_layer_id` they are selected among its candidates."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, LEGEND)
        self.config, self.source = config, config.candidate_source_layer_id
        self.makes_candidates, self.takes_candidates = layer == self.source, 0 <= self.source < layer
        self.q = Einsum("BTQ,Qnx->BTnx", sizes, dtype=dtype, keys=keys)
        self.router = Einsum("BTD,Dn->BTn", sizes, dtype=dtype, keys=keys)
        if layer in config.entry_layers:
            self.k = Einsum("BSH,Hx->BSx", sizes, dtype=dtype, keys=keys)
            self.k_norm = ScaledRMSNorm("x", sizes, config.rms_norm_eps, dtype=dtype)

    def made(self, entries_BSH: jax.Array, number_BS: jax.Array, ratio: int) -> Entries:
        """Returns entries and their keys, turned to the position of the first token of each."""
        config = self.config
        cos_sin = rope_cos_sin(config.compress_rope, config.rope_dim, number_BS * ratio)
        both = (entries_BSH, self.k_norm(self.k(entries_BSH)))
        return Entries(*(turned(each[:, :, None], cos_sin)[:, :, 0] for each in both))

    def __call__(
        self, x_BTD: jax.Array, x_BTQ: jax.Array, cos_sin: Any, complete_BTS: jax.Array, handed: Handed
    ) -> Handed:
        """Returns what a layer hands on: the selected ones among the complete entries of each token."""
        config, entries, visible_BTS = self.config, handed.entries, complete_BTS
        assert entries is not None
        # Computed where they are not needed too, since a quantization finds kernels by their products.
        q_BTnx = turned(self.q(x_BTQ), cos_sin)
        weights_BTn = self.router(x_BTD).astype(jnp.float32) * (q_BTnx.shape[2] * q_BTnx.shape[3]) ** -0.5
        if self.takes_candidates:
            assert handed.candidates_BTS is not None
            visible_BTS = visible_BTS & handed.candidates_BTS
        scores_BTS = indexer_scores(q_BTnx, weights_BTn, entries.index_BSx)
        few = visible_BTS.shape[-1] <= config.index_topk
        selected_BTS = visible_BTS if few else among_best(scores_BTS, config.index_topk, visible_BTS)
        handed = handed._replace(selected_BTS=selected_BTS)
        if not self.makes_candidates:
            return handed
        blocks, size = config.candidate_topk_blocks, config.candidate_block_size
        return handed._replace(candidates_BTS=in_best_blocks(scores_BTS, complete_BTS, blocks, size))


def in_best_blocks(scores_BTS: jax.Array, complete_BTS: jax.Array, count: int, size: int) -> jax.Array:
    """Returns the mask [B, T, S] of the complete entries in the `count` blocks of `size` entries whose best entries
    have the highest scores. The block of the newest complete entry is always one of them."""
    entries = scores_BTS.shape[-1]
    blocks = -(-entries // size)
    if blocks <= count:
        return complete_BTS
    masked = jnp.where(complete_BTS, scores_BTS, MASKED_SCORE)
    masked = jnp.pad(masked, ((0, 0), (0, 0), (0, blocks * size - entries)), constant_values=MASKED_SCORE)
    best_BTP = masked.reshape(*masked.shape[:2], blocks, size).max(axis=-1)
    newest_BT1 = complete_BTS.sum(axis=-1, keepdims=True) - 1
    numbers = jnp.arange(blocks)
    best_BTP = jnp.where(numbers == newest_BT1 // size, jnp.inf, best_BTP)
    chosen_BTP = among_best(best_BTP, count, numbers * size <= newest_BT1)
    return complete_BTS & jnp.repeat(chosen_BTP, size, axis=-1)[..., :entries]
