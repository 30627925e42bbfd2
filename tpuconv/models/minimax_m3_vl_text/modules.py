"""MiniMax-M3 (arXiv:2606.13392): tokens attend to blocks of keys that an indexer selects."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.cache import KV, IndexKeys, append_kv, write_slots
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import MASKED_SCORE, CenteredRMSNorm, Einsum, Keys, apply_rope, times
from tpuconv.models.common.moe import Expert, GatedExperts, Rows, routed
from tpuconv.models.common.placement import placed, rules_for
from tpuconv.models.common.steps import Step
from tpuconv.models.minimax_m3_vl_text.family import Config
from tpuconv.models.modules.minimax import Router
from tpuconv.notation.letters import with_letters

LEGEND = {"n": "index_heads", "x": "index_dim"}
"""The words of this module, by the letters of its einsums and arrays."""


class MaxBlockIndexer(nnx.Module):
    """Selects for each token the `index_topk_blocks` blocks of keys with the highest scores, for each of its n heads
    (arXiv:2606.13392). The score of a block is the largest product of the query with a key of the block. A token's own
    block and the ones before it, `index_local_blocks` of them, are always selected. Scores are computed in float32: a
    small error may select another block.

    Blocks are counted by positions, so that padding does not move them."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes, eps = with_letters(config.sizes, LEGEND), config.rms_norm_eps
        self.size, self.count, self.local = config.index_block_size, config.index_topk_blocks, config.index_local_blocks
        self.q = Einsum("BTD,Dnx->BTnx", sizes, dtype=dtype, keys=keys)
        self.k = Einsum("BTD,Dx->BTx", sizes, dtype=dtype, keys=keys)
        self.q_norm = CenteredRMSNorm("x", sizes, eps, dtype=dtype)
        self.k_norm = CenteredRMSNorm("x", sizes, eps, dtype=dtype)

    def key(self, x_BTD: jax.Array, step: Step) -> jax.Array:
        """Returns the keys [B, T, x] of these tokens."""
        k_BTx = self.k_norm(self.k(x_BTD))
        return apply_rope(k_BTx[:, :, None], step.cos_sin_in(k_BTx.dtype))[:, :, 0]

    def __call__(self, x_BTD: jax.Array, i_BSx: jax.Array, step: Step, visible_BTS: jax.Array) -> jax.Array:
        """Returns the mask [B, n, T, S] of the tokens in selected blocks; [B, 1, T, S] if all are selected.

        Args:
            x_BTD: hidden states.
            i_BSx: the indexer's keys of all tokens so far.
            step: positions.
            visible_BTS: the mask of the tokens that each token sees.
        """
        # Computed where they are not needed too, since a quantization finds kernels by their products.
        q_BTnx = self.q_norm(self.q(x_BTD))
        q_BTnx = apply_rope(q_BTnx, step.cos_sin_in(q_BTnx.dtype)).astype(jnp.float32)
        S = i_BSx.shape[1]
        number = -(-S // self.size)
        if number <= self.count:
            return visible_BTS[:, None]
        # The slot of each position; those without a token come last.
        slots_BS = jnp.argsort(jnp.where(step.pos_BS < 0, S, step.pos_BS), axis=1)
        i_BSx = jnp.take_along_axis(i_BSx, slots_BS[..., None], axis=1).astype(jnp.float32)
        scores_BTnS = jnp.einsum("BTnx,BSx->BTnS", q_BTnx, i_BSx, precision=jax.lax.Precision.HIGHEST)
        is_later_BT1S = jnp.arange(S) > step.pos_BT[..., None, None]
        scores_BTnS = jnp.where(is_later_BT1S, -jnp.inf, scores_BTnS)
        scores_BTnS = jnp.pad(scores_BTnS, ((0, 0),) * 3 + ((0, number * self.size - S),), constant_values=-jnp.inf)
        # From here on the last axis is the axis of blocks.
        scores = scores_BTnS.reshape(*scores_BTnS.shape[:3], number, self.size).max(-1)
        distance = step.pos_BT[..., None, None] // self.size - jnp.arange(number)
        scores = jnp.where((distance >= 0) & (distance < self.local), jnp.inf, scores)
        ids_BTnX = jax.lax.top_k(scores, self.count)[1]
        selected = jax.nn.one_hot(ids_BTnX, number).sum(-2)
        is_block_of_key = jax.nn.one_hot(step.pos_BS // self.size, number)
        selected_BnTS = jnp.einsum("BTnb,BSb->BnTS", selected, is_block_of_key)
        return visible_BTS[:, None] & (selected_BnTS > 0)


def attention_by_group(q_BTNH: jax.Array, kv: KV, visible_BnTS: jax.Array) -> jax.Array:
    """Returns softmax attention [B, T, N, H], in which each of n groups of adjacent query heads has a mask of its own;
    else as `tpuconv.models.common.layers.attention`."""
    B, T, N, H = q_BTNH.shape
    K = kv.k_BSKH.shape[2]
    q_BTKGH = placed(q_BTNH.reshape(B, T, K, N // K, H), "B T K G H", rules_for(kv))
    visible_BNTS = jnp.repeat(visible_BnTS, N // visible_BnTS.shape[1], axis=1)
    visible_BKGTS = visible_BNTS.reshape(B, K, N // K, T, -1)
    scores_BKGTS = jnp.where(visible_BKGTS, kv.scores(q_BTKGH) * H**-0.5, MASKED_SCORE)
    y_BTKGH = kv.weighted_values(jax.nn.softmax(scores_BKGTS, axis=-1), q_BTNH.dtype)
    return placed(y_BTKGH.reshape(B, T, N, H), "B T N H").astype(q_BTNH.dtype)


class Attention(blocks.NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    and keys are normalized, each head separately."""

    norm_type = CenteredRMSNorm


class SparseAttention(Attention):
    """Attention to the blocks of keys that an indexer selects. Also returns the indexer's keys."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.indexer = MaxBlockIndexer(config, dtype=dtype, keys=keys)

    def __call__(  # type: ignore[override]
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, cache: tuple[KV, IndexKeys] | None
    ) -> tuple[jax.Array, tuple[KV, IndexKeys]]:
        kv, index = cache or (None, None)
        q_BTNH, k_BTKH = self.positioned(self.q(x_BTD), self.k(x_BTD), step)
        kv = append_kv(kv, k_BTKH, self.values(x_BTD), step.slot)
        new = IndexKeys(self.indexer.key(x_BTD, step))
        index = new if index is None else write_slots(index, new, step.slot)
        visible_BnTS = self.indexer(x_BTD, index.i_BSx, step, step.visible(window))
        return self.o(attention_by_group(q_BTNH, kv, visible_BnTS)), (kv, index)


def swiglu_oai(gate: jax.Array, up: jax.Array, config: Config) -> jax.Array:
    """Returns (up + 1) gate sigmoid(alpha gate), with gates of at most a limit and `up` between -limit and limit."""
    limit = config.swiglu_limit
    gate = jnp.minimum(gate, limit)
    return (jnp.clip(up, -limit, limit) + 1) * (gate * nnx.sigmoid(gate * config.swiglu_alpha))


class MLP(blocks.GatedMLP):
    """Gated MLP with limits, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, F: str = "F", *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, F, dtype=dtype, keys=keys)
        self.config = config

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(swiglu_oai(self.gate(x_BTD), self.up(x_BTD), self.config))


class MoE(GatedExperts):
    """The chosen experts, with a factor, and the shared one, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.sizes, nnx.silu, dtype=dtype, keys=keys)
        self.config = config
        self.router = Router(config, dtype=dtype, keys=keys)
        self.shared = MLP(config, "W", dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        config = self.config

        def feed(gate: Expert, up: Expert, down: Expert, rows: Rows) -> jax.Array:
            return down(swiglu_oai(gate(rows.x, rows), up(rows.x, rows), config), rows)

        y_BTD = routed(feed, (self.gate, self.up, self.down), x_BTD, *self.router(x_BTD))
        return times(y_BTD, config.routed_scaling_factor) + self.shared(x_BTD)


class Block(blocks.PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections."""

    mlp_type = MLP
    moe_type = MoE
    norm_type = CenteredRMSNorm

    def new_attention(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
        kind = SparseAttention if layer in config.layer_sets["indexer_layers"] else Attention
        return kind(config, dtype=dtype, keys=keys)


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = CenteredRMSNorm

    def cached(self, config: Config, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Returns the empty cache of a layer; `shape` is [B, S], or [L, B, S] for all layers."""
        kv = KV.empty(config, layer, shape, dtype)
        if layer not in config.layer_sets["indexer_layers"]:
            return kv
        return kv, IndexKeys.empty(config, shape, self.embed.embedding.dtype)
