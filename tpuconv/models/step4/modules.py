"""Step-5 Preview: Step-3.5 whose layers that see all tokens attend to regions of keys that an indexer selects."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import CenteredRMSNorm, Einsum, Keys, LayerNorm, apply_rope, rope_cos_sin
from tpuconv.models.common.recurrence import exact_einsum
from tpuconv.models.common.selection import (
    GroupSelecting,
    GroupSelectingDecoder,
    PoolKeys,
    pooled,
    tokens_of_best_blocks,
)
from tpuconv.models.common.steps import Step
from tpuconv.models.deepseek_v32.modules import HeadWeights
from tpuconv.models.step3p5 import modules as step3p5
from tpuconv.models.step4.family import Config
from tpuconv.notation.letters import with_letters

LEGEND = {"q": "index_heads", "x": "index_dim"}
"""The words of this module, by the letters of its einsums and arrays. n stands for groups of query heads."""


class RegionIndexer(nnx.Module):
    """Selects for each token, and each group of query heads, the `topk` regions with the highest scores among those
    before its own region, which it sees too. A region's key is the weighted sum of the keys of its tokens, with weights
    for each element; its score is as in DeepSeek V3.2 (arXiv:2512.02556, section 2.1), of the indexer's heads of the
    group. Scores are computed in float32: a small error may select another region."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes, eps, self.config = with_letters(config.sizes, LEGEND), config.rms_norm_eps, config
        self.scale = (config.sparse_indexer_num_heads // config.num_provider_groups) ** -0.5
        self.q = Einsum("BTD,Dqx->BTqx", sizes, dtype=dtype, keys=keys)
        self.k = Einsum("BTD,Dx->BTx", sizes, dtype=dtype, keys=keys)
        self.q_norm = CenteredRMSNorm("x", sizes, eps, dtype=dtype)
        self.k_norm = LayerNorm("x", sizes, eps, dtype=dtype)
        self.router = HeadWeights(config, dtype=dtype, keys=keys)  # type: ignore[arg-type]
        self.router_gate = Einsum("BTD,Dx->BTx", sizes, dtype=dtype, keys=keys)  # named as what stays unquantized

    def turned(self, x_BTqx: jax.Array, step: Step) -> jax.Array:
        """Returns queries or keys with the rotary positions of the layer, in the first dimensions."""
        cos, sin = rope_cos_sin(self.config.rope, self.config.sparse_indexer_rope_dim, step.pos_BT)
        return apply_rope(x_BTqx, (cos.astype(x_BTqx.dtype), sin.astype(x_BTqx.dtype)))

    def kept(self, x_BTD: jax.Array, step: Step) -> PoolKeys:
        """Returns what the cache holds of these tokens."""
        k_BT1x = self.k_norm(self.k(x_BTD))[:, :, None]
        return PoolKeys(self.turned(k_BT1x, step)[:, :, 0], self.router_gate(x_BTD))

    def __call__(self, x_BTD: jax.Array, index: PoolKeys, step: Step, visible_BTS: jax.Array) -> jax.Array:
        """Returns the mask [B, n, T, S] of the selected tokens among the visible ones; [B, 1, T, S] if all are
        selected.

        Args:
            x_BTD: hidden states.
            index: the cache with these tokens.
            step: positions.
            visible_BTS: the mask of the tokens that each token sees.
        """
        config, size = self.config, self.config.region_block_size
        # Computed where they are not needed too, since a quantization finds kernels by their products.
        q_BTqx, weights_BTq = self.turned(self.q_norm(self.q(x_BTD)), step), self.router(x_BTD) * self.scale
        regions = visible_BTS.shape[-1] // size
        if regions <= config.topk:
            return visible_BTS[:, None]
        k_BPx = pooled(index.i_BSx, index.gate_BSx, step, regions, size).astype(jnp.float32)
        products_BTqP = nnx.relu(exact_einsum("BTqx,BPx->BTqP", q_BTqx.astype(jnp.float32), k_BPx))
        weighted_BTqP = weights_BTq[..., None] * products_BTqP
        before_BT1 = step.pos_BT[..., None] // size
        of_groups = [
            tokens_of_best_blocks(each.sum(axis=2), config.topk, size, before_BT1, step, visible_BTS)
            for each in jnp.split(weighted_BTqP, config.num_provider_groups, axis=2)
        ]
        return jnp.stack(of_groups, axis=1)


class RegionAttention(GroupSelecting, step3p5.Attention):
    """Step-3.5's attention to the regions that an indexer selects."""

    indexer_type = RegionIndexer

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        self.growth = nnx.Param(jnp.zeros(config.sizes["full_heads"], dtype))  # nothing reads it


class OutputNorm(CenteredRMSNorm):
    """The norm of hidden states in float32, which rounds them to the model's dtype."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x).astype(self.scale.dtype)


class Block(step3p5.Block):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections in float32."""

    norm_type = OutputNorm

    def new_attention(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
        kind = RegionAttention if layer in config.layer_sets["indexer_layers"] else step3p5.Attention
        return kind(config, layer, dtype=dtype, keys=keys)


class Model(GroupSelectingDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = OutputNorm
    index_type = PoolKeys

    def positioned(self, x_BTD: jax.Array, pos_BT: jax.Array) -> jax.Array:
        """Returns the hidden states in float32, as layers add to them."""
        return x_BTD.astype(jnp.float32)
