"""Attention to blocks of tokens that an indexer selects. Blocks are counted by positions, so that padding does not move
them."""

import jax
import jax.numpy as jnp

from tpuconv.models.common.decoder import Step
from tpuconv.models.common.layers import MASKED_SCORE


def in_blocks(x_BSx: jax.Array, step: Step, blocks: int, size: int) -> jax.Array:
    """Returns the vectors [B, P, c, x] of the first P `blocks` of `size` tokens, made of those of all slots."""
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
    B, T, blocks = scores_BTP.shape
    own_BT1 = (step.pos_BT[..., None] + 1) // size  # the blocks before are complete
    is_complete_BTP = jnp.arange(blocks) < own_BT1
    ids_BTX = jax.lax.top_k(jnp.where(is_complete_BTP, scores_BTP, MASKED_SCORE), count)[1]
    rows, columns = jnp.arange(B)[:, None, None], jnp.arange(T)[None, :, None]
    selected_BTP = jnp.zeros(scores_BTP.shape, bool).at[rows, columns, ids_BTX].set(True) & is_complete_BTP
    block_B1S = step.pos_BS[:, None] // size
    of_block_BTS = jnp.take_along_axis(selected_BTP, jnp.clip(block_B1S, 0, blocks - 1), axis=2)
    return visible_BTS & (of_block_BTS | (block_B1S >= own_BT1))
