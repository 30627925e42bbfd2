"""Attention to tokens, entries or blocks of tokens that an indexer selects. Blocks are counted by positions, so that
padding does not move them."""

import jax
import jax.numpy as jnp
from flax import nnx

from tpuconv.models.common.layers import MASKED_SCORE
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


def tokens_of_best_blocks(
    scores_BTP: jax.Array, count: int, size: int, step: Step, visible_BTS: jax.Array
) -> jax.Array:
    """Returns the mask [B, T, S] of the visible tokens in the `count` complete blocks with the highest scores, and in
    the token's own block while that is incomplete.

    Args:
        scores_BTP: the scores of the P blocks.
        count: number of blocks that a token selects.
        size: tokens of a block.
        step: positions.
        visible_BTS: the mask of the tokens that each token sees.
    """
    blocks = scores_BTP.shape[-1]
    own_BT1 = (step.pos_BT[..., None] + 1) // size  # the blocks before are complete
    selected_BTP = among_best(scores_BTP, count, jnp.arange(blocks) < own_BT1)
    block_B1S = step.pos_BS[:, None] // size
    of_block_BTS = jnp.take_along_axis(selected_BTP, jnp.clip(block_B1S, 0, blocks - 1), axis=2)
    return visible_BTS & (of_block_BTS | (block_B1S >= own_BT1))
