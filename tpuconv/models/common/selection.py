"""Attention to tokens, entries or blocks of tokens that an indexer selects. Blocks are counted by positions, so that
padding does not move them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import Attention
from tpuconv.models.common.cache import KV, IndexKeys, append_kv, write_slots
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import MASKED_SCORE, Keys
from tpuconv.models.common.placement import placed, rules_for
from tpuconv.models.common.recurrence import exact_einsum
from tpuconv.models.common.steps import Step


def indexer_scores(q_BTnx: jax.Array, weights_BTn: jax.Array, k_BSx: jax.Array) -> jax.Array:
    """Returns the scores [B, T, S] of keys (arXiv:2512.02556, section 2.1): the sum over the heads of the products of
    queries and keys, negative ones as 0, times weights of the token. They are computed in float32: a small error may
    select another key."""
    products_BnTS = exact_einsum("BTnx,BSx->BnTS", q_BTnx.astype(jnp.float32), k_BSx.astype(jnp.float32))
    return exact_einsum("BTn,BnTS->BTS", weights_BTn, nnx.relu(products_BnTS))


def among_best(scores_BTS: jax.Array, count: int, candidates_BTS: jax.Array) -> jax.Array:
    """Returns the mask [B, T, S] of the candidates that have the `count` highest scores."""
    ids_BTX = jax.lax.top_k(jnp.where(candidates_BTS, scores_BTS, MASKED_SCORE), count)[1]
    B, T = ids_BTX.shape[:2]
    rows, columns = jnp.arange(B)[:, None, None], jnp.arange(T)[None, :, None]
    return candidates_BTS & jnp.zeros(scores_BTS.shape, bool).at[rows, columns, ids_BTX].set(True)


def in_blocks(x_BSx: jax.Array, step: Step, blocks: int, size: int) -> jax.Array:
    """Returns the vectors [B, P, c, x] of the first P `blocks` of `size` tokens, made of the vectors of all slots."""
    order_BS1 = jnp.argsort(step.pos_BS < 0, axis=1, stable=True)[:, : blocks * size, None]
    return jnp.take_along_axis(x_BSx, order_BS1, axis=1).reshape(len(x_BSx), blocks, size, -1)


def pooled(
    k_BSx: jax.Array, gate_BSx: jax.Array, step: Step, pools: int, size: int, bias: jax.Array | None = None
) -> jax.Array:
    """Returns the keys [B, P, x] of the first P `pools` of `size` tokens: the sums of the keys of their tokens, each
    element with weights of its own. `gate_BSx` has the logits of these, to which `bias` [p, x] is added."""
    k_BPpx, gate_BPpx = (in_blocks(each, step, pools, size) for each in (k_BSx, gate_BSx))
    logits_BPpx = gate_BPpx.astype(jnp.float32)
    if bias is not None:
        logits_BPpx += bias.astype(jnp.float32)
    return (nnx.softmax(logits_BPpx, axis=2).astype(k_BPpx.dtype) * k_BPpx).sum(axis=2)


def complete_blocks(step: Step, size: int) -> jax.Array:
    """Returns the number [B, T, 1] of blocks of `size` tokens that end with a token or before it."""
    return (step.pos_BT[..., None] + 1) // size


def tokens_of_best_blocks(
    scores_BTP: jax.Array, count: int, size: int, before_BT1: jax.Array, step: Step, visible_BTS: jax.Array
) -> jax.Array:
    """Returns the mask [B, T, S] of the visible tokens in the `count` blocks with the highest scores among the first
    ones, and in all blocks after these.

    Args:
        scores_BTP: the scores of the P blocks.
        count: number of blocks that a token selects.
        size: tokens of a block.
        before_BT1: number of the first blocks, among which a token selects.
        step: positions.
        visible_BTS: the mask of the tokens that each token sees.
    """
    blocks = scores_BTP.shape[-1]
    selected_BTP = among_best(scores_BTP, count, jnp.arange(blocks) < before_BT1)
    block_B1S = step.pos_BS[:, None] // size
    of_block_BTS = jnp.take_along_axis(selected_BTP, jnp.clip(block_B1S, 0, blocks - 1), axis=2)
    return visible_BTS & (of_block_BTS | (block_B1S >= before_BT1))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PoolKeys:
    """The state of an indexer for each token: its key, and the logits of its weight in the key of its pool. In the
    model's dtype, as `IndexKeys`. `axes` are the letters of each array."""

    axes: ClassVar[tuple[str, ...]] = ("B S index_dim", "B S index_dim")

    i_BSx: jax.Array
    gate_BSx: jax.Array

    @classmethod
    def empty(cls, config: DecoderConfig, shape: tuple[int, ...], dtype: DTypeLike) -> Self:
        """Returns zeros; `shape` is [B, S]."""
        return cls(*(jnp.zeros((*shape, config.sizes["index_dim"]), dtype) for _ in cls.axes))


