"""Attention of towers: of patches to all patches of the same image, frame or window.

Letters: B rows, P patches, S patches as keys, Q queries of a block, N heads, K heads of keys and values, H their
width."""

import jax
import jax.numpy as jnp

from tpuconv.models.common.layers import MASKED_SCORE

SCORE_BYTES = 128 << 20
"""The largest size of the scores in memory at once. Where all would be larger, queries are computed block by block."""


def attend(
    q_BPNH: jax.Array,
    k_BPKH: jax.Array,
    v_BPKH: jax.Array,
    segment_BP: jax.Array,
    *,
    scale: float | None = None,
    is_key_BP: jax.Array | None = None,
    sees_before: bool = False,
    place_BP: jax.Array | None = None,
    reach: int | None = None,
    bias_BNS: jax.Array | None = None,
    apart_BP: jax.Array | None = None,
) -> jax.Array:
    """Returns softmax attention [B, P, N, H] of each patch to all patches with the same segment number. Scores and
    their softmax are in float32.

    Args:
        q_BPNH: queries; `k_BPKH` and `v_BPKH` keys and values, of as many heads or fewer.
        segment_BP: numbers of images, frames or windows. Padding has -1: it attends to padding alone, so that its
            values are finite.
        scale: the products of queries and keys are multiplied by it; by default H^-0.5.
        is_key_BP: False for patches that none attends to, though they attend to others (Idefics' padding).
        sees_before: patches attend to those with smaller segment numbers too.
        place_BP: numbers of patches in an order. Those whose numbers differ by more than `reach` do not see each other.
        bias_BNS: is added to the scores of keys, by head.
        apart_BP: True for patches that do not see each other, though they see all others, which see them.
    """
    B, P, N, H = q_BPNH.shape
    k_BPNH, v_BPNH = (jnp.repeat(each, N // each.shape[2], axis=2) for each in (k_BPKH, v_BPKH))
    factor = H**-0.5 if scale is None else scale

    order_BP = segment_BP if place_BP is None else place_BP
    lone_BP = jnp.zeros(segment_BP.shape, bool) if apart_BP is None else apart_BP

    def of_queries(queries: tuple[jax.Array, ...]) -> jax.Array:
        q_BQNH, segment_BQ, order_BQ, lone_BQ = queries
        scores_BNQS = jnp.einsum("BQNH,BSNH->BNQS", q_BQNH, k_BPNH, preferred_element_type=jnp.float32) * factor
        if bias_BNS is not None:
            scores_BNQS += bias_BNS[:, :, None]
        query_BQS, key_BQS = segment_BQ[:, :, None], segment_BP[:, None, :]
        seen_BQS = query_BQS >= key_BQS if sees_before else query_BQS == key_BQS
        if is_key_BP is not None:
            seen_BQS &= is_key_BP[:, None, :]
        if reach is not None:
            seen_BQS &= jnp.abs(order_BQ[:, :, None] - order_BP[:, None, :]) <= reach
        if apart_BP is not None:
            seen_BQS &= ~(lone_BQ[:, :, None] & lone_BP[:, None, :])
        weights_BNQS = jax.nn.softmax(jnp.where(seen_BQS[:, None], scores_BNQS, MASKED_SCORE), axis=-1)
        return jnp.einsum("BNQS,BSNH->BQNH", weights_BNQS.astype(v_BPNH.dtype), v_BPNH)

    blocks = -(-4 * B * N * P * P // SCORE_BYTES)
    if blocks <= 1:
        return of_queries((q_BPNH, segment_BP, order_BP, lone_BP))
    Q = -(-P // blocks)
    blocks = -(-P // Q)
    fill = [(0, 0), (0, blocks * Q - P)]  # of the last block; cut off again
    q_BPNH = jnp.pad(q_BPNH, [*fill, (0, 0), (0, 0)]).reshape(B, blocks, Q, N, H).swapaxes(0, 1)
    numbers = (
        jnp.pad(each_BP, fill).reshape(B, blocks, Q).swapaxes(0, 1) for each_BP in (segment_BP, order_BP, lone_BP)
    )
    # gradients compute the scores of a block again, so that the scores of all blocks are never in memory
    y: jax.Array = jax.lax.map(jax.checkpoint(of_queries), (q_BPNH, *numbers))
    return y.swapaxes(0, 1).reshape(B, blocks * Q, N, -1)[:, :P]
