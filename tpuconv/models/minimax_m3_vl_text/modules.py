"""MiniMax-M3 (arXiv:2606.13392): tokens attend to blocks of keys that an indexer selects."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.cache import IndexKeys
from tpuconv.models.common.layers import CenteredRMSNorm, Einsum, Keys, apply_rope, times
from tpuconv.models.common.moe import GatedExperts
from tpuconv.models.common.selection import GroupSelecting, GroupSelectingDecoder
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

    def kept(self, x_BTD: jax.Array, step: Step) -> IndexKeys:
        """Returns what the cache holds of these tokens."""
        k_BTx = self.k_norm(self.k(x_BTD))
        return IndexKeys(apply_rope(k_BTx[:, :, None], step.cos_sin_in(k_BTx.dtype))[:, :, 0])

    def __call__(self, x_BTD: jax.Array, index: IndexKeys, step: Step, visible_BTS: jax.Array) -> jax.Array:
        """Returns the mask [B, n, T, S] of the tokens in selected blocks; [B, 1, T, S] if all are selected.

        Args:
            x_BTD: hidden states.
            index: the indexer's keys of all tokens so far.
            step: positions.
            visible_BTS: the mask of the tokens that each token sees.
        """
        # Computed where they are not needed too, since a quantization finds kernels by their products.
        q_BTnx = self.q_norm(self.q(x_BTD))
        q_BTnx = apply_rope(q_BTnx, step.cos_sin_in(q_BTnx.dtype)).astype(jnp.float32)
        S = index.i_BSx.shape[1]
        number = -(-S // self.size)
        if number <= self.count:
            return visible_BTS[:, None]
        # The slot of each position; those without a token come last.
        slots_BS = jnp.argsort(jnp.where(step.pos_BS < 0, S, step.pos_BS), axis=1)
        i_BSx = jnp.take_along_axis(index.i_BSx, slots_BS[..., None], axis=1).astype(jnp.float32)
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


class Attention(blocks.NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    and keys are normalized, each head separately."""

    norm_type = CenteredRMSNorm


class SparseAttention(GroupSelecting, Attention):
    """Attention to the blocks of keys that an indexer selects."""

    indexer_type = MaxBlockIndexer


class MLP(blocks.GatedMLP):
    """Gated MLP with limits, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, F: str = "F", *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, F, dtype=dtype, keys=keys)
        self.config = config

    def hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return blocks.shifted(gate, up, self.config.swiglu_limit, self.config.swiglu_alpha)


class MoE(GatedExperts):
    """The chosen experts, with a factor, and the shared one, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.sizes, dtype=dtype, keys=keys)
        self.config = config
        self.router = Router(config, dtype=dtype, keys=keys)
        self.shared = MLP(config, "W", dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        y_BTD = super().__call__(x_BTD, *self.router(x_BTD))
        return times(y_BTD, self.config.routed_scaling_factor) + self.shared(x_BTD)

    def hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return blocks.shifted(gate, up, self.config.swiglu_limit, self.config.swiglu_alpha)


class Block(blocks.PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections."""

    mlp_type = MLP
    moe_type = MoE
    norm_type = CenteredRMSNorm

    def new_attention(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
        kind = SparseAttention if layer in config.layer_sets["indexer_layers"] else Attention
        return kind(config, dtype=dtype, keys=keys)


class Model(GroupSelectingDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = CenteredRMSNorm