def attention_by_group(q_BTNH: jax.Array, kv: KV, visible_BnTS: jax.Array, *, scale: float | None = None) -> jax.Array:
    """Returns softmax attention [B, T, N, H], in which each of n groups of adjacent query heads has a mask of its own;
    else as `tpuconv.models.common.layers.attention`."""
    B, T, N, H = q_BTNH.shape
    K = kv.k_BSKH.shape[2]
    q_BTKGH = placed(q_BTNH.reshape(B, T, K, N // K, H), "B T K G H", rules_for(kv))
    visible_BNTS = jnp.repeat(visible_BnTS, N // visible_BnTS.shape[1], axis=1)
    visible_BKGTS = visible_BNTS.reshape(B, K, N // K, T, -1)
    scores_BKGTS = kv.scores(q_BTKGH) * (H**-0.5 if scale is None else scale)
    weights_BKGTS = jax.nn.softmax(jnp.where(visible_BKGTS, scores_BKGTS, MASKED_SCORE), axis=-1)
    y_BTKGH = kv.weighted_values(weights_BKGTS, q_BTNH.dtype)
    return placed(y_BTKGH.reshape(B, T, N, H), "B T N H").astype(q_BTNH.dtype)


class GroupSelecting(Attention):
    """Attention to the keys that an indexer selects for each group of query heads. Also returns the indexer's state of
    all tokens so far. A family's class derives from this class and from its attention, in this order."""

    indexer_type: ClassVar[Callable[..., Any]]

    def __init__(self, config: Any, *args: Any, dtype: DTypeLike, keys: Keys, **options: Any):
        super().__init__(config, *args, dtype=dtype, keys=keys, **options)
        self.indexer = self.indexer_type(config, dtype=dtype, keys=keys)

    def __call__(  # type: ignore[override]
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, cache: tuple[KV, Any] | None
    ) -> tuple[jax.Array, tuple[KV, Any]]:
        kv, index = cache or (None, None)
        q_BTNH, k_BTKH = self.positioned(self.queries(x_BTD), self.k(x_BTD), step)
        kv = append_kv(kv, k_BTKH, self.values(x_BTD), step.slot)
        new = self.indexer.kept(x_BTD, step)
        index = new if index is None else write_slots(index, new, step.slot)
        visible_BnTS = self.indexer(x_BTD, index, step, step.visible(window))
        y_BTNH = attention_by_group(q_BTNH, kv, visible_BnTS, scale=self.scale)
        return self.o(self.gated(x_BTD, y_BTNH)), (kv, index)


class GroupSelectingDecoder(Decoder):
    """A decoder with such attention in its `indexer_layers`. `index_type` is the class of their indexers' state."""

    index_type: ClassVar[Any] = IndexKeys

    def cached(self, config: DecoderConfig, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Returns the empty cache of a layer; `shape` is [B, S], or [L, B, S] for all layers."""
        kv = KV.empty(config, layer, shape, dtype)
        if layer not in config.layer_sets["indexer_layers"]:
            return kv
        return kv, self.index_type.empty(config, shape, self.embed.embedding.dtype)
