"""StableLM (arXiv:2402.17834)."""

from functools import partial

import jax
from jax.typing import DTypeLike

from tpuconv.models.cohere.modules import HeadLayerNorm
from tpuconv.models.common import blocks
from tpuconv.models.common.cache import KV
from tpuconv.models.common.decoder import Decoder, Step
from tpuconv.models.common.layers import Keys, LayerNorm
from tpuconv.models.stablelm.family import Config


class Attention(blocks.NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    and keys may be normalized, each head separately."""

    norm_type = partial(HeadLayerNorm, bias=False)

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        is_normed = config.qk_layernorm
        super().__init__(config, bias=config.use_qkv_bias, all_heads=True, normed=is_normed, dtype=dtype, keys=keys)


class Block(blocks.PreNormBlock):
    """One layer: attention and MLP, one after the other with a norm each, or side by side after the same norm."""

    attention_type = Attention
    norm_type = LayerNorm

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        self.parallel = config.use_parallel_residual
        if self.parallel:
            del self.mlp_norm

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        if not self.parallel:
            return super().__call__(x_BTD, step, window, kv)
        normed_BTD = self.attn_norm(x_BTD)
        y_BTD, kv = self.attn(normed_BTD, step, window, kv)
        return x_BTD + y_BTD + self.mlp(normed_BTD), kv


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = LayerNorm
